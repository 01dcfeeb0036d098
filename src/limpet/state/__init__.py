"""Flatten the live training state: modules, optimizers, and other objects.

Terms: a *leaf* is one tensor or array of the state under its key. Every other value is a plain
value in the tree. A *savepoint* is the state at the last step boundary.
May import: the root modules, ``format``, ``layout``, and ``ranks``. It does no storage I/O.
"""
