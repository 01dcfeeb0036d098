"""Staging: copy a shard's image from the live state into host buffers.

The whole image need not be in memory at once: any thread can copy any piece of it into a buffer on
demand. An asynchronous save copies pieces before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import msgspec

from holdfast.buffers import Buffer, BufferPool
from holdfast.engine.distributed.group import Group
from holdfast.engine.saving.image import Image, Piece, release_buffers
from holdfast.engine.state.flatten import FlatState, flatten
from holdfast.format.digest import digest
from holdfast.storage.store import MappedUpload
from holdfast.threads import Workers, start_thread


def cuda_devices(sources: Sequence[Any]) -> set[Any]:
    """Return the CUDA devices that hold sources."""
    return {s.device for s in sources if getattr(s, "is_cuda", False)}


def synchronize_streams(sources: Sequence[Any]) -> None:
    """Wait for the work that is queued on this thread's current CUDA streams, on every device that
    holds sources. Other threads copy on their own streams, which do not wait for that work."""
    for device in cuda_devices(sources):
        import torch

        torch.cuda.current_stream(device).synchronize()


def stage_pieces(
    image: Image,
    pieces: Sequence[Piece],
    workers: Workers,
    upload: MappedUpload | None = None,
    make_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Copy all pieces into buffers. After this returns, the live state may change.

    With an ``upload``, the buffers are the memory of the file itself. Each copy runs within a
    context made by ``make_context``. If a copy fails, release all buffers and raise its error.
    """

    def fill(piece: Piece) -> None:
        if upload is None:
            buffer = workers.acquire(1)[0]
        else:
            buffer = Buffer.over(upload.view(piece.start, piece.stop - piece.start))
        piece.buffer = buffer
        with make_context():
            image.copy_piece(piece, buffer)

    try:
        workers.each(pieces, fill, image.length)
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


class BufferReservation:
    """Allocates the buffers that a state needs, on a thread.

    The first touch of new memory takes ten times as long as a copy into it.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._nbytes = 0
        self._thread: Thread | None = None

    def measure(self, state: Any, group: Group) -> str:
        """Determine how much buffer memory this rank needs for ``state``.

        Returns the digest of its tree, which shows whether other ranks have the same leaves. Raises
        the errors of ``flatten`` if the state cannot be saved.
        """
        flat = flatten(state, group.rank)
        self._nbytes = 2 * self._pool.buffer_size + shard_bytes(flat, group)
        return digest(msgspec.msgpack.encode(flat.tree))

    def start(self) -> None:
        """Allocate the buffers, once. Call it at the first step that does not save: a save
        allocates its buffers itself, and would take longer while a thread does the same."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            thread = Thread(target=self._pool.preallocate, args=(nbytes,), name="holdfast-buffers")
            if start_thread(thread):  # otherwise, the first save allocates
                self._thread = thread

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()
