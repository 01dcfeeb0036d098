"""Live arrays that share memory: a load refuses to put different elements into the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from limpet.errors import PlanError
from limpet.loading.targets import LoadTargets
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays import Memory, part_library
from limpet.state.loadable import may_repeat
from limpet.state.memory_ranges import find_read_only
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
    """Raise ``PlanError`` if an array is in read-only memory, or if arrays share elements of memory
    for which the snapshot has different values. Arrays whose ranges of memory overlap are read for
    this into new memory, which takes their size, and that of their common range, at once."""
    every = [claim for by_leaf in claims.values() for claim in by_leaf.values()]
    on_host = [c for c in every if c.source is not None and c.memory.device == "cpu"]
    for claim, is_read_only in zip(on_host, find_read_only(c.memory.range for c in on_host)):
        if is_read_only:
            raise PlanError(
                f"The live array {claim.key!r} is in memory that this process may only read",
                found="memory such as that of a file mapped for reading",
                todo="Put an array with its own memory into the live state: tensor.clone()",
                leaf=claim.key,
            )
    groups = [
        [(claim, part_library(type(claim.part)).empty_like(claim.part)) for claim in group]
        for group in _group_by_range(every)
        if len(group) > 1 or may_repeat((m := group[0].memory).sizes, m.strides, m.itemsize)
    ]
    targets = LoadTargets(snapshot)
    for claim, copy in chain(*groups):
        if claim.source is None:
            copy[...] = claim.part
        else:
            targets.add(claim.source, copy, claim.box)
    if targets.requests:
        # without headers, because all ranks of a shared read must check the same ones later
        snapshot.read(targets.requests, targets.targets, check_headers=False)
    for group in groups:
        wrong = _find_overwritten(group)
        if wrong is not None:
            tries = (_find_overwritten([group[wrong], pair]) == 0 for pair in group)
            other = next((i for i, differs in enumerate(tries) if differs), wrong)
            raise _conflict(*(group[i][0] for i in sorted((wrong, other))))


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


def _find_overwritten(group: Sequence[tuple[Claim, Any]]) -> int | None:
    """Write arrays, given by contiguous copies, to one copy of their memory, in turn. Return the
    first one whose bytes are not there afterward, or None."""
    ranges = [claim.memory.range for claim, _ in group]
    first, last = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    memory = np.empty(last - first, np.uint8)
    written = []
    for claim, copy in group:
        at, address = claim.memory, part_library(type(copy)).address(copy)
        shape = (*at.sizes, at.itemsize)
        raw: Any = (ctypes.c_ubyte * copy.nbytes).from_address(address)
        elements = np.ndarray(shape, np.uint8, raw)
        view = np.ndarray(shape, np.uint8, memory, at.address - first, (*at.strides, 1))
        view[...] = elements
        written.append((view, elements))
    return next((i for i, pair in enumerate(written) if not np.array_equal(*pair)), None)


def _conflict(first: Claim, second: Claim) -> PlanError:
    arrays = f"The live arrays {first.key!r} and {second.key!r}"
    if first is second:
        arrays = f"Elements of the live array {first.key!r}"
    kept = "what one of them keeps"
    return PlanError(
        f"{arrays} share memory, but would get different elements",
        found=f"different elements of {first.source or kept} and {second.source or kept}",
        todo="Give each its own memory in the live state, such as by tensor.clone(), or exclude one"
        " with keys=",
        leaf=second.key,
        leaves=(first.key, second.key),
    )
