"""Store objects as files in a local folder.

Terms: a *temporary file* is an upload; the commit links it to its name.
May import: the root modules and ``storage``.
"""
