"""Opens the store at a URL or path."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from holdfast.errors import StoreError
from holdfast.settings import read_settings
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store

_SUPPORTED = "a path, file:// or memory://"
_memory_stores: dict[str, MemoryStore] = {}


def open_store(url: str | os.PathLike[str] | Store) -> Store:
    """Return the store at ``url``. This neither reads nor creates anything.

    A path (see ``expand_home``) or ``file:///path`` is a local folder. ``memory://NAME`` is one
    store per name in this process, and ``memory://NAME/folder`` is a view of a folder in it. A
    ``Store`` object is returned unchanged.

    Raises ``StoreError`` for anything else.
    """
    if not isinstance(url, str | os.PathLike):
        if hasattr(url, "put_if_absent"):
            return url
        raise StoreError(
            "The argument is not a store", expected=f"{_SUPPORTED}, or a Store", found=repr(url)
        )
    text = os.fspath(url)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text) if isinstance(url, str) else None
    if scheme is None:
        path = expand_home(text)
    elif scheme[1] == "memory":
        return _open_memory(text)
    elif scheme[1] == "file":
        host, slash, path = text.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise StoreError(
                f"The URL {text} names another machine", expected="file:///path", found=host
            )
        path = unquote(slash + path)
    else:
        raise StoreError(
            f"Unsupported kind of store: {text}", expected=_SUPPORTED, found=f"{scheme[1]}://"
        )
    if not path:
        raise StoreError("The URL does not name a folder", expected=_SUPPORTED, found=repr(text))
    return LocalStore(path, direct=read_settings().direct)


def expand_home(path: str) -> str:
    """Replace ``~`` or ``~user`` at the beginning of a path with the home directory.

    Shells do the same, but not in arguments such as ``--out=~/runs``. Raises ``StoreError`` if the
    home directory is unknown.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise StoreError(
            f"The home directory in {path} is unknown",
            todo=f"Write the full path, or ./{path} for a folder with this name",
        )
    return expanded


def _open_memory(url: str) -> MemoryStore:
    name, _, folder = url.removeprefix("memory://").strip("/").partition("/")
    if not name:
        raise StoreError("The memory store has no name", expected="memory://NAME", found=url)
    store = _memory_stores.setdefault(name, MemoryStore(name))  # atomic, so there is no lock
    return store.at(folder) if folder else store
