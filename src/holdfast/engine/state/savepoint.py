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
from holdfast.engine.state.fingerprint import Samples
from holdfast.engine.state.flatten import Flat, flatten
from holdfast.engine.state.replication import PerRank, Replicated, keeps_per_rank
from holdfast.engine.state.sharding import Boxed, is_spread
from holdfast.engine.state.step_hooks import Guard
from holdfast.engine.state.walk import (
    local_of,
    modules_in,
    optimizers_in,
    owned,
    slots_of,
    storage,
    storages,
)
from holdfast.format.tree import MAX_DEPTH
from holdfast.threads import uncollected

if TYPE_CHECKING:
    import torch

Members = list[tuple[str, Any]]
"""Submodules, each with the prefix of its members' names."""

Kind = tuple[Any, Any, Any]
"""Shape, dtype and device: what copies must have in common to take the same memory."""

Seen = dict[int, tuple[Any, Any]]
"""By its id what was met in a walk (held, so that no other gets the id), and what it became."""

_FIXED = frozenset({str, int, float, bool, complex, bytes, type(None)})


_UNMARKED = "no step has been marked yet"
_INTERRUPTED = "the copying of what may change was interrupted"
_BEGUN = "the optimizer had begun the next step"
_CHANGED = "a parameter was changed outside of an optimizer"
_OTHER = "the structure of the state has changed"
_FORGOTTEN = "a load into the state had begun"


class _Gone(Exception):
    """The live state is no longer that of the boundary."""


class Boundary:
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
        self._held: Any = None
        self._gone: str | None = _UNMARKED
        self._seen: Seen = {}
        self._copies = _Copies()
        self._guard = Guard((), self._begun)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[torch.nn.Module] = []
        self._tensors: list[torch.Tensor] = []  # held, so that no other object gets one of the ids
        self._ids: list[int] = []
        self._owned: list[torch.Tensor] = []
        self._places: list[int] = []
        self._counts: list[int] = []
        self._samples = Samples(())
        self._outline: list[int] = []
        self._still: frozenset[int] = frozenset()
        self._loose: dict[int, Members | None] = {}
        self._pure: set[int] = set()

    @property
    def gone(self) -> str | None:
        """Why the state of the last mark cannot be had, in words; None if it can be."""
        if self._gone is not None:
            return self._gone
        if not self._same():
            return _OTHER
        changed = _counts(self._owned) != self._counts or self._samples.differ()
        return _CHANGED if changed else None

    def mark(self) -> None:
        """The state is at a boundary: copy what may change before an optimizer steps."""
        self._gone, self._held = _INTERRUPTED, None
        if not self._same():
            self._learn()
        self._counts = _counts(self._owned)
        self._samples.take()
        self._copies.begin()
        self._seen = {}
        self._held = _mapped(self._state, self._hold, self._seen)
        self._seen = {}
        self._gone = None

    def forget(self) -> None:
        """Drop the mark: the live state is about to be overwritten."""
        self._gone, self._held = _FORGOTTEN, None

    def state_at_boundary(self) -> Flat | None:
        """The state of the last mark, taken apart; None if it is gone: an optimizer has begun a
        step, or parameters, slots or what there is have been changed in another way.

        Its leaves are copies, and live parameters and slots; good until the next mark, or the next
        step of an optimizer. Raises ``Unsupported`` as ``flatten`` does.
        """
        if self.gone is not None:
            return None
        names = live.parameter_names(self._state)
        try:
            with uncollected():
                return flatten(_together(self._held, names), current_group().rank)
        except _Gone:
            self._gone = _OTHER
            return None

    def close(self) -> None:
        """Take the hooks off the optimizers, and forget all copies."""
        self._guard.remove()
        self._optimizers = []
        self._gone = self._gone or _UNMARKED
        self._held, self._copies, self._samples = None, _Copies(), Samples(())

    def _begun(self) -> None:
        self._gone = self._gone or _BEGUN

    def _same(self) -> bool:
        """Whether the optimizers, modules, parameters and slots are those that were learned."""
        return (
            optimizers_in(self._state) == self._optimizers
            and modules_in(self._state) == self._modules
            and [*map(id, owned(self._optimizers))] == self._ids
            and [t.data_ptr() for t in self._owned] == self._places
            and _outline(self._modules) == self._outline
        )

    def _learn(self) -> None:
        """Which memory holds still has changed, as when the first step makes the slots."""
        self._places = [0]  # so that nothing is the same if this is interrupted
        self._guard.remove()
        self._optimizers = optimizers_in(self._state)
        self._guard = Guard(self._optimizers, self._begun)
        self._modules = modules_in(self._state)
        self._tensors = list(owned(self._optimizers))
        self._ids = [*map(id, self._tensors)]
        self._still = storages(self._tensors, self._modules)
        self._owned = [local_of(t) for t in self._tensors if storage(t) in self._still]
        self._samples = Samples(self._owned)
        self._outline = _outline(self._modules)
        self._loose = {id(m): _loose(m, self._still) for m in self._modules}
        self._pure = {
            id(o)
            for o in self._optimizers
            if optimizers.is_optimizer(o) and all(storage(t) in self._still for t in slots_of(o))
        }
        self._places = [t.data_ptr() for t in self._owned]

    def _hold(self, value: Any, depth: int) -> Any:
        """A value as it is now, safe from all that happens before an optimizer steps."""
        torch = lazy_torch.torch_or_none()
        if torch is not None and isinstance(value, torch.Tensor):
            return value if storage(value) in self._still else self._copies.tensor(value)
        if isinstance(value, np.ndarray):
            return self._copies.array(value)
        if isinstance(value, set | bytearray):
            return copy(value)
        if isinstance(value, PerRank | Replicated):
            return type(value)(_mapped(value.value, self._hold, self._seen, depth + 1))
        if isinstance(value, Boxed):
            held = self._hold(value.tensor, depth)
            return value if held is value.tensor else replace(value, tensor=held)
        if live.is_module(value):
            return self._hold_module(value, depth)
        if optimizers.is_optimizer(value):
            if id(value) not in self._pure:
                names = live.parameter_names(self._state)
                return _mapped(
                    optimizers.optimizer_state(value, names, ""), self._hold, self._seen, depth
                )
            groups = [{k: v for k, v in g.items() if k != "params"} for g in value.param_groups]
            return _HeldOptimizer(value, _mapped(groups, self._hold, self._seen, depth))
        if live.is_stateful(value) and not isinstance(value, type):
            held = _mapped(value.state_dict(), self._hold, self._seen, depth + 1)
            return PerRank(held) if keeps_per_rank(value) else held
        return value

    def _hold_module(self, module: torch.nn.Module, depth: int) -> Any:
        loose = self._loose.get(id(module))
        if loose is None:
            return _mapped(live.module_state(module, ""), self._hold, self._seen, depth)
        members: dict[str, Any] = {}
        for prefix, sub in loose:
            sub._save_to_state_dict(members, prefix, False)
        held = {name: _mapped(v, self._hold, self._seen, depth) for name, v in members.items()}
        return _HeldModule(module, held, self._still)


@dataclass(frozen=True, slots=True)
class _HeldModule:
    """A module at a boundary. ``held``: the members of its submodules that are not all steady."""

    module: torch.nn.Module
    held: dict[str, Any]
    still: frozenset[int]

    def together(self) -> dict[str, Any]:
        """Its state dict. Raises ``_Gone`` if it is made in another way now."""
        now = self.module.state_dict()
        others = now.keys() - self.held.keys()
        if len(others) + len(self.held) != len(now):
            raise _Gone
        if not all(storage(now[name]) in self.still for name in others):
            raise _Gone
        made = {**now, **self.held}
        return dict(zip(live.plain_names(self.module, list(made), ""), made.values(), strict=True))


@dataclass(frozen=True, slots=True)
class _HeldOptimizer:
    """An optimizer at a boundary. ``options``: those of its groups."""

    optimizer: torch.optim.Optimizer
    options: list[dict[str, Any]]

    def together(self, names: dict[int, str]) -> dict[str, Any]:
        """What ``optimizer_state`` gave. Raises ``_Gone`` if there are other groups now."""
        state = optimizers.optimizer_state(self.optimizer, names, "")
        if len(state["groups"]) != len(self.options):
            raise _Gone
        state["groups"] = [
            {k: v for k, v in options.items() if k != "param_names"} | {"params": now["params"]}
            for options, now in zip(self.options, state["groups"], strict=True)
        ]
        return state


def _together(held: Any, names: dict[int, str]) -> Any:
    def put(part: Any, depth: int) -> Any:
        if isinstance(part, PerRank | Replicated):
            return type(part)(_together(part.value, names))
        if isinstance(part, _HeldModule):
            return part.together()
        return part.together(names) if isinstance(part, _HeldOptimizer) else part

    return _mapped(held, put, {})


def _loose(module: torch.nn.Module, still: frozenset[int]) -> Members | None:
    """The submodules with members that may change; None if the whole may have code of the user's
    in the making of its state dict."""
    torch = lazy_torch.torch_or_none()
    base = torch.nn.Module
    found: Members = []
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
            or any(p is not None and storage(p) not in still for p in sub._parameters.values())
            or kind.get_extra_state is not base.get_extra_state
            or kind._save_to_state_dict is not base._save_to_state_dict
        ):
            found.append((f"{path}." if path else "", sub))
    return found


def _outline(modules: list[torch.nn.Module]) -> list[int]:
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


def _counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often PyTorch has seen each tensor changed. A second look only: fused optimizers and
    ``p.data`` change tensors unseen."""
    return [t._version for t in tensors]


def _mapped(value: Any, do: Callable[[Any, int], Any], seen: Seen, depth: int = 0) -> Any:
    """A copy of nested dicts, lists and tuples, with ``do(value, depth)`` for all within them.

    What is met again becomes what it became before, also within itself: a walk takes as long as
    there are values. What ``flatten`` would refuse for its depth stays as it is, for it to say so.
    """
    kind = type(value)
    if depth > 2 * MAX_DEPTH:
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    made: Any = value  # for an object whose state contains itself: flatten refuses it
    if kind in (dict, OrderedDict, Counter, list):
        made = copy(value)  # with what PyTorch hangs on a state dict
    seen[id(value)] = value, made
    if kind in (list, tuple):
        members = [m if type(m) in _FIXED else _mapped(m, do, seen, depth + 1) for m in value]
        if kind is tuple:
            made = tuple(members)
        else:
            made[:] = members
    elif made is value:
        made = do(value, depth)
    else:
        for name, member in value.items():
            if type(member) not in _FIXED:
                made[name] = _mapped(member, do, seen, depth + 1)
    seen[id(value)] = value, made
    return made


class _Copies:
    """The copies of one mark, in memory of the mark before it where they are alike."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, Kind], Any] = {}
        self._free: dict[Kind, list[Any]] = {}

    def begin(self) -> None:
        """The copies made until now are wanted no more."""
        self._free = defaultdict(list)
        for (_, kind), made in self._made.items():
            self._free[kind].append(made)
        self._made = {}

    def tensor(self, t: Any) -> Any:
        """A copy; the same one for tensors that are one, so that they stay tied. Until the mark is
        done ``t`` must live: another tensor at the same place would be taken for it."""
        pt = lazy_torch.torch_or_none()
        if is_spread(t):
            return t.detach().clone()
        if type(t) is not pt.Tensor and type(t) is not pt.nn.Parameter:
            return t  # refused by name when the state is taken apart
        t = t.detach()
        if t.layout is not pt.strided or t.is_nested or t.is_quantized or t.is_meta:
            return t.clone()
        kind = (t.shape, t.dtype, t.device)
        place = ((t.data_ptr(), t.stride(), t.is_conj(), t.is_neg()), kind)
        if place not in self._made:
            made = self._room(kind, lambda: pt.empty(t.shape, dtype=t.dtype, device=t.device))
            self._made[place] = made.copy_(t)
        return self._made[place]

    def array(self, a: np.ndarray[Any, Any]) -> Any:
        """A copy."""
        if a.dtype.isbuiltin != 1 or a.dtype.metadata or a.dtype.hasobject:
            return a.copy()
        kind = (a.shape, a.dtype, "array")
        made = self._room(kind, lambda: np.empty(a.shape, a.dtype))
        np.copyto(made, a)
        self._made[len(self._made), kind] = made
        return made

    def _room(self, kind: Kind, make: Callable[[], Any]) -> Any:
        free = self._free.get(kind)
        return free.pop() if free else make()
