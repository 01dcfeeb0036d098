"""Digests that show whether several ranks hold the same tensors.

At every save, each rank digests its tensors that are not declared to be replicated. Otherwise, if
such tensors differed, all ranks' values but one would be lost. On the CPU, the digest is XXH3-128,
which runs at memory speed. On an accelerator, it consists of two sums of the tensor's 64-bit words,
each word multiplied by a number derived from its position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from xxhash import xxh3_128_digest

from limpet.buffers import Buffer
from limpet.saving.image import contiguous_address, copy_bytes
from limpet.state.flatten import LocalLeaf
from limpet.threads import Workers
from limpet.types import BLOCK_SIZE, MIB

_INLINE_BYTES = 4096


def digest_values(leaves: Sequence[LocalLeaf], workers: Workers) -> list[bytes]:
    """Return a 16-byte digest of the elements of each leaf. The box of every leaf is the whole
    leaf."""
    block_digests: list[list[bytes]] = []
    blocks: list[tuple[int, int, int]] = []

    def digest_block(block: tuple[int, int, int]) -> None:
        i, n, start = block
        source = leaves[i].source
        stop = min(start + BLOCK_SIZE, int(source.nbytes))
        block_digests[i][n] = _digest_range(source, start, stop, workers)

    for i, leaf in enumerate(leaves):
        if not getattr(leaf.source, "is_cpu", True):
            block_digests.append([digest_on_device(leaf.source)])
            continue
        nbytes = int(leaf.source.nbytes)
        leaf_blocks = [(i, n, a) for n, a in enumerate(range(0, nbytes, BLOCK_SIZE))]
        block_digests.append([b""] * len(leaf_blocks))
        if nbytes > _INLINE_BYTES:
            blocks += leaf_blocks
        elif leaf_blocks:
            digest_block(leaf_blocks[0])
    workers.each(blocks, digest_block)
    return [d[0] if len(d) == 1 else xxh3_128_digest(b"".join(d)) for d in block_digests]


def _digest_range(source: Any, start: int, stop: int, workers: Workers) -> bytes:
    """Return the digest of bytes ``start`` to ``stop`` of an array on the CPU, in row-major
    order."""
    if address := contiguous_address(source):
        return xxh3_128_digest((ctypes.c_char * (stop - start)).from_address(address + start))
    is_small = stop - start <= _INLINE_BYTES
    with nullcontext(Buffer(stop - start)) if is_small else workers.buffer() as buffer:
        copy_bytes(source, start, stop, buffer, 0)
        return xxh3_128_digest(buffer.view[: stop - start])


_WORDS_PER_STEP = 4 * MIB
_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))


def digest_on_device(tensor: Any) -> bytes:
    """Return the digest of a tensor, computed on the tensor's own device. Only 16 bytes are copied
    to the CPU."""
    import torch

    raw = tensor.contiguous().view(-1)
    raw = torch.view_as_real(raw).reshape(-1) if raw.is_complex() else raw
    raw = raw.view(torch.uint8)
    remainder = raw.numel() % 8
    if remainder:
        raw = torch.cat([raw, raw.new_zeros(8 - remainder)])
    words = raw.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for at in range(0, words.numel(), _WORDS_PER_STEP):
        block = words[at : at + _WORDS_PER_STEP]
        positions = torch.arange(at + 1, at + 1 + block.numel(), device=words.device)
        for i, multiplier in enumerate(_MULTIPLIERS):
            mixed = (block ^ (block >> 29)) * (positions * multiplier | 1)
            sums[i] += (mixed ^ (mixed >> 32)).sum()
    return bytes(sums.cpu().numpy().tobytes())
