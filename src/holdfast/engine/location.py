"""Where a snapshot is: a store and a folder in it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from holdfast.errors import StoreError
from holdfast.storage.open import open_store
from holdfast.storage.store import Store

Url = str | os.PathLike[str] | Store


@dataclass(frozen=True, slots=True)
class Location:
    """A snapshot's folder within a store; ``""`` where the store's root is the snapshot."""

    store: Store
    folder: str

    def key(self, name: str) -> str:
        """The key of a file of the snapshot."""
        return f"{self.folder}/{name}" if self.folder else name

    def beside(self, name: str) -> str:
        """The key of a file of the run, beside the snapshot's folder."""
        return "/".join([*self.folder.split("/")[:-1], name])

    @property
    def url(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.folder}" if self.folder else self.store.url


def locate(url: Url) -> Location:
    """The location of one snapshot. The last level of a URL is its folder, what is before it is
    the run's place, so that files beside the snapshot can be reached."""
    if not isinstance(url, str | os.PathLike):
        return Location(open_store(url), "")
    text = os.fspath(url).rstrip("/")
    scheme, mark, path = text.rpartition("://")
    root, _, folder = path.rpartition("/")
    if scheme == "memory" and not root:
        return Location(open_store(text), "")
    if folder in ("", ".", ".."):
        raise StoreError(f"{os.fspath(url)!r} names no snapshot", expected="RUN/version_120")
    if not scheme:
        root = root or ("/" if text.startswith("/") else ".")
    return Location(open_store(f"{scheme}{mark}{root}"), folder)
