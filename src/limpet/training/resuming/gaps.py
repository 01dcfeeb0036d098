"""What a state lacks so that a resumed training would continue exactly.

Nothing is reported that only may be missing: the rules are in docs/resume.md.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from limpet.data.progress import Progress
from limpet.data.rng import RNG
from limpet.data.sampler import ElasticSampler
from limpet.errors import InexactResume
from limpet.generators import States, capture_states
from limpet.lazy_torch import torch_or_none
from limpet.run.policy import AtEnd, EveryEpoch, Never, SavePolicy
from limpet.state.walk import find_instances
from limpet.text import format_list, warn_user
from limpet.training.resuming.members import find_members
from limpet.training.resuming.parameters import find_unsaved_parameters
from limpet.training.step_counter import StepCounter

_RNG_STATE_SIZES = frozenset({16, 5056})
"""The bytes of a generator's state in PyTorch: on a device, and on the CPU."""

_MAX_NAMES = 3
_RNG_TODO = 'Add "rng": limpet.RNG() to the state'
_POSITION_TODO = (
    "Pass an ElasticSampler to the loader as batch_sampler=, or use a StatefulDataLoader, and add"
    " it to the state. With an ElasticSampler, a step that takes k batches is"
    " ckpt.step(batches=k)"
)
_ADD_TODO = 'To add a member to an existing run, call resume(missing="keep") once.'


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any:
        """Return the state."""


class GapCheck:
    """Warns once, at the first step, of what the state lacks for an exact resume.

    The generators and counters of now are compared with those when the object was created, or of
    the last ``restart``.
    """

    def __init__(
        self, run: str, state: dict[str, Any], policy: SavePolicy, rank: int, counter: StepCounter
    ) -> None:
        self._run, self._state, self._counter = run, state, counter
        self._is_needed = rank == 0 and not isinstance(policy, Never)
        self._saves_within_epochs = _saves_within_epochs(policy)
        self._generators: States = {}
        self._counters: list[int] = []
        self._stale = self._find_iterators()
        self.restart()

    def restart(self) -> None:
        """Compare with the generators and counters of now, which a resume may have set."""
        if self._is_needed:
            self._generators, self._counters = capture_states(), _read_counters(self._state)

    def check(self) -> None:
        """Warn, once, if the first step has ended."""
        if not (self._is_needed and self._counter.has_counted):
            return
        self._is_needed = False
        gaps = self._find()
        self._generators = {}
        self._stale.clear()
        if gaps:
            warn_user(
                f"A resume of {self._run} would not be exact, because the state lacks something:"
                + "".join(f"\n- {gap}." for gap in gaps)
                + f"\n{_ADD_TODO}",
                InexactResume,
            )

    def _find_iterators(self) -> WeakKeyDictionary[Any, int]:
        """Return how many batches the iterators of now have yielded, if that may be needed.

        In a notebook, those of an earlier cell may still be alive.
        """
        found = WeakKeyDictionary[Any, int]()
        if self._is_needed and torch_or_none() is not None:
            members = _members(self._state)
            if self._lacks_rng(members) or self._lacks_position(members):
                found.update({it: it._num_yielded for it in _find_live()[0]})
        return found

    def _find(self) -> list[str]:
        if torch_or_none() is None:
            return []
        members = _members(self._state)
        lacks_rng = self._lacks_rng(members)
        # else the user counts batches
        is_counted = self._counters != _read_counters(self._state)
        lacks_position = self._lacks_position(members) and not is_counted
        iterators, schedulers = list[Any](), list[Any]()
        if lacks_rng or lacks_position or _has_scheduler(members):
            iterators, schedulers = _find_live()
            iterators = [it for it in iterators if it._num_yielded != self._stale.get(it)]
        gaps = (
            self._find_random(members, iterators) if lacks_rng else "",
            _find_position(iterators) if lacks_position else "",
            _find_schedulers(members, schedulers),
            find_unsaved_parameters(self._state, members) if _are_known(members) else "",
        )
        return [gap for gap in gaps if gap]

    def _find_random(self, members: Sequence[Any], iterators: Sequence[Any]) -> str:
        now, before = capture_states(), self._generators
        changed = {name for name in now if not _are_equal(now[name], before.get(name))}
        reasons = []
        if changed - {"python", "numpy"}:
            reasons = _find_random_modules(members)
        if any(map(_shuffles_with_global_generator, iterators)):
            reasons.append("a shuffling DataLoader")
        reasons += sorted(f"the generator of {n}" for n in changed if _has_drawn(n, now, before))
        if not reasons:
            return ""
        who = format_list(reasons, _MAX_NAMES)
        return f"It has no RNG, although random numbers are drawn by {who}. {_RNG_TODO}"

    def _lacks_rng(self, members: Sequence[Any]) -> bool:
        return not (any(isinstance(m, RNG) for m in members) or _has_generator_states(self._state))

    def _lacks_position(self, members: Sequence[Any]) -> bool:
        """Return True if no member of the state can be a position in the data that is needed."""
        known = _known_types()
        return self._saves_within_epochs and all(isinstance(m, known) for m in members)


def _find_position(iterators: Sequence[Any]) -> str:
    if not any(_batch_count(it) > 1 for it in iterators):
        return ""
    what = "It has no position in the data, although batches come from a DataLoader"
    return f"{what}. {_POSITION_TODO}"


def _saves_within_epochs(policy: SavePolicy) -> bool:
    """Return True if a policy may save a step that does not complete an epoch."""
    if hasattr(policy, "first") and hasattr(policy, "second"):
        return _saves_within_epochs(policy.first) or _saves_within_epochs(policy.second)
    return not isinstance(policy, EveryEpoch | AtEnd | Never)


def _known_types() -> tuple[type, ...]:
    """Return the types of members that surely do not contain a position in the data."""
    torch: Any = torch_or_none()
    scheduler = torch.optim.lr_scheduler.LRScheduler
    scaler = torch.amp.grad_scaler.GradScaler
    return torch.nn.Module, torch.optim.Optimizer, scheduler, scaler, Progress, RNG


def _are_known(members: Sequence[Any]) -> bool:
    """Return True if no member of the state can contain parameters that nobody sees."""
    known = *_known_types(), ElasticSampler
    return all(isinstance(m, known) for m in members)


def _members(state: dict[str, Any]) -> list[Any]:
    """Return the objects with a ``state_dict`` in the containers and wrappers of a state."""
    return [member for _, member in find_members(state, _Stateful)]


def _read_counters(state: dict[str, Any]) -> list[int]:
    """Return the ints that a user may count in: those at the top, and ``Progress.samples``."""
    progress = (v.samples for v in state.values() if isinstance(v, Progress))
    return [*(v for v in state.values() if type(v) is int), *progress]


def _are_equal(a: Any, b: Any) -> bool:
    torch: Any = torch_or_none()
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and all(_are_equal(v, b.get(k)) for k, v in a.items())
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _has_drawn(name: str, now: States, before: States) -> bool:
    """Return True if a generator of a device was not only created or seeded, but has been used.

    Its state is the seed and, from byte 8 on, how many numbers it has drawn.
    """
    return ":" in name and name in before and bool(now[name][8:].any())


# -- random numbers --------------------------------------------------------------------------------


def _has_generator_states(state: dict[str, Any]) -> bool:
    """Return True if the state has a tensor like those of ``torch.get_rng_state``."""
    torch: Any = torch_or_none()
    tensors = find_instances(state, torch.Tensor)
    return any(t.dtype == torch.uint8 and t.numel() in _RNG_STATE_SIZES for t in tensors)


def _find_random_modules(members: Sequence[Any]) -> list[str]:
    """Return the classes of the modules of the state that draw random numbers in training mode."""
    torch: Any = torch_or_none()
    modules = (m for m in members if isinstance(m, torch.nn.Module))
    found = {type(sub).__name__ for m in modules for sub in m.modules() if _draws(sub, torch.nn)}
    return sorted(found)


def _draws(module: Any, nn: Any) -> bool:
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return bool(module.dropout > 0)
    return isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)


def _shuffles_with_global_generator(iterator: Any) -> bool:
    data: Any = sys.modules["torch.utils.data"]  # that of a DataLoader
    batches = iterator._index_sampler
    sampler = getattr(batches, "sampler", batches)
    shuffling = data.RandomSampler | data.SubsetRandomSampler | data.WeightedRandomSampler
    return isinstance(sampler, shuffling) and sampler.generator is None


# -- live objects ----------------------------------------------------------------------------------


def _find_live() -> tuple[list[Any], list[Any]]:
    """Return the iterators of DataLoaders that have yielded a batch, and the schedulers, which
    exist in this process. Takes 40 to 90 ms for a million objects, so it is done only if needed."""
    loaders = sys.modules.get("torch.utils.data.dataloader")
    optim = sys.modules.get("torch.optim.lr_scheduler")
    iterator = () if loaders is None else tuple(_subclasses(loaders._BaseDataLoaderIter))
    scheduler = () if optim is None else tuple(_subclasses(optim.LRScheduler))
    # an object refers to its class
    found = gc.get_referrers(*iterator, *scheduler)
    used = [o for o in found if isinstance(o, iterator) and hasattr(o, "_num_yielded")]
    used = [o for o in used if o._num_yielded]
    return used, [o for o in found if isinstance(o, scheduler) and hasattr(o, "optimizer")]


def _has_scheduler(members: Sequence[Any]) -> bool:
    """Return True if a scheduler of PyTorch exists for an optimizer: it wraps ``step``."""
    torch: Any = torch_or_none()
    optimizers = (m for m in members if isinstance(m, torch.optim.Optimizer))
    steps = (o.step for o in (getattr(o, "optimizer", o) for o in optimizers))
    return any(hasattr(step, "_wrapped_by_lr_sched") for step in steps)


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    sub: type
    for sub in cls.__subclasses__():
        yield from _subclasses(sub)


def _batch_count(iterator: Any) -> float:
    """Return the number of batches of an epoch; infinity if it is not known."""
    try:
        return len(iterator._index_sampler)
    except (TypeError, NotImplementedError):
        return float("inf")


def _find_schedulers(members: Sequence[Any], live: Sequence[Any]) -> str:
    """Describe the schedulers of optimizers of the state that no member of the state contains."""
    torch: Any = torch_or_none()
    optimizers = [m for m in members if isinstance(m, torch.optim.Optimizer)]
    known = {id(o) for o in optimizers} | {id(getattr(o, "optimizer", o)) for o in optimizers}
    saved, pending = set[int](), [m for m in members if id(m) not in known]
    while pending:
        member = pending.pop()
        if id(member) in saved or isinstance(member, torch.nn.Module):
            continue
        saved.add(id(member))
        for value in getattr(member, "__dict__", {}).values():
            values = tuple(value.values()) if isinstance(value, dict) else value
            values = values if isinstance(values, list | tuple) else (values,)
            pending += [v for v in values if isinstance(v, torch.optim.lr_scheduler.LRScheduler)]
    lacking = [s for s in live if id(s.optimizer) in known and id(s) not in saved]
    if not lacking:
        return ""
    names = format_list(sorted({type(s).__name__ for s in lacking}), _MAX_NAMES)
    return f"It has no scheduler, although its optimizer has one: {names}. Add it to the state"
