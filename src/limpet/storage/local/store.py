"""Durable files in a local folder or in a folder that hosts share.

The store writes an object to a temporary file in the object's folder, makes the file durable, and
gives it its final name with ``link``, which never replaces a file. It then makes the folders
durable. A folder that another process created may not be durable yet. A commit therefore syncs all
parent folders, not only those that it created. Syncing an unchanged folder takes 0.05 ms.

Symbolic links below the root are followed to read, but nothing is written or deleted through one. A
link that leads to nothing raises ``BrokenLink``. The path of the root may contain links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import unquote

from limpet.errors import NotFound, StoreError
from limpet.settings import read_settings
from limpet.storage.checks import is_partial
from limpet.storage.local import files as local_files
from limpet.storage.local.files import NOT_FOUND_ERRORS, LocalFiles
from limpet.storage.local.upload import LocalUpload
from limpet.storage.store import Entry, Stat, Traits, Upload, check_key
from limpet.types import ALIGNMENT

_ENTRY_KINDS: dict[str, Literal["object", "folder", "link"]] = {
    "file": "object",
    "folder": "folder",
    "link": "link",
}
"""The kinds of the entries of a level. There are no other objects, such as devices."""


class LocalStore(LocalFiles):
    """A store in the folder ``root``, which the first write creates.

    ``direct``: bypass the page cache with O_DIRECT if the alignment and the file system allow it.
    ``fs``: the system calls, which tests replace.
    """

    @property
    def traits(self) -> Traits:
        return Traits(name="local", alignment=ALIGNMENT, durable=True)

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        return LocalUpload(
            self, key, length, direct=self._direct and length >= local_files.DIRECT_MIN_BYTES
        )

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        try:
            upload = LocalUpload(self, key, len(data), direct=False)
        except StoreError as error:
            if "link" in error.fields and self.object_equals(key, data):
                return self.stat(key)  # nothing has to be written through the link
            raise
        with upload:
            upload.write_at(0, memoryview(data))
            return upload.commit(accept_existing=data)

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._list_prefix(prefix, partial=False)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return self._list_prefix(prefix, partial=True)

    def list_level(
        self, folder: str, prefix: str = "", *, partial: bool = False
    ) -> Sequence[Entry]:
        """See the function. ``partial``: return unfinished uploads instead of objects."""
        path = self.path(folder) if folder else self._root
        try:
            with self.translate_errors("list", folder or "."):
                found = self.fs.scandir(path)
        except NotFound:
            return []
        return [
            Entry(name, _ENTRY_KINDS[kind])
            for name, kind in found
            if (kind == "folder" or (kind in _ENTRY_KINDS and is_partial(name) == partial))
            and name.startswith(prefix)
        ]

    def delete(self, key: str) -> None:
        path = self.path(key, to_change=True)
        folder = os.path.dirname(path)
        with self.translate_errors("delete", key), suppress(*NOT_FOUND_ERRORS):
            # The folder is opened first, so that it can be synced even if another process removes
            # it. It is synced even if the file is gone: an earlier delete may have failed here.
            with self.syncing(folder), suppress(*NOT_FOUND_ERRORS):
                self.fs.unlink(path)
            if folder != self._root:
                self.remove_empty_folders(folder)

    def link_target(self, key: str) -> str | None:
        """Return the key of the object or folder that a symbolic link leads to.

        The result is None if the target is not in this store.
        """
        root, target = os.path.realpath(self._root), os.path.realpath(self.path(key))
        inside = target.startswith(root.rstrip("/") + "/")
        return target[len(root.rstrip("/")) + 1 :] if inside else None

    def _list_prefix(self, prefix: str, *, partial: bool) -> Iterator[Stat]:
        folder = self._root
        with self.translate_errors("list", prefix or "."), suppress(*NOT_FOUND_ERRORS):
            for level in check_key(prefix, self.url).split("/") if prefix else []:
                folder = f"{folder}/{level}"
                # unfinished uploads are listed to delete them, and never through a link
                if self.fs.stat(folder, follow=not partial).kind != "folder":
                    return
            yield from self._list_folder(folder, prefix, partial)

    def _list_folder(self, folder: str, prefix: str, partial: bool) -> Iterator[Stat]:
        # A folder sorts as "name/", so that the objects are listed in the order of their keys.
        kinds = {e.name: e.kind for e in self.list_level(prefix, partial=partial)}
        for name, kind in kinds.items():
            if kind == "link" and not partial:
                kinds[name] = self._kind_of_target(folder, name)
        for name in sorted(n + "/" * (k == "folder") for n, k in kinds.items() if k != "link"):
            key = f"{prefix}/{name}" if prefix else name
            if name[-1] == "/":
                yield from self._list_folder(f"{folder}/{name[:-1]}", key[:-1], partial)
            else:
                with suppress(*NOT_FOUND_ERRORS):  # deleted after the folder was read
                    file_stat = self.fs.stat(f"{folder}/{name}")
                    yield Stat(key, file_stat.size, file_stat.modified)

    def _kind_of_target(self, folder: str, name: str) -> Literal["object", "folder", "link"]:
        """Return the kind of what a link leads to, or "link" if that is missing or a cycle."""
        with suppress(OSError):
            target = self.fs.stat(f"{folder}/{name}")
            while target.kind == "folder" and len(folder) >= len(self._root):
                if self.fs.stat(folder).inode == target.inode:
                    return "link"
                folder = os.path.dirname(folder)
            return _ENTRY_KINDS.get(target.kind, "link")
        return "link"


def open_local(url: str, **options: Any) -> LocalStore:
    """Return the store at a path or at ``file:///path``. Raises ``StoreError`` for any option."""
    path = url
    if url.startswith("file://"):
        host, slash, rest = url.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise StoreError(
                f"The URL {url} names another machine", expected="file:///path", found=host
            )
        path = unquote(slash + rest)
    if not path:
        raise StoreError("The URL does not name a folder", expected="file:///path", found=url)
    if options:
        raise StoreError(f"A local folder has no options, but got {', '.join(options)}")
    return LocalStore(path, direct=read_settings().direct)
