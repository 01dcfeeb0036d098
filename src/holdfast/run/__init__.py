"""The versions of one run: the lineage, retention, garbage collection, and the writer lock.

Terms: a *version* is a snapshot named by its step. A *branch* begins where training resumed from
an older version. The *lineage* is the sequence of versions that count, across branches.
May import: the root modules, ``format``, ``storage``, and ``engine``.
"""
