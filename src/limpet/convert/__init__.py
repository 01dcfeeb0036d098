"""Make one snapshot from another, from a checkpoint of another library, or for another library.

Terms: to *copy* a snapshot transfers its shards, and makes an incremental snapshot full; to
*reshard* it writes its state again as other shards. A *foreign* checkpoint is one that another
library wrote; no code in its files is executed. The *record* of an export is a file beside it that
says which version it is from, and has the digests of its files.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, and ``run``.
"""
