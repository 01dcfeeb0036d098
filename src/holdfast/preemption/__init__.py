"""Notices that this process will be stopped, where they come from, and how the process exits.

Terms: a *notice* is a message that the process will be stopped. Its *deadline* is the time of that
stop. A *source* reports notices. A *savepoint* is the state after the last complete step.
May import: the root modules, ``format``, ``preemption``, and from the engine ``distributed`` and
``state``.
"""
