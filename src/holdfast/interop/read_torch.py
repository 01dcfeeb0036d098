"""Files of ``torch.save``, read without running anything that is in them.

Only ever by ``torch.load(weights_only=True)``. What it refuses is refused here, with the name of
what the file wants to run; there is no option to unpickle.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import warnings
from contextlib import suppress
from typing import Any

from holdfast.errors import FormatError, HoldfastError, Unsupported
from holdfast.interop.mmap_files import Advance, MappedFile, ZipRecord, check_crc, read_zip_records
from holdfast.settings import read_settings
from holdfast.threads import in_parallel

ZIP_MAGIC = b"PK\3\4"
_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
"""What files of PyTorch before 1.6 begin with, as a pickled integer."""

_GLOBAL_PATTERNS = (
    re.compile(r"GLOBAL (\S+) was not an allowed global"),
    re.compile(r"unsupported GLOBAL (\S+) whose module"),
    re.compile(r"unsupported class (\S+)"),
    re.compile(r"for unrecognized function (.+)"),
)
_ADVICE = (
    "If you trust where it comes from, load it in Python with torch.load(weights_only=False), and"
    " give what you need of it to holdfast.save"
)
_LOAD_ERRORS = (
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    MemoryError,
    struct.error,
)
"""What ``torch.load`` raises for bytes that it did not write."""


def is_legacy(head: bytes) -> bool:
    """Whether a file begins as ``torch.save`` wrote it before PyTorch 1.6."""
    return head[:1] == b"\x80" and _LEGACY_MAGIC in head[:16]


def read_torch_records(file: MappedFile) -> dict[str, ZipRecord] | None:
    """The records of a zip file of ``torch.save``; None if it is another zip file. Raises
    ``Unsupported`` for a TorchScript archive."""
    records = read_zip_records(file)
    if "data.pkl" not in records:
        return None
    if "constants.pkl" in records:
        raise Unsupported(
            f"{file.path} is a program (TorchScript), not a checkpoint",
            todo="Load it with torch.jit.load, and give its state_dict() to holdfast.save",
        )
    return records


def load_zip(file: MappedFile, records: dict[str, ZipRecord], advance: Advance) -> Any:
    """What is in a zip file of ``torch.save``, its tensors mapped; every CRC is compared first."""
    todo = list(records.values())
    in_parallel(
        todo, lambda r: check_crc(file, r, advance), min(read_settings().threads, len(todo))
    )
    # torch.load takes a path that ends in .safetensors for one such, whatever is in it
    with open(file.path, "rb") as opened:
        odd = file.path.endswith(".safetensors")
        path = f"/proc/self/fd/{opened.fileno()}" if odd else file.path
        return _torch_load(path, file.path, mmap=True)


def load_legacy(path: str) -> Any:
    """What is in a file of the old format. It cannot be mapped: all of it is read into memory."""
    with open(path, "rb") as opened:
        return _torch_load(opened, path, mmap=False)


def load_bytes(data: bytes, name: str) -> Any:
    """What ``torch.save`` wrote into these bytes; ``name`` says where they are from."""
    return _torch_load(io.BytesIO(data), name, mmap=False)


def _torch_load(file: Any, name: str, *, mmap: bool) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other protocols, and of deprecated storages
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as e:
        raise _unsafe_pickle_error(file, name, str(e)) from e
    except _LOAD_ERRORS as e:
        if "unable to mmap" in str(e):
            raise HoldfastError(
                f"{name} is larger than the memory that the system promises for it",
                expected=f"{os.path.getsize(name)} bytes of memory and swap",
                todo="Let it promise more (sysctl vm.overcommit_memory=1): they are not used",
            ) from e
        told = str(e).strip().partition("\n")[0] or type(e).__name__
        raise FormatError(
            f"{name} is damaged, or not what it seems",
            expected="a file that torch.save wrote",
            found=told[:300],
            todo="Take another copy of it",
            file=name,
        ) from e


def _unsafe_pickle_error(file: Any, name: str, message: str) -> Unsupported:
    """The refusal of a pickle, by the names of what it wants to have run or made."""
    names: list[str] = []
    for pattern in _GLOBAL_PATTERNS:
        names += [m[1].strip() for m in pattern.finditer(message)]
    with suppress(Exception):  # only more names are lost
        import torch

        if isinstance(file, io.IOBase):
            file.seek(0)
        listed = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        names += sorted(n for n in listed if n not in names)
    if not names:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        return Unsupported(
            f"{name} cannot be read without running what is in it",
            expected="tensors, numbers, text, lists and dicts",
            found=(lines[-2:] or ["nothing that can be told"])[0][:300],
            todo=_ADVICE,
        )
    more = f", and {len(names) - 5} more" if len(names) > 5 else ""
    return Unsupported(
        f"{name} wants to run {', '.join(names[:5])}{more}, and nothing in it was run",
        expected="tensors, numbers, text, lists and dicts",
        todo=_ADVICE,
        classes=tuple(names),
    )
