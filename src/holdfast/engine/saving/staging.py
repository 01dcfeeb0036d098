"""The image of a shard before it is a file, and copying it out of the live state.

The image is never in memory as a whole: any piece of it can be filled on demand into a buffer,
from whatever thread. Filling pieces ahead, before the save returns, is what makes it asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast.buffers import BufferPool
from holdfast.engine.saving.image import Image, Piece
from holdfast.threads import in_parallel


def cuda_devices(sources: Sequence[Any]) -> set[Any]:
    """The CUDA devices on which sources lie."""
    return {s.device for s in sources if getattr(s, "is_cuda", False)}


def synchronize_streams(sources: Sequence[Any]) -> None:
    """Wait until all is done that this thread's streams have queued by now on devices where sources
    lie. Other threads copy on streams of their own, which do not wait for it by themselves."""
    for device in cuda_devices(sources):
        import torch

        torch.cuda.current_stream(device).synchronize()


def stage_pieces(
    image: Image,
    pieces: Sequence[Piece],
    pool: BufferPool,
    threads: int,
    make_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Fill all pieces now; when this returns, the live state may change. Each is filled within a
    context that ``lane`` makes."""

    def fill(piece: Piece) -> None:
        buffer = pool.acquire()
        try:
            with make_context():
                image.copy_piece(piece, buffer)
        except BaseException:
            pool.release(buffer)
            raise
        piece.buffer = buffer

    try:
        in_parallel(pieces, fill, min(threads, len(pieces)))
    except BaseException:
        release_buffers(pieces, pool)
        raise


def release_buffers(pieces: Sequence[Piece], pool: BufferPool) -> None:
    """Give the buffers of all staged pieces back."""
    for piece in pieces:
        if piece.buffer is not None:
            pool.release(piece.buffer)
            piece.buffer = None
