"""Flattens the live training state. Only this package and ``loading`` handle PyTorch objects.

Terms: a *leaf* is one tensor or array of the state under its key. Every other value is a plain
value in the tree. A *savepoint* is the state at the last step boundary.
May import: the root modules, ``format``, ``planning``, and ``distributed``. It does no storage
I/O.
"""
