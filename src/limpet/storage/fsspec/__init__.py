"""Store bytes in any file system of fsspec.

Terms: a *connection* is an instance of a file system of fsspec, which serves one call at a time.
``files`` bounds and translates the calls, ``upload`` writes one file, and ``store`` is the store.
May import: the root modules and ``storage``.
"""
