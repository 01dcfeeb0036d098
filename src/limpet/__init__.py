"""Limpet keeps the state of a training run safe and resumes the run after anything that stops it.

This module exports the public names. Each name is imported on first use, so that
``import limpet`` imports neither torch nor rich.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from limpet.events import set_default
from limpet.lazy_names import lazy_names
from limpet.version import __version__ as __version__

if TYPE_CHECKING:
    from limpet import (
        errors as errors,
        preemption as preemption,
        sinks as sinks,
        tables as tables,
        tasks as tasks,
    )
    from limpet.convert.import_ import import_checkpoint as import_checkpoint
    from limpet.data.loader import DataLoader as DataLoader, elastic as elastic
    from limpet.data.progress import Progress as Progress
    from limpet.data.rng import RNG as RNG
    from limpet.evaluation.evaluation import Evaluation as Evaluation
    from limpet.events import attach as attach
    from limpet.loading.differences import LoadReport as LoadReport
    from limpet.ranks.group import Group as Group
    from limpet.run.address import load as load, open_version
    from limpet.run.policy import (
        AtEnd as AtEnd,
        AtSteps as AtSteps,
        Continuously as Continuously,
        EveryEpoch as EveryEpoch,
        EverySeconds as EverySeconds,
        EverySteps as EverySteps,
        KeepBest as KeepBest,
        KeepEvery as KeepEvery,
        KeepLast as KeepLast,
        KeepSteps as KeepSteps,
        Never as Never,
        OnException as OnException,
        OnPreemption as OnPreemption,
        StopWhen as StopWhen,
    )
    from limpet.run.run import Run as Run
    from limpet.saving.pending import Pending as Pending
    from limpet.saving.save import save as save, save_async as save_async
    from limpet.snapshot.leaf import LeafView as LeafView
    from limpet.loading.snapshot import Snapshot as Snapshot
    from limpet.snapshot.verify import Report as Report
    from limpet.state.replication import PerRank as PerRank, Replicated as Replicated
    from limpet.state.sharding import Boxed as Boxed
    from limpet.storage.open import open_store as open_store, register_store as register_store
    from limpet.storage.store import Store as Store
    from limpet.tables.export import export as export
    from limpet.tiers.settings import LocalTier as LocalTier, MemoryTier as MemoryTier
    from limpet.training.checkpointer import Checkpointer as Checkpointer
    from limpet.training.member import Member as Member
    from limpet.training.preemption_plan import Preemption as Preemption
    from limpet.training.training_evaluation import TrainingEvaluation as TrainingEvaluation

    open = open_version

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "": "errors preemption sinks tables tasks",
        "convert.import_": "import_checkpoint",
        "data.loader": "DataLoader elastic",
        "data.progress": "Progress",
        "data.rng": "RNG",
        "evaluation.evaluation": "Evaluation",
        "events": "attach",
        "loading.differences": "LoadReport",
        "ranks.group": "Group",
        "run.address": "load open_version=open",
        "run.policy": "AtEnd AtSteps Continuously EveryEpoch EverySeconds EverySteps KeepBest"
        " KeepEvery KeepLast KeepSteps Never OnException OnPreemption StopWhen",
        "run.run": "Run",
        "saving.pending": "Pending",
        "saving.save": "save save_async",
        "snapshot.leaf": "LeafView",
        "loading.snapshot": "Snapshot",
        "snapshot.verify": "Report",
        "state.replication": "PerRank Replicated",
        "state.sharding": "Boxed",
        "storage.open": "open_store register_store",
        "storage.store": "Store",
        "tables.export": "export",
        "tiers.settings": "LocalTier MemoryTier",
        "training.checkpointer": "Checkpointer",
        "training.member": "Member",
        "training.preemption_plan": "Preemption",
        "training.training_evaluation": "TrainingEvaluation",
    },
)

# from the first event on, the module itself is the default
set_default(lambda *event: import_module("limpet.sinks.terminal").default_terminal(*event))
