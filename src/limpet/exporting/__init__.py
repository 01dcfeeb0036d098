"""Export: the tensors of a version, or of an average of versions, in files for other libraries.

Terms: the *record* of an exported file says which version it is from, and has its checksum. A
*companion* is a file that is copied from another model, such as its configuration.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, ``run``, and ``interop``.
"""
