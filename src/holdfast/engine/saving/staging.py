"""Staging: copy a shard's image from the live state into host buffers.

The whole image need not be in memory at once: any thread can copy any piece of it into a buffer on
demand. An asynchronous save copies pieces before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast.buffers import Buffer
from holdfast.engine.saving.image import Image, Piece, release_buffers
from holdfast.storage.store import MappedUpload
from holdfast.threads import Workers


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
