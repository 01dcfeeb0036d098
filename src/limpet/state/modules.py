"""Modules as nested dicts, and the qualified names of their parameters.

Wrappers (DDP, ``torch.compile``, FSDP, activation checkpointing, ...) leave no trace in a key, so
the snapshot of a wrapped model loads into a bare one.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from limpet.errors import LimpetError, MemberFailed, PlanError, Unsupported
from limpet.format.tree import OTHER_MODULES
from limpet.lazy_torch import torch_or_none
from limpet.state.walk import find_named_instances
from limpet.text import format_list, with_article

if TYPE_CHECKING:
    import torch

WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
EXTRA_STATE = "_extra_state"


def is_module(value: object) -> bool:
    torch = torch_or_none()
    return torch is not None and isinstance(value, torch.nn.Module)


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


@contextmanager
def calling(value: object, key: str, method: str, effect: str, **fields: Any) -> Iterator[None]:
    """Raise ``MemberFailed`` from an exception of the object's ``method``, which the block calls,
    with the ``effect`` on the live state. An error of Limpet passes."""
    try:
        yield
    except LimpetError:
        raise
    except Exception as e:
        kind = with_article(type(value).__qualname__)
        raise MemberFailed(
            f"{f'{key[:300]!r}, {kind}' if key else kind.capitalize()}, raised an exception in its"
            f" {method}(): {type(e).__qualname__}: {str(e)[:1000]}",
            todo=f"{effect}. Correct {method}(), or leave the object out of the state",
            member=key,
            **fields,
        ) from e


UNCHANGED = "Limpet has not modified the live state"


def state_dict_of(value: Any, key: str) -> Any:
    """Return ``value.state_dict()`` for a save. Its tensors share memory with the object."""
    with calling(value, key, "state_dict", f"Nothing was saved. {UNCHANGED}"):
        return value.state_dict()


def require_complete(value: object, key: str) -> None:
    """Raise ``Unsupported`` for an object whose ``state_dict()`` is known to omit what it needs: it
    would not continue from where it was."""
    for part, why, todo in _find_incomplete(value):
        what = f"{key[:300]!r} has {with_article(type(part).__name__)} that would be lost: {why}"
        raise Unsupported(what, todo=todo, leaf=key)


def _find_incomplete(value: object) -> Iterator[tuple[object, str, str]]:
    """Yield each part whose state would be lost, why, and what to do."""
    torchmetrics, schedulefree = sys.modules.get("torchmetrics"), sys.modules.get("schedulefree")
    if torchmetrics is not None and isinstance(
        value, (torchmetrics.Metric, torchmetrics.MetricCollection)
    ):
        incomplete = (torchmetrics.wrappers.Running, torchmetrics.wrappers.MinMaxMetric)
        for metric in value.modules():
            if isinstance(metric, incomplete):
                yield (
                    metric,
                    "torchmetrics keeps a part of it outside of state_dict()",
                    "Save an object whose state_dict() and load_state_dict() also copy its other"
                    " attributes, or leave it out of the state",
                )
            transient = [n for n, kept in getattr(metric, "_persistent", {}).items() if not kept]
            if transient:
                yield (
                    metric,
                    f"its state_dict() omits {format_list(transient, 5)}, because these states are"
                    " not persistent",
                    f"Call persistent(True) of the {type(value).__name__} and of the metrics in"
                    " it, here and before a load",
                )
    elif (
        schedulefree is not None
        and isinstance(value, schedulefree.ScheduleFreeWrapper)
        and value.train_mode
    ):
        yield (
            value,
            "its state_dict() omits whether the model has the weights of training or evaluation",
            "Call its eval() before the save, and its train() afterward and after a load",
        )


# -- modules -------------------------------------------------------------------------------------


def submodules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and its submodules, each once, in a tenth of the time of ``modules()``."""
    seen: set[int] = set()
    pending: list[Any] = [module]
    while pending:
        sub = pending.pop()
        if sub is not None and id(sub) not in seen:
            seen.add(id(sub))
            yield sub
            pending += sub._modules.values()


def strip_wrapper_names(module: torch.nn.Module, names: list[str], key: str) -> list[str]:
    """Return names without wrapper prefixes. Raises ``PlanError`` if two become the same."""
    stripped = _strip_names(module, names)
    if len(set(stripped)) < len(stripped):
        duplicates = sorted(n for n, count in Counter(stripped).items() if count > 1)
        raise PlanError(
            f"Leaves of the module at {key!r} have the same name without their wrapper prefixes",
            found=", ".join(duplicates[:5]),
            todo="Rename the submodules",
            leaf=key,
        )
    return stripped


def strip_wrapper_paths(module: torch.nn.Module, paths: Sequence[str]) -> list[str]:
    """Return paths of submodules without wrapper prefixes: a wrapper and its module share one."""
    names = [f"{path}.name" if path else "name" for path in paths]
    return [name.rpartition(".")[0] for name in (names and _strip_names(module, names))]


def _strip_names(module: torch.nn.Module, names: list[str]) -> list[str]:
    torch = torch_or_none()
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    wrapped_paths = set()
    if any(isinstance(sub, wrappers) for sub in submodules_of(module)):
        wrapped_paths = {
            f"{path}.module" if path else "module"
            for path, sub in module.named_modules()
            if isinstance(sub, wrappers)
        }
    joined = ".".join(names)
    is_wrapped = wrapped_paths or any(a in joined for a in WRAPPER_ATTRIBUTES)
    return [_strip_wrappers(n, wrapped_paths) for n in names] if is_wrapped else names


def _strip_wrappers(name: str, wrapped_paths: set[str]) -> str:
    levels = name.split(".")
    paths = accumulate(levels[:-1], "{}.{}".format)
    kept = [level for level, path in zip(levels, paths) if path not in wrapped_paths]
    return ".".join(level for level in [*kept, levels[-1]] if level not in WRAPPER_ATTRIBUTES)


def unwrap_state(module: torch.nn.Module, state: Any, key: str) -> dict[str, Any]:
    """Return a module's state dict without wrapper prefixes, also in the versions that it has of
    its submodules. Most have version 1, which ``OTHER_MODULES`` states for all of them."""
    names = strip_wrapper_names(module, list(state), key)
    unwrapped = OrderedDict(zip(names, state.values(), strict=True))
    if not isinstance(versions := getattr(state, "_metadata", None), dict):
        return dict(unwrapped)
    usual = {"version": 1}
    others = {path: entry for path, entry in versions.items() if entry != usual}
    # the entry of a module replaces that of its wrapper, which has version 1, or comes before it
    metadata = dict(zip(strip_wrapper_paths(module, [*others]), others.values(), strict=True))
    unwrapped._metadata = {OTHER_MODULES: usual, **metadata}  # type: ignore[attr-defined]
    return unwrapped


# -- parameter names -----------------------------------------------------------------------------


def parameter_names(state: Any) -> dict[int, str]:
    """Return the qualified names (``model.layers.0.weight``) of the parameters of all modules, by
    ``id``. They do not depend on the rest of the state."""
    names: dict[int, str] = {}
    torch = torch_or_none()
    for path, module in find_named_instances(state, torch.nn.Module) if torch is not None else ():
        parameters = dict(module.named_parameters(remove_duplicate=False))
        stripped = strip_wrapper_names(module, list(parameters), path)
        for name, parameter in zip(stripped, parameters.values(), strict=True):
            names.setdefault(id(parameter), f"{path}.{name}")
    return names
