"""The position of a training: its steps and epochs, and the samplers that advance with it.

Only ``end_epoch`` counts epochs. Nothing is inferred from values of ``progress.epoch`` or from the
passes of a sampler, because some correct loops leave a pass early, or make several per epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limpet.arguments import check_count
from limpet.data.progress import Progress
from limpet.data.sampler import ElasticSampler, SamplerGroup
from limpet.errors import LimpetError
from limpet.generators import open_block
from limpet.state.walk import find_instances

POSITIONS: Any = Progress, ElasticSampler
"""The classes of what counts the steps of one training only."""


class StepCounter:
    """Counts steps and epochs in the state's ``Progress``, or its own, and advances samplers."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.has_counted = False
        """True if a step has ended since the start of the process, or the last resume."""

        self.calls = 0
        """The number of calls of ``add_steps`` in this process."""

        self._block: object | None = None
        self.attach(state)
        self.progress.begin()

    def attach(self, state: dict[str, Any]) -> None:
        """Count in ``state`` from now on; ``LimpetError`` if it has several ``Progress``."""
        found = list(find_instances(state, Progress))
        if len(found) > 1:
            raise LimpetError(
                "The state has several Progress objects",
                expected="one, which counts the steps of this training",
                found=len(found),
            )
        self._is_in_state = bool(found)
        self.positions = list(find_instances(state, POSITIONS))
        self.progress = found[0] if found else Progress()
        self.progress.resume(None)
        self._samplers = list(find_instances(state, ElasticSampler))
        group = SamplerGroup()
        for sampler in self._samplers:
            sampler.join(group)

    @property
    def is_within_step(self) -> bool:
        """True if a step has begun whose gradients are accumulated beyond the end of the pass."""
        for sampler in self._samplers:  # noqa: SIM110  (at each step: no generator)
            if sampler.is_within_step:
                return True
        return False

    def add_steps(self, steps: int, batches: int | None) -> None:
        """Count ``steps`` more steps, which consist of ``batches`` batches together (None: of as
        many). If the ``Progress`` has an owner, its number is read instead."""
        count = check_count("steps=", steps)
        if batches is not None:
            batches = check_count("batches=", batches, 0)
        if self.progress.owner is not None and count != 1:
            raise LimpetError("step(steps=...) is refused: the owner of the Progress counts steps")
        block, self._block = self._block, open_block()
        if block is not None and block is self._block:
            # such a training would save the generators as they were before all of its steps
            raise LimpetError(
                "Two steps of the training were in the same block of isolated_rng()",
                expected="only an evaluation in the block, because random numbers drawn in it are"
                " undone and not saved",
                todo="Train outside of the block",
            )
        count = self.progress.read("step") or count
        batches = count if batches is None else batches
        for sampler in self._samplers:
            sampler.check(batches)  # check all samplers before any of them advances
        for sampler in self._samplers:
            sampler.advance(batches)
        if self.progress.owner is None:
            self.progress.add_steps(count)
        self.has_counted = True
        self.calls += 1

    def end_epoch(self) -> None:
        """Count an epoch as complete, in ``progress.epoch`` and for the samplers."""
        self.progress.read("epoch")
        for sampler in self._samplers:
            sampler.end_epoch()
        if self.progress.owner is None:
            self.progress.end_epoch()

    def to_metadata(self) -> dict[str, Any]:
        """Return what a version stores about the epochs if its state has no ``Progress``."""
        is_stored = self._is_in_state or not self.progress.epoch
        return {} if is_stored else {"progress": self.progress.state_dict()}

    def release(self) -> None:
        """Let other code set the ``Progress`` of the state, after a load or at the end."""
        self.has_counted = False
        self.progress.resume(None)

    def resume_at(self, step: int, from_own_run: bool, metadata: Mapping[str, Any]) -> None:
        """Continue at ``step``, which replaces that of the ``Progress`` after a version of the run
        itself. ``metadata``: what the version stores."""
        if not self._is_in_state:
            first = {"epoch": 0, "step": 0, "samples": 0}
            self.progress.load_state_dict(metadata.get("progress", first))
        if from_own_run or not self._is_in_state:
            self.progress.resume(step)
        self.progress.begin()
