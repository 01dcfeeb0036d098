"""Export: the tensors of a version, in files for other libraries.

Terms: the *record* of an exported file says which version it is from, and has its checksum.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, ``run``, and ``interop``.
"""
