"""What holds still between two steps of the optimizers: their parameters and slots.

Forward and backward passes may change all else: buffers such as BatchNorm's, the scales of FP8,
plain tensors, random generators. So parameters and slots can be copied beside them, until an
optimizer begins its next step, which a ``Guard`` tells.

What holds still is recognised by its memory: a parameter that shares its storage with a buffer
does not, whoever owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.engine import live
from holdfast.engine.tree import Flat
from holdfast.format.tree import MAX_DEPTH

if TYPE_CHECKING:
    import torch


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
    """Calls ``before_step`` whenever one of the optimizers begins a step, before it changes
    anything; an exception of it keeps the step from happening. (PyTorch's own
    ``register_step_pre_hook``, so closures, foreach, fused and subclasses are covered.)"""

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], before_step: Callable[[], object]
    ) -> None:
        def hook(optimizer: Any, args: Any, options: Any) -> None:
            before_step()

        self._handles = [o.register_step_pre_hook(hook) for o in optimizers]

    def remove(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()


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
        for group in optimizer.param_groups:
            yield from group["params"]
        yield from slots_of(optimizer)


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
    """The storages of the tensors, without those that a buffer of the modules shares, and of
    inference tensors, whose changes nobody counts."""
    loose = {0, *(storage(b) for module in modules for b in module.buffers())}
    return frozenset(s for t in tensors if (s := storage(t)) not in loose and not t.is_inference())


def storage(t: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has no memory that can be named."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0  # sparse, a wrapper subclass, not materialised: nothing holds still there


def found_in(value: Any, kind: type[Any]) -> Iterator[Any]:
    """What is of a kind in nested dicts, lists and tuples, each object once."""
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, kind):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, dict) and depth < MAX_DEPTH:
            for member in value.values():
                yield from walk(member, depth + 1)
        elif isinstance(value, list | tuple) and depth < MAX_DEPTH:
            for member in value:
                yield from walk(member, depth + 1)

    return walk(value, 0)
