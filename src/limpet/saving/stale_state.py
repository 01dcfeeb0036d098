"""Find out whether the trainable leaves of a state have changed since the version before.

The comparison reads neither the state nor the store: it uses digests of the bytes that are written.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from limpet.format.digest import digest, digest_parts
from limpet.layout.shard_layout import SMALL_BOX_BYTES, LeafBox
from limpet.lazy_torch import torch_or_none
from limpet.saving.image import Image, Piece
from limpet.saving.partition import Partition
from limpet.state.replication import PerRank, Replicated
from limpet.state.sharding import Boxed
from limpet.state.step_hooks import StepPreHook
from limpet.state.walk import (
    find_instances,
    modules_in,
    optimizers_in,
    parameters_of,
    slots_of,
    storage_address,
)
from limpet.threads import gc_paused, no_op

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class TrainableBoxes:
    """The trainable boxes in a layout of one rank's shard.

    ``header_digest``: identifies the layout; ``tensors``: weak references to all tensors that may
    require a gradient; ``flags``: which of them did; ``addresses`` and ``shapes``: of those that
    did; ``boxes``: the trainable boxes; ``large``: the file offsets of the large ones; ``small``:
    those of runs of small ones.
    """

    header_digest: str
    tensors: list[weakref.ref[torch.Tensor]]
    flags: bytes
    addresses: frozenset[int]
    shapes: Counter[tuple[int, ...]]
    boxes: list[LeafBox]
    large: list[tuple[int, int]]
    small: list[tuple[int, int]]

    @classmethod
    @gc_paused
    def find(cls, state: Any, partition: Partition, image: Image) -> TrainableBoxes:
        """Find the trainable boxes of ``partition``, which are those of ``image``."""
        torch, values = torch_or_none(), _unwrap(state)
        modules = modules_in(values)
        tensors: list[Any] = [p for module in modules for p in module.parameters()]
        tensors += find_instances(values, torch.Tensor)
        trained = [t for t in tensors if t.requires_grad]
        addresses = frozenset(map(storage_address, trained)) - {0}
        is_known = bool(trained or modules)
        slots = {storage_address(t) for o in optimizers_in(values) for t in slots_of(o)}
        found = {
            id(leaf_box): leaf_box
            for leaf_box, source in zip(partition.leaf_boxes, partition.sources, strict=True)
            if isinstance(source, torch.Tensor)
            and (
                storage_address(source) in addresses
                if is_known
                else source.is_floating_point() and storage_address(source) not in slots
            )
        }
        shapes = [tuple(t.shape) for t in trained]
        if not is_known:
            shapes = list({box.key: tuple(box.shape) for box in found.values()}.values())
        boxes, large, small = list[LeafBox](), list[tuple[int, int]](), list[tuple[int, int]]()
        for leaf_box, start, end in zip(
            image.leaf_boxes, image.box_starts, image.box_ends, strict=True
        ):
            if id(leaf_box) not in found:
                continue
            boxes.append(leaf_box)
            if end - start >= SMALL_BOX_BYTES:
                large.append((start, end))
            elif small and small[-1][1] == start:
                small[-1] = small[-1][0], end
            else:
                small.append((start, end))
        references = [weakref.ref(t) for t in tensors]
        flags = _requires_grad(references)
        header = digest(image.header)
        return cls(header, references, flags, addresses, Counter(shapes), boxes, large, small)

    def matches(self, image: Image) -> bool:
        """Return True if the layout is the same, and the same tensors require gradients."""
        is_same = self.header_digest == digest(image.header)
        return is_same and self.flags == _requires_grad(self.tensors)

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer has a parameter of the state, or parameters like them.

        In the latter case, the state may hold a copy of what the optimizer trains.
        """
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        return any(storage_address(p) in self.addresses for p in parameters) or (
            bool(parameters) and Counter(tuple(p.shape) for p in parameters) <= self.shapes
        )


def _unwrap(state: Any) -> list[Any]:
    """Return the state, and the values in its ``Boxed``, ``PerRank``, and ``Replicated``."""
    wrappers: Any = (Boxed, PerRank, Replicated)
    found = find_instances(state, wrappers)
    return [state, *(w.tensor if isinstance(w, Boxed) else w.value for w in found)]


def _requires_grad(references: Sequence[weakref.ref[torch.Tensor]]) -> bytes:
    """Return one byte per tensor: 1 if it requires a gradient, 2 if it does not exist anymore."""
    tensors = (reference() for reference in references)
    return bytes(2 if t is None else int(t.requires_grad) for t in tensors)


class StepCount(StepPreHook):
    """Counts the steps of the optimizers that train the state, or that train a copy like it.

    A step with a learning rate of 0 does not count. ``GradScaler`` skips a step if a gradient is
    infinite: it does not call the optimizer, or passes ``found_inf`` to it. That flag of the last
    step is kept, because reading it on an accelerator would wait.
    """

    def __init__(self, trainable: TrainableBoxes) -> None:
        self.count = 0
        self.found_inf: Any = None
        self.follow(trainable)
        super().__init__(None, no_op)

    def follow(self, trainable: TrainableBoxes) -> None:
        self._trainable = trainable
        self._counted = weakref.WeakKeyDictionary[Any, bool]()

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        is_counted = self._counted.get(optimizer)
        if is_counted is None:
            is_counted = self._trainable.is_trained_by(optimizer)
            self._counted[optimizer] = is_counted
        if is_counted and not all(_is_zero(g.get("lr")) for g in optimizer.param_groups):
            self.count += 1
            self.found_inf = getattr(optimizer, "found_inf", None)


def _is_zero(learning_rate: Any) -> bool:
    """Return True for 0. A tensor on an accelerator counts as another value: it is not read."""
    return bool(getattr(learning_rate, "is_cpu", True) and learning_rate == 0)


@dataclass(slots=True, eq=False)
class Observation:
    """The digests of the trainable boxes that one rank saves, and their comparison.

    ``version``: the name of the version; ``base``: the observation of the version before, if there
    is one; ``step_count``: the steps of the optimizers before this save; ``found_inf``: see
    ``StepCount``.
    """

    version: str
    trainable: TrainableBoxes
    base: Observation | None
    step_count: int
    found_inf: Any
    large: list[str] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    small: str | None = None

    def on_staged(self, pieces: Sequence[Piece]) -> None:
        """Digest the small boxes, which share chunks with others. The pieces are staged."""
        if all(piece.buffer is not None for piece in pieces):
            self.small = digest_parts(_parts(self.trainable.small, pieces))

    def on_written(self, image: Image, digests: Sequence[str]) -> list[str] | None:
        """Return the keys of the trainable leaves if none has changed, and None otherwise.

        ``digests``: those of the chunks of ``image``.
        """
        for start, end in self.trainable.large:
            first, last = np.searchsorted(image.cuts, [start + 1, end]).tolist()
            self.large += digests[first : last + 1]
            self.cuts += (image.cuts[first : last + 1] - start).tolist()
        base, found_inf, self.found_inf = self.base, self.found_inf, None
        if not self.trainable.boxes:
            return []
        is_unchanged = (
            base is not None
            and base.step_count < self.step_count
            and self.large == base.large
            and self.cuts == base.cuts
            and (not self.trainable.small or (self.small is not None and self.small == base.small))
            and self.trainable.boxes == base.trainable.boxes
            and (found_inf is None or not bool(found_inf))
        )
        return [box.key for box in self.trainable.boxes] if is_unchanged else None


def _parts(spans: Sequence[tuple[int, int]], pieces: Sequence[Piece]) -> Iterator[memoryview]:
    """Yield the staged bytes at these file offsets."""
    starts = [piece.start for piece in pieces]
    for start, end in spans:
        number = bisect_right(starts, start) - 1
        while start < end:
            piece = pieces[number]
            if piece.buffer is not None:
                yield piece.buffer.view[start - piece.start : min(end, piece.stop) - piece.start]
            start, number = piece.stop, number + 1
