"""What holds still between two steps of the optimizers: their parameters and slots.

Forward and backward passes may change all else: buffers such as BatchNorm's, the scales of FP8,
plain tensors, random generators, the weights of an embedding with ``max_norm``. So parameters and
slots can be copied beside them, until an optimizer begins its next step, which a ``Guard`` tells.

What holds still is recognised by its memory: a parameter that shares its storage with a buffer
does not, whoever owns it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any

from holdfast import lazy_torch
from holdfast.engine.state.walk import (
    modules_in,
    optimizers_in,
    owned,
    parameters_of,
    storage,
    storages,
)

if TYPE_CHECKING:
    import torch

    from holdfast.engine.state.flatten import Flat


def steady(state: dict[str, Any], flat: Flat) -> set[str]:
    """The keys of the leaves that hold still until an optimizer in ``state`` begins a step.

    ``flat`` is the state taken apart. Leaves without elements are not among them, nor is what
    ``flatten`` had to copy.
    """
    torch = lazy_torch.torch_or_none()
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
