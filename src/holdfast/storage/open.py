"""From what the user wrote to a store."""

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
    """The store at ``url``; a store is returned as it is. Nothing is read or made yet.

    A path (see ``expand``) or ``file:///path`` is a local folder. ``memory://NAME`` is one store
    per name in this process, ``memory://NAME/folder`` the same one seen from a folder in it.

    Raises ``StoreError`` for anything else.
    """
    if not isinstance(url, str | os.PathLike):
        if hasattr(url, "put_if_absent"):
            return url
        raise StoreError("This is no store", expected=f"{_SUPPORTED}, or a Store", found=repr(url))
    text = os.fspath(url)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text) if isinstance(url, str) else None
    if scheme is None:
        return _open_local(expand_home(text), text)
    if scheme[1] == "file":
        host, slash, path = text.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise StoreError(f"{text} names another machine", expected="file:///path", found=host)
        return _open_local(unquote(slash + path), text)
    if scheme[1] == "memory":
        return _open_memory(text.removeprefix("memory://").strip("/"), text)
    raise StoreError(
        f"Nothing is known of stores like {text}", expected=_SUPPORTED, found=f"{scheme[1]}://"
    )


def expand_home(path: str) -> str:
    """``~`` and ``~user`` at the beginning of a path become the home directory, as a shell does it
    (though not in ``--out=~/runs``). Raises ``StoreError`` where none is known."""
    made = os.path.expanduser(path)
    if made.startswith("~"):
        raise StoreError(
            f"No home directory is known for {path}",
            todo=f"Write the whole path, or ./{path} for what is called so",
        )
    return made


def _open_local(path: str, url: str) -> LocalStore:
    if not path:
        raise StoreError("No folder is named", expected=_SUPPORTED, found=repr(url))
    return LocalStore(path, direct=read_settings().direct)


def _open_memory(path: str, url: str) -> MemoryStore:
    name, _, folder = path.partition("/")
    if not name:
        raise StoreError("The memory store has no name", expected="memory://NAME", found=url)
    with _lock:
        store = _memory_stores.setdefault(name, MemoryStore(name))
    return store.at(folder) if folder else store
