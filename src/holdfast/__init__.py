"""Holdfast keeps the state of a training run safe and resumes the run after anything that stops it.

This module exports the public names. Each name is imported on first use, so that
``import holdfast`` imports neither torch nor rich.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.version import __version__ as __version__

if TYPE_CHECKING:
    from holdfast import errors, preemption, sinks, tasks
    from holdfast.data.progress import Progress
    from holdfast.data.rng import RNG
    from holdfast.data.sampler import ElasticSampler
    from holdfast.engine.loading.report import LoadReport
    from holdfast.engine.saving.pending import Pending
    from holdfast.engine.saving.save import save, save_async
    from holdfast.engine.snapshot.leaf import LeafView
    from holdfast.engine.snapshot.snapshot import Snapshot
    from holdfast.engine.snapshot.verify import Report
    from holdfast.engine.state.replication import PerRank, Replicated
    from holdfast.engine.state.sharding import Boxed
    from holdfast.evaluation.evaluation import Evaluation
    from holdfast.events import attach
    from holdfast.exporting.export import export
    from holdfast.generators import isolated_rng
    from holdfast.preemption.policy import Preemption
    from holdfast.run.address import load
    from holdfast.run.address import open_version as open
    from holdfast.run.policy import (
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
    from holdfast.run.run import Run
    from holdfast.storage.open import open_store, register_store
    from holdfast.storage.store import Store
    from holdfast.tiers.local_tier import LocalTier
    from holdfast.tiers.memory_tier import MemoryTier
    from holdfast.training.checkpointer import Checkpointer
    from holdfast.training.evaluations.training_evaluation import TrainingEvaluation

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
    "Boxed": "engine.state.sharding",
    "Checkpointer": "training.checkpointer",
    "ElasticSampler": "data.sampler",
    "Evaluation": "evaluation.evaluation",
    "EveryEpoch": "run.policy",
    "EverySeconds": "run.policy",
    "EverySteps": "run.policy",
    "KeepBest": "run.policy",
    "KeepEvery": "run.policy",
    "KeepLast": "run.policy",
    "KeepSteps": "run.policy",
    "LeafView": "engine.snapshot.leaf",
    "LoadReport": "engine.loading.report",
    "LocalTier": "tiers.local_tier",
    "MemoryTier": "tiers.memory_tier",
    "Never": "run.policy",
    "OnException": "run.policy",
    "Pending": "engine.saving.pending",
    "PerRank": "engine.state.replication",
    "Preemption": "preemption.policy",
    "Progress": "data.progress",
    "RNG": "data.rng",
    "Replicated": "engine.state.replication",
    "Report": "engine.snapshot.verify",
    "Run": "run.run",
    "Snapshot": "engine.snapshot.snapshot",
    "StopWhen": "run.policy",
    "Store": "storage.store",
    "TrainingEvaluation": "training.evaluations.training_evaluation",
    "attach": "events",
    "errors": "errors",
    "export": "exporting.export",
    "isolated_rng": "generators",
    "load": "run.address",
    "open": "run.address:open_version",
    "open_store": "storage.open",
    "preemption": "preemption",
    "register_store": "storage.open",
    "save": "engine.saving.save",
    "save_async": "engine.saving.save",
    "sinks": "sinks",
    "tasks": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    module_name, _, attribute = _LAZY_NAMES[name].partition(":")
    module = import_module(f"holdfast.{module_name}")
    value = module if name == module_name else getattr(module, attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
