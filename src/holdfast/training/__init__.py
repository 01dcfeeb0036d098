"""``Checkpointer`` and its parts: when to save, how to resume, and how a training ends.

Terms: the *cadence* decides when a save is due; *goodput* is the share of time spent on steps that
were kept.
May import: everything below: ``run``, ``engine``, ``data``, ``storage``, ``format``, the root
modules.
"""
