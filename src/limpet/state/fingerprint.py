"""A few sampled bytes of many tensors: changes that PyTorch does not count, as by ``p.data``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import ceil
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from limpet import lazy_torch
from limpet.state.memory_ranges import group_ranges, read_ranges

if TYPE_CHECKING:
    import torch

_SAMPLE_BYTES = 64
_MAX_DEVICE_TENSORS = 256


class Fingerprint:
    """Samples of the bytes of tensors at the last ``record``. ``partial``: those sampled in part.

    On the CPU, 64 bytes at the beginning, the middle, and the end of each (10,000 tensors take 0.5
    ms); on accelerators, 64 from the middle of at most 256 tensors, copied without waiting. The
    tensors' memory is not kept alive: it MUST be the same whenever a method is called.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        windows = [_sample_windows(t) if t.is_cpu else [] for t in tensors]
        sampled = [sum(size for _, size in own) for own in windows]
        self.partial = [t for t, nbytes in zip(tensors, sampled, strict=True) if nbytes < t.nbytes]
        self._cpu_windows = group_ranges(chain.from_iterable(windows))
        device_tensors = [t for t in tensors if not (t.is_cpu or t.is_conj() or t.is_neg())]
        stride = max(1, ceil(len(device_tensors) / _MAX_DEVICE_TENSORS))
        self._device_tensors = device_tensors[::stride]
        self._recorded: tuple[bytes, list[Any]] = (b"", [])

    def record(self) -> None:
        self._recorded = self._sample()

    def has_changed(self) -> bool:
        """Return True if the bytes differ from the recorded ones. Waits for accelerators."""
        torch = lazy_torch.torch_or_none()
        on_cpu, on_devices = self._sample()
        pairs = zip(on_devices, self._recorded[1], strict=True)  # empty if torch is not loaded
        return on_cpu != self._recorded[0] or not all(torch.equal(a, b) for a, b in pairs)

    def _sample(self) -> tuple[bytes, list[Any]]:
        """Return the bytes of CPU tensors, and one uint8 tensor with those of each device."""
        on_cpu = b"".join(map(np.ndarray.tobytes, read_ranges(self._cpu_windows)))
        return on_cpu, _sample_on_device(self._device_tensors)


def _contiguous_elements(t: torch.Tensor) -> int:
    """Return the number of contiguous elements from the first on: all, or one if there are gaps."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.numel() if t.numel() == span else min(1, t.numel())


def _sample_windows(t: torch.Tensor) -> list[tuple[int, int]]:
    """Return the address and the size of each sample of a CPU tensor."""
    nbytes = _contiguous_elements(t) * t.element_size()
    size = min(nbytes, _SAMPLE_BYTES)
    offsets = sorted({0, (nbytes - size) // 2, nbytes - size}) if size else []
    return [(t.data_ptr() + offset, size) for offset in offsets]


def _sample_on_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the middle bytes of the tensors, as one uint8 tensor per device."""
    torch = lazy_torch.torch_or_none()
    samples_by_device: dict[Any, list[Any]] = {}
    for t in tensors:
        contiguous = _contiguous_elements(t)
        size = min(contiguous, _SAMPLE_BYTES // t.element_size())
        offset = t.storage_offset() + (contiguous - size) // 2
        sample = t.detach().as_strided((size,), (1,), offset)
        samples_by_device.setdefault(t.device, []).append(sample.view(torch.uint8))
    return [torch.cat(samples) for samples in samples_by_device.values()]


def module_structure(roots: list[torch.nn.Module]) -> tuple[list[Any], list[int]]:
    """Return the submodules and the parameters of modules, and numbers that change with these, with
    the hooks, and with the number of buffers."""
    members: list[Any] = []
    counts: list[int] = []
    pending: list[Any] = list(roots)
    while pending:
        sub = pending.pop()
        if sub is not None:
            members.append(sub)
            attributes = sub.__dict__  # faster than each attribute of the module
            if hooks := attributes["_state_dict_hooks"]:
                counts.append(len(hooks))
            if hooks := attributes["_state_dict_pre_hooks"]:
                counts.append(-len(hooks))
            if buffers := attributes["_buffers"]:
                counts.append(len(buffers))
            if parameters := attributes["_parameters"]:
                members += parameters.values()
            if submodules := attributes["_modules"]:
                counts.append(len(submodules))
                pending += submodules.values()
            counts.append(0)
    return members, counts


def are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))
