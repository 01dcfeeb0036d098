"""Read files of ``torch.save`` without running any code in them.

Every file is read with ``torch.load(weights_only=True)``. A file that PyTorch refuses is refused
here as well, with the names of the classes and functions that it refers to. There is no option to
unpickle without restrictions.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from limpet.convert.extent import check_extent
from limpet.convert.mmap_files import ForeignFile, MappedFile, check_crc, read_zip_records
from limpet.errors import FormatError, LimpetError, Unsupported
from limpet.text import format_list
from limpet.threads import Workers, no_op
from limpet.types import Advance

ZIP_MAGIC = b"PK\3\4"
_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
"""The magic number of files before PyTorch 1.6, which begin with it as a pickled integer."""

_GLOBAL_PATTERNS = (
    re.compile(r"GLOBAL (\S+) was not an allowed global"),
    re.compile(r"unsupported GLOBAL (\S+) whose module"),
    re.compile(r"unsupported class (\S+)"),
    re.compile(r"for unrecognized function (.+)"),
)
_ADVICE = (
    "If you trust the origin of the file, load it in Python with torch.load(weights_only=False),"
    " and pass what you need to limpet.save"
)


class LoadedFile(NamedTuple):
    """What a file of ``torch.save`` contains, and whether its tensors are mapped."""

    value: Any
    mapped: bool


def load_torch_file(foreign: ForeignFile, advance: Advance) -> LoadedFile | None:
    """Load a file of ``torch.save``, else return None: a zip file is mapped, after checking every
    CRC; the format before PyTorch 1.6 is not. Refuses a pickle that could run code."""
    head = foreign.read(0, 16)
    is_legacy = head[:1] == b"\x80" and _LEGACY_MAGIC in head
    if not is_legacy and head[:4] != ZIP_MAGIC:
        return None
    file = foreign.mapped(advance)
    try:
        # the bytes of a fetched file were counted
        return _load_mapped(file, is_legacy, no_op if file.is_fetched else advance)
    finally:
        file.release_descriptor()


def _load_mapped(file: MappedFile, is_legacy: bool, advance: Advance) -> LoadedFile | None:
    if is_legacy:
        with file.open_path() as path, open(path, "rb") as opened:
            value = torch_load(opened, file.path, mmap=False)
        check_extent(value, file.length, file.path)
        return LoadedFile(value, False)
    records = read_zip_records(file)
    if "data.pkl" not in records:
        return None
    if "constants.pkl" in records:
        raise Unsupported(
            f"{file.path} is a program (TorchScript), not a checkpoint",
            todo="Load it with torch.jit.load, and pass its state_dict() to limpet.save",
        )
    Workers.create().each(list(records.values()), lambda r: check_crc(file, r, advance))
    # torch.load reads any path that ends in .safetensors as that format
    with file.open_path() as path:
        value = torch_load(path, file.path, mmap=True)
    check_extent(value, file.length, file.path)
    return LoadedFile(value, True)


def torch_load(file: Any, name: str, *, mmap: bool) -> Any:
    """Load a path or file that ``torch.save`` wrote; ``name`` describes its origin in errors."""
    import torch

    try:
        # PyTorch makes sparse tensors on the default device, whatever ``map_location`` says
        with torch.device("cpu"), torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols and deprecated storages
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as e:
        raise _unsafe_pickle_error(file, name, str(e)) from e
    except Exception as e:  # for an invalid file, torch.load raises any
        if "unable to mmap" in str(e):
            raise LimpetError(
                f"{name} cannot be mapped: it is larger than the memory that the system commits",
                expected=f"{os.path.getsize(file)} bytes of memory and swap",
                todo="Allow overcommit (sysctl vm.overcommit_memory=1); this memory is never used",
            ) from e
        message = str(e).strip().partition("\n")[0] or type(e).__name__
        raise FormatError(
            f"{name} is damaged or has another format",
            expected="a file that torch.save wrote",
            found=message[:300],
            todo="Use another copy of the file",
            file=name,
        ) from e


def _unsafe_pickle_error(file: Any, name: str, message: str) -> Unsupported:
    """Return the error for a refused pickle, with the names of the classes that it refers to."""
    names = [m[1].strip() for pattern in _GLOBAL_PATTERNS for m in pattern.finditer(message)]
    with suppress(Exception):  # this only adds names to the error
        import torch

        if isinstance(file, io.IOBase):
            file.seek(0)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        names += sorted(n for n in unsafe if n not in names)
    if not names:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        return Unsupported(
            f"{name} cannot be read without running code in it",
            expected="tensors, numbers, text, lists and dicts",
            found=(lines[-2:] or ["an unknown cause"])[0][:300],
            todo=_ADVICE,
        )
    return Unsupported(
        f"{name} refers to {format_list(names, 5)}, which could run code; nothing was run",
        expected="tensors, numbers, text, lists and dicts",
        todo=_ADVICE,
        classes=tuple(names),
    )
