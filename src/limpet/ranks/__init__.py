"""Coordinate ranks over the key-value store of their job, without torch collectives.

``wire`` has the authenticated connections between processes of a job.
Terms: a *group* is a set of ranks that act together; a *collective* is one operation that all
ranks of a group perform.
May import: the root modules and ``format``. It handles neither tensors, snapshots, nor stores.
"""
