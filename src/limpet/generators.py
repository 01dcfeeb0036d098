"""The global random generators of Python, NumPy, PyTorch, and the devices of its accelerator: their
states, and seeds that are functions of a position.

A seed is a digest of where it is used, such as (seed of a loader, epoch, sample). The numbers that
follow it depend on nothing that happened before. This module imports neither NumPy nor torch, and
initializes no device.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from struct import pack, unpack
from typing import Any

from limpet.lazy_torch import torch_or_none

States = dict[str, Any]
"""The states of generators by name: ``python``, ``numpy``, ``torch``, and devices as ``cuda:0``."""

PYTHON, NUMPY, TORCH = 1, 2, 4
"""Kinds of generators. TORCH includes the current device."""

ORDER, SAMPLE, BATCH, COLLATE, STEP, END, EPOCH, WORKER = range(8)
"""What a seed is for."""

MASK = (1 << 64) - 1

_python: Any = random.random.__self__  # type: ignore[attr-defined]  # the global generator
_seed_python = super(random.Random, _python).seed  # of C: random.seed() hashes its argument


def digest(*position: int | str) -> int:
    """Return 64 bits that depend on all of a position, the same in each process."""
    return int.from_bytes(blake2b(repr(position).encode(), digest_size=8).digest(), "little")


def seed_generators(*position: int, kinds: int = PYTHON | NUMPY | TORCH) -> None:
    """Seed the global generators of these kinds, each with another digest of a position of 64-bit
    numbers: NumPy and PyTorch share one algorithm. (10 us; ``torch.manual_seed``: 146 us.)"""
    content = blake2b(pack(f"<{len(position)}Q", *position), digest_size=24).digest()
    for_python, for_numpy, for_torch = unpack("<QQQ", content)
    if kinds & PYTHON:
        _seed_python(for_python)
        _python.gauss_next = None
    if kinds & NUMPY and (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(for_numpy & 0xFFFFFFFF)
    if kinds & TORCH and (torch := torch_or_none()) is not None:
        torch.default_generator.manual_seed(for_torch)
        if module := _module_in_use(torch):
            generators = getattr(module, "default_generators", ())
            if generators:
                generators[module.current_device()].manual_seed(for_torch)
            else:
                module.manual_seed(for_torch)


def initial_seed() -> int:
    """Return the seed of PyTorch's generator, or without PyTorch a digest of Python's generator."""
    torch = torch_or_none()
    return digest(repr(random.getstate())) if torch is None else torch.initial_seed() & MASK


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore all generators at the end of the block."""
    states = capture_states()
    try:
        yield
    finally:
        restore_states(states)


def capture_states() -> States:
    """Return the current states of all generators that the program uses."""
    states: States = {"python": random.getstate()}
    numpy_random, torch = sys.modules.get("numpy.random"), torch_or_none()
    if numpy_random is not None:
        states["numpy"] = numpy_random.get_state(legacy=False)
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if module := _module_in_use(torch):
            for name, args in _devices(torch, module).items():
                states[name] = module.get_rng_state(*args)
    return states


def restore_states(states: States) -> None:
    """Set generators to the given states. Devices that do not exist are left out."""
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch  # the program may import it only after the resume

        torch.set_rng_state(states["torch"])
        if states.keys() - {"python", "numpy", "torch"} and torch.accelerator.is_available():
            module = torch.get_device_module(torch.accelerator.current_accelerator())
            for name, args in _devices(torch, module).items():
                if name in states:
                    module.set_rng_state(states[name], *args)


def _module_in_use(torch: Any) -> Any:
    """Return the module of PyTorch's accelerator, or None if the program has not used it yet."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    # ask is_initialized first: is_available may break a later fork
    is_in_use = module is not None and getattr(module, "is_initialized", lambda: True)()
    return module if is_in_use else None


def _devices(torch: Any, module: Any) -> dict[str, tuple[int, ...]]:
    """Return by name (``cuda:0``) the arguments that select each device of the accelerator. A
    single device needs none (MPS takes none)."""
    if not hasattr(module, "get_rng_state") or not torch.accelerator.is_available():
        return {}
    kind = torch.accelerator.current_accelerator().type
    count = torch.accelerator.device_count()
    return {f"{kind}:{i}": (i,) if count > 1 else () for i in range(count)}
