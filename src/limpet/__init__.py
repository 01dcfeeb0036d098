"""Limpet keeps the state of a training run safe and resumes the run after anything that stops it.

This module exports the public names. Each name is imported on first use, so that
``import limpet`` imports neither torch nor rich.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from limpet.version import __version__ as __version__

if TYPE_CHECKING:
    from limpet import errors, preemption, sinks, tasks
    from limpet.convert.export import export
    from limpet.convert.import_ import import_checkpoint
    from limpet.data.progress import Progress
    from limpet.data.rng import RNG
    from limpet.data.sampler import ElasticSampler
    from limpet.evaluation.evaluation import Evaluation
    from limpet.events import attach
    from limpet.generators import isolated_rng
    from limpet.loading.differences import LoadReport
    from limpet.ranks.group import JoinedGroup as Group
    from limpet.run.address import load
    from limpet.run.address import open_version as open
    from limpet.run.policy import (
        AtEnd,
        AtSteps,
        EveryEpoch,
        EverySeconds,
        EverySteps,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepSteps,
        Never,
        OnException,
        StopWhen,
    )
    from limpet.run.run import Run
    from limpet.saving.pending import Pending
    from limpet.saving.save import save, save_async
    from limpet.snapshot.leaf import LeafView
    from limpet.snapshot.snapshot import Snapshot
    from limpet.snapshot.verify import Report
    from limpet.state.replication import PerRank, Replicated
    from limpet.state.sharding import Boxed
    from limpet.storage.open import open_store, register_store
    from limpet.storage.store import Store
    from limpet.tiers.settings import LocalTier, MemoryTier
    from limpet.training.checkpointer import Checkpointer
    from limpet.training.preemption import Preemption
    from limpet.training.training_evaluation import TrainingEvaluation

__all__ = [
    "AtEnd",
    "AtSteps",
    "Boxed",
    "Checkpointer",
    "ElasticSampler",
    "Evaluation",
    "EveryEpoch",
    "EverySeconds",
    "EverySteps",
    "Group",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepSteps",
    "LeafView",
    "LoadReport",
    "LocalTier",
    "MemoryTier",
    "Never",
    "OnException",
    "Pending",
    "PerRank",
    "Preemption",
    "Progress",
    "RNG",
    "Replicated",
    "Report",
    "Run",
    "Snapshot",
    "StopWhen",
    "Store",
    "TrainingEvaluation",
    "attach",
    "errors",
    "export",
    "import_checkpoint",
    "isolated_rng",
    "load",
    "open",
    "open_store",
    "preemption",
    "register_store",
    "save",
    "save_async",
    "sinks",
    "tasks",
]

_LAZY_NAMES = {
    "AtEnd": "run.policy",
    "AtSteps": "run.policy",
    "Boxed": "state.sharding",
    "Checkpointer": "training.checkpointer",
    "ElasticSampler": "data.sampler",
    "Evaluation": "evaluation.evaluation",
    "EveryEpoch": "run.policy",
    "EverySeconds": "run.policy",
    "EverySteps": "run.policy",
    "Group": "ranks.group:JoinedGroup",
    "KeepBest": "run.policy",
    "KeepEvery": "run.policy",
    "KeepLast": "run.policy",
    "KeepSteps": "run.policy",
    "LeafView": "snapshot.leaf",
    "LoadReport": "loading.differences",
    "LocalTier": "tiers.settings",
    "MemoryTier": "tiers.settings",
    "Never": "run.policy",
    "OnException": "run.policy",
    "Pending": "saving.pending",
    "PerRank": "state.replication",
    "Preemption": "training.preemption",
    "Progress": "data.progress",
    "RNG": "data.rng",
    "Replicated": "state.replication",
    "Report": "snapshot.verify",
    "Run": "run.run",
    "Snapshot": "snapshot.snapshot",
    "StopWhen": "run.policy",
    "Store": "storage.store",
    "TrainingEvaluation": "training.training_evaluation",
    "attach": "events",
    "errors": "errors",
    "export": "convert.export",
    "import_checkpoint": "convert.import_",
    "isolated_rng": "generators",
    "load": "run.address",
    "open": "run.address:open_version",
    "open_store": "storage.open",
    "preemption": "preemption",
    "register_store": "storage.open",
    "save": "saving.save",
    "save_async": "saving.save",
    "sinks": "sinks",
    "tasks": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'limpet' has no attribute {name!r}")
    module_name, _, attribute = _LAZY_NAMES[name].partition(":")
    module = import_module(f"limpet.{module_name}")
    value = module if name == module_name else getattr(module, attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
