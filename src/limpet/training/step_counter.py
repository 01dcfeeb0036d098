"""The position of a training: its steps and epochs, and the loaders that advance with it.

Only ``end_epoch`` counts epochs. Nothing is inferred from the passes of a loader, because some
correct loops leave a pass early, or make several per epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from limpet.arguments import check_count
from limpet.data.progress import Progress
from limpet.data.rng import RNG
from limpet.errors import LimpetError
from limpet.generators import EPOCH, MASK, STEP, initial_seed, seed_generators
from limpet.lazy_torch import rank_and_world_size
from limpet.ranks.group import Group, broadcast_from_first
from limpet.state.step_hooks import StepPreHook
from limpet.state.walk import optimizers_in
from limpet.training.state_check import find_members, loader_kinds

if TYPE_CHECKING:
    from limpet.data.loader import DataLoader

_SEED = "seed"
"""The field of the training metadata that has the seed of ``epochs`` and ``steps``."""


def find_positions(state: dict[str, Any]) -> list[Any]:
    """Return the members of a state that count the steps of one training only."""
    return [*find_members(state, (Progress, *loader_kinds())).values()]


class StepCounter:
    """Counts steps and epochs in the state's ``Progress``, or its own, and advances loaders."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.has_counted = False
        """True if a step has ended since the start of the process, or the last resume."""

        self.calls = 0
        """The number of calls of ``add_steps`` in this process."""

        self._seed = initial_seed()
        self._owner = object()
        self.attach(state)
        self.progress.begin()

    def attach(self, state: dict[str, Any]) -> None:
        """Count in ``state`` from now on; ``LimpetError`` if it has several ``Progress``."""
        found = [*find_members(state, Progress).values()]
        if len(found) > 1:
            raise LimpetError("The state has several Progress objects, so none counts the steps")
        self.ended_epochs = 0
        """The complete epochs by a record about the loaded version. Its position may be earlier, if
        the last steps were not saved, or if the ``Progress`` has an owner."""

        self._is_in_state = bool(found)
        self.positions = find_positions(state)
        # the hook must not refer to this object, which is then discarded without the collector
        self._stepped = set[bool]()
        self._hook = StepPreHook(optimizers_in(state), partial(self._stepped.add, True))
        self.progress = found[0] if found else Progress()
        self.progress.resume(None)
        self._has_rng = bool(find_members(state, RNG))
        members = find_members(state, loader_kinds())
        # accelerator.prepare returns an object around the loader
        self._prepared = {n: m for n, m in members.items() if hasattr(m, "base_dataloader")}
        self._loaders: dict[str, DataLoader] = {
            name: getattr(found, "base_dataloader", found) for name, found in members.items()
        }
        for name, loader in self._loaders.items():
            loader.attach(name, self._owner)

    @property
    def is_within_step(self) -> bool:
        """True if a step has begun whose gradients are accumulated beyond the end of the pass."""
        for loader in self._loaders.values():  # noqa: SIM110  (at each step: no generator)
            if loader.is_within_step:
                return True
        return False

    @property
    def is_uncounted(self) -> bool:
        """True if an optimizer of the state has stepped, and ``add_steps`` was never called."""
        return bool(self._stepped) and not self.calls

    def add_steps(self, steps: int, batches: int | None) -> None:
        """Count ``steps`` more steps, which consist of ``batches`` batches together (None: of as
        many, or of those since the last step if Accelerate has prepared the loader). If the
        ``Progress`` has an owner, its number is read instead."""
        count = check_count("steps=", steps)
        if batches is not None:
            batches = check_count("batches=", batches, 0)
        if self.progress.owner is not None and count != 1:
            raise LimpetError("step(steps=...) is refused: the owner of the Progress counts steps")
        count = self.progress.read("step") or count
        # a prepared loader has fetched a batch ahead, unless it has yielded the last one
        ahead = {name: int(not p.end_of_dataloader) for name, p in self._prepared.items()}
        if batches is None:
            since = [self._loaders[name].uncounted - fetched for name, fetched in ahead.items()]
            batches = max(1, *since) if since else count
        for loader in self._loaders.values():
            loader.check(batches)  # check all loaders before any of them advances
        for name, loader in self._loaders.items():
            loader.count(batches, ahead=ahead.get(name, 0))
        if self.progress.owner is None:
            self.progress.add_steps(count)
        self.has_counted = True
        if not self.calls:
            self._hook.remove()
        self.calls += 1

    def end_epoch(self) -> bool:
        """Count an epoch as complete, in ``progress.epoch`` and for the loaders. Return False if
        the last batches may belong to the next step. States are then as before until that step: a
        resume repeats these batches, and what follows them in the epoch."""
        self.progress.read("epoch")
        before = self.progress.state_dict()
        are_over = [loader.end_epoch() for loader in self._loaders.values()]
        if self.progress.owner is None:
            self.progress.end_epoch()
        if not all(are_over):
            self.progress.hold(before)
        return all(are_over)

    def loader_epochs(self) -> dict[str, int]:
        """Return the epoch of each loader by its key in the state."""
        return {name: loader.epoch for name, loader in self._loaders.items()}

    def begin_epoch(self, epoch: int, positions: Mapping[str, int] | None) -> None:
        """Begin a later epoch than that of the version, which was saved at its last step. Without
        ``positions``, it does not have the last steps of ``epoch`` complete epochs."""
        self.ended_epochs = epoch
        if positions is None:
            return
        while self.progress.epoch < epoch and self.progress.owner is None:
            self.progress.end_epoch()
        for name, loader in self._loaders.items():
            if loader.epoch < positions.get(name, 0):
                loader.begin_epoch(positions[name])

    def to_metadata(self) -> dict[str, Any]:
        """Return what a version stores about the position in addition to its state."""
        seed = {_SEED: self._seed}
        is_stored = self._is_in_state or not self.progress.epoch
        return seed if is_stored else {**seed, "progress": self.progress.state_dict()}

    def release(self) -> None:
        """Let other code set the ``Progress`` of the state."""
        self.has_counted = False
        self._stepped.clear()
        self.progress.resume(None)

    def close(self) -> None:
        """Let other code set the ``Progress``, and end the workers of the loaders."""
        self.release()
        self._hook.remove()
        for loader in self._loaders.values():
            loader.detach(self._owner)

    def resume_at(self, step: int, from_own_run: bool, metadata: Mapping[str, Any]) -> None:
        """Continue at ``step``, which replaces that of the ``Progress`` after a version of the run
        itself. ``metadata``: what the version stores."""
        self.ended_epochs = 0
        if type(seed := metadata.get(_SEED)) is int:
            self._seed = seed & MASK
        if not self._is_in_state:
            first = {"epoch": 0, "step": 0, "samples": 0}
            self.progress.load_state_dict(metadata.get("progress", first))
        if from_own_run or not self._is_in_state:
            self.progress.resume(step)
        self.progress.begin()

    # -- random numbers ----------------------------------------------------------------------------

    def share_seeds(self, group: Group, run_url: str) -> None:
        if group.size == 1:
            return
        own = {"": self._seed} | {name: loader.key for name, loader in self._loaders.items()}
        operation = f"the seeds of {run_url}"
        seeds = broadcast_from_first(group, operation, lambda: own, dict[str, int])
        self._seed = seeds[""]
        for name, loader in self._loaders.items():
            loader.use_key(seeds.get(name, loader.key))

    def loader_seeds(self) -> dict[str, str]:
        """Return the seeds of the loaders, which must be equal on all ranks at the first step."""
        return {
            f"the seed of the loader {name!r} (resume() shares that of rank 0)": str(loader.key)
            for name, loader in self._loaders.items()
        }

    def seed_epoch(self, epoch: int) -> None:
        """Seed the generators of the training at the start of an epoch."""
        for loader in self._loaders.values():
            loader.begin_body()
        self._seed_start(EPOCH, epoch)

    def seed_step(self, place: int | None = None) -> None:
        """Seed the generators of the training at the start of a step. Ranks with the same ``place``
        (by default, their number) draw the same numbers. A loader that a resume has left at the end
        of an epoch begins the next: `next(iter(loader))` expects a batch."""
        for loader in self._loaders.values():
            if not loader.keeps_per_rank:  # a stream may have more than its length
                loader.skip_rest(loader.epoch + 1)
        self._seed_start(STEP, self.progress.step, place)

    def _seed_start(self, kind: int, number: int, place: int | None = None) -> None:
        if not self._has_rng:  # it has its own sequence
            place = rank_and_world_size()[0] if place is None else place
            seed_generators(self._seed, kind, number, place)

    def describe_sizes(self) -> list[str]:
        """Return by how many samples per step a resume differs from the version, for people."""
        changes = []
        for loader in self._loaders.values():
            now, before = loader.samples_per_step, loader.samples_per_step_before
            if None not in (now, before) and now != before:
                changes.append(f"{now} samples per step, was {before}")
        return changes
