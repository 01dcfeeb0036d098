"""The files of an export to safetensors: their layout, and how they are streamed.

The files are written in pieces under temporary names, and then get their names. Memory use is that
of ``stream_leaves``, and does not depend on the size of the snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from limpet.convert.export_record import ExportedFile
from limpet.convert.mmap_files import Advance
from limpet.convert.stream import stream_leaves
from limpet.format.digest import digest
from limpet.format.safetensors import build_header
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.types import BLOCK_SIZE, DTYPES, MIB

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

UNSUPPORTED_DTYPES = ("complex32", "complex128")
"""The dtypes that safetensors has no code for."""

# Codes of the safetensors library for dtypes that Limpet's shards store as another dtype.
_DTYPE_CODES = {
    "complex64": "C64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}

SEGMENT = 64 * MIB
"""How many bytes of a file are exported before the next ones, to a store that uploads parts or only
appends. The leaves come in the order in which a shard has them. This bounds the bytes that wait for
those in front of them."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to export: its ``name`` in the file, and the ``key`` of the leaf with its bytes."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class OutputFile:
    """The layout of a file of ``length`` bytes, which begins with ``head``, and in which leaf
    ``keys[i]`` begins at ``offsets[i]``."""

    name: str
    length: int
    head: bytes
    keys: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()


def plan_safetensors_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    """Plan a safetensors file. Larger elements come first, so that all tensors are aligned.

    Raises ``Unsupported`` if there are so many tensors that the library would refuse the header.
    """
    ordered = sorted(tensors, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
    rows, at = [], 0
    for tensor in ordered:
        code = _DTYPE_CODES.get(tensor.dtype, DTYPES[tensor.dtype].stored_dtype)
        shape = tensor.shape
        if code == "F4":  # two elements per byte
            shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
        rows.append((tensor.name, code, shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    header = build_header(rows)
    return OutputFile(
        name,
        length=len(header) + at,
        head=header,
        keys=tuple(t.key for t in ordered),
        offsets=tuple(len(header) + row[3] for row in rows),
    )


def plan_hf_files(tensors: Sequence[OutputTensor], max_shard_size: float) -> list[OutputFile]:
    """Plan the files of a Hugging Face checkpoint; if there are several, the index comes last."""
    shards = list(_split_into_files(tensors, max_shard_size))
    if len(shards) == 1:
        return [plan_safetensors_file(SINGLE_FILE, shards[0])]
    total = len(shards)
    names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    file_of = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors)},
        "weight_map": {t.name: file_of[t.name] for t in tensors},
    }
    text = (json.dumps(index, indent=2) + "\n").encode()
    files = [plan_safetensors_file(*pair) for pair in zip(names, shards, strict=True)]
    return [*files, OutputFile(INDEX_FILE, len(text), text)]


def _split_into_files(
    tensors: Sequence[OutputTensor], max_shard_size: float
) -> Iterator[list[OutputTensor]]:
    """Split tensors into files, in the order of the state, as ``huggingface_hub`` does.

    A tensor that is larger than ``max_shard_size`` gets its own file.
    """
    shard: list[OutputTensor] = []
    used = 0
    for tensor in tensors:
        if tensor.nbytes > max_shard_size:
            yield [tensor]
            continue
        if used + tensor.nbytes > max_shard_size:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += tensor.nbytes
    if shard:
        yield shard


def write_file(
    snapshot: SnapshotReader, file: OutputFile, location: Location, advance: Advance
) -> ExportedFile:
    """Write a file, in ascending order as far as possible.

    A store that uploads parts keeps incomplete parts in memory, and a store that can only append
    keeps everything that comes too early. Raises ``AlreadyExists``, ``FormatError`` if the snapshot
    is damaged, and ``StoreError``.
    """
    store = location.store
    pieces: list[tuple[int, int, str]] = []
    with store.put(location.key(file.name), file.length) as upload:

        def write(at: int, data: Any) -> None:
            upload.write_at(at, data)
            pieces.append((at, len(data), digest(data)))

        head = memoryview(file.head)
        for at in range(0, len(head), BLOCK_SIZE):
            write(at, head[at : at + BLOCK_SIZE])
        is_split = store.traits.part_size or store.traits.ordered
        for numbers in _split_by_offset(file, SEGMENT if is_split else file.length):

            def write_leaf(i: int, at: int, data: memoryview) -> None:
                write(file.offsets[numbers[i]] + at, data)  # noqa: B023  (called in this iteration)
                advance(len(data))

            stream_leaves(snapshot, [file.keys[n] for n in numbers], write_leaf)
        upload.commit()
    return ExportedFile(file.length, [(length, found) for _, length, found in sorted(pieces)])


def _split_by_offset(file: OutputFile, nbytes: int) -> Iterator[list[int]]:
    """Yield the numbers of the leaves in the order of their offsets, in groups that lie within
    ``nbytes`` bytes of the file. A larger leaf is a group of its own: in a group, the leaves that
    are assembled come last, so one in front of it would keep all of it waiting."""
    in_order = sorted(range(len(file.keys)), key=file.offsets.__getitem__)
    ends = [file.offsets[n] for n in in_order[1:]] + [file.length]
    start = 0
    while start < len(in_order):
        end = file.offsets[in_order[start]] + nbytes
        stop = start + 1
        while stop < len(in_order) and ends[stop] <= end:
            stop += 1
        yield in_order[start:stop]
        start = stop
