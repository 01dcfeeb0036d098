"""Imports and exports checkpoints of other libraries. Nothing in them is ever executed.

May import: the root modules, ``format``, ``storage``, and ``engine``, but not ``run``.
"""
