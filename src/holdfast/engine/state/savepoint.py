"""The state at the last step boundary, for a save after an exception in the middle of a step.

When a forward or backward pass raises, parameters and slots are still those of the boundary before
it, while buffers, counters and random generators have gone on. A ``Boundary`` copies the latter
at each boundary, and puts both together when it is asked: no parameter or slot is ever copied,
and the state is taken apart only after something was raised.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast import lazy_torch
from holdfast.engine.distributed.group import current_group
from holdfast.engine.state import modules as live
from holdfast.engine.state import optimizers
from holdfast.engine.state.fingerprint import Fingerprint
from holdfast.engine.state.flatten import FlatState, flatten
from holdfast.engine.state.replication import PerRank, Replicated, keeps_per_rank
from holdfast.engine.state.sharding import Boxed, is_distributed_tensor
from holdfast.engine.state.step_hooks import StepPreHook
from holdfast.engine.state.walk import (
    find_stable_storages,
    modules_in,
    optimizers_in,
    parameters_and_slots,
    slots_of,
    storage_address,
    to_local,
)
from holdfast.format.tree import MAX_DEPTH
from holdfast.threads import gc_paused

if TYPE_CHECKING:
    import torch

PrefixedModules = list[tuple[str, Any]]
"""Submodules, each with the prefix of its members' names."""

AllocationKey = tuple[Any, Any, Any]
"""Shape, dtype and device: what copies must have in common to take the same memory."""

Memo = dict[int, tuple[Any, Any]]
"""By its id what was met in a walk (held, so that no other gets the id), and what it became."""

_IMMUTABLE_TYPES = frozenset({str, int, float, bool, complex, bytes, type(None)})


_NO_SAVEPOINT = "no step has been marked yet"
_INTERRUPTED = "the copying of what may change was interrupted"
_STEP_BEGAN = "the optimizer had begun the next step"
_PARAMETER_CHANGED = "a parameter was changed outside of an optimizer"
_STRUCTURE_CHANGED = "the structure of the state has changed"
_LOAD_BEGAN = "a load into the state had begun"


class _Invalidated(Exception):
    """The live state is no longer that of the boundary."""


class Savepoint:
    """Gives the state of the last ``mark`` until an optimizer in it begins a step.

    ``state``: as for ``holdfast.save``. ``mark`` is called when a step is complete, and after a
    load, by the thread that trains. What is no parameter or slot of an optimizer in the state is
    copied, on its own device; the copies' memory is used again from mark to mark.

    Parameters and slots that are changed in another way are told by PyTorch's counts of changes,
    and, where those do not move (``p.data``, NumPy, a kernel that is not PyTorch's), by
    ``Samples``. What stays unseen is a change behind both: through ``p.data``, but only of
    elements that are not among the samples, or, on an accelerator, of tensors that are not.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._captured: Any = None
        self._invalid_reason: str | None = _NO_SAVEPOINT
        self._memo: Memo = {}
        self._copies = _CopyPool()
        self._step_hook = StepPreHook((), self._on_step_begin)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[torch.nn.Module] = []
        self._owned_tensors: list[
            torch.Tensor
        ] = []  # held, so that no other object gets one of the ids
        self._owned_ids: list[int] = []
        self._stable_tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._version_counters: list[int] = []
        self._fingerprint = Fingerprint(())
        self._signature: list[int] = []
        self._stable_storages: frozenset[int] = frozenset()
        self._mutable_members: dict[int, PrefixedModules | None] = {}
        self._stable_optimizer_ids: set[int] = set()

    @property
    def invalid_reason(self) -> str | None:
        """Why the state of the last mark cannot be had, in words; None if it can be."""
        if self._invalid_reason is not None:
            return self._invalid_reason
        if not self._is_structure_unchanged():
            return _STRUCTURE_CHANGED
        changed = (
            _read_version_counters(self._stable_tensors) != self._version_counters
            or self._fingerprint.has_changed()
        )
        return _PARAMETER_CHANGED if changed else None

    def capture(self) -> None:
        """The state is at a boundary: copy what may change before an optimizer steps."""
        self._invalid_reason, self._captured = _INTERRUPTED, None
        if not self._is_structure_unchanged():
            self._scan_state()
        self._version_counters = _read_version_counters(self._stable_tensors)
        self._fingerprint.record()
        self._copies.recycle()
        self._memo = {}
        self._captured = _map_containers(self._state, self._capture_value, self._memo)
        self._memo = {}
        self._invalid_reason = None

    def invalidate(self) -> None:
        """Drop the mark: the live state is about to be overwritten."""
        self._invalid_reason, self._captured = _LOAD_BEGAN, None

    def flatten_captured(self) -> FlatState | None:
        """The state of the last mark, taken apart; None if it is gone: an optimizer has begun a
        step, or parameters, slots or what there is have been changed in another way.

        Its leaves are copies, and live parameters and slots; good until the next mark, or the next
        step of an optimizer. Raises ``Unsupported`` as ``flatten`` does.
        """
        if self.invalid_reason is not None:
            return None
        names = live.parameter_names(self._state)
        try:
            with gc_paused():
                return flatten(_merge_live_state(self._captured, names), current_group().rank)
        except _Invalidated:
            self._invalid_reason = _STRUCTURE_CHANGED
            return None

    def close(self) -> None:
        """Take the hooks off the optimizers, and forget all copies."""
        self._step_hook.remove()
        self._optimizers = []
        self._invalid_reason = self._invalid_reason or _NO_SAVEPOINT
        self._captured, self._copies, self._fingerprint = None, _CopyPool(), Fingerprint(())

    def _on_step_begin(self) -> None:
        self._invalid_reason = self._invalid_reason or _STEP_BEGAN

    def _is_structure_unchanged(self) -> bool:
        """Whether the optimizers, modules, parameters and slots are those that were learned."""
        return (
            optimizers_in(self._state) == self._optimizers
            and modules_in(self._state) == self._modules
            and [*map(id, parameters_and_slots(self._optimizers))] == self._owned_ids
            and [t.data_ptr() for t in self._stable_tensors] == self._addresses
            and _structure_signature(self._modules) == self._signature
        )

    def _scan_state(self) -> None:
        """Which memory holds still has changed, as when the first step makes the slots."""
        self._addresses = [0]  # so that nothing is the same if this is interrupted
        self._step_hook.remove()
        self._optimizers = optimizers_in(self._state)
        self._step_hook = StepPreHook(self._optimizers, self._on_step_begin)
        self._modules = modules_in(self._state)
        self._owned_tensors = list(parameters_and_slots(self._optimizers))
        self._owned_ids = [*map(id, self._owned_tensors)]
        self._stable_storages = find_stable_storages(self._owned_tensors, self._modules)
        self._stable_tensors = [
            to_local(t) for t in self._owned_tensors if storage_address(t) in self._stable_storages
        ]
        self._fingerprint = Fingerprint(self._stable_tensors)
        self._signature = _structure_signature(self._modules)
        self._mutable_members = {
            id(m): _mutable_members(m, self._stable_storages) for m in self._modules
        }
        self._stable_optimizer_ids = {
            id(o)
            for o in self._optimizers
            if optimizers.is_standard_optimizer(o)
            and all(storage_address(t) in self._stable_storages for t in slots_of(o))
        }
        self._addresses = [t.data_ptr() for t in self._stable_tensors]

    def _capture_value(self, value: Any, depth: int) -> Any:
        """A value as it is now, safe from all that happens before an optimizer steps."""
        torch = lazy_torch.torch_or_none()
        if torch is not None and isinstance(value, torch.Tensor):
            return (
                value
                if storage_address(value) in self._stable_storages
                else self._copies.copy_tensor(value)
            )
        if isinstance(value, np.ndarray):
            return self._copies.copy_array(value)
        if isinstance(value, set | bytearray):
            return copy(value)
        if isinstance(value, PerRank | Replicated):
            return type(value)(
                _map_containers(value.value, self._capture_value, self._memo, depth + 1)
            )
        if isinstance(value, Boxed):
            held = self._capture_value(value.tensor, depth)
            return value if held is value.tensor else replace(value, tensor=held)
        if live.is_module(value):
            return self._capture_module(value, depth)
        if optimizers.is_standard_optimizer(value):
            if id(value) not in self._stable_optimizer_ids:
                names = live.parameter_names(self._state)
                return _map_containers(
                    optimizers.optimizer_state(value, names, ""),
                    self._capture_value,
                    self._memo,
                    depth,
                )
            groups = [{k: v for k, v in g.items() if k != "params"} for g in value.param_groups]
            return _CapturedOptimizer(
                value, _map_containers(groups, self._capture_value, self._memo, depth)
            )
        if live.is_stateful(value) and not isinstance(value, type):
            held = _map_containers(value.state_dict(), self._capture_value, self._memo, depth + 1)
            return PerRank(held) if keeps_per_rank(value) else held
        return value

    def _capture_module(self, module: torch.nn.Module, depth: int) -> Any:
        loose = self._mutable_members.get(id(module))
        if loose is None:
            return _map_containers(
                live.module_state(module, ""), self._capture_value, self._memo, depth
            )
        members: dict[str, Any] = {}
        for prefix, sub in loose:
            sub._save_to_state_dict(members, prefix, False)
        held = {
            name: _map_containers(v, self._capture_value, self._memo, depth)
            for name, v in members.items()
        }
        return _CapturedModule(module, held, self._stable_storages)


@dataclass(frozen=True, slots=True)
class _CapturedModule:
    """A module at a boundary. ``held``: the members of its submodules that are not all steady."""

    module: torch.nn.Module
    captured: dict[str, Any]
    stable_storages: frozenset[int]

    def merge_live_state(self) -> dict[str, Any]:
        """Its state dict. Raises ``_Gone`` if it is made in another way now."""
        now = self.module.state_dict()
        others = now.keys() - self.captured.keys()
        if len(others) + len(self.captured) != len(now):
            raise _Invalidated
        if not all(storage_address(now[name]) in self.stable_storages for name in others):
            raise _Invalidated
        made = {**now, **self.captured}
        return dict(
            zip(live.strip_wrapper_names(self.module, list(made), ""), made.values(), strict=True)
        )


@dataclass(frozen=True, slots=True)
class _CapturedOptimizer:
    """An optimizer at a boundary. ``options``: those of its groups."""

    optimizer: torch.optim.Optimizer
    options: list[dict[str, Any]]

    def merge_live_state(self, names: dict[int, str]) -> dict[str, Any]:
        """What ``optimizer_state`` gave. Raises ``_Gone`` if there are other groups now."""
        state = optimizers.optimizer_state(self.optimizer, names, "")
        if len(state["groups"]) != len(self.options):
            raise _Invalidated
        state["groups"] = [
            {k: v for k, v in options.items() if k != "param_names"} | {"params": now["params"]}
            for options, now in zip(self.options, state["groups"], strict=True)
        ]
        return state


def _merge_live_state(captured: Any, names: dict[int, str]) -> Any:
    def put(part: Any, depth: int) -> Any:
        if isinstance(part, PerRank | Replicated):
            return type(part)(_merge_live_state(part.value, names))
        if isinstance(part, _CapturedModule):
            return part.merge_live_state()
        return part.merge_live_state(names) if isinstance(part, _CapturedOptimizer) else part

    return _map_containers(captured, put, {})


def _mutable_members(
    module: torch.nn.Module, stable_storages: frozenset[int]
) -> PrefixedModules | None:
    """The submodules with members that may change; None if the whole may have code of the user's
    in the making of its state dict."""
    torch = lazy_torch.torch_or_none()
    base = torch.nn.Module
    found: PrefixedModules = []
    for path, sub in module.named_modules(remove_duplicate=False):
        kind = type(sub)
        if (
            kind.state_dict is not base.state_dict
            or sub._state_dict_hooks
            or sub._state_dict_pre_hooks
        ):
            return None
        if (
            sub._buffers
            or any(
                p is not None and storage_address(p) not in stable_storages
                for p in sub._parameters.values()
            )
            or kind.get_extra_state is not base.get_extra_state
            or kind._save_to_state_dict is not base._save_to_state_dict
        ):
            found.append((f"{path}." if path else "", sub))
    return found


def _structure_signature(modules: list[torch.nn.Module]) -> list[int]:
    """Numbers that change when submodules, parameters or buffers come or go, or hooks do."""
    found: list[int] = []
    ahead: list[Any] = list(modules)
    while ahead:
        sub = ahead.pop()
        if sub is not None:
            hooks = len(sub._state_dict_hooks) + len(sub._state_dict_pre_hooks)
            found += (id(sub), hooks, len(sub._buffers), len(sub._modules))
            found += map(id, sub._parameters.values())
            ahead += sub._modules.values()
    return found


def _read_version_counters(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often PyTorch has seen each tensor changed. A second look only: fused optimizers and
    ``p.data`` change tensors unseen."""
    return [t._version for t in tensors]


def _map_containers(
    value: Any, map_value: Callable[[Any, int], Any], memo: Memo, depth: int = 0
) -> Any:
    """A copy of nested dicts, lists and tuples, with ``do(value, depth)`` for all within them.

    What is met again becomes what it became before, also within itself: a walk takes as long as
    there are values. What ``flatten`` would refuse for its depth stays as it is, for it to say so.
    """
    kind = type(value)
    if depth > 2 * MAX_DEPTH:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    made: Any = value  # for an object whose state contains itself: flatten refuses it
    if kind in (dict, OrderedDict, Counter, list):
        made = copy(value)  # with what PyTorch hangs on a state dict
    memo[id(value)] = value, made
    if kind in (list, tuple):
        members = [
            m if type(m) in _IMMUTABLE_TYPES else _map_containers(m, map_value, memo, depth + 1)
            for m in value
        ]
        if kind is tuple:
            made = tuple(members)
        else:
            made[:] = members
    elif made is value:
        made = map_value(value, depth)
    else:
        for name, member in value.items():
            if type(member) not in _IMMUTABLE_TYPES:
                made[name] = _map_containers(member, map_value, memo, depth + 1)
    memo[id(value)] = value, made
    return made


class _CopyPool:
    """The copies of one mark, in memory of the mark before it where they are alike."""

    def __init__(self) -> None:
        self._in_use: dict[tuple[Any, AllocationKey], Any] = {}
        self._free: dict[AllocationKey, list[Any]] = {}

    def recycle(self) -> None:
        """The copies made until now are wanted no more."""
        self._free = defaultdict(list)
        for (_, kind), made in self._in_use.items():
            self._free[kind].append(made)
        self._in_use = {}

    def copy_tensor(self, t: Any) -> Any:
        """A copy; the same one for tensors that are one, so that they stay tied. Until the mark is
        done ``t`` must live: another tensor at the same place would be taken for it."""
        pt = lazy_torch.torch_or_none()
        if is_distributed_tensor(t):
            return t.detach().clone()
        if type(t) is not pt.Tensor and type(t) is not pt.nn.Parameter:
            return t  # refused by name when the state is taken apart
        t = t.detach()
        if t.layout is not pt.strided or t.is_nested or t.is_quantized or t.is_meta:
            return t.clone()
        kind = (t.shape, t.dtype, t.device)
        place = ((t.data_ptr(), t.stride(), t.is_conj(), t.is_neg()), kind)
        if place not in self._in_use:
            made = self._allocate(kind, lambda: pt.empty(t.shape, dtype=t.dtype, device=t.device))
            self._in_use[place] = made.copy_(t)
        return self._in_use[place]

    def copy_array(self, a: np.ndarray[Any, Any]) -> Any:
        """A copy."""
        if a.dtype.isbuiltin != 1 or a.dtype.metadata or a.dtype.hasobject:
            return a.copy()
        kind = (a.shape, a.dtype, "array")
        made = self._allocate(kind, lambda: np.empty(a.shape, a.dtype))
        np.copyto(made, a)
        self._in_use[len(self._in_use), kind] = made
        return made

    def _allocate(self, key: AllocationKey, allocate: Callable[[], Any]) -> Any:
        free = self._free.get(key)
        return free.pop() if free else allocate()
