"""The versions of one run: which count, which may be deleted, and who writes.

Terms: a *version* is a snapshot named by its step; a *branch* begins where training resumed from
an older version; the *lineage* is the versions that count, across branches.
May import: the root modules, ``format``, ``storage``, and ``engine``.
"""
