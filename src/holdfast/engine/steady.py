"""What holds still between two steps of the optimizers: their parameters and slots.

Forward and backward passes may change all else: buffers such as BatchNorm's, the scales of FP8,
plain tensors, random generators, the weights of an embedding with ``max_norm``. So parameters and
slots can be copied beside them, until an optimizer begins its next step, which a ``Guard`` tells.

What holds still is recognised by its memory: a parameter that shares its storage with a buffer
does not, whoever owns it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from holdfast.engine import live
from holdfast.format.tree import MAX_DEPTH

if TYPE_CHECKING:
    import torch

    from holdfast.engine.tree import Flat


def steady(state: dict[str, Any], flat: Flat) -> set[str]:
    """The keys of the leaves that hold still until an optimizer in ``state`` begins a step.

    ``flat`` is the state taken apart. Leaves without elements are not among them, nor is what
    ``flatten`` had to copy.
    """
    torch = live.torch_or_none()
    if torch is None:
        return set()
    still = storages(owned(optimizers_in(state)), modules_in(state))
    return {
        leaf.key
        for leaf in flat.leaves
        if isinstance(leaf.source, torch.Tensor) and storage(leaf.source) in still
    }


class Guard:
    """Calls ``before_step`` whenever an optimizer begins a step, before it changes anything; an
    exception of it keeps the step from happening.

    ``optimizers``: those, and all with a parameter in the memory of theirs, such as what a wrapper
    holds; None: every optimizer of the process. It ends with ``remove``, or with the guard itself.
    (One hook of PyTorch's for all optimizers: closures, foreach, fused and subclasses are covered;
    what is no ``torch.optim.Optimizer`` is not.)
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer] | None, before_step: Callable[[], object]
    ) -> None:
        self._before_step = before_step
        self._all = optimizers is None
        mine = list(optimizers or ())
        self._ids = frozenset(map(id, mine))
        self._memory = frozenset(storage(p) for o in mine for p in parameters_of(o)) - {0}
        if self._all or mine:
            _attach(self)

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins a step."""
        if (
            self._all
            or id(optimizer) in self._ids
            or any(storage(p) in self._memory for p in parameters_of(optimizer))
        ):
            self._before_step()

    def remove(self) -> None:
        """Let all optimizers step unseen."""
        _detach(self)


_guards: tuple[weakref.ref[Guard], ...] = ()
"""Weak, so that nobody who forgets to close a checkpointer keeps its state in memory."""
_guards_lock = Lock()
_hooked: list[object] = []


def _attach(guard: Guard) -> None:
    global _guards
    with _guards_lock:
        if not _hooked:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            # for good: PyTorch's own table must not change while another thread waits in it
            _hooked.append(register_optimizer_step_pre_hook(_begins))
        _guards = (*(r for r in _guards if r() is not None), weakref.ref(guard))


def _detach(guard: Guard) -> None:
    global _guards
    with _guards_lock:
        _guards = tuple(r for r in _guards if r() is not None and r() is not guard)


def _begins(optimizer: Any, args: Any, options: Any) -> None:
    for known in _guards:
        guard = known()
        if guard is not None:
            guard.begins(optimizer)


def optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in the containers of a state, each once, those with a ``state_dict`` of
    their own included."""
    torch = live.torch_or_none()
    return [] if torch is None else list(found_in(state, torch.optim.Optimizer))


def modules_in(state: Any) -> list[torch.nn.Module]:
    """The modules in the containers of a state, each once; not what is inside them."""
    torch = live.torch_or_none()
    return [] if torch is None else list(found_in(state, torch.nn.Module))


def owned(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The parameters of the optimizers, and the tensors among their slots."""
    for optimizer in optimizers:
        yield from parameters_of(optimizer)
        yield from slots_of(optimizer)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def slots_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors among an optimizer's slots, in lists and dicts too."""
    torch = live.torch_or_none()
    for slots in optimizer.state.values():
        for slot in slots.values() if isinstance(slots, dict) else (slots,):
            if type(slot) is torch.Tensor:  # nearly always, and quickly told
                yield slot
            else:
                yield from found_in(slot, torch.Tensor)


def storages(tensors: Iterable[torch.Tensor], modules: Sequence[torch.nn.Module]) -> frozenset[int]:
    """The storages of the tensors, without those of what a forward pass of the modules changes
    (buffers, and the weights of embeddings with ``max_norm``), and of inference tensors, whose
    changes nobody counts."""
    loose = {0}
    for sub in (sub for module in modules for sub in module.modules()):
        loose.update(storage(b) for b in sub._buffers.values() if b is not None)
        if getattr(sub, "max_norm", None) is not None:
            loose.update(storage(p) for p in sub.parameters(recurse=False))
    return frozenset(s for t in tensors if (s := storage(t)) not in loose and not t.is_inference())


def storage(t: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has no memory that can be named."""
    try:
        return local_of(t).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0  # sparse, a wrapper subclass, not materialised: nothing holds still there


def local_of(t: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: of a DTensor its local part."""
    local: torch.Tensor = getattr(t, "_local_tensor", t)
    return local


def found_in(value: Any, kind: type[Any]) -> Iterator[Any]:
    """What is of a kind in nested dicts, lists and tuples, each object once."""
    seen: dict[int, Any] = {}  # held: what a container makes while it is read might share its id

    def walk(value: Any, depth: int) -> Iterator[Any]:
        found = isinstance(value, kind)
        if not found and (depth >= MAX_DEPTH or not isinstance(value, dict | list | tuple)):
            return
        if id(value) in seen:
            return
        seen[id(value)] = value
        if found:
            yield value
        else:
            for member in value.values() if isinstance(value, dict) else value:
                yield from walk(member, depth + 1)

    return walk(value, 0)
