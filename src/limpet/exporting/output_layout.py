"""Layouts of the files that an export writes: inert plans, no I/O.

Formats: a safetensors file, a Hugging Face checkpoint of one or more safetensors files, and a file
for ``torch.load``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from limpet.format import torchzip
from limpet.format.safetensors import build_header
from limpet.interop.export_record import (
    CRC,
    NO_CRC,
    RECORD,
    SIDECAR_SUFFIX,
    encode_record,
    find_crc,
    format_crc,
    seal_text,
)
from limpet.types import DTYPES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

Record = Mapping[str, Any] | None
"""What an export records about its origin; None: nothing."""

Piece = tuple[int, bytes]
"""Bytes of a file, with their offset."""

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
    """The layout of a file of ``length`` bytes, in which leaf ``keys[i]`` begins at ``offsets[i]``.

    ``pieces``: all other bytes that are known before the leaves are read, in ascending order. If
    the leaves have checksums, ``build_leaf_header`` returns the header of a leaf, given its number
    and CRC-32, and ``build_directory`` returns the end of the file, given the CRC-32 of each leaf.
    ``crc_at``: the offset, in the first piece, of the digits of the file's own CRC-32.
    ``build_text`` returns the whole file, given the CRC-32 of the files before it, by name.
    """

    name: str
    length: int
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    pieces: tuple[Piece, ...]
    build_leaf_header: Callable[[int, int], Piece] | None = None
    build_directory: Callable[[Sequence[int]], Piece] | None = None
    crc_at: int | None = None
    build_text: Callable[[Mapping[str, int]], bytes] | None = None


def plan_safetensors_file(
    name: str, tensors: Sequence[OutputTensor], record: Record = None
) -> OutputFile:
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
    metadata = {} if record is None else {CRC: NO_CRC, RECORD: encode_record(record)}
    header = build_header(rows, metadata)
    offsets = tuple(len(header) + row[3] for row in rows)
    keys = tuple(t.key for t in ordered)
    crc_at = None if record is None else find_crc(header)
    return OutputFile(name, len(header) + at, keys, offsets, ((0, header),), crc_at=crc_at)


def plan_hf_files(
    tensors: Sequence[OutputTensor], max_shard_size: float, record: Record = None
) -> list[OutputFile]:
    """Plan the files of a Hugging Face checkpoint; if there are several, the index comes last."""
    shards = list(_split_into_files(tensors, max_shard_size))
    if len(shards) == 1:
        return [plan_safetensors_file(SINGLE_FILE, shards[0], record)]
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    file_of = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    metadata = {"total_size": sum(t.nbytes for t in tensors)}
    weight_map = {t.name: file_of[t.name] for t in tensors}

    def build_index(crcs: Mapping[str, int]) -> bytes:
        index = {"metadata": metadata | _record_members(record, names, crcs)}
        return seal_text(_to_text({**index, "weight_map": weight_map}))

    files = [plan_safetensors_file(name, shard, record) for name, shard in zip(names, shards)]
    return [*files, _text_file(INDEX_FILE, build_index)]


def plan_sidecar(file: OutputFile, record: Mapping[str, Any]) -> OutputFile:
    """Plan the file with the record of a file for ``torch.load``, next to it."""
    return _text_file(
        file.name + SIDECAR_SUFFIX,
        lambda crcs: seal_text(_to_text(_record_members(record, [file.name], crcs))),
    )


def plan_record(names: Sequence[str], record: Mapping[str, Any]) -> OutputFile:
    """Plan the file with the record of several files of a checkpoint."""
    return _text_file(
        "checkpoint" + SIDECAR_SUFFIX,
        lambda crcs: seal_text(_to_text(_record_members(record, names, crcs))),
    )


def plan_text(name: str, text: bytes) -> OutputFile:
    """Plan a file with a given text."""
    return _text_file(name, lambda _: text)


def _record_members(
    record: Record, names: Sequence[str], crcs: Mapping[str, int]
) -> dict[str, Any]:
    """Return the members with a record that also has the CRC-32 of other files."""
    if record is None:
        return {}
    files = {name: format_crc(crcs.get(name, 0)) for name in names}
    return {CRC: NO_CRC, RECORD: {**json.loads(encode_record(record)), "files": files}}


def _to_text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _text_file(name: str, build: Callable[[Mapping[str, int]], bytes]) -> OutputFile:
    return OutputFile(name, len(build({})), (), (), (), build_text=build)


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


def plan_torch_file(name: str, data_pkl: bytes, tensors: Sequence[OutputTensor]) -> OutputFile:
    """Plan a file for ``torch.load``: the pickled object, and the bytes of each tensor in it."""
    small = {"data.pkl": data_pkl, "byteorder": b"little", "version": b"3\n"}
    records = [(n, len(raw)) for n, raw in small.items()]
    records += [(f"data/{i}", t.nbytes) for i, t in enumerate(tensors)]
    archive = torchzip.plan_archive(records)
    offsets = [r.data_offset for r in archive.records]

    small_checksums = [*map(zlib.crc32, small.values())]
    headers = [archive.encode_header(n, crc) for n, crc in enumerate(small_checksums)]
    contents = zip(offsets, small.values(), strict=False)
    return OutputFile(
        name,
        archive.length,
        keys=tuple(t.key for t in tensors),
        offsets=tuple(offsets[len(small) :]),
        pieces=tuple(sorted([*headers, *contents])),
        build_leaf_header=lambda n, crc: archive.encode_header(len(small) + n, crc),
        build_directory=lambda crcs: archive.encode_directory([*small_checksums, *crcs]),
    )
