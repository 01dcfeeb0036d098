"""``Checkpointer`` and its parts: when to save, how to resume, and how a training ends.

Terms: the *cadence* decides when a save is due.
May import: the root modules, ``format``, ``storage``, ``data``, ``sinks``, ``layout``, ``ranks``,
``state``, ``snapshot``, ``saving``, ``loading``, ``convert``, ``notices``, ``run``,
``tiers``, and ``training``.
"""
