"""Convert between bytes and values: manifests, state trees, indexes, records, and headers.

Terms: an *index* lists the boxes and chunk digests of a shard; a *sealed* file contains its own
digest; a *reference* points to a shard of an earlier version. ``docs/format.md`` is the
specification.
May import: the root modules. This package does no I/O and never imports torch.
"""
