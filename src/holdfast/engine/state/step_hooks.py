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
    find_stable_storages,
    modules_in,
    optimizers_in,
    parameters_and_slots,
    parameters_of,
    storage_address,
)

if TYPE_CHECKING:
    import torch

    from holdfast.engine.state.flatten import FlatState


def find_stable_leaves(state: dict[str, Any], flat: FlatState) -> set[str]:
    """The keys of the leaves that hold still until an optimizer in ``state`` begins a step.

    ``flat`` is the state taken apart. Leaves without elements are not among them, nor is what
    ``flatten`` had to copy.
    """
    torch = lazy_torch.torch_or_none()
    if torch is None:
        return set()
    still = find_stable_storages(parameters_and_slots(optimizers_in(state)), modules_in(state))
    return {
        leaf.key
        for leaf in flat.leaves
        if isinstance(leaf.source, torch.Tensor) and storage_address(leaf.source) in still
    }


class StepPreHook:
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
        self._all_optimizers = optimizers is None
        mine = list(optimizers or ())
        self._optimizer_ids = frozenset(map(id, mine))
        self._parameter_storages = frozenset(
            storage_address(p) for o in mine for p in parameters_of(o)
        ) - {0}
        if self._all_optimizers or mine:
            _register(self)

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins a step."""
        if (
            self._all_optimizers
            or id(optimizer) in self._optimizer_ids
            or any(storage_address(p) in self._parameter_storages for p in parameters_of(optimizer))
        ):
            self._before_step()

    def remove(self) -> None:
        """Let all optimizers step unseen."""
        _unregister(self)


_step_pre_hooks: tuple[weakref.ref[StepPreHook], ...] = ()
"""Weak, so that nobody who forgets to close a checkpointer keeps its state in memory."""
_step_pre_hooks_lock = Lock()
_registrations: list[object] = []


def _register(hook: StepPreHook) -> None:
    global _step_pre_hooks
    with _step_pre_hooks_lock:
        if not _registrations:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            # for good: PyTorch's own table must not change while another thread waits in it
            _registrations.append(register_optimizer_step_pre_hook(_on_any_step_begin))
        _step_pre_hooks = (*(r for r in _step_pre_hooks if r() is not None), weakref.ref(hook))


def _unregister(hook: StepPreHook) -> None:
    global _step_pre_hooks
    with _step_pre_hooks_lock:
        _step_pre_hooks = tuple(r for r in _step_pre_hooks if r() is not None and r() is not hook)


def _on_any_step_begin(optimizer: Any, args: Any, options: Any) -> None:
    for known in _step_pre_hooks:
        guard = known()
        if guard is not None:
            guard.on_step_begin(optimizer)
