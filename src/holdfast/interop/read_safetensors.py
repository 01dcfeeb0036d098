"""Files and folders of safetensors and of Hugging Face: names to tensors, mapped."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import msgspec

from holdfast.errors import FormatError, Unsupported
from holdfast.format.safetensors import MAX_HEADER
from holdfast.format.tree import is_valid_shape
from holdfast.interop.mmap_files import Advance, MappedFile
from holdfast.interop.read_torch import (
    ZIP_MAGIC,
    is_legacy,
    load_legacy,
    load_zip,
    read_torch_records,
)
from holdfast.types import DTYPES

SAFE_WEIGHTS_NAME, WEIGHTS_NAME = "model.safetensors", "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
_MAX_INDEX_SIZE = 1 << 28

_DTYPES_BY_CODE = {d.stored_dtype: d.name for d in DTYPES.values() if d.stored_per_element == 1} | {
    "U8": "uint8",
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""What safetensors calls a dtype, and what we call it."""


class _TensorEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def is_safetensors(head: bytes, length: int) -> bool:
    """Whether a file of that length begins as a safetensors file does."""
    size = int.from_bytes(head[:8], "little")
    return len(head) > 8 and head[8:9] == b"{" and 2 <= size <= min(MAX_HEADER, length - 8)


def load_safetensors(file: MappedFile) -> dict[str, Any]:
    """The tensors by name, in the order of the file. It has no digests: what is damaged in the
    data cannot be told. Raises ``FormatError``, and ``Unsupported`` for dtypes that are not ours.
    """
    entries, begin = _read_header(file)
    odd = sorted({t.dtype for t in entries.values()} - _DTYPES_BY_CODE.keys())
    if odd:
        raise Unsupported(
            f"{file.path} has tensors of dtype {', '.join(odd)}, which cannot be kept",
            expected=f"one of {', '.join(sorted(_DTYPES_BY_CODE))}",
            found=next(n for n, t in entries.items() if t.dtype in odd),
        )
    at, made = 0, {}
    for name, t in sorted(entries.items(), key=lambda e: e[1].data_offsets):
        dtype, (start, stop) = _DTYPES_BY_CODE[t.dtype], t.data_offsets
        fits = (
            is_valid_shape(dtype, t.shape)
            and prod(t.shape) * DTYPES[dtype].itemsize == stop - start
        )
        if start != at or not fits or begin + stop > file.length:
            raise file.format_error(
                f"{name} from byte {at} of the data, in full", f"{t}", begin + at
            )
        made[name] = file.tensor(dtype, t.shape, begin + start)
        at = stop
    if begin + at != file.length:
        raise file.format_error(f"a file of {begin + at} bytes", f"{file.length} bytes", begin + at)
    return {name: made[name] for name in entries}


def _read_header(file: MappedFile) -> tuple[dict[str, _TensorEntry], int]:
    """The entries of a safetensors file by name, and where its data begins."""
    head = bytes(file.view[:9])
    if not is_safetensors(head, file.length):
        raise file.format_error("a header within the file, as safetensors has it", f"{head!r}")
    begin = 8 + int.from_bytes(head[:8], "little")
    try:
        raw = msgspec.json.decode(bytes(file.view[8:begin]), type=dict[str, msgspec.Raw])
        about = raw.pop("__metadata__", None)
        notes = {} if about is None else msgspec.json.decode(about, type=dict[str, str])
        entries = {n: msgspec.json.decode(r, type=_TensorEntry) for n, r in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise file.format_error("a JSON header as safetensors has it", str(e), 8) from e
    _refuse_rank_files(file, notes)
    return entries, begin


def _refuse_rank_files(file: MappedFile, metadata: dict[str, str]) -> None:
    """PyTorch's DCP can write the parts of each rank as safetensors files, whose tensors have the
    names of the whole ones: one such file looks like a checkpoint and is none."""
    told = metadata.get("DCP_SHARDING_INFO")
    if told is None:
        return
    try:
        found = msgspec.json.decode(told, type=dict[str, dict[str, list[int]]])
    except msgspec.DecodeError as e:
        raise file.format_error("a note of where parts begin", str(e), 8) from e
    moved = any(any(p.get("saved_offsets", ())) for p in found.values())
    if moved or os.path.basename(file.path).startswith("shard-"):
        raise Unsupported(
            f"{file.path} holds the parts of one rank, not whole tensors",
            todo="Put the parts together first, with"
            " torch.distributed.checkpoint's consolidate_safetensors_files",
        )


# -- folders of Hugging Face ---------------------------------------------------------------------


def find_model_file(names: set[str]) -> str | None:
    """The file by which Transformers would find the model in a folder with these names, in its
    order; None if there is none."""
    order = (
        SAFE_WEIGHTS_NAME,
        SAFE_WEIGHTS_NAME + INDEX_SUFFIX,
        WEIGHTS_NAME,
        WEIGHTS_NAME + INDEX_SUFFIX,
    )
    return next((n for n in order if n in names), None)


def load_huggingface_folder(
    folder: str, name: str, advance: Advance
) -> tuple[dict[str, Any], list[str], bool]:
    """The tensors of the model in a folder by ``name``, its file or index; the files that they are
    from; and whether all of them are mapped.

    Raises ``FormatError`` if a part is missing or lacks what the index says is in it.
    """
    if not name.endswith(INDEX_SUFFIX):
        value, mapped = _load_weights(os.path.join(folder, name), advance)
        return value, [name], mapped
    places = _read_index(os.path.join(folder, name))
    made: dict[str, Any] = {}
    mapped = True
    parts = sorted(set(places.values()))
    for part in parts:
        path = os.path.join(folder, part)
        if not os.path.isfile(path):
            raise _incomplete_error(folder, name, f"the part {part}", "no such file")
        found, whole = _load_weights(path, advance)
        mapped = mapped and whole
        lacks = [n for n, p in places.items() if p == part and n not in found]
        if lacks:
            raise _incomplete_error(folder, name, f"{lacks[0]} in {part}", f"{len(found)} others")
        # what the index does not mention is of the model too: so Transformers takes it
        made.update((n, v) for n, v in found.items() if places.get(n, part) == part)
    return made, [name, *parts], mapped


def _load_weights(path: str, advance: Advance) -> tuple[dict[str, Any], bool]:
    file = MappedFile(path)
    head = bytes(file.view[:16])
    if is_safetensors(head, file.length):
        return load_safetensors(file), True
    records = read_torch_records(file) if head[:4] == ZIP_MAGIC else None
    if records is None and not is_legacy(head):
        raise file.format_error("a safetensors file, or one of torch.save", repr(head))
    value = load_legacy(path) if records is None else load_zip(file, records, advance)
    if not isinstance(value, dict):
        raise file.format_error("a dict of tensors by name", type(value).__name__)
    return value, records is not None


def _read_index(path: str) -> dict[str, str]:
    """Which part holds which tensor. Parts lie beside the index: a name that leads elsewhere is
    refused."""

    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    file = MappedFile(path)
    try:
        if file.length > _MAX_INDEX_SIZE:
            raise ValueError(f"{file.length} bytes")
        places = msgspec.json.decode(bytes(file.view), type=Index).weight_map
        for part in places.values():
            if part in ("", ".", "..") or "/" in part or "\0" in part:
                raise ValueError(f"a part called {part!r}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise file.format_error("an index of tensors and the files beside it", str(e)) from e
    return places


def _incomplete_error(folder: str, name: str, expected: str, found: str) -> FormatError:
    return FormatError(
        f"{folder} is not complete, or {name} is of another model",
        expected=expected,
        found=found,
        todo="Take another copy of it",
        file=os.path.join(folder, name),
    )
