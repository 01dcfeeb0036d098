"""Staging: copy a shard's image from the live state into host buffers.

The whole image need not be in memory at once: any thread can copy any piece of it into a buffer on
demand. An asynchronous save copies pieces before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

from limpet.buffers import Buffer, BufferPool
from limpet.ranks.group import Group
from limpet.saving.image import Image, Piece, release_buffers, synchronize_streams
from limpet.state.flatten import FlatState, flatten
from limpet.storage.store import MappedUpload
from limpet.threads import Workers, start_thread


def stage_pieces(
    image: Image,
    pieces: Sequence[Piece],
    workers: Workers,
    upload: MappedUpload | None = None,
    streams: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Copy all pieces into buffers. After this returns, the live state may change.

    With an ``upload``, the buffers are the memory of the file itself. The calling thread alone
    queues the copies from CUDA devices, on ``streams``: that keeps the copy engine busy, and more
    threads would compete with the training for the GIL. If a copy fails, release all buffers and
    raise its error.
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
                    synchronize_streams(image.sources)
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

    def measure(self, state: Any, group: Group) -> None:
        """Determine how much buffer memory this rank needs for ``state``.

        Raises the errors of ``flatten`` if the state cannot be saved.
        """
        flat = flatten(state, group.rank)
        self._nbytes = 2 * self._pool.buffer_size + shard_bytes(flat, group)

    def start(self) -> None:
        """Allocate the buffers, once. Call it at the first step that does not save: a save
        allocates its buffers itself, and would take longer while a thread does the same."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            thread = Thread(target=self._pool.preallocate, args=(nbytes,), name="limpet-buffers")
            if start_thread(thread):  # otherwise, the first save allocates
                self._thread = thread

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()
