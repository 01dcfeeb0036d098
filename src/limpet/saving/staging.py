"""Staging: copy a shard's image from the live state into host buffers.

The whole image need not be in memory at once: any thread can copy any piece of it into a buffer on
demand. An asynchronous save copies pieces before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from limpet.buffers import Buffer
from limpet.ranks.group import Group
from limpet.saving.image import Image, Piece, has_sources, release_buffers, synchronize
from limpet.state.arrays import part_library
from limpet.state.flatten import FlatState
from limpet.storage.store import MappedUpload
from limpet.threads import Latch, Workers


def stage_pieces(
    image: Image,
    pieces: Sequence[Piece],
    workers: Workers,
    upload: MappedUpload | None = None,
    streams: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Copy all pieces into buffers, or into an ``upload``'s file. Then, the live state may change.

    The calling thread alone queues the copies from accelerators, on ``streams``: that keeps the
    copy engine busy, and more threads would compete with the training for the GIL.
    """

    def add_buffer(piece: Piece) -> Buffer:
        if upload is None:
            piece.buffer = workers.acquire(1)[0]
        else:
            piece.buffer = Buffer.over(upload.view(piece.start, piece.stop - piece.start))
        return piece.buffer

    on_device, on_host = image.split_by_device(pieces)
    try:
        with streams():
            try:
                for piece in on_device:
                    image.begin_copy(piece.start, piece.stop, add_buffer(piece), 0)
                    workers.advance()
                workers.each(on_host, lambda p: image.copy_piece(p, add_buffer(p)), image.length)
            finally:
                if on_device:
                    synchronize(image.sources)
    except BaseException:
        release_buffers(pieces, workers.pool)
        raise


def shard_bytes(flat: FlatState, group: Group) -> int:
    """Return how many bytes this rank writes of a state. Leaves that all ranks have in full are
    divided among the ranks."""
    return sum(
        int(leaf.source.nbytes) // (group.size if leaf.box.sizes == leaf.shape else 1)
        for leaf in flat.leaves
    )


# -- overlap: stable tensors are copied in the background while the next step is computed ----------
#
# Parameters and optimizer slots change only when an optimizer steps (``step_hooks``). A save can
# therefore return before it copies them, and copy them during the next forward and backward pass. A
# hook on the optimizers waits for the copies. (The idea: DataStates-LLM, Maurya et al., 2024.)
# It is off by default, because nothing but the optimizers may then change what is copied.


class DeferredStaging:
    """The pieces that a background thread still has to stage. ``done`` is set once the save no
    longer reads the live state, even if the copy failed."""

    def __init__(
        self, image: Image, pieces: Sequence[Piece], upload: MappedUpload | None = None
    ) -> None:
        self.done = Latch()
        self._upload = upload
        self._image = image
        self._pieces = pieces
        boxes = {i for p in pieces for i in range(*image.boxes_between(p.start, p.stop))}
        self._leaf_indices = sorted(i for i in boxes if image.box_starts[i] < image.box_ends[i])
        self._versions = self._read_versions()
        if not pieces:
            self.release()

    def stage(self, workers: Workers) -> list[str]:
        """Copy the pieces and release the live state. Return the keys of leaves that changed
        meanwhile, by PyTorch's version counters: they miss ``p.data`` and changes in progress."""
        try:
            if self.done.is_set():
                return []
            streams = partial(_own_streams, self._image.sources)
            stage_pieces(self._image, self._pieces, workers, self._upload, streams)
            versions = zip(self._leaf_indices, self._versions, self._read_versions(), strict=True)
            return [self._image.leaf_boxes[i].key for i, old, new in versions if old != new]
        finally:
            self.release()

    def release(self) -> None:
        """Drop the references to the live state, unless something is held, and set ``done``."""
        if not has_sources(self._image.sources):
            self._image.sources.clear()  # frees temporary copies
        self.done.set()

    def _read_versions(self) -> list[object]:
        """Return, for each leaf, what its library counts of changes to it."""
        sources = (self._image.sources[i] for i in self._leaf_indices)
        return [part_library(type(source)).version(source) for source in sources]


def split_pieces(
    image: Image, pieces: Sequence[Piece], stable_keys: Collection[str]
) -> tuple[list[Piece], list[Piece]]:
    """Split the pieces into those to stage now and those to stage later. The later ones hold only
    leaves that do not change until an optimizer steps (``stable_keys``). Those that hold only what
    is held until the save ends are not staged."""
    if not (stable_keys or has_sources(image.sources)):
        return list(pieces), []
    boxes = zip(image.leaf_boxes, image.sources, image.box_starts, image.box_ends, strict=True)
    kinds = [
        2 if a == b or getattr(source, "is_held", False) else int(leaf_box.key in stable_keys)
        for leaf_box, source, a, b in boxes
    ]
    parts: tuple[list[Piece], ...] = [], [], []
    for piece in pieces:
        found = slice(*image.boxes_between(piece.start, piece.stop))
        parts[0 if piece.start < len(image.header) else min(kinds[found])].append(piece)
    return parts[0], parts[1]


@contextmanager
def _own_streams(sources: Sequence[Any]) -> Iterator[None]:
    """Copy on separate queues within the context, to overlap the computation of the training."""
    with ExitStack() as entered:
        for library in {*map(part_library, {*map(type, sources)})}:
            entered.enter_context(library.streams(sources))
        yield
