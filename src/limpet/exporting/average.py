"""The average of several versions, computed box by box in bounded memory.

Floating-point and complex leaves are averaged in float64 and rounded once to their stored dtype.
All other leaves are those of the newest version. (Averages of the last versions: Izmailov et al.,
Averaging Weights Leads to Wider Optima and Better Generalization, 2018.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np

from limpet.buffers import Buffer
from limpet.errors import LimpetError, NotFound, PlanError, Unsupported
from limpet.exporting.stream import (
    ContiguousBox,
    WriteLeafBytes,
    indexes_with,
    plan_windows,
    read_window,
    stream_leaves,
    write_window,
)
from limpet.format.names import parse_version
from limpet.format.validate import LeafSpecs
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_list
from limpet.threads import Workers
from limpet.types import DTYPES, MIB

WINDOW = 16 * MIB
"""Bytes that are averaged at a time. In float64, they take up to eight times as much."""

_BLOCK = MIB // 2
"""Bytes that one thread converts at a time; a multiple of the size of every element."""

_NOTHING = np.empty(0)

_MAX_LISTED = 20
_NUMPY_PARTS = {
    "float16": "f2", "float32": "f4", "float64": "f8",
    "complex32": "f2", "complex64": "f4", "complex128": "f8",
}  # fmt: skip
_TORCH_FLOATS = (
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
_NO_AVERAGE = ("float8_e8m0fnu", "float4_e2m1fn_x2")
"""Dtypes of scales and of packed values: their average has no meaning."""

_STATISTICS = ("running_mean", "running_var")


def find_versions(snapshot: SnapshotReader, count: int) -> list[SnapshotReader]:
    """Return the last ``count`` versions of the lineage that ends at a version, oldest first.

    Raises ``LimpetError`` if the snapshot is not a version of a run, or there are fewer versions,
    and ``FormatError`` if one of them is damaged.
    """
    if type(count) is not int or count < 1:
        raise LimpetError(
            "Invalid number of versions to average", expected="1 or more", found=repr(count)[:80]
        )
    if count == 1:
        return [snapshot]
    if parse_version(snapshot.location.folder) is None:
        raise LimpetError(
            f"{snapshot.url} is not a version of a run, so no earlier versions are known",
            expected="a version, such as RUN/version_120, for an average",
            found=snapshot.location.folder or "the root of a store",
            todo="Name the version by its run: RUN@STEP",
        )
    run, newest = Run(snapshot.location.store), snapshot.version
    line = run.line(branch=newest.branch)
    line = line[: line.index(newest) + 1][-count:] if newest in line else []
    if len(line) < count:
        raise NotFound(
            f"{run.url} has too few versions for an average",
            expected=f"{count} versions up to {newest}",
            found=format_list(line, _MAX_LISTED) or "none",
            todo=f"Average {len(line)} versions; KeepLast({count}) keeps enough of them",
            key=str(newest),
            store=run.url,
        )
    return [*(run.catalog.open(version) for version in line[:-1]), snapshot]


def check_versions(versions: Sequence[SnapshotReader], leaves: Sequence[LeafSpecs]) -> None:
    """Check that the leaves to export have the same names, dtypes, and shapes in all versions.

    Raises ``PlanError``, which lists the differences, and ``Unsupported`` for a dtype whose values
    cannot be averaged.
    """
    newest, wanted = versions[-1], leaves[-1]
    for other, found in zip(versions[:-1], leaves[:-1], strict=True):
        differing = sorted(k for k in {**wanted, **found} if wanted.get(k) != found.get(k))
        if differing:
            lines = [f"{k} ({_describe(found, k)}, not {_describe(wanted, k)})" for k in differing]
            raise PlanError(
                f"{newest.url} and {other.location.folder} cannot be averaged",
                expected="leaves of the same names, dtypes, and shapes",
                found=f"{format_list(lines, _MAX_LISTED)} in {other.location.folder}",
                todo="Average fewer versions, or select leaves that all of them have (keys=)",
                leaves=tuple(differing),
            )
    refused = [f"{k} ({dtype})" for k, (dtype, _) in wanted.items() if dtype in _NO_AVERAGE]
    if refused:
        raise Unsupported(
            f"Leaves of {newest.url} have dtypes that cannot be averaged",
            found=format_list(refused, _MAX_LISTED),
            todo="Export one version, or select other leaves (keys=)",
        )


def _describe(leaves: LeafSpecs, key: str) -> str:
    return f"{leaves[key][0]} {leaves[key][1]}" if key in leaves else "absent"


def find_statistics(leaves: LeafSpecs) -> list[str]:
    """Return the leaves that are statistics of BatchNorm, which do not fit averaged weights."""
    return [key for key in leaves if key.endswith(_STATISTICS)]


class AveragedLeaves:
    """Streams the average of several versions, oldest first. In a ``with`` block, they are pinned.

    Every byte of every version is checked. Uses at most 9 times ``WINDOW`` bytes, and
    the buffers of the threads.
    """

    def __init__(self, versions: Sequence[SnapshotReader]) -> None:
        self._versions = versions
        self._pins = ExitStack()

    def __enter__(self) -> AveragedLeaves:
        with ExitStack() as stack:
            for snapshot in self._versions[:-1]:  # the export pins the newest one
                stack.enter_context(snapshot.pin_while_reading())
            self._pins = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pins.close()

    def stream(self, keys: Sequence[str], write: WriteLeafBytes) -> None:
        """Pass every byte of the averages of leaves to ``write``: see ``stream_leaves``."""
        newest = self._versions[-1]
        floats = [n for n, key in enumerate(keys) if _is_float(newest.leaves[key][0])]
        averaged = [n for n in floats if _nbytes(newest, keys[n])]
        others = sorted({*range(len(keys))}.difference(averaged))
        if others:
            stream_leaves(
                newest,
                [keys[n] for n in others],
                lambda i, at, data: write(others[i], at, data),
            )
        if averaged:
            self._stream_average(keys, averaged, write)

    def _stream_average(
        self, keys: Sequence[str], numbers: Sequence[int], write: WriteLeafBytes
    ) -> None:
        newest = self._versions[-1]
        stored = [indexes_with(snapshot, {keys[n] for n in numbers}) for snapshot in self._versions]
        window = Buffer(min(sum(_nbytes(newest, keys[n]) for n in numbers), WINDOW))
        for boxes in plan_windows(newest, keys, numbers, WINDOW):
            blocks = [*_split_boxes(boxes, [newest.leaves[keys[b.leaf_number]][0] for b in boxes])]
            totals = [_NOTHING] * len(blocks)

            def add(i: int) -> None:
                dtype, start, stop = blocks[i]  # noqa: B023  (called in this iteration only)
                values = _to_float64(window.view[start:stop], dtype)
                with np.errstate(all="ignore"):  # NaN and infinity are values like others
                    # not from zero, which would change -0.0
                    totals[i] = values if totals[i] is _NOTHING else totals[i] + values  # noqa: B023

            def divide(i: int) -> None:
                dtype, start, stop = blocks[i]  # noqa: B023
                with np.errstate(all="ignore"):  # such as a mean that is out of the dtype's range
                    mean = totals[i] / len(self._versions)  # noqa: B023
                    window.view[start:stop] = _from_float64(mean, dtype)

            workers = Workers.create()
            for snapshot, indexes in zip(self._versions, stored, strict=True):
                with snapshot.not_found_if_deleted():
                    read_window(snapshot, keys, boxes, indexes, window)
                workers.each(range(len(blocks)), add)
            workers.each(range(len(blocks)), divide)
            write_window(boxes, window.view, write)


def _split_boxes(
    boxes: Sequence[ContiguousBox], dtypes: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """Split the bytes of a window into blocks of one dtype: the dtype, the start, and the stop."""
    begin = 0
    for box, dtype in zip(boxes, dtypes, strict=True):
        end = begin + box.nbytes
        for start in range(begin, end, _BLOCK):
            yield dtype, start, min(start + _BLOCK, end)
        begin = end


def _is_float(dtype: str) -> bool:
    return dtype in _NUMPY_PARTS or dtype in _TORCH_FLOATS


def _nbytes(snapshot: SnapshotReader, key: str) -> int:
    dtype, shape = snapshot.leaves[key]
    return prod(shape) * DTYPES[dtype].itemsize


def _to_float64(raw: memoryview, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the values of a buffer as a new array; a complex value is two of them."""
    if dtype in _NUMPY_PARTS:
        return np.frombuffer(raw, _NUMPY_PARTS[dtype]).astype(np.float64)
    import torch

    if not len(raw):
        return np.empty(0)
    values = torch.frombuffer(raw, dtype=getattr(torch, dtype))
    result: np.ndarray[Any, np.dtype[np.float64]] = values.to(torch.float64).numpy()
    return result


def _from_float64(values: np.ndarray[Any, np.dtype[np.float64]], dtype: str) -> memoryview:
    """Return the bytes of values, rounded once to ``dtype``: to nearest, ties to even."""
    if dtype in _NUMPY_PARTS:
        return values.astype(_NUMPY_PARTS[dtype]).data.cast("B")
    import torch

    if not len(values):
        return memoryview(b"")
    rounded = torch.from_numpy(_round_to_odd(values)).to(getattr(torch, dtype))
    return memoryview(rounded.view(torch.uint8).numpy().data).cast("B")


def _round_to_odd(
    values: np.ndarray[Any, np.dtype[np.float64]],
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Round to float32 so that a second rounding to a shorter dtype is as one from float64.

    A value that is not exact becomes the neighbor whose last bit is 1. (Boldo and Melquiond,
    Emulation of a FMA and Correctly Rounded Sums, 2008.)
    """
    single = values.astype(np.float32)
    inexact = np.isfinite(values) & (single.astype(np.float64) != values)
    bits = single.view(np.uint32)
    is_even = inexact & (bits & 1 == 0)
    away = np.abs(values) > np.abs(single.astype(np.float64))  # the odd neighbor is further away
    bits[is_even & away] += 1
    bits[is_even & ~away] -= 1
    return single
