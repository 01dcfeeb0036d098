"""The versions of one run: the writer, lineage, metrics, policies, retention, and their deletion.

Terms: a *version* is a snapshot named by its step. A *branch* begins where training resumed from an
older version. The *lineage* is the sequence of versions that count, across branches. A *policy*
decides when to save, which versions to keep, or when to stop.
May import: the root modules, ``format``, ``storage``, ``sinks``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, and ``run``.
"""
