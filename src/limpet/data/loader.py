"""A ``DataLoader`` with a position: a pass over it begins at the position that the training has
counted, and each batch is a function of its position.

A batch counts when a step has used it, not when it is yielded: wrappers fetch batches ahead, and
scripts look at one first. Random numbers are functions of a position, too (``limpet.generators``),
so nothing but the position must be saved.
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.utils import data

from limpet import generators
from limpet.arguments import check_count, check_rank, check_whole, require
from limpet.data.epoch_order import EpochOrder, wrapped_samplers
from limpet.data.samples import Samples, Stream, Task, WorkerState, get_back, start_worker
from limpet.errors import InexactResume, LimpetError, PlanError
from limpet.generators import digest, initial_seed, kept_generators, seed_generators
from limpet.lazy_torch import rank_and_world_size
from limpet.threads import no_op

_SAME_OPTIONS = (
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "multiprocessing_context",
    "persistent_workers",
    "prefetch_factor",
)

_COMPUTED = ("shuffled", "sequential")
"""The orders that no sampler gives."""

_COUNTS = {"seed", "epoch", "at", "passes", "ended", "per_step"}

_FIELDS = _COUNTS | {"order", "is_last", "length", "samples_per_step", "first"}

_POSITION = {
    *("_explicit", "_initial_seed", "key", "_name", "_is_key_final", "_owner", "_per_step"),
    *("_handed", "_pass", "_body", "_phase", "_has_counted", "_passes_before", "_passes", "_ended"),
    *("_counted", "_began", "samples_per_step_before"),
}
"""The attributes that stay if a loader is replaced."""

_Phase = Literal["none", "open", "left", "over"]
"""What has become of the last pass: there was none in this epoch, it goes on, it was left early, or
it has yielded the last batch of the epoch."""


class _Position(NamedTuple):
    """The position after a batch. ``at``: the samples of all ranks before it in the epoch, or the
    batches of a stream or of a batch sampler. ``is_last``: the epoch has no batch after it.
    ``length``, ``first``: see ``EpochOrder``. ``states``, ``turn``: of a stream, those of its
    workers, and whose batch is the next."""

    epoch: int
    at: int
    is_last: bool = False
    length: int | None = None
    first: int | None = None
    states: tuple[WorkerState | None, ...] = ()
    turn: int = 0


class DataLoader(data.DataLoader[Any]):
    """``torch.utils.data.DataLoader`` with the same arguments, whose position is saved.

    Put it into the state of a ``Checkpointer``, whose ``step`` counts its batches. After a resume,
    the next pass is the rest of the epoch, with the same batches and the same random numbers:

    - The generators of Python, NumPy, and PyTorch are seeded before each ``dataset[i]`` from the
      seed, the epoch, and the sample, in any process. ``torch.initial_seed()`` is then the seed of
      the sample, for transforms with generators of their own. For ``__getitems__``, ``collate_fn``,
      samplers, and streams, they are seeded from the position.
    - In the training process, they are seeded whenever a loader in the state yields a batch, and at
      the end of a pass. A loader outside the state changes no generator.

    ``batch_size`` is that of one rank. ``total_batch_size`` is the alternative, for all ranks
    together: a resume on another number of ranks is then exact. There is one order of the samples
    for all ranks, and each rank takes its part, also of the batches of a ``batch_sampler``. An
    incomplete last batch is padded to a multiple of the ranks with samples from the beginning of
    the epoch, or dropped with ``drop_last``. ``rank``, ``ranks``: if not given, those of
    ``torch.distributed`` when a pass begins; give the data-parallel ones to tensor-parallel jobs.

    ``seed``: any int. By default, it is that of ``generator``, or else PyTorch's initial seed and
    the key in the state. It is saved. All ranks use that of rank 0.

    A stream (``IterableDataset``) begins each pass as it was made, after ``set_epoch(epoch)`` if it
    has that. Its ``state_dict`` makes a resume fast. Without one, if a copy shows that it does not
    continue exactly, or with ``replay=True``, workers read the finished part of the epoch again. A
    stream must divide itself among ranks and workers, and resumes only with as many as before.

    ``batch`` is the number of the last batch in its epoch, from 0.

    Raises ``LimpetError`` for a ``DistributedSampler``, for ``in_order=False``, and for arguments
    that do not fit together.
    """

    key: int
    """The seed, as 64 bits that all ranks must share."""

    _phase: _Phase
    _has_counted: bool
    _sets_epoch = False  # of a dataset that is not a stream

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        total_batch_size: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        seed: int | None = None,
        replay: bool = False,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(data.DataLoader.__init__).bind(self, dataset, *args, **kwargs)
        self._rank, self._ranks = check_rank(rank, ranks)
        if total_batch_size is not None:
            total_batch_size = check_count("total_batch_size=", total_batch_size)
            if {"batch_size", "batch_sampler"} & given.arguments.keys():
                raise LimpetError(
                    "total_batch_size= replaces batch_size= and batch_sampler=: give one of them"
                )
            kwargs["batch_size"] = -(-total_batch_size // self._place()[1])
        self._is_stream = isinstance(dataset, data.IterableDataset)
        super().__init__(dataset, *args, **kwargs)
        sampler, batch_sampler = (given.arguments.get(n) for n in ("sampler", "batch_sampler"))
        self._given: Any = sampler if batch_sampler is None else batch_sampler
        if not getattr(self, "in_order", True):
            raise LimpetError("in_order=False is refused: the order of the batches would be random")
        if any(isinstance(s, data.DistributedSampler) for s in wrapped_samplers(self._given)):
            raise LimpetError(
                "A DistributedSampler is refused: remove it, and pass shuffle= to the loader, which"
                " gives each rank its part"
            )
        shuffle = bool(given.arguments.get("shuffle"))
        own = "stream" if self._is_stream else "shuffled" if shuffle else "sequential"
        self._order = (
            own if self._given is None else "sampler" if batch_sampler is None else "batch_sampler"
        )
        self._total, self._replay = total_batch_size, bool(replay)
        self._explicit = None if seed is None else check_whole("seed=", seed, "an int", -math.inf)
        generator = given.arguments.get("generator")
        if seed is None and generator is not None:
            self._explicit = generator.initial_seed()
        self._initial_seed = initial_seed()
        self.key = digest(self._initial_seed, "")
        if self._explicit is not None:
            self.key = self._explicit = self._explicit & generators.MASK
        self._name, self._is_key_final = "", self._explicit is not None
        self._owner: object | None = None  # of the state that has this loader
        self._per_step = 1  # the most batches that one step has counted
        self._handed: deque[tuple[int, _Position]] = deque()  # uncounted, with the passes
        self._pass = 0
        self._body: int | None = None  # the passes before this body of ``epochs``
        self.begin_epoch(0)
        self._began = self._counted  # where the last pass began
        self._warned = False
        self.batch = 0
        self.samples_per_step_before: int | None = None
        self._inner: data.DataLoader[Any] | None = None
        self._stream: Stream | None = None
        self._tasks = _Tasks()
        self._source = EpochOrder(
            dataset,
            self._given,
            is_shuffled=shuffle,
            is_by_batch=self._order == "batch_sampler",
            drop_last=self.drop_last,
        )

    # Libraries look at the samplers. They refer to the loader, so it does not refer to them:
    # otherwise, only the garbage collector would end the workers of a loader.

    @property
    def sampler(self) -> Any:
        """What gives the order of the samples."""
        return self._torch_sampler if self._is_stream else _Order(self)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._torch_sampler = sampler

    @property
    def batch_sampler(self) -> Any:
        """What gives the order of the batches. None: there are only samples."""
        own = self._torch_batch_sampler
        return own if own is None or self._is_stream else _Batches(self)

    @batch_sampler.setter
    def batch_sampler(self, batch_sampler: Any) -> None:
        self._torch_batch_sampler = batch_sampler

    def __repr__(self) -> str:
        return f"<limpet.DataLoader at {self._counted.at} of epoch {self._counted.epoch}>"

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        if self._is_stream:
            size, length = self._local_size() or 1, len(self.dataset)  # type: ignore[arg-type]
        else:  # with a batch sampler, the positions are batches
            size, length = self.samples_per_step or 1, len(self._source)
        return self._count_batches(length, size)

    def _count_batches(self, length: int, size: int) -> int:
        return length // size if self.drop_last else -(-length // size)

    @property
    def batches_done(self) -> int:
        """The number of batches of the epoch before the counted position, for loops that count them
        themselves: ``len(loader) - batches_done`` remain, also if their size has changed in the
        epoch."""
        at, size = self._counted.at, self.samples_per_step
        if size is None:  # positions are batches
            return at
        length = self._counted.length or len(self._source)
        return len(self) - self._count_batches(length - at, size)

    # -- for the Checkpointer ----------------------------------------------------------------------

    @property
    def keeps_per_rank(self) -> bool:
        """True for a stream: each rank saves its own position."""
        return self._is_stream

    def derive(self, rank: int) -> None:
        """Begin on a rank that no version has, which is possible only between two epochs."""

    def attach(self, name: str, owner: object) -> None:
        """Be a member of the state of ``owner``, with the key ``name``: seed its steps."""
        self._owner, self._name, self._source.must_check = owner, name, True
        if not self._is_key_final:
            self.use_key(digest(self._initial_seed, name))

    def detach(self, owner: object) -> None:
        """The training of ``owner`` has ended: seed no more, and end the workers."""
        if self._owner is owner:
            self._owner = self._inner = None
            self._is_key_final = True  # as after a resume of this training, for one that follows

    def use_key(self, key: int) -> None:
        """Use the seed of rank 0. A pass that has begun with another one is over."""
        if key != self.key:
            self.key, self._inner = key, None
            self._pass += 1
            self._passes_before = self._pass  # else a cycle of loaders would end at a resume
            self._handed.clear()

    @property
    def is_within_step(self) -> bool:
        """True if the pass is over, but its last batches belong to a step that has not ended."""
        is_over = self._phase == "over"
        return is_over and self._has_counted and 0 < len(self._handed) < self._per_step

    @property
    def uncounted(self) -> int:
        """The number of batches that were yielded and not counted."""
        return len(self._handed)

    def check(self, batches: int) -> None:
        """Raise the error that ``count`` would raise. A step first checks all loaders."""
        if batches > len(self._handed):
            raise LimpetError(
                f"A step counts more batches than the loader {self._name!r} has yielded",
                expected=f"at most {len(self._handed)}",
                found=batches,
                todo="Call step() once per batch, and step(batches=0) for a step without a batch."
                " Call resume() before the first pass, if the state is a function."
                " Iterate over this loader itself: if accelerator.prepare() has copied it, write"
                " loader = limpet.elastic(accelerator.prepare(loader)). Do not put a loader for"
                " evaluation into the state: if Accelerate has prepared it, do not make it elastic",
            )

    def count(self, batches: int, *, ahead: int = 0) -> None:
        """Count this many batches as trained. ``ahead``: those that nothing has used yet."""
        fresh = sum(number == self._pass for number, _ in self._handed) - ahead
        while batches and fresh >= batches and self._handed[0][0] != self._pass:
            self._handed.popleft()  # the last batches of the epoch before belonged to no step
        for _ in range(batches):
            number, self._counted = self._handed.popleft()
            self._passes = max(1, number - self._passes_before)
            self._has_counted = True
        self._per_step = max(self._per_step, batches)
        if batches and self._phase == "over" and not self._handed:
            self._seed_end(self._counted)  # as a resume does: wrappers end the pass before the step

    def _seed_end(self, position: _Position) -> None:
        rank, name = self._place()[0], digest(self._name)
        seed_generators(self.key, generators.END, name, position.epoch, position.at, rank)

    def seed_end(self) -> None:
        """Seed what follows the pass, which an object around this loader ends after the steps."""
        if self._owner is not None and self._phase == "over":
            self._seed_end(self._handed[-1][1] if self._handed else self._counted)

    def begin_body(self) -> None:
        """Begin the body of an epoch. A pass before it, which no step has counted, was a peek."""
        if self._phase == "over" and not self._has_counted:
            self._phase = "left"
        if self._body is not None:  # not the body of a resume
            self._ended = 0
        self._passes_before = self._body = self._pass

    def end_epoch(self) -> bool:
        """End the epoch if its pass is over or was left. Return False if batches remain uncounted
        that may belong to the next step: the position stays until that."""
        if self._phase == "over":
            self._check_count_fits()
            if self.is_within_step:
                return False
        # else a resume at the end of the epoch, and `zip` has not begun the second loader
        is_at_end = self._phase == "none" and self._counted.is_last
        if self._phase in ("over", "left") or is_at_end:
            self.begin_epoch(self._counted.epoch + 1)
        return True

    def begin_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch."""
        self._counted = _Position(epoch, 0)
        self._phase = "none"
        self._has_counted = False
        # this epoch, and since it up to the position
        self._passes_before, self._passes = self._pass, 1
        # in this body, up to the last one that ended before the position: empty after a resume
        self._ended = 0
        self._handed.clear()

    @property
    def epoch(self) -> int:
        """The epoch of the counted position."""
        return self._counted.epoch

    def skip_rest(self, epoch: int) -> None:
        """Begin this epoch, if the loaded position is the end of an earlier one: a framework that
        counts epochs itself does not expect an empty rest of one that it has ended."""
        if self._phase == "none" and self._counted.is_last and self._counted.epoch < epoch:
            self.begin_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain values, which are the same on all ranks, unless this is a
        stream. Then the states of its workers are included."""
        epoch, at, is_last, length, first, states, turn = self._counted
        state: dict[str, Any] = {
            "seed": self.key,
            "order": self._order,
            "epoch": epoch,
            "at": at,
            "is_last": is_last,
            "passes": self._passes,
            "ended": self._ended,
            "length": length,
            "per_step": self._per_step,
            "samples_per_step": self.samples_per_step,
            "first": first,
        }
        if self._is_stream:
            state["stream"] = {
                "place": [*self._place(), max(1, self.num_workers)],
                "states": [None if s is None else [*s] for s in states],
                "turn": turn,
            }
        return state

    def check_state_dict(self, state: object) -> None:
        """Raise the error that ``load_state_dict`` would raise. A load calls this first."""
        if not (
            isinstance(state, dict)
            and state.keys() >= _FIELDS
            and all(type(state[name]) is int and state[name] >= 0 for name in _COUNTS)
        ):
            raise PlanError(
                "The loaded value is not the state of a limpet.DataLoader",
                expected=", ".join(sorted(_FIELDS)),
                found=state if isinstance(state, dict) else type(state).__name__,
            )
        own: dict[str, Any] = {} if self._explicit is None else {"seed": self._explicit}
        if state["at"]:
            own["order"] = self._order
            if self._is_stream and "stream" in state:
                own["rank, ranks, workers"] = [*self._place(), max(1, self.num_workers)]
                state = {**state, "rank, ranks, workers": state["stream"]["place"]}
            elif own["order"] in _COMPUTED and len(self.dataset) < (state["length"] or 0):  # type: ignore[arg-type]
                own["length"] = len(self.dataset)  # type: ignore[arg-type]
        differing = [name for name in own if state[name] != own[name]]
        if differing:
            raise PlanError(
                f"The loader {self._name!r} would yield other batches than the saved one",
                expected=", ".join(f"{name} {state[name]}" for name in differing),
                found=", ".join(f"{name} {own[name]}" for name in differing),
                todo="Use the earlier arguments until the end of this epoch (a dataset may grow)."
                " Or start a new run in another folder without the saved position:"
                ' resume(start="RUN@latest", keys=["model/**", ...])',
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position: the next pass is the rest of that epoch. Raises
        ``PlanError``, and changes nothing, if the batches would be others than the saved ones."""
        self.check_state_dict(state)
        self.use_key(state["seed"])
        self._is_key_final = True
        self.begin_epoch(state["epoch"])
        stream = state.get("stream") or {"states": (), "turn": 0}
        states = tuple(None if s is None else WorkerState(*s) for s in stream["states"])
        self._counted = _Position(
            state["epoch"],
            state["at"],
            is_last=bool(state["is_last"]),
            length=state["length"],
            first=state["first"],
            states=states,
            turn=stream["turn"],
        )
        self._per_step, self.samples_per_step_before = state["per_step"], state["samples_per_step"]
        self._pass, self._inner = self._pass + 1, None
        self._passes_before, self._passes = self._pass, state["passes"]
        self._body, self._ended = None, state["ended"]

    def replace(self, other: DataLoader) -> None:
        """Continue at the same position with the dataset and the arguments of another loader, such
        as one that a framework makes for each epoch. Call it between two passes."""
        new = {name: value for name, value in vars(other).items() if name not in _POSITION}
        vars(self).update(new)
        self._pass += 1  # a pass that has begun is over
        self._source.must_check = self._owner is not None

    # -- one pass ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the rest of the epoch. As this is a generator, nothing happens
        before the first batch is requested."""
        if self._body is not None and self._pass - self._body < self._ended:
            self._pass += 1
            self._passes_before = self._pass
            return  # a resume in a later pass of this body
        start = self._begin_pass()
        number, in_state = self._pass, self._owner is not None
        rank, ranks = self._place()
        ahead: deque[_Position] = deque()
        inner = self._prepare(start, rank, ranks, ahead)
        draws = not in_state and (self.num_workers == 0 or self._given is not None)
        name, size = digest(self._name), self.samples_per_step or 1
        length = self._stream_length()
        position, states = start, list(start.states)
        states = states or [None] * max(1, self.num_workers)
        try:
            with kept_generators() if draws else nullcontext():
                iterator = iter(inner)
            while True:
                with kept_generators() if draws else nullcontext():
                    made = next(iterator, self)
                if number != self._pass:
                    raise LimpetError(
                        f"This pass over the loader {self._name!r} began before a resume, a new"
                        " seed, or a later pass",
                        todo="Iterate over the loader again. Begin no pass before resume()",
                    )
                if made is self:
                    break
                if made is None:  # of a stream: a worker whose turn was before the position
                    continue
                before, (batch, note) = position, made
                if self._is_stream:
                    states[note.worker] = note
                    turn = (note.worker + 1) % len(states)
                    at = before.at + 1
                    position = before._replace(
                        at=at, is_last=at >= length, states=tuple(states), turn=turn
                    )
                else:
                    position = ahead.popleft()
                    if note is not None:
                        self._warn(note)
                self._handed.append((number, position))
                if position.is_last:  # some loops stop after len(loader) batches
                    self._phase = "over"
                self.batch = before.at // size
                if in_state:
                    step = name, before.epoch, before.at, rank
                    seed_generators(self.key, generators.STEP, *step)
                yield batch
            # a rest that is shorter than a step is of the training, although no step has counted it
            self._has_counted |= start.at > 0 and 0 < len(self._handed) < self._per_step
            if self._counted.epoch <= position.epoch:  # else end_epoch was called
                self._phase = "over"
            if in_state:
                self._seed_end(position)
        finally:
            if number == self._pass and self._phase == "open":
                self._phase = "left"

    def _begin_pass(self) -> _Position:
        """Return the position at which a pass begins."""
        start = self._counted
        if self._phase == "over":
            self._check_count_fits()
            begun, is_unused = self._pass - self._passes_before, not self._handed
            if is_unused and not self._has_counted and begun < self._passes:
                pass  # a resume at the end of an epoch that has several passes, as for a peek
            elif self._has_counted or is_unused:
                last = self._handed[-1][1] if self._handed else start
                start, self._passes_before = _Position(last.epoch + 1, 0), self._pass
                self._ended = 0 if self._body is None else self._pass - self._body
            else:
                self._handed.clear()
        else:  # the pass before was left: its uncounted batches come again
            self._handed.clear()
            if self._phase != "none" and self._began.epoch > start.epoch:
                start = self._began  # a peek after the last batch of an epoch
        self._pass, self._began = self._pass + 1, start
        self._phase, self._has_counted = "open", False
        return start

    def _check_count_fits(self) -> None:
        if self._has_counted and len(self._handed) >= self._per_step:
            raise LimpetError(
                f"The steps have not counted all batches of this pass over {self._name!r}",
                expected=f"less than {self._per_step} uncounted at the end of a pass",
                found=len(self._handed),
                todo="Under gradient accumulation, call step(batches=k) with the number of batches"
                " since the last step. End each pass before the next one begins",
            )

    def _prepare(
        self, start: _Position, rank: int, ranks: int, ahead: deque[_Position]
    ) -> data.DataLoader[Any]:
        """Return the loader of the pass, whose dataset makes whole batches. ``ahead`` gets their
        positions."""
        is_random = self._order in ("shuffled", "sampler", "batch_sampler")
        if ranks > 1 and is_random and self._owner is None and not self._is_key_final:
            raise LimpetError(
                "Several ranks must share an order: give seed= to a loader outside of the state"
            )
        if self._inner is not None and start.states:
            self._inner = None  # new workers, which begin in the middle
        if self._inner is None:
            self._inner = self._make_inner(rank)
        worker_side = cast(Any, self._inner.dataset)
        worker_side.key = self.key
        if self._is_stream:
            worker_side.begin(start.epoch, list(start.states), start.turn)
        else:
            worker_side.epoch = None
            source, epoch = self._source, start.epoch
            source.key, source.size = self.key, self.samples_per_step or 1
            source.length, source.first = start.length, start.first
            parts = source.parts(epoch, start.at, rank, ranks)

            def make_tasks() -> Iterator[Task]:
                for at, stop, is_last, indices in parts:
                    ahead.append(_Position(epoch, stop, is_last, source.length, source.first))
                    yield Task(epoch, at, rank, indices)

            self._tasks.tasks = make_tasks()
        generator = cast(torch.Generator, self._inner.generator)
        generator.manual_seed(digest(self.key, generators.WORKER, start.epoch) >> 1)
        return self._inner

    def _make_inner(self, rank: int) -> data.DataLoader[Any]:
        options = {name: getattr(self, name) for name in _SAME_OPTIONS}
        if self.num_workers:
            options["worker_init_fn"] = partial(start_worker, self.worker_init_fn)
        if self._is_stream:
            is_pipe = isinstance(self.dataset, getattr(data, "IterDataPipe", ()))
            if is_pipe and (self.num_workers or self._place()[1] > 1):
                raise LimpetError(
                    "An IterDataPipe, which PyTorch has deprecated, is not divided among workers"
                    " and ranks: use num_workers=0 on one rank, or an IterableDataset"
                )
            # of Accelerate: each rank reads all of the stream and keeps its part, so all draw alike
            is_shared = type(self.dataset).__name__ == "IterableDatasetShard"
            self._stream = self._stream or Stream(
                self.dataset,
                self.collate_fn,
                batch_size=self._local_size(),
                drop_last=self.drop_last,
                rank=0 if is_shared else rank,
                replay=self._replay,
            )
            dataset: Any = self._stream
        else:
            is_batched = self.batch_size is not None or self._order == "batch_sampler"
            dataset = Samples(
                self.dataset,
                self.collate_fn,
                is_batched=is_batched,
                sets_epoch=self._sets_epoch and hasattr(self.dataset, "set_epoch"),
            )
            options["sampler"] = self._tasks
        return data.DataLoader(
            dataset,
            batch_size=None,
            collate_fn=get_back,
            generator=torch.Generator(),
            **options,
        )

    # -- sizes -------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        if self._rank is not None and self._ranks is not None:
            return self._rank, self._ranks
        return rank_and_world_size()

    @property
    def samples_per_step(self) -> int | None:
        """The samples of all ranks in a batch. None: a stream or a batch sampler decides."""
        if self._order in ("stream", "batch_sampler"):
            return None
        ranks = self._place()[1]
        if self._total is not None:
            enough = self._total >= ranks
            require("total_batch_size=", enough, f"{ranks} or more for {ranks} ranks", self._total)
        return self._total or (self.batch_size or 1) * ranks

    def _local_size(self) -> int | None:
        """Return the number of samples in a batch of a stream, None for single samples."""
        if self._total is None:
            return self.batch_size
        rank, ranks = self._place()
        return self._total // ranks + (rank < self._total % ranks)

    def _stream_length(self) -> float:
        """Return the number of batches of a stream, infinity if it does not tell."""
        if self._is_stream and hasattr(self.dataset, "__len__"):
            with suppress(TypeError):  # it wraps another one, which does not
                return len(self)
        return math.inf

    def _warn(self, found: Any) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn_explicit(
                f"{found.name} gave two different samples for one index: it draws from a generator"
                " of its own, so a resume is not exact. Seed that with torch.initial_seed() in this"
                " method",
                InexactResume,
                found.file,
                found.line,
            )


class _Tasks:
    """The sampler of the inner loader: the tasks of the pass that begins."""

    tasks: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.tasks


class _Order(data.DistributedSampler[Any]):
    """The ``sampler`` of a loader, for libraries that ask for it: Lightning does not replace a
    ``DistributedSampler``. It gives the order of all ranks, also to a library that iterates."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.epoch = loader, 0
        self.dataset, self.drop_last = loader.dataset, loader.drop_last

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.loader.skip_rest(epoch)

    def __len__(self) -> int:
        return len(self.loader._source)

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        if loader._given is not None:
            return iter(loader._given)
        source = replace(loader._source, key=loader.key, size=1, length=None)
        return chain.from_iterable(part for *_, part in source.parts(self.epoch, 0, 0, 1))


class _Batches(data.BatchSampler):
    """The ``batch_sampler`` of a loader, by which ``elastic`` finds the loader again, with what
    Accelerate asks for to know which samples of the last batch are repeated."""

    even_batches = True

    @property
    def num_processes(self) -> int:
        return self.loader._place()[1]

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(_Order(loader), loader.batch_size or 1, loader.drop_last)
        self.loader = loader

    def __iter__(self) -> Iterator[list[Any]]:
        loader = self.loader
        return iter(loader._given) if loader._order == "batch_sampler" else super().__iter__()

    def __len__(self) -> int:
        loader = self.loader
        return len(loader._given) if loader._order == "batch_sampler" else super().__len__()


def elastic(
    loader: Any,
    *,
    seed: int | None = None,
    replay: bool = False,
    total_batch_size: int | None = None,
    rank: int | None = None,
    ranks: int | None = None,
) -> Any:
    """Return a ``limpet.DataLoader`` with the dataset and arguments of a PyTorch ``DataLoader``.

    A ``DistributedSampler`` of the loader becomes ``shuffle=``, and its ``batch_size`` stays that
    of one rank, unless ``total_batch_size`` replaces it. The other arguments are those of
    ``limpet.DataLoader``. For what ``accelerator.prepare`` returns, the loader inside is replaced,
    and the same object is returned. A ``limpet.DataLoader`` that was passed to ``prepare`` is used.

    Raises ``LimpetError`` for another object, and for a loader whose rank 0 sends the batches
    (``DataLoaderConfiguration(dispatch_batches=False)`` of Accelerate avoids that).
    """
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base, data.DataLoader):
        raise LimpetError(
            f"elastic() takes a DataLoader, not {type(loader).__name__}: make one, with"
            " batch_size=None if these are batches"
        )
    for kind in type(base).__mro__:
        overridden = {"__iter__", "_get_iterator"} & vars(kind).keys()
        if overridden and not kind.__module__.startswith(("torch.", "torchdata.", "limpet.")):
            raise LimpetError(
                f"elastic() would not call {kind.__name__}.{min(overridden)}: do that in the"
                " dataset, the sampler, or collate_fn"
            )
    if type(loader).__name__ == "DataLoaderDispatcher":
        raise LimpetError(
            "The batches of this loader come from rank 0: pass"
            " DataLoaderConfiguration(dispatch_batches=False) to the Accelerator"
        )
    samplers = [*wrapped_samplers(base.batch_sampler), *wrapped_samplers(base.sampler)]
    wrapped = next((s.loader for s in samplers if isinstance(s, _Order)), None)
    found = base if isinstance(base, DataLoader) else wrapped
    own = {
        "seed": seed,
        "replay": replay or None,
        "total_batch_size": total_batch_size,
        "rank": rank,
        "ranks": ranks,
    }
    given = {name: value for name, value in own.items() if value is not None}
    if found is not None and given:
        raise LimpetError(
            f"{'= and '.join(given)}= must be given to the limpet.DataLoader that was passed"
        )
    if found is None:
        options = _read_arguments(base, is_wrapped=base is not loader)
        if total_batch_size is not None and options.get("batch_size") is not None:
            del options["batch_size"]
        found = DataLoader(base.dataset, **options | given)
    if base is loader:
        return found
    found._sets_epoch = True  # as the object around it does, from 0 in each process
    if base is not found:
        loader.base_dataloader = found
        loader.end = partial(_end_pass, weakref.ref(loader))
        loader.state_dict = found.state_dict  # its own returns a copy that was made earlier
        loader.adjust_state_dict_for_prefetch = no_op  # before 1.13, it expects other keys
    return loader


def _end_pass(prepared: weakref.ref[Any]) -> None:
    """End a pass over what ``accelerator.prepare`` returns. The loader inside ended its pass before
    the last step, so what a script has drawn since, as in a validation, would change the rest."""
    loader: Any = prepared()
    type(loader).end(loader)
    loader.base_dataloader.seed_end()


def _read_arguments(base: Any, *, is_wrapped: bool) -> dict[str, Any]:
    """Return the arguments of a ``limpet.DataLoader`` that is like ``base``."""
    options = {name: getattr(base, name) for name in (*_SAME_OPTIONS, "collate_fn")}
    options |= {"worker_init_fn": base.worker_init_fn}
    if not is_wrapped:
        options |= {"generator": base.generator}
    batches, sampler, is_total = base.batch_sampler, base.sampler, False
    while type(batches).__name__ == "BatchSamplerShard":  # of Accelerate: the part of a rank
        is_total, batches = is_total or batches.split_batches, batches.batch_sampler
    if isinstance(base.dataset, data.IterableDataset):
        return options | {"batch_size": base.batch_size, "drop_last": base.drop_last}
    if batches is not None and type(batches) is not data.BatchSampler:
        return options | {"batch_sampler": batches}
    if batches is None:
        options["batch_size"] = None
    else:
        sampler = batches.sampler
        options["total_batch_size" if is_total else "batch_size"] = batches.batch_size
        options["drop_last"] = batches.drop_last
    if isinstance(sampler, data.DistributedSampler):
        drop_last = sampler.drop_last or options.get("drop_last", False)
        return options | {"shuffle": sampler.shuffle, "drop_last": drop_last, "seed": sampler.seed}
    # the second is of Accelerate
    is_random = type(sampler).__name__ in ("RandomSampler", "SeedableRandomSampler")
    if is_random and not sampler.replacement and sampler.num_samples == len(base.dataset):
        return options | {"shuffle": True}
    return options if type(sampler) is data.SequentialSampler else options | {"sampler": sampler}
