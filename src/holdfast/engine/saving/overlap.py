"""Staging beside the training: what holds still is copied while the next step is being computed.

Parameters and slots change only when an optimizer steps (``steady``). So a save may leave them
where they are, return, and copy them during the next forward and backward pass; a hook on the
optimizers waits for it. (The idea is that of DataStates-LLM, Maurya et al., 2024.)

Experimental, and off by default: on a CPU it is tested, on an accelerator it has never run.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Event, local
from typing import Any

from holdfast.buffers import Buffer, BufferPool
from holdfast.engine.saving.image import Image, Piece
from holdfast.engine.saving.staging import cuda_devices, stage_pieces
from holdfast.lazy_torch import torch_or_none


class DeferredStaging:
    """The pieces of a save that are still to be staged, by a thread beside the training.

    ``done`` is set once no more is read of the live state, whatever became of it.
    """

    def __init__(self, image: Image, pieces: Sequence[Piece]) -> None:
        self.done = Event()
        self._image = image
        self._pieces = pieces
        self._streams = _ThreadStreams(cuda_devices(image.sources))
        self._leaf_indices = _leaf_indices_in(image, pieces)
        self._tensor_versions = self._read_tensor_versions()
        if not pieces:
            self.release()

    def stage(self, pool: BufferPool, threads: int) -> list[str]:
        """Copy them now, and let go of the live state. Returns the keys of the leaves that were
        changed meanwhile, as far as PyTorch counts changes: it sees none through ``p.data``, nor
        one that is still being made. Their copies are worthless."""
        try:
            if self.done.is_set():
                return []
            stage_pieces(self._image, self._pieces, pool, threads, self._streams)
            pairs = zip(
                self._leaf_indices, self._tensor_versions, self._read_tensor_versions(), strict=True
            )
            return [self._image.leaf_boxes[i].key for i, was, now in pairs if was != now]
        finally:
            self.release()

    def release(self) -> None:
        """Read no more of the live state."""
        self._image.sources.clear()  # temporaries of the live state may go
        self.done.set()

    def _read_tensor_versions(self) -> list[tuple[int, int]]:
        """Of each leaf where it is, and how often it was changed."""
        sources = [self._image.sources[i] for i in self._leaf_indices]
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in sources]


def _leaf_indices_in(image: Image, pieces: Sequence[Piece]) -> list[int]:
    """The leaves that have bytes in the pieces, which are in order."""
    stops = [p.stop for p in pieces]
    found = []
    for i, (a, b) in enumerate(zip(image.box_starts, image.box_ends, strict=True)):
        first = bisect_right(stops, a)
        if first < len(pieces) and pieces[first].start < b and b > a:
            found.append(i)
    return found


def split_pieces(
    image: Image, pieces: Sequence[Piece], stable_keys: Collection[str]
) -> tuple[list[Piece], list[Piece]]:
    """The pieces that are to be staged now, and those of whose bytes all hold still (``still``:
    the keys of such leaves)."""
    moving = [
        (a, b)
        for h, a, b in zip(image.leaf_boxes, image.box_starts, image.box_ends, strict=True)
        if h.key not in stable_keys and b > a
    ]
    now: list[Piece] = []
    later: list[Piece] = []
    at = 0
    for piece in pieces:
        while at < len(moving) and moving[at][1] <= piece.start:
            at += 1
        waits = at == len(moving) or moving[at][0] >= piece.stop
        (later if waits and stable_keys and piece.start >= len(image.header) else now).append(piece)
    return now, later


def pin_memory(buffer: Buffer) -> None:
    """Lock a buffer's memory for copies from CUDA devices, for as long as it lives. Where the
    driver refuses it stays as it is: copies are then slower, not wrong."""
    torch = torch_or_none()
    if torch is None or not torch.cuda.is_available():
        return
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(buffer.address, buffer.size, 0)) == 0:
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.address)


class _ThreadStreams:
    """A CUDA stream of its own for each thread that copies, so that copies run beside what the
    training computes; nothing where nothing lies on such a device."""

    def __init__(self, devices: Collection[Any]) -> None:
        self._devices = devices
        self._thread_local = local()

    def __call__(self) -> AbstractContextManager[None]:
        return self._enter_streams() if self._devices else nullcontext()

    @contextmanager
    def _enter_streams(self) -> Iterator[None]:
        torch: Any = torch_or_none()
        streams = getattr(self._thread_local, "streams", None)
        if streams is None:
            streams = self._thread_local.streams = [torch.cuda.Stream(d) for d in self._devices]
        with ExitStack() as entered:
            for stream in streams:
                entered.enter_context(torch.cuda.stream(stream))
            yield
