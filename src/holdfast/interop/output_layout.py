"""The files of other formats, laid out before there are any bytes: inert, and no I/O.

A safetensors file, a Hugging Face checkpoint of several of them, a file for ``torch.load``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from holdfast.format import torchzip
from holdfast.format.safetensors import build_header
from holdfast.types import DTYPES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

BuildFraming = Callable[[Sequence[int]], list[tuple[int, bytes]]]

UNSUPPORTED_DTYPES = ("complex32", "complex128")
"""The dtypes that safetensors has no name for."""

# What its own library writes for those that our shards store under the names of others.
_DTYPE_CODES = {
    "complex64": "C64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor on its way out: its ``name`` there, and the ``key`` of the leaf with its bytes."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file as it will be: ``length`` bytes; the leaf ``keys[i]`` begins at ``begins[i]``.

    ``frame`` gives all other bytes, as pieces and their offsets: from the CRC-32 of each leaf if
    ``summed``, else from nothing.
    """

    name: str
    length: int
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    build_framing: BuildFraming
    needs_crc: bool = False


def plan_safetensors_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    """A safetensors file: larger elements first, so that all are aligned in it.

    Raises ``Unsupported`` for so many tensors that the library would refuse the header.
    """
    ordered = sorted(tensors, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
    rows, at = [], 0
    for tensor in ordered:
        dtype, shape = (
            _DTYPE_CODES.get(tensor.dtype, DTYPES[tensor.dtype].stored_dtype),
            tensor.shape,
        )
        if dtype == "F4":  # two elements in a byte
            shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
        rows.append((tensor.name, dtype, shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    header = build_header(rows)
    begins = tuple(len(header) + row[3] for row in rows)
    keys = tuple(t.key for t in ordered)
    return OutputFile(name, len(header) + at, keys, begins, lambda _: [(0, header)])


def plan_hf_files(tensors: Sequence[OutputTensor], max_shard_size: int) -> list[OutputFile]:
    """The files of a Hugging Face checkpoint; with several the index that names them, last."""
    shards = list(_split_into_files(tensors, max_shard_size))
    if len(shards) == 1:
        return [plan_safetensors_file(SINGLE_FILE, shards[0])]
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors)},
        "weight_map": {t.name: where[t.name] for t in tensors},
    }
    raw = (json.dumps(index, indent=2) + "\n").encode()
    files = [plan_safetensors_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    return [*files, OutputFile(INDEX_FILE, len(raw), (), (), lambda _: [(0, raw)])]


def _split_into_files(
    tensors: Sequence[OutputTensor], max_shard_size: int
) -> Iterator[list[OutputTensor]]:
    """In the order of the state; a tensor that is larger than a shard may be has one alone. (As
    ``huggingface_hub`` splits a state dict.)"""
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
    """A file for ``torch.load``: the pickled object, and of each tensor in it the bytes."""
    small = [("data.pkl", data_pkl), ("byteorder", b"little"), ("version", b"3\n")]
    records = [(n, len(raw)) for n, raw in small]
    records += [(f"data/{i}", t.nbytes) for i, t in enumerate(tensors)]
    archive = torchzip.plan_archive(records)

    def frame(sums: Sequence[int]) -> list[tuple[int, bytes]]:
        begins = archive.data_offsets[: len(small)]
        texts = [(at, raw) for at, (_, raw) in zip(begins, small, strict=True)]
        return texts + archive.encode_headers([*(zlib.crc32(raw) for _, raw in small), *sums])

    keys = tuple(t.key for t in tensors)
    return OutputFile(
        name, archive.length, keys, archive.data_offsets[len(small) :], frame, needs_crc=True
    )
