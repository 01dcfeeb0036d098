"""Saves after a notice without the training thread: the state after the last complete step.

Terms: a *savepoint* is the state after the last complete step. A *live rank* is one that takes part
in the vote on which savepoint to save.
May import: the root modules, ``format``, ``preemption``, ``ranks``, and ``state``.
"""
