"""Opens the store at a URL or path, and knows which function opens which kind of URL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from holdfast.errors import StoreError
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store

OpenStore = Callable[..., Store]
"""A function that returns the store at a URL: ``open(url, **options)``."""

_SCHEME = re.compile(r"(fsspec\+[^/]*|[A-Za-z][A-Za-z0-9+.-]*)://")
_FSSPEC = "fsspec+"  # followed by any protocol of fsspec
_BUILT_IN = {
    "file": "holdfast.storage.local.store:open_local",
    "hdfs": "holdfast.storage.hdfs.store:open_hdfs",
    "az": "holdfast.storage.cloud.store:open_azure",
    "gs": "holdfast.storage.cloud.store:open_google",
    "s3": "holdfast.storage.s3.store:open_s3",
    _FSSPEC: "holdfast.storage.fsspec.store:open_fsspec",
}
_memory_stores: dict[str, MemoryStore] = {}


def open_store(url: str | os.PathLike[str] | Store, **options: Any) -> Store:
    """Return the store at ``url``. This neither reads nor creates anything.

    A path (see ``expand_home``) or ``file:///path`` is a local folder. ``memory://NAME`` is one
    store per name in this process, and ``memory://NAME/folder`` is a view of a folder in it.
    ``s3://BUCKET/folder`` is a folder in a bucket, with the options ``S3Options``; so is
    ``az://CONTAINER/folder`` (``AzureOptions``) and ``gs://BUCKET/folder`` (``GoogleOptions``).
    ``hdfs://NAMENODE:PORT/folder`` is a folder in HDFS (``HdfsOptions``), and
    ``fsspec+PROTOCOL://...`` is any file system of fsspec (``open_fsspec``). A
    ``Store`` object is returned unchanged. ``register_store`` and packages with an entry point in
    the group ``holdfast.stores`` add other kinds.

    Raises ``StoreError`` for anything else, and for an option that the kind of store does not have.
    """
    if not isinstance(url, str | os.PathLike):
        if hasattr(url, "put_if_absent") and not options:
            return url
        raise StoreError(
            "The argument is not a store" if not options else "A store takes no options",
            expected=f"{_supported()}, or a Store",
            found=repr(url),
        )
    text = os.fspath(url)
    scheme = _SCHEME.match(text) if isinstance(url, str) else None
    if not text:
        raise StoreError("The URL does not name a folder", expected=_supported(), found=repr(text))
    if scheme is None:
        return _find_function("file", text)(expand_home(text), **options)
    return _find_function(scheme[1], text)(text, **options)


def register_store(scheme: str, function: OpenStore) -> None:
    """Make ``function(url, **options)`` open the URLs that begin with ``scheme://``.

    ``load``, ``save``, ``open``, ``Run``, ``Checkpointer``, and all commands then accept them. A
    package does the same without a call, by an entry point in the group ``holdfast.stores`` whose
    name is the scheme. Raises ``StoreError`` if the scheme is invalid or is one of Holdfast's own.
    """
    is_own = scheme in (*_BUILT_IN, "memory") or scheme.startswith(_FSSPEC)
    if not _SCHEME.fullmatch(f"{scheme}://") or is_own:
        raise StoreError(
            f"Cannot register the kind of store {scheme!r}",
            expected="letters, digits, '+', '-', or '.', and not a kind that Holdfast has",
        )
    _functions[scheme] = function


def has_authority(scheme: str) -> bool:
    """Return True if the first level of a URL is not a folder: a bucket, a host, or a name."""
    return scheme not in ("", "file")


def _find_function(scheme: str, url: str) -> OpenStore:
    """Return the function that opens URLs with this scheme. Raises ``StoreError``."""
    scheme = _FSSPEC if scheme.startswith(_FSSPEC) else scheme
    if (function := _functions.get(scheme)) is not None:
        return function
    if scheme in _BUILT_IN:
        module, _, name = _BUILT_IN[scheme].partition(":")
        function = getattr(import_module(module), name)
    else:
        found = [*entry_points(group="holdfast.stores", name=scheme)]
        if len(found) != 1:
            raise StoreError(
                f"Unsupported kind of store: {url}"
                if not found
                else f"Several packages support {scheme}://",
                expected=_supported() if not found else "one package",
                found=f"{scheme}://" if not found else ", ".join(e.value for e in found),
            )
        function = found[0].load()
    return _functions.setdefault(scheme, function)


def _supported() -> str:
    added = {e.name for e in entry_points(group="holdfast.stores")} | {*_functions}
    return "a path or " + " or ".join(
        f"{s}PROTOCOL://" if s == _FSSPEC else f"{s}://" for s in sorted(added | {*_BUILT_IN})
    )


def _open_memory(url: str) -> MemoryStore:
    name, _, folder = url.removeprefix("memory://").strip("/").partition("/")
    if not name:
        raise StoreError("The memory store has no name", expected="memory://NAME", found=url)
    store = _memory_stores.setdefault(name, MemoryStore(name))  # atomic, so there is no lock
    return store.at(folder) if folder else store


_functions: dict[str, OpenStore] = {"memory": _open_memory}


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
