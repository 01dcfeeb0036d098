"""Policies: when to save, what to keep, and when to stop.

Policies are frozen and pure. A policy decides from its arguments alone and never reads a clock, a
store, or a model. A table of inputs and results therefore tests it. Policies combine with ``|``.
(The design follows Orbax's ``save_decision_policy`` and ``preservation_policy``.)

Terms: a save is *due* if the state after a step must be saved.
May import: the root modules, and ``format``.
"""

from limpet.run.policy.checks import Mode
from limpet.run.policy.keep import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepSteps,
    KeepUnion,
    Record,
    best_first,
)
from limpet.run.policy.save import (
    AtEnd,
    AtSteps,
    EveryEpoch,
    EverySeconds,
    EverySteps,
    Never,
    OnException,
    PolicyInput,
    SavePolicy,
)
from limpet.run.policy.stop import StopState, StopWhen

__all__ = [
    "AtEnd",
    "AtSteps",
    "EveryEpoch",
    "EverySeconds",
    "EverySteps",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepSteps",
    "KeepUnion",
    "Mode",
    "Never",
    "OnException",
    "PolicyInput",
    "Record",
    "SavePolicy",
    "StopState",
    "StopWhen",
    "best_first",
]
