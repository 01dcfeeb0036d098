"""Opens the store at a URL or path, and knows which function opens which kind of URL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from limpet.errors import StoreError
from limpet.machine import path_text
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Store
from limpet.text import hide_secrets, to_repr, truncate

OpenStore = Callable[..., Store]
"""A function that returns the store at a URL: ``open(url, **options)``."""

_SCHEME = re.compile(r"(fsspec\+[^/]*|[A-Za-z][A-Za-z0-9+.-]*)://")
_FSSPEC = "fsspec+"  # followed by any protocol of fsspec
_LOST_SLASH = re.compile(r"(fsspec\+[^/]*|[A-Za-z][A-Za-z0-9+.-]*):(/(?!/)|$)")
_EMPTY_LEVEL = re.compile(r"(?<=[^/])//+(?=[^/])")
_BUILT_IN = {
    "file": "limpet.storage.local.store:open_local",
    "hdfs": "limpet.storage.hdfs:open_hdfs",
    "az": "limpet.storage.cloud:open_azure",
    "gs": "limpet.storage.cloud:open_google",
    "s3": "limpet.storage.s3:open_s3",
    _FSSPEC: "limpet.storage.fsspec:open_fsspec",
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
    the group ``limpet.stores`` add other kinds.

    Raises ``StoreError`` for anything else, for an option that a kind of Limpet's own does not
    have, and for what ``check_url`` refuses, such as ``s3:/BUCKET``, to which ``pathlib`` shortens
    a URL.
    """
    if not isinstance(url, str | os.PathLike):
        if hasattr(url, "put_if_absent") and not isinstance(url, type) and not options:
            return url
        found: Any = url
        todo = "Pass its url" if hasattr(url, "url") else "The place is first: save(url, state)"
        if hasattr(url, "step") and not hasattr(url, "url"):  # a version of ``run.versions``
            todo = "Pass the Snapshot itself, or an address, such as RUN@120"
        elif found is None:
            todo = "Run.best() and Run.latest() return None if there is no such version"
        raise StoreError(
            "The argument is not a store" if not options else "A store takes no options",
            expected=f"{_supported()}, or a Store",
            found=truncate(to_repr(url), 120),
            todo=todo,
        )
    text = check_url(url)
    scheme = _SCHEME.match(text)
    name = "file" if scheme is None else scheme[1]
    function = _find_function(name, text)
    if options and name in ("file", "memory"):
        raise StoreError(f"A store at {name}:// has no options, but got {', '.join(options)}")
    return function(text, **options)


def check_url(url: str | os.PathLike[str]) -> str:
    """Return a URL or a path as text, with ``~`` replaced (``expand_home``). Raises ``StoreError``
    if it is empty, lost a slash as in ``pathlib``, or has a folder without a name."""
    text = path_text("A URL", url)
    if not text:
        raise StoreError("The URL does not name a folder", expected=_supported(), found=repr(text))
    lost = _LOST_SLASH.match(text)
    if lost is not None and (
        is_built_in(lost[1])
        or lost[1] in _functions
        or entry_points(group="limpet.stores", name=lost[1])
    ):
        shown = hide_secrets(text.replace(":/", "://", 1)).replace("://", ":/", 1)
        raise StoreError(
            f"{shown} looks like a URL that lost a slash",
            expected=f"{lost[1]}://",
            found=f"{lost[1]}:{lost[2]}",
            todo="Pass the URL as a string (pathlib removes a slash), or write"
            f" ./{shown} for a local folder with this name",
        )
    scheme = _SCHEME.match(text)
    if scheme is None:
        return expand_home(text) if text.startswith("~") else text
    is_server = scheme[1] in _BUILT_IN and scheme[1] != "file"
    if is_server and (shown := hide_secrets(text)) != text:
        raise StoreError(
            f"{shown} does not name a folder: it contains a user, a password, or a query",
            todo="Credentials and other options are not part of the URL: see docs/stores.md",
        )
    levels = text[scheme.end() :]
    if (is_server or scheme[1] == "memory") and _EMPTY_LEVEL.search(levels):
        raise StoreError(
            f"A folder in {text} has no name",
            expected="one slash between two names",
            found="two or more",
            todo=f"Perhaps you meant {scheme[0]}{_EMPTY_LEVEL.sub('/', levels)}",
        )
    return text


def register_store(scheme: str, function: OpenStore) -> None:
    """Make ``function(url, **options)`` open the URLs that begin with ``scheme://``.

    ``load``, ``save``, ``open``, ``Run``, ``Checkpointer``, and all commands then accept them. A
    package does the same without a call, by an entry point in the group ``limpet.stores`` whose
    name is the scheme. Raises ``StoreError`` if the scheme is invalid or is one of Limpet's own.
    """
    if not callable(function):
        raise StoreError(f"function= must be a function, not {truncate(to_repr(function), 120)}")
    is_text = isinstance(scheme, str)
    if not is_text or not _SCHEME.fullmatch(f"{scheme}://") or is_built_in(scheme):
        raise StoreError(
            f"Cannot register the kind of store {scheme!r}",
            expected="letters, digits, '+', '-', or '.', and not a kind that Limpet has",
        )
    _functions[scheme] = function


def is_built_in(scheme: str) -> bool:
    """Return True if a scheme is one of Limpet's own."""
    return scheme in (*_BUILT_IN, "memory") or scheme.startswith(_FSSPEC)


def _find_function(scheme: str, url: str) -> OpenStore:
    """Return the function that opens URLs with this scheme. Raises ``StoreError``."""
    scheme = _FSSPEC if scheme.startswith(_FSSPEC) else scheme
    if (function := _functions.get(scheme)) is not None:
        return function
    if scheme in _BUILT_IN:
        module, _, name = _BUILT_IN[scheme].partition(":")
        function = getattr(import_module(module), name)
    else:
        found = [*entry_points(group="limpet.stores", name=scheme)]
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
    added = {e.name for e in entry_points(group="limpet.stores")} | {*_functions}
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
    """Replace ``~`` or ``~user`` at the beginning of a path, as shells do, but not in
    ``--out=~/runs``. Raises ``StoreError`` if the home directory is unknown."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise StoreError(
            f"The home directory in {path} is unknown",
            todo=f"Write the full path, or ./{path} for a folder with this name",
        )
    return expanded
