"""Coordinates ranks over the key-value store of their job, without collectives of torch.

Terms: a *group* is a set of ranks that act together; a *collective* is one operation of all of
them.
May import: the root modules and ``format``. It handles neither tensors, snapshots, nor stores.
"""
