"""Read safetensors files and Hugging Face folders as mapped tensors by name."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import msgspec

from limpet.convert.mmap_files import ForeignFile
from limpet.convert.read_torch import LoadedFile, load_torch_file
from limpet.convert.stored_files import ForeignFolder, is_safetensors, require_space
from limpet.errors import FormatError, NotFound, Unsupported
from limpet.format.safetensors import decode_entries
from limpet.format.strict_json import DECODE_ERRORS, StrictDecoder
from limpet.format.tree import is_valid_shape
from limpet.types import DTYPES, Advance

SAFE_WEIGHTS_NAME, WEIGHTS_NAME = "model.safetensors", "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
_MAX_INDEX_SIZE = 1 << 28

_SHARDING = StrictDecoder(msgspec.json.Decoder(dict[str, dict[str, list[int]]]))
_INDEX = StrictDecoder(msgspec.json.Decoder(dict[str, Any]))

FOREIGN_CODES = {
    "complex64": "C64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Codes of the safetensors library for dtypes that Limpet's shards store as another dtype."""

_DTYPES_BY_CODE = {
    **{d.stored_dtype: d.name for d in DTYPES.values() if d.stored_per_element == 1},
    "U8": "uint8",
    **{code: name for name, code in FOREIGN_CODES.items()},
}
"""The names of dtypes by their safetensors codes."""


def load_safetensors(file: ForeignFile) -> dict[str, Any]:
    """Return the tensors by name, in the order of the header. (No digests: damage in the data
    cannot be detected.) ``Unsupported``: a dtype that Limpet does not have."""
    begin = 8 + int.from_bytes(file.read(0, 8), "little")
    try:
        entries, metadata = decode_entries(file.read(8, begin))
    except DECODE_ERRORS as e:
        raise file.format_error("a JSON header of safetensors", str(e), 8) from e
    _refuse_rank_files(file, metadata)
    unsupported = sorted({t.dtype for t in entries.values()} - _DTYPES_BY_CODE.keys())
    if unsupported:
        raise Unsupported(
            f"{file.path} has tensors of dtype {', '.join(unsupported)}, which cannot be imported",
            expected=f"one of {', '.join(sorted(_DTYPES_BY_CODE))}",
            found=next(n for n, t in entries.items() if t.dtype in unsupported),
        )
    at, tensors = 0, {}
    for name, t in sorted(entries.items(), key=lambda e: e[1].data_offsets):
        dtype, (start, stop) = _DTYPES_BY_CODE[t.dtype], t.data_offsets
        fits = (
            is_valid_shape(dtype, t.shape)
            and prod(t.shape) * DTYPES[dtype].itemsize == stop - start
        )
        if start != at or not fits or begin + stop > file.length:
            raise file.format_error(
                f"tensor {name} from byte {at} of the data, in full",
                f"{t.dtype} of shape {t.shape} at bytes {start} to {stop}",
                begin + at,
            )
        tensors[name] = file.tensor(dtype, t.shape, begin + start)
        at = stop
    if begin + at != file.length:
        raise file.format_error(f"a file of {begin + at} bytes", f"{file.length} bytes", begin + at)
    return {name: tensors[name] for name in entries}


def _refuse_rank_files(file: ForeignFile, metadata: dict[str, str]) -> None:
    """Raise ``Unsupported`` for a file that DCP wrote with the parts of one rank: its tensors have
    the names of whole tensors, so it looks like a checkpoint."""
    encoded = metadata.get("DCP_SHARDING_INFO")
    if encoded is None:
        return
    try:
        sharding = _SHARDING.decode(encoded.encode())
    except DECODE_ERRORS as e:
        raise file.format_error("the offsets of parts in DCP_SHARDING_INFO", str(e), 8) from e
    has_offset = any(any(p.get("saved_offsets", ())) for p in sharding.values())
    if has_offset or os.path.basename(file.path).startswith("shard-"):
        raise Unsupported(
            f"{file.path} contains the parts of one rank, not whole tensors",
            todo="Assemble the parts first, with"
            " torch.distributed.checkpoint's consolidate_safetensors_files",
        )


# -- folders of Hugging Face ---------------------------------------------------------------------


def find_model_file(names: set[str]) -> str | None:
    """Return the file, of these in a folder, from which Transformers would load a model, in its
    order of preference, or None."""
    files = (n + suffix for n in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME) for suffix in ("", INDEX_SUFFIX))
    return next((n for n in files if n in names), None)


def load_huggingface_folder(
    folder: ForeignFolder, name: str, advance: Advance
) -> tuple[dict[str, Any], list[str], bool]:
    """Load the model in a folder, whose file or index is ``name``. Returns the tensors by name, the
    files that were read, and whether all tensors are mapped."""
    if not name.endswith(INDEX_SUFFIX):
        value, mapped = _load_weights(folder.open(name), advance)
        return value, [name], mapped
    weight_map = _read_index(folder.open(name))
    tensors: dict[str, Any] = {}
    all_mapped = True
    names_by_part: dict[str, list[str]] = {}
    for tensor_name, part in weight_map.items():
        names_by_part.setdefault(part, []).append(tensor_name)
    parts = sorted(names_by_part)
    files = []
    for part in parts:
        try:
            files.append(folder.open(part))
        except NotFound as e:
            expected = f"the part {part}"
            raise _incomplete_error(folder, name, expected, "no such file") from e
    require_space([file for file in files if not is_safetensors(file)])
    for part, file in zip(parts, files, strict=True):
        values, mapped = _load_weights(file, advance)
        all_mapped = all_mapped and mapped
        missing = [n for n in names_by_part[part] if n not in values]
        if missing:
            raise _incomplete_error(
                folder, name, f"{missing[0]} in {part}", f"{len(values)} other tensors"
            )
        # as in Transformers, tensors that the index does not list also belong to the model
        tensors.update((n, v) for n, v in values.items() if weight_map.get(n, part) == part)
    return tensors, [name, *parts], all_mapped


def _load_weights(file: ForeignFile, advance: Advance) -> LoadedFile:
    if is_safetensors(file):
        return LoadedFile(load_safetensors(file), True)
    loaded = load_torch_file(file, advance)
    if loaded is None:
        found = repr(file.read(0, 16))
        raise file.format_error("a safetensors file, or a file of torch.save", found)
    if not isinstance(loaded.value, dict):
        raise file.format_error("a dict of tensors by name", type(loaded.value).__name__)
    return loaded


def _read_index(file: ForeignFile) -> dict[str, str]:
    """Return the part of each tensor, in the index's folder: other names are a ``FormatError``."""
    try:
        if file.length > _MAX_INDEX_SIZE:
            raise ValueError(f"{file.length} bytes")
        weight_map = _INDEX.decode(file.read(0, file.length)).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("no weight_map")
        for part in weight_map.values():
            if not isinstance(part, str) or part in ("", ".", "..") or "/" in part or "\0" in part:
                raise ValueError(f"a part named {part!r}")
    except (*DECODE_ERRORS, ValueError) as e:
        raise file.format_error("an index of tensors and files in the same folder", str(e)) from e
    return weight_map


def _incomplete_error(folder: ForeignFolder, name: str, expected: str, found: str) -> FormatError:
    return FormatError(
        f"{folder.path} is not complete, or {name} belongs to another model",
        expected=expected,
        found=found,
        todo="Use another copy of the folder",
        file=folder.join(name),
    )
