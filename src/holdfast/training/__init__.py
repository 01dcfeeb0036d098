"""``Checkpointer`` and its parts: when to save, how to resume, and how a training ends.

Terms: the *cadence* decides when a save is due. *Goodput* is the share of wall time spent on steps
that a committed version holds.
May import: the root modules, ``format``, ``storage``, ``data``, ``engine``,
``preemption``, ``restarts``, ``run``, and ``tiers``.
"""
