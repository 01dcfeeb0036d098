"""Calls before the steps of optimizers, by PyTorch's global hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any

from limpet.state.walk import parameters_of, storage_address

if TYPE_CHECKING:
    import torch


class StepPreHook:
    """Calls ``before_step`` when an optimizer begins a step, and prevents the step if that raises.

    It covers these optimizers (None: all) and each that has a parameter in the same memory, such as
    one inside a wrapper, until ``remove`` is called or the object is garbage collected. It uses
    PyTorch's global hook, which covers closures, fused implementations, and subclasses.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer] | None, before_step: Callable[[], object]
    ) -> None:
        self._before_step = before_step
        self._all_optimizers = optimizers is None
        covered = list(optimizers or ())
        self._optimizer_ids = frozenset(map(id, covered))
        self._parameter_storages = frozenset(
            storage_address(p) for o in covered for p in parameters_of(o)
        ) - {0}
        if self._all_optimizers or covered:
            _register(self)

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        if (
            self._all_optimizers
            or id(optimizer) in self._optimizer_ids
            or any(storage_address(p) in self._parameter_storages for p in parameters_of(optimizer))
        ):
            self._before_step()

    def remove(self) -> None:
        global _step_pre_hooks
        with _step_pre_hooks_lock:
            _step_pre_hooks = tuple(ref for ref in _step_pre_hooks if ref() not in (None, self))


_step_pre_hooks: tuple[weakref.ref[StepPreHook], ...] = ()
"""Weak references, so that a checkpointer that is never closed does not keep its state alive."""
_step_pre_hooks_lock = Lock()
_registrations: list[object] = []


def _register(hook: StepPreHook) -> None:
    global _step_pre_hooks
    with _step_pre_hooks_lock:
        if not _registrations:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            # never removed: PyTorch's hook table must not change while another thread iterates it
            _registrations.append(register_optimizer_step_pre_hook(_on_any_step_begin))
        active = (ref for ref in _step_pre_hooks if ref() is not None)
        _step_pre_hooks = (*active, weakref.ref(hook))


def _on_any_step_begin(optimizer: Any, args: Any, options: Any) -> None:
    for hook in filter(None, (ref() for ref in _step_pre_hooks)):
        hook.on_step_begin(optimizer)
