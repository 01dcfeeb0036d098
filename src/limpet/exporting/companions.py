"""The files of a Hugging Face folder that a snapshot does not have: configuration and tokenizer.

They are copied from a folder of a model of the same architecture, which may be in any store.
"""

from __future__ import annotations

import os
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import NamedTuple

from limpet.errors import LimpetError, NotFound
from limpet.interop.stored_files import ForeignFile, ForeignFolder, locate_foreign
from limpet.snapshot.location import Location
from limpet.snapshot.spread import unspread
from limpet.storage.local.store import LocalStore
from limpet.text import format_list
from limpet.types import BLOCK_SIZE

CONFIG = "config.json"
_PATTERNS = (
    CONFIG,
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*processor*config*.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)
"""The names of the files to copy. No name of a file with weights or with code matches."""


class Companion(NamedTuple):
    """A file to copy into the folder of an export."""

    name: str
    file: ForeignFile


def find_companions(like: str | os.PathLike[str], target: Location) -> list[Companion]:
    """Return the files to copy from the folder ``like``, a path or a URL.

    Raises ``NotFound`` if there is no such folder or no ``config.json`` in it, and
    ``LimpetError`` if it is the folder ``target`` of the export.
    """
    path, location = locate_foreign(os.fspath(like))
    folder = ForeignFolder(path, location)
    if _is_target(path, location, target):
        raise LimpetError(
            f"The export would copy the files of {path} onto themselves",
            expected="the folder of another model for --like (like=)",
            found="the folder that the export writes to",
            todo="Export to another folder; or export without --like if it has these files",
        )
    try:
        names = folder.names()
        found = format_list(names, 10) or "nothing"
    except OSError as e:
        names, found = [], str(e.strerror)
    companions = []
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in _PATTERNS):
            with suppress(NotFound):  # a folder of that name
                companions.append(Companion(name, folder.open(name)))
    if CONFIG not in {companion.name for companion in companions}:
        raise NotFound(
            f"{path} is not the folder of a Hugging Face model",
            expected=f"a folder with {CONFIG}",
            found=found,
            todo="Give the folder of a model of the same architecture, such as the one that the"
            " training began from",
            key=path,
        )
    return companions


def _is_target(path: str, location: Location | None, target: Location) -> bool:
    store = unspread(target.store)
    if location is not None:
        return location.url.rstrip("/") == target.url.rstrip("/")
    if not isinstance(store, LocalStore):
        return False
    return os.path.realpath(path) == os.path.realpath(os.path.join(store.url, target.folder))


def copy_companion(companion: Companion, location: Location) -> None:
    """Copy a file into a folder. Raises ``AlreadyExists`` and ``StoreError``."""
    name, file = companion
    with location.store.put(location.key(name), file.length) as upload:
        for start in range(0, file.length, BLOCK_SIZE):
            stop = min(start + BLOCK_SIZE, file.length)
            upload.write_at(start, memoryview(file.read(start, stop)))
        upload.commit()
