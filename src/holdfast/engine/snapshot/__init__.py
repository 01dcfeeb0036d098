"""One committed snapshot: open, read, verify, pin, and compare it.

Terms: a *snapshot* is a manifest and the shards that it refers to; a *pin* keeps its files from
being deleted.
May import: the root modules, ``format``, ``planning``, and ``storage``.
"""
