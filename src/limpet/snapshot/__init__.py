"""One committed snapshot: open, read, verify, pin, and compare it.

Terms: a *snapshot* is a manifest and the shards that it refers to. A *pin* protects the files of a
snapshot from deletion.
May import: the root modules, ``format``, ``storage``, ``layout``, and
``state/arrays``.
"""
