"""What makes the workers of an evaluation: this process, other processes, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from limpet.errors import LimpetError
from limpet.evaluation.arguments import check_argument, is_count
from limpet.evaluation.functions import FunctionName
from limpet.evaluation.inline import InlineWorker
from limpet.evaluation.pool import WorkerHandle
from limpet.evaluation.process import ProcessWorker
from limpet.evaluation.ray_engine import ray_workers
from limpet.evaluation.worker import Functions, Worker, WorkerSpec

_check = partial(check_argument, "Evaluation")

_LABELS = "setup", "evaluate", "data", "collate"

_FunctionsOfUser = tuple[Any, Any, Any, Any]
"""Functions or their names, as in ``_LABELS``. The last one may be None."""


def make_workers(
    functions: _FunctionsOfUser,
    batch_size: int | None,
    keys: str | Sequence[str],
    device: str | None,
    workers: int,
    engine: str,
    ray_options: Mapping[str, Any] | None,
) -> Callable[[str], WorkerHandle]:
    """Return the function that starts a worker with a name. Raises ``LimpetError`` for an invalid
    argument of ``Evaluation``, or if the engine cannot be used."""
    _check("workers", workers, is_count(workers, 0), "a whole number, 0 or more")
    _check_engine(engine, ray_options, workers)
    _check_functions(functions)
    patterns = _check_keys(keys)
    if workers == 0:
        return _inline_workers(functions, batch_size, patterns, device)
    spec = _spec(functions, batch_size, patterns, device)
    if engine == "ray":
        return ray_workers(spec, ray_options or {})
    return partial(ProcessWorker, spec=spec)


def import_functions(functions: _FunctionsOfUser, engine: str) -> None:
    """Import the functions that are given by name, as each worker does. With Ray, the workers alone
    may have their modules. Raises ``LimpetError`` if that fails."""
    for function, label in zip(functions, _LABELS, strict=True):
        if isinstance(function, str) and engine == "local":
            FunctionName.of(function, label).resolve()


def _inline_workers(
    functions: _FunctionsOfUser, batch_size: int | None, keys: tuple[str, ...], device: str | None
) -> Callable[[str], WorkerHandle]:
    """Return the function that starts a worker in this process."""
    found = [
        FunctionName.of(f, label).resolve() if isinstance(f, str) else f
        for f, label in zip(functions, _LABELS, strict=True)
    ]
    own = Functions(*found)
    return lambda name: InlineWorker(name, lambda: Worker(own, batch_size, keys, device))


def _spec(
    functions: _FunctionsOfUser, batch_size: int | None, keys: tuple[str, ...], device: str | None
) -> WorkerSpec:
    names = [
        None if f is None else FunctionName.of(f, label)
        for f, label in zip(functions, _LABELS, strict=True)
    ]
    setup, evaluate, data, collate = names
    if setup is None or evaluate is None or data is None:
        raise LimpetError("setup, evaluate, and data are required")
    return WorkerSpec(setup, evaluate, data, batch_size, keys, device, collate)


def _check_functions(functions: _FunctionsOfUser) -> None:
    for label, function in zip(_LABELS, functions, strict=True):
        is_missing = function is None and label == "collate"
        is_valid = callable(function) or isinstance(function, str) or is_missing
        _check(label, function, is_valid, "a function: dataset, not dataset()")


def _check_keys(keys: str | Sequence[str]) -> tuple[str, ...]:
    found = (keys,) if isinstance(keys, str) else keys
    is_valid = isinstance(found, Sequence) and all(isinstance(key, str) for key in found)
    _check("keys", keys, is_valid, "a pattern, or a list of patterns")
    return tuple(found)


def _check_engine(engine: object, ray_options: object, workers: int) -> None:
    _check("engine", engine, engine in ("local", "ray"), '"local" or "ray"')
    if engine == "ray":
        _check("workers", workers, workers > 0, 'with engine="ray", 1 or more')
        is_valid = ray_options is None or isinstance(ray_options, Mapping)
        _check("ray_options", ray_options, is_valid, "a dict of the options of an actor")
    else:
        _check("ray_options", ray_options, ray_options is None, 'None, without engine="ray"')
