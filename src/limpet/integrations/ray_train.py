"""``ray.train`` (v2): a ``Checkpointer`` for ``train_loop_per_worker``.

A *drain* is Ray's announcement that it will take a node away, such as one on a spot instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray.train
from ray.train.v2._internal.execution.context import get_train_context

from limpet.errors import LimpetError
from limpet.integrations.frameworks import check_arguments, check_release
from limpet.notices.call import CallNotice
from limpet.snapshot.location import Url
from limpet.training.checkpointer import Checkpointer
from limpet.training.preemption_plan import Preemption

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""How the URL begins, by the name that pyarrow has for a file system."""

_UNKNOWN_SECONDS = 110.0
"""The time until a drain whose end is not known: Ray Train waits for two minutes."""

_LONGEST_WAIT = 3600.0
"""Seconds: longer than Ray Train waits until it starts the workers elsewhere."""


def checkpointer(
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    run: Url | None = None,
    **options: Any,
) -> Checkpointer:
    """Return a ``Checkpointer`` for ``train_loop_per_worker``, which each worker calls.

    ``run``: by default, ``storage_path/name`` of the ``RunConfig``. So the workers that Ray Train
    starts again after a failure, and those of another ``fit()`` with the same name, resume.

    When Ray drains the node of a worker, all workers save, train on, and save again before the
    deadline. Then they wait until Ray Train starts them elsewhere, which counts as a preemption,
    not as a failure. ``options`` are arguments of ``Checkpointer``; ``preemption=`` replaces this.

    Raises ``LimpetError`` for a storage that needs ``run=``, and what ``Checkpointer`` raises.
    """
    check_release("ray", "2.60", "2.60")
    check_arguments(options, {})
    drains = CallNotice(_seconds_left, name="the drain of a node")
    preemption = Preemption(grace=_LONGEST_WAIT, notices=[drains], exit_fn=_wait_for_the_end)
    return Checkpointer(
        _storage_url() if run is None else run, state, **{"preemption": preemption, **options}
    )


def _storage_url() -> str:
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind not in _SCHEMES:
        raise LimpetError(f"The storage path is on a file system {kind!r}: pass its URL as run=")
    return f"{_SCHEMES[kind]}{storage.experiment_fs_path}"


def _seconds_left() -> float | None:
    # ray.train.get_preemption_info() waits for all workers, and so cannot be polled
    info = get_train_context().preemption_context.preemption_info
    if info is None:
        return None
    return _UNKNOWN_SECONDS if info.deadline_ms is None else info.deadline_ms / 1e3 - time.time()


def _wait_for_the_end() -> None:
    """Wait until Ray Train stops this process. An exception would count as a failure of the
    training, and a return as its end."""
    time.sleep(_LONGEST_WAIT)
    raise LimpetError("Ray Train has not stopped this worker in the hour after a drain")
