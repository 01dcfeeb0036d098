"""The states that are saved. Every child process makes the same ones, to check a load."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from bench import disk

MIB = 1 << 20
TENSOR_BYTES = 32 * MIB


def base_tensor() -> torch.Tensor:
    return torch.randn(TENSOR_BYTES // 4, generator=torch.Generator().manual_seed(7))


def large_state(size: int) -> dict[str, torch.Tensor]:
    """Return ``size`` bytes as float32 tensors of 32 MiB. All differ and resemble weights."""
    base = base_tensor()
    return {f"layers.{i:02}.weight": base + i / 64 for i in range(size // TENSOR_BYTES)}


def small_state(count: int = 2000) -> dict[str, torch.Tensor]:
    """Return ``count`` float32 tensors of 64 bytes."""
    return {f"layers.{i:04}.bias": torch.full((16,), float(i)) for i in range(count)}


def blank_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return live tensors to load into, whose memory is touched."""
    return {key: torch.full_like(value, -1.0) for key, value in state.items()}


def blank_large_state(size: int) -> dict[str, torch.Tensor]:
    return {
        f"layers.{i:02}.weight": torch.full((TENSOR_BYTES // 4,), -1.0)
        for i in range(size // TENSOR_BYTES)
    }


def find_mismatches(loaded: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys whose values differ from those of ``large_state``."""
    base = base_tensor()
    return [
        key
        for i, (key, value) in enumerate(loaded.items())
        if not torch.equal(value, base + i / 64)
    ]


def memcpy_of(state: dict[str, torch.Tensor]) -> Callable[[int], float]:
    """Return a function that copies the state to other memory, in pieces of 8 MiB, with a number of
    threads, and returns the seconds."""
    sources = [value.numpy().view(np.uint8) for value in state.values()]
    targets = [np.full_like(source, 1) for source in sources]
    pieces = [
        (source[at : at + disk.CHUNK], target[at : at + disk.CHUNK])
        for source, target in zip(sources, targets, strict=True)
        for at in range(0, len(source), disk.CHUNK)
    ]

    def memcpy(threads: int) -> float:
        start = time.perf_counter()
        disk.run_in_threads(
            threads, len(pieces), lambda at: np.copyto(pieces[at][1], pieces[at][0])
        )
        return time.perf_counter() - start

    return memcpy
