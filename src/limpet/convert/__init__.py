"""Make one snapshot from another.

Terms: to *copy* a snapshot transfers its shards, and makes an incremental snapshot full; to
*reshard* it writes its state again as other shards.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, and ``loading``.
"""
