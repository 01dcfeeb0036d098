"""Holdfast keeps the state of a training run safe, and carries the run across what stops it.

The public names. Each is loaded when it is first used, so that ``import holdfast`` loads neither
torch nor rich.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import errors, sinks
    from holdfast.checkpointer import Checkpointer
    from holdfast.engine.load import load
    from holdfast.engine.save import save, save_async
    from holdfast.engine.sharding import Boxed
    from holdfast.engine.snapshot import Snapshot
    from holdfast.engine.snapshot import open_snapshot as open
    from holdfast.engine.spread import PerRank, Replicated
    from holdfast.engine.verify import Report
    from holdfast.engine.view import LeafView
    from holdfast.engine.worker import Pending
    from holdfast.events import attach
    from holdfast.policy import (
        EveryEpoch,
        EverySeconds,
        EverySteps,
        KeepBest,
        KeepEvery,
        KeepLast,
        OnException,
        StopWhen,
    )
    from holdfast.progress import RNG, Progress
    from holdfast.run import Run
    from holdfast.sampler import ElasticSampler
    from holdfast.storage.open import open_store
    from holdfast.storage.store import Store

__version__ = "0.1.0"

__all__ = [
    "Boxed",
    "Checkpointer",
    "ElasticSampler",
    "EveryEpoch",
    "EverySeconds",
    "EverySteps",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "LeafView",
    "OnException",
    "Pending",
    "PerRank",
    "Progress",
    "RNG",
    "Replicated",
    "Report",
    "Run",
    "Snapshot",
    "StopWhen",
    "Store",
    "attach",
    "errors",
    "load",
    "open",
    "open_store",
    "save",
    "save_async",
    "sinks",
]

_HOME = {
    "Boxed": "engine.sharding",
    "Checkpointer": "checkpointer",
    "ElasticSampler": "sampler",
    "EveryEpoch": "policy",
    "EverySeconds": "policy",
    "EverySteps": "policy",
    "KeepBest": "policy",
    "KeepEvery": "policy",
    "KeepLast": "policy",
    "LeafView": "engine.view",
    "OnException": "policy",
    "Pending": "engine.worker",
    "PerRank": "engine.spread",
    "Progress": "progress",
    "RNG": "progress",
    "Replicated": "engine.spread",
    "Report": "engine.verify",
    "Run": "run",
    "Snapshot": "engine.snapshot",
    "StopWhen": "policy",
    "Store": "storage.store",
    "attach": "events",
    "errors": "errors",
    "load": "engine.load",
    "open": "engine.snapshot:open_snapshot",
    "open_store": "storage.open",
    "save": "engine.save",
    "save_async": "engine.save",
    "sinks": "sinks",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    module, _, other = home.partition(":")
    found = import_module(f"holdfast.{module}")
    value = found if name == module else getattr(found, other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
