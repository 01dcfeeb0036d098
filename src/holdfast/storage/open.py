"""Opens the store at a URL or path."""

from __future__ import annotations

import os
import re
from threading import Lock
from urllib.parse import unquote

from holdfast.errors import StoreError
from holdfast.settings import read_settings
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store

_SUPPORTED = "a path, file:// or memory://"
_memory_stores: dict[str, MemoryStore] = {}
_lock = Lock()


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
        return _open_local(expand_home(text), text)
    if scheme[1] == "file":
        host, slash, path = text.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise StoreError(
                f"The URL {text} names another machine", expected="file:///path", found=host
            )
        return _open_local(unquote(slash + path), text)
    if scheme[1] == "memory":
        return _open_memory(text.removeprefix("memory://").strip("/"), text)
    raise StoreError(
        f"Unsupported kind of store: {text}", expected=_SUPPORTED, found=f"{scheme[1]}://"
    )


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


def _open_local(path: str, url: str) -> LocalStore:
    if not path:
        raise StoreError("The URL does not name a folder", expected=_SUPPORTED, found=repr(url))
    return LocalStore(path, direct=read_settings().direct)


def _open_memory(path: str, url: str) -> MemoryStore:
    name, _, folder = path.partition("/")
    if not name:
        raise StoreError("The memory store has no name", expected="memory://NAME", found=url)
    with _lock:
        store = _memory_stores.setdefault(name, MemoryStore(name))
    return store.at(folder) if folder else store
