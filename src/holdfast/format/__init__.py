"""Converts between bytes and values: manifests, indexes, records, and shard headers.

Terms: an *index* lists the boxes and chunk digests of a shard; a *sealed* file carries its own
digest; a *reference* leads to a chunk in an earlier version. ``docs/format.md`` specifies all of
it.
May import: the root modules. It does no I/O and never imports torch.
"""
