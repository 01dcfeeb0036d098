"""The state at the last step boundary, for a save in the middle of the next step.

During a step, parameters and slots still have the values of the boundary before it, but buffers,
counters, and random generators have changed. A ``Savepoint`` copies only these at each boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from math import ceil, inf
from operator import attrgetter, is_
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from limpet import lazy_torch
from limpet.state import modules, optimizers, walk
from limpet.state.arrays import library_of
from limpet.state.copy_pool import CopyPool, is_plain
from limpet.state.flatten import FlatState, ParameterNames, flatten
from limpet.state.memory_ranges import group_ranges, read_ranges
from limpet.state.replication import PerRank, Replicated, keeps_per_rank
from limpet.state.step_hooks import StepPreHook
from limpet.threads import Latch

if TYPE_CHECKING:
    import torch

_SAMPLE_BYTES, _MAX_DEVICE_TENSORS = 64, 256
_NO_SAVEPOINT = "no step has been completed yet"
_STRUCTURE_CHANGED = "the structure of the state changed"


class _Invalidated(Exception):
    """The live state is no longer the state of the savepoint."""


class Savepoint:
    """The state at the last ``capture``, available until an optimizer in it begins a step.

    The training thread calls ``capture`` when a step is complete, and after a load. It copies all
    but the stable parameters and slots. Another thread may ``hold`` the savepoint to save it: until
    ``release``, the training thread waits before an optimizer steps, the next capture, and a load.

    PyTorch's version counters and a ``Fingerprint`` detect changes of parameters and slots outside
    of a step. One that does not count, of elements or (on an accelerator) tensors that are not
    sampled, remains undetected.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state  # may be replaced before the first capture
        self._captured: Any = None
        self._invalid_reason: str | None = _NO_SAVEPOINT
        self._memo: walk.Memo = {}
        self._names = ParameterNames(state)
        self._copies = CopyPool()
        self._step_hook = StepPreHook((), self._on_step_begin)
        self._structure = _Structure({})
        self._lock = RLock()
        self._hold: Latch | None = None
        self.label: Any = None
        """What the last ``capture`` got as its ``label``."""

    @property
    def invalid_reason(self) -> str | None:
        """The reason why the savepoint is not available, as text; None if it is available."""
        if self._invalid_reason is not None:
            return self._invalid_reason
        if not self._structure.is_that_of(self.state):
            return _STRUCTURE_CHANGED
        if self._structure.has_changed_elements():
            return "a parameter was changed outside of an optimizer step"
        return None

    def capture(self, label: Any = None, max_bytes: float = inf) -> None:
        """Copy what may change before the next optimizer step. Raises ``TooManyBytes``."""
        self._invalidate("the copy of the mutable state was interrupted")
        self._copies.max_bytes = max_bytes
        self.label, self._captured = label, None
        if not self._structure.is_that_of(self.state):  # the first step creates the slots
            self._structure = _Structure({})  # in case this is interrupted
            self._step_hook.remove()
            self._step_hook = StepPreHook(walk.optimizers_in(self.state), self._on_step_begin)
            self._structure = _Structure(self.state)
        self._structure.record_elements()
        self._copies.recycle(self._structure.stable_storages)
        state = walk.as_dict(self.state)
        self._memo, self._names = {}, ParameterNames(state)
        self._captured = self._capture(state)
        self._memo = {}
        self._invalid_reason = None

    def invalidate(self) -> None:
        """Discard the savepoint, because a load is about to overwrite the live state."""
        self._invalidate("a load into the state had begun")
        self._captured = self.label = None

    def free(self) -> None:
        """Discard the savepoint and its copies, because they are too expensive."""
        self._invalidate("copies of the state take too long compared to a step")
        self._captured, self._copies, self.label = None, CopyPool(), None

    def hold(self) -> bool:
        """Keep the savepoint until ``release``; False: it is not available. Other code than
        optimizers may still change parameters: ask for ``invalid_reason`` again after the copy."""
        with self._lock:
            if self._invalid_reason is not None:
                return False
            self._hold = self._hold or Latch()
        if self.invalid_reason is None:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Let the training continue that waits because of ``hold``."""
        with self._lock:
            hold, self._hold = self._hold, None
        if hold is not None:
            hold.set()

    def _invalidate(self, reason: str) -> None:
        """Record why the savepoint is not available, once nothing holds it."""
        while True:
            with self._lock:
                hold = self._hold
                if hold is None:
                    self._invalid_reason = reason
                    return
            hold.wait()

    def flatten_captured(self, rank: int = 0) -> FlatState | None:
        """Return the state of the last ``capture``, valid until the next one or the next step, or
        None if it is not available (``invalid_reason``). Raises ``Unsupported``."""
        if self.invalid_reason is not None:
            return None
        name_of = ParameterNames(self.state).name_of
        try:
            return flatten(_merge_live_state(self._captured, name_of), rank)
        except _Invalidated:
            self._invalid_reason = _STRUCTURE_CHANGED
            return None

    def close(self) -> None:
        """Remove the hooks from the optimizers and release all copies."""
        self.release()
        self._step_hook.remove()
        self._invalid_reason = self._invalid_reason or _NO_SAVEPOINT
        self._captured, self._copies, self._structure = None, CopyPool(), _Structure({})

    def _on_step_begin(self) -> None:
        self._invalidate(self._invalid_reason or "the optimizer had begun the next step")

    def _capture(self, value: Any, depth: int = 0) -> Any:
        return walk.map_containers(value, self._capture_value, self._memo, depth)

    def _capture_value(self, value: Any, depth: int) -> Any:
        """Return the value in a form that does not change before the next optimizer step."""
        if (library := library_of(type(value))) is not None:
            return library.copy(value, self._copies)
        if isinstance(value, set | bytearray):
            return copy(value)
        if isinstance(value, PerRank | Replicated):
            return type(value)(self._capture(value.value, depth + 1))
        if modules.is_module(value):
            return self._capture_module(value, depth)
        if optimizers.is_standard_optimizer(value):
            if id(value) not in self._structure.stable_optimizer_ids:
                state = optimizers.optimizer_state(value, self._names.name_of, "")
                return self._capture(state, depth)
            return self._capture_options(value, depth)
        if modules.is_stateful(value) and not isinstance(value, type):
            state = optimizers.name_parameters(value, value.state_dict(), self._names.name_of, "")
            state = self._capture(state, depth + 1)
            return PerRank(state) if keeps_per_rank(value) else state
        return value

    def _capture_module(self, module: torch.nn.Module, depth: int) -> Any:
        mutable_members = self._structure.mutable_members.get(id(module))
        if mutable_members is None:
            state = modules.unwrap_state(module, modules.state_dict_of(module, ""), "")
            return self._capture(state, depth)
        custom, member_copies = mutable_members
        members: dict[str, Any] = {}
        for prefix, sub in custom:
            sub._save_to_state_dict(members, prefix, False)
        copies, others = member_copies.copy(self._copies)
        members |= others
        captured = copies | {name: self._capture(v, depth) for name, v in members.items()}
        stable_storages = self._structure.stable_storages

        def merge_live_state(name_of: optimizers.NameOf) -> dict[str, Any]:
            live_state = module.state_dict()
            others = live_state.keys() - captured.keys()
            if len(others) + len(captured) != len(live_state) or not all(
                walk.storage_address(live_state[name]) in stable_storages for name in others
            ):
                raise _Invalidated
            live_state.update(captured)
            return modules.unwrap_state(module, live_state, "")

        return _Captured(merge_live_state)

    def _capture_options(self, optimizer: torch.optim.Optimizer, depth: int) -> Any:
        """Copy the options of an optimizer's parameter groups, because its slots are stable."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        captured = self._capture(groups, depth)

        def merge_live_state(name_of: optimizers.NameOf) -> dict[str, Any]:
            state = optimizers.optimizer_state(optimizer, name_of, "")
            if len(state["groups"]) != len(captured):
                raise _Invalidated
            state["groups"] = [
                {k: v for k, v in options.items() if k != "param_names"}
                | {"params": group["params"]}
                for options, group in zip(captured, state["groups"], strict=True)
            ]
            return state

        return _Captured(merge_live_state)


_version_of = attrgetter("_version")  # PyTorch's counter of changes


class _Structure:
    """The optimizers, modules, parameters, and slots of a state, and which of them are stable."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._optimizers, self._modules = walk.optimizers_in(state), walk.modules_in(state)
        self._owned_tensors = walk.parameters_and_slots(self._optimizers)
        self.stable_storages = walk.find_stable_storages(self._owned_tensors, self._modules)
        self._stable_tensors = [
            walk.to_local(t)
            for t in self._owned_tensors
            if walk.storage_address(t) in self.stable_storages
        ]
        self._fingerprint = Fingerprint(self._stable_tensors)
        self._version_counters: list[int] = []
        self._members, self._counts = module_structure(self._modules)
        self._addresses = _read_addresses(self._stable_tensors)
        stable_addresses = frozenset(self._addresses)
        self.mutable_members = {
            id(m): find_mutable_members(m, self.stable_storages, stable_addresses)
            for m in self._modules
        }
        self.stable_optimizer_ids = {
            id(o)
            for o in self._optimizers
            if optimizers.is_standard_optimizer(o)
            and all(walk.storage_address(t) in self.stable_storages for t in walk.slots_of(o))
        }

    def is_that_of(self, state: dict[str, Any]) -> bool:
        """Return True if the state has the same objects, and the same stable memory."""
        members, counts = module_structure(self._modules)
        return (
            walk.optimizers_in(state) == self._optimizers
            and walk.modules_in(state) == self._modules
            and are_same(walk.parameters_and_slots(self._optimizers), self._owned_tensors)
            and _read_addresses(self._stable_tensors) == self._addresses
            and counts == self._counts
            and are_same(members, self._members)
        )

    def record_elements(self) -> None:
        """Record the elements of the stable tensors for ``has_changed_elements``."""
        self._version_counters = [*map(_version_of, self._fingerprint.partial)]
        self._fingerprint.record()

    def has_changed_elements(self) -> bool:
        counters = [*map(_version_of, self._fingerprint.partial)]
        return counters != self._version_counters or self._fingerprint.has_changed()


@dataclass(frozen=True, slots=True)
class _Captured:
    """A module or an optimizer without what is stable. ``merge_live_state``: returns its state with
    that, by the names of parameters, or raises ``_Invalidated`` if its structure changed."""

    merge_live_state: Callable[[optimizers.NameOf], dict[str, Any]]


def _merge_live_state(captured: Any, name_of: optimizers.NameOf) -> Any:
    def merge(value: Any, depth: int) -> Any:
        if isinstance(value, PerRank | Replicated):
            return type(value)(_merge_live_state(value.value, name_of))
        return value.merge_live_state(name_of) if isinstance(value, _Captured) else value

    return walk.map_containers(captured, merge, {})


def _read_addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of each tensor's first element."""
    torch = lazy_torch.torch_or_none()
    return [*map(torch.Tensor.data_ptr, tensors)] if torch is not None else []


# -- the members of modules that may change between two optimizer steps ----------------------------
#
# Most are small, such as buffers of thousands of layers, and are read all at once. They are found
# again at every copy: code may replace, add, or remove them.

_MAX_RANGE_BYTES = 4096
"""Larger tensors are copied one at a time, each into memory of its own."""

_metadata_of = attrgetter("dtype", "shape", "is_cpu")


class MemberCopies:
    """Copies the mutable members of submodules that PyTorch's own code saves: each with its prefix,
    and True if its parameters may change, too. ``stable_addresses`` need no copy."""

    def __init__(
        self, submodules: list[tuple[str, Any, bool]], stable_addresses: frozenset[int]
    ) -> None:
        self._submodules = submodules
        self._stable_addresses = stable_addresses
        self._metadata: list[Any] | None = None
        self._small: list[int] = []
        self._others: list[int] = []
        self._copies: list[Any] = []
        self._groups: list[tuple[NDArray[np.void], NDArray[np.int64]]] = []

    def copy(self, pool: CopyPool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a copy of each member by its name, and the members that must be copied one by one.
        Each call overwrites the copies of the call before it."""
        members = self._find_members()
        names, tensors = [*members], [*members.values()]
        torch: Any = lazy_torch.torch_or_none()
        if not {*map(type, tensors)} <= {torch.Tensor, torch.nn.Parameter}:
            # as in a state dict: there, a parameter of a class of its own is a plain tensor
            return {}, {name: member.detach() for name, member in members.items()}
        try:
            addresses = [*map(torch.Tensor.data_ptr, tensors)]
            metadata = [
                *map(_metadata_of, tensors),
                *map(torch.Tensor.is_contiguous, tensors),
                *map(torch.Tensor.is_neg, tensors),
            ]
        except (RuntimeError, NotImplementedError):  # a sparse or nested tensor
            return {}, members
        if metadata != self._metadata:
            self._metadata = None  # in case the next line is interrupted
            self._allocate(tensors)
            self._metadata = metadata
        others = {names[i]: tensors[i] for i in self._others}
        if others:
            names, addresses = ([v[i] for i in self._small] for v in (names, addresses))
        if not (
            self._stable_addresses.isdisjoint(addresses)
            and pool.add_copies(addresses, self._copies)
        ):
            return {}, members
        table = np.array(addresses, np.int64)
        for copies, positions in self._groups:
            (copies[:],) = read_ranges([(copies.itemsize, table[positions])])
        return dict(zip(names, self._copies, strict=True)), others

    def _find_members(self) -> dict[str, Any]:
        """Return the members by their names, as ``state_dict`` returns them now."""
        found: dict[str, Any] = {}
        for prefix, sub, with_parameters in self._submodules:
            transient = sub._non_persistent_buffers_set
            for name, member in sub._buffers.items():
                if member is not None and name not in transient:
                    found[prefix + name] = member
            if with_parameters:
                for name, member in sub._parameters.items():
                    if member is not None:
                        found[prefix + name] = member
        return found

    def _allocate(self, tensors: Sequence[Any]) -> None:
        """Allocate the copies of the small members, of each size in one array."""
        torch: Any = lazy_torch.torch_or_none()
        self._small, self._others = [], []
        for i, t in enumerate(tensors):
            is_small = 0 < t.nbytes <= _MAX_RANGE_BYTES and not t.is_complex()
            is_copied = is_small and is_plain(t) and lazy_torch.dtype_name(t.dtype) is not None
            (self._small if is_copied else self._others).append(i)
        small = [tensors[i] for i in self._small]
        self._groups, self._copies = [], [None] * len(small)
        for size, positions in group_ranges((i, t.nbytes) for i, t in enumerate(small)):
            memory = np.empty((len(positions), size), np.uint8)
            self._groups.append((memory.view(f"V{size}").reshape(-1), positions))
            for row, i in zip(torch.from_numpy(memory), positions.tolist(), strict=True):
                self._copies[i] = row.view(small[i].dtype).view(small[i].shape)


def find_mutable_members(
    module: torch.nn.Module, stable_storages: Container[int], stable_addresses: frozenset[int]
) -> tuple[list[tuple[str, Any]], MemberCopies] | None:
    """Return the submodules with members that may change: those with code of their own, each with
    its prefix, and the others. None: hooks or an overridden ``state_dict`` build the state dict."""
    base: Any = lazy_torch.torch_or_none().nn.Module
    custom: list[tuple[str, Any]] = []
    plain: list[tuple[str, Any, bool]] = []
    for path, sub in module.named_modules(remove_duplicate=False):
        cls: Any = type(sub)
        if (
            cls.state_dict is not base.state_dict
            or sub._state_dict_hooks
            or sub._state_dict_pre_hooks
        ):
            return None
        prefix = f"{path}." if path else ""
        stable = {
            walk.storage_address(p) in stable_storages
            for p in sub._parameters.values()
            if p is not None
        }
        if (
            cls.get_extra_state is not base.get_extra_state
            or cls._save_to_state_dict is not base._save_to_state_dict
            or len(stable) == 2
        ):
            custom.append((prefix, sub))
        elif sub._buffers or False in stable:
            plain.append((prefix, sub, False in stable))
    return custom, MemberCopies(plain, stable_addresses)


# -- what has changed ----------------------------------------------------------------------------


class Fingerprint:
    """Samples of the bytes of tensors at the last ``record``, because PyTorch does not count some
    changes, such as those by ``p.data``. ``partial``: the tensors that are sampled in part.

    On the CPU, 64 bytes at the beginning, the middle, and the end of each (10,000 tensors take 0.5
    ms); on accelerators, 64 from the middle of at most 256 tensors, copied without waiting. The
    tensors' memory is not kept alive: it MUST be the same whenever a method is called.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        windows = [_sample_windows(t) if t.is_cpu else [] for t in tensors]
        sampled = [sum(size for _, size in own) for own in windows]
        self.partial = [t for t, nbytes in zip(tensors, sampled, strict=True) if nbytes < t.nbytes]
        self._cpu_windows = group_ranges(chain.from_iterable(windows))
        device_tensors = [t for t in tensors if not (t.is_cpu or t.is_conj() or t.is_neg())]
        stride = max(1, ceil(len(device_tensors) / _MAX_DEVICE_TENSORS))
        self._device_tensors = device_tensors[::stride]
        self._recorded: tuple[bytes, list[Any]] = (b"", [])

    def record(self) -> None:
        self._recorded = self._sample()

    def has_changed(self) -> bool:
        """Return True if the bytes differ from the recorded ones. Waits for accelerators."""
        torch = lazy_torch.torch_or_none()
        on_cpu, on_devices = self._sample()
        pairs = zip(on_devices, self._recorded[1], strict=True)  # empty if torch is not loaded
        return on_cpu != self._recorded[0] or not all(torch.equal(a, b) for a, b in pairs)

    def _sample(self) -> tuple[bytes, list[Any]]:
        """Return the bytes of CPU tensors, and one uint8 tensor with those of each device."""
        on_cpu = b"".join(map(np.ndarray.tobytes, read_ranges(self._cpu_windows)))
        return on_cpu, _sample_on_device(self._device_tensors)


def _contiguous_elements(t: torch.Tensor) -> int:
    """Return the number of contiguous elements from the first on: all, or one if there are gaps."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.numel() if t.numel() == span else min(1, t.numel())


def _sample_windows(t: torch.Tensor) -> list[tuple[int, int]]:
    """Return the address and the size of each sample of a CPU tensor."""
    nbytes = _contiguous_elements(t) * t.element_size()
    size = min(nbytes, _SAMPLE_BYTES)
    offsets = sorted({0, (nbytes - size) // 2, nbytes - size}) if size else []
    return [(t.data_ptr() + offset, size) for offset in offsets]


def _sample_on_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the middle bytes of the tensors, as one uint8 tensor per device."""
    torch = lazy_torch.torch_or_none()
    samples_by_device: dict[Any, list[Any]] = {}
    for t in tensors:
        contiguous = _contiguous_elements(t)
        size = min(contiguous, _SAMPLE_BYTES // t.element_size())
        offset = t.storage_offset() + (contiguous - size) // 2
        sample = t.detach().as_strided((size,), (1,), offset)
        samples_by_device.setdefault(t.device, []).append(sample.view(torch.uint8))
    return [torch.cat(samples) for samples in samples_by_device.values()]


def module_structure(roots: list[torch.nn.Module]) -> tuple[list[Any], list[int]]:
    """Return the submodules and the parameters of modules, and numbers that change with these, with
    the hooks, and with the number of buffers."""
    members: list[Any] = []
    counts: list[int] = []
    pending: list[Any] = list(roots)
    while pending:
        sub = pending.pop()
        if sub is not None:
            members.append(sub)
            attributes = sub.__dict__  # faster than each attribute of the module
            if hooks := attributes["_state_dict_hooks"]:
                counts.append(len(hooks))
            if hooks := attributes["_state_dict_pre_hooks"]:
                counts.append(-len(hooks))
            if buffers := attributes["_buffers"]:
                counts.append(len(buffers))
            if parameters := attributes["_parameters"]:
                members += parameters.values()
            if submodules := attributes["_modules"]:
                counts.append(len(submodules))
                pending += submodules.values()
            counts.append(0)
    return members, counts


def are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))
