"""Files in memory (tmpfs) that a save stages into directly.

Terms: a *mapped file* is mapped into this process, with all its pages allocated. A *spare file* is
a mapped file without content, which the next upload takes.
May import: the root modules, and ``storage``.
"""
