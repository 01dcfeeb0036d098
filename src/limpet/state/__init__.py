"""Flatten the live training state: modules, optimizers, and other objects.

Terms: a *leaf* is one tensor or array of the state under its key. Every other value is a plain
value in the tree. A *savepoint* is the state at the last step boundary.
May import: the root modules, ``format``, ``layout``, ``ranks``, and ``state/arrays``. It does no
storage I/O.
"""
