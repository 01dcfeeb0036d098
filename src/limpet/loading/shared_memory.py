"""Live arrays that share memory: a load in place is refused if the snapshot has different elements
for the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.errors import PlanError
from limpet.layout.read_plan import ReadRequest
from limpet.snapshot.chunks import Target
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays import Memory, part_library
from limpet.types import Box


class Claim(NamedTuple):
    """The memory of a live array gets a box of the leaf ``source``, or keeps its elements (None).
    ``key``: that of the live array."""

    key: str
    source: str | None
    box: Box
    part: Any
    memory: Memory


def check_shared_memory(
    claims: Mapping[Any, Mapping[Any, Claim]], snapshot: SnapshotReader
) -> None:
    """Raise ``PlanError`` if arrays share elements of memory for which the snapshot has different
    values. Only arrays whose ranges of memory overlap are read for this, into new memory."""
    groups = [
        g
        for g in _group_by_range(chain(*(c.values() for c in claims.values())))
        if len(g) > 1 or _may_repeat(g[0].memory)
    ]
    copies = [[part_library(type(c.part)).empty_like(c.part) for c in group] for group in groups]
    requests, targets = [], []
    for claim, copy in zip(chain(*groups), chain(*copies), strict=True):
        if claim.source is None:
            copy[...] = claim.part
        else:
            dtype, _ = snapshot.leaves[claim.source]
            requests.append(ReadRequest(claim.source, claim.box))
            targets.append(Target.from_tensor(dtype, claim.box.sizes, copy))
    if requests:
        # without headers, because all ranks of a shared read must check the same ones later
        snapshot.read(requests, targets, check_headers=False)
    for group, made in zip(groups, copies, strict=True):
        pairs = list(zip(group, map(_raw_bytes, made), strict=True))
        wrong = _find_overwritten(pairs)
        if wrong is not None:
            tries = (_find_overwritten([pairs[wrong], pair]) == 0 for pair in pairs)
            other = next((i for i, differs in enumerate(tries) if differs), wrong)
            raise _conflict(group[min(wrong, other)], group[max(wrong, other)])


def _group_by_range(claims: Iterable[Claim]) -> list[list[Claim]]:
    """Return the arrays in groups: those whose ranges of memory overlap with others of the group.
    Interleaved arrays are in one group, but share no elements."""
    ranges = sorted((c.memory.device, *c.memory.range, i, c) for i, c in enumerate(claims))
    groups: list[list[Claim]] = []
    last, end = "", 0
    for device, start, stop, _, claim in ranges:
        if device != last or start >= end:
            groups.append([])
            last, end = device, stop
        groups[-1].append(claim)
        end = max(end, stop)
    return groups


def _may_repeat(memory: Memory) -> bool:
    """Return True unless the elements of an array surely have no byte in common."""
    span = memory.itemsize - 1
    for stride, n in sorted(zip(map(abs, memory.strides), memory.sizes, strict=True)):
        if n > 1 and stride <= span:
            return True
        span += stride * (n - 1)
    return False


def _raw_bytes(copy: Any) -> NDArray[np.uint8]:
    """Return the bytes of contiguous elements in host memory, without a copy."""
    memory = part_library(type(copy)).memory(copy)
    first, stop = (0, 0) if memory is None else memory.range
    return np.frombuffer(
        memoryview((ctypes.c_ubyte * (stop - first)).from_address(first)), np.uint8
    )


def _find_overwritten(pairs: Sequence[tuple[Claim, NDArray[np.uint8]]]) -> int | None:
    """Write the bytes of arrays to one copy of their memory, in turn. Return the first array whose
    elements are not the written ones afterward, or None."""
    ranges = [claim.memory.range for claim, _ in pairs]
    first, last = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    memory = np.empty(last - first, np.uint8)
    written = []
    for claim, raw in pairs:
        at = claim.memory
        elements = raw.reshape(*at.sizes, at.itemsize)
        strides = (*at.strides, 1)
        view = np.ndarray(elements.shape, np.uint8, memory, at.address - first, strides)
        view[...] = elements
        written.append((view, elements))
    return next((i for i, pair in enumerate(written) if not np.array_equal(*pair)), None)


def _conflict(first: Claim, second: Claim) -> PlanError:
    names = f"The live arrays {first.key!r} and {second.key!r} share memory"
    if first is second:
        names = f"Several elements of the live array {first.key!r} share memory"
    is_kept = None in (first.source, second.source)
    return PlanError(
        f"{names}, but would get different elements",
        expected="elements of their own, or equal ones, as tied tensors have",
        found="that one of them would keep its live value"
        if is_kept
        else f"different elements of {first.source} and {second.source} in the snapshot",
        todo="Give each of them its own memory in the live state, such as by tensor.clone(), or"
        " exclude one with keys=",
        leaf=second.key,
        leaves=(first.key, second.key),
    )
