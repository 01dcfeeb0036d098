"""Store objects as files in a local folder, on a disk or in memory (tmpfs).

Terms: a *temporary file* is an upload; the commit links it to its name. A *mapped file* is mapped
into this process; a *spare file* is one without content, which the next upload takes.
May import: the root modules and ``storage``.
"""
