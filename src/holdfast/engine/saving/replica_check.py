"""Whether what several ranks hold is the same, told by digests of it.

Of a tensor that nobody has declared to be replicated each rank digests all it has, at every save:
one that is not would otherwise be lost but for one rank's. On the CPU that is XXH3-128, at the
speed of memory; on accelerators two sums of the words, each times a number made of its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from holdfast.buffers import Buffer, BufferPool
from holdfast.engine.saving.image import copy_bytes
from holdfast.engine.state.flatten import LocalLeaf
from holdfast.threads import in_parallel
from holdfast.types import BLOCK_SIZE, MIB

_INLINE_BYTES = 4096


def digest_values(leaves: Sequence[LocalLeaf], pool: BufferPool, threads: int) -> list[bytes]:
    """A digest (16 bytes) of the elements of each leaf, of which all boxes are whole."""
    made: list[bytes] = [b""] * len(leaves)
    jobs: list[tuple[int, int, int]] = []
    parts: dict[int, list[bytes]] = {}
    for i, leaf in enumerate(leaves):
        source = leaf.source
        nbytes = int(source.nbytes)
        if getattr(source, "is_cpu", True):
            cuts = range(0, nbytes, BLOCK_SIZE)
            parts[i] = [b""] * len(cuts)
            if nbytes <= _INLINE_BYTES:
                parts[i][:] = [
                    _digest_range(source, a, min(a + BLOCK_SIZE, nbytes), pool) for a in cuts
                ]
            else:
                jobs += [(i, n, a) for n, a in enumerate(cuts)]
        else:
            parts[i] = [digest_on_device(source)]

    def look(job: tuple[int, int, int]) -> None:
        i, n, start = job
        source = leaves[i].source
        parts[i][n] = _digest_range(
            source, start, min(start + BLOCK_SIZE, int(source.nbytes)), pool
        )

    in_parallel(jobs, look, min(threads, len(jobs)))
    for i, several in parts.items():
        made[i] = several[0] if len(several) == 1 else xxh3_128_digest(b"".join(several))
    return made


def _digest_range(source: Any, start: int, stop: int, pool: BufferPool) -> bytes:
    """Of bytes ``start`` to ``stop`` of a row-major array on the CPU."""
    address = 0
    if isinstance(source, np.ndarray):
        if source.flags.c_contiguous:
            address = source.__array_interface__["data"][0]
    elif source.is_contiguous():
        address = source.data_ptr()
    if address:
        return xxh3_128_digest((ctypes.c_char * (stop - start)).from_address(address + start))
    buffer = Buffer(stop - start) if stop - start <= _INLINE_BYTES else pool.acquire()
    try:
        copy_bytes(source, start, stop, buffer, 0)
        return xxh3_128_digest(buffer.view[: stop - start])
    finally:
        if buffer.size == pool.buffer_size:
            pool.release(buffer)


_WORDS_PER_STEP = 4 * MIB
_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))


def digest_on_device(tensor: Any) -> bytes:
    """Of a tensor wherever it is, made there: only 16 bytes come to the CPU."""
    import torch

    raw = tensor.contiguous().view(-1)
    raw = torch.view_as_real(raw).reshape(-1) if raw.is_complex() else raw
    raw = raw.view(torch.uint8)
    rest = raw.numel() % 8
    if rest:
        raw = torch.cat([raw, raw.new_zeros(8 - rest)])
    words = raw.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for at in range(0, words.numel(), _WORDS_PER_STEP):
        some = words[at : at + _WORDS_PER_STEP]
        place = torch.arange(at + 1, at + 1 + some.numel(), device=words.device)
        for i, odd in enumerate(_MULTIPLIERS):
            mixed = (some ^ (some >> 29)) * (place * odd | 1)
            sums[i] += (mixed ^ (mixed >> 32)).sum()
    return bytes(sums.cpu().numpy().tobytes())
