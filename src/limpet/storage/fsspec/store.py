"""A store in any file system of fsspec. What it guarantees is unknown, so it is weak.

fsspec's interface has neither an atomic creation nor a way to make a file durable. An object is
written under another name, moved to its name, and looked up. Without ``allow_weak``, nothing is
written or deleted. fsspec's ``exists``, ``isfile``, ``find``, and ``walk`` are not used: they
report an error as a missing file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from limpet.buffers import as_byte_view
from limpet.errors import AlreadyExists, NotFound, StoreError, Unavailable
from limpet.storage.checks import (
    TIMEOUT,
    check_option,
    check_range,
    exists_error,
    is_partial,
    short_read_error,
    switch,
    too_long_error,
)
from limpet.storage.fsspec.files import FsspecFiles, secrets_in, shown
from limpet.storage.fsspec.upload import FileAppender
from limpet.storage.sequential_upload import SequentialUpload
from limpet.storage.store import Entry, Stat, Traits, Upload
from limpet.text import hide_secrets
from limpet.types import MIB

INSTALL = "Install it: pip install 'limpet[fsspec]'"


_PASSWORD = re.compile(r"(?![^/]*:\d+/)[^/:]*:[^@]*@|[^/]*:[^/]*@")
"""A password, which may contain slashes. The user may be an e-mail address. What follows a host and
its port is a folder."""

_QUERY = re.compile(r"[^?]*\?[^/?=]*=")

_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci")


class FsspecStore(FsspecFiles):
    """A store in a folder of a file system. Creating it connects to nothing."""

    @property
    def traits(self) -> Traits:
        protocol = self.url.removeprefix("fsspec+").partition(":")[0]
        hidden = "add a lifecycle rule to the bucket" if protocol in _OBJECT_STORES else ""
        return Traits(
            "fsspec",
            1,
            durable=False,
            ordered=True,
            atomic=False,
            hidden_uploads=hidden,
            upload_memory=64 * MIB,  # of a file system that sends parts, which nobody can ask
        )

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, length: int) -> Upload:
        return SequentialUpload(self.url, key, length, FileAppender(self, key, length))

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        appender = FileAppender(self, key, len(data))
        try:
            appender.append(memoryview(data))
            appender.commit()
            error: BaseException = exists_error(key, self.url)  # if another writer replaces it
        except BaseException as e:
            appender.abort()
            may_exist = isinstance(e, StoreError) and e.is_outcome_unknown
            if not may_exist and not isinstance(e, AlreadyExists):
                raise
            error = e
        return self.require_equal(key, data, error)

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, limit: int) -> bytes:
        path, length = self.path(key), self.stat(key).length
        if length > limit:
            raise too_long_error(key, self.url, limit, length)
        data: bytes = b""
        if length:
            data = self.call("read", key, lambda fs: fs.cat_file(path))
        if len(data) != length:
            raise short_read_error(key, self.url, 0, length, len(data))
        return data

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        into, path = as_byte_view(into), self.path(key)
        check_range(key, self.url, offset, length, len(into))
        data: bytes = b""
        try:
            if length:
                # not into the buffer: a call that is late must not change it
                data = self.call("read", key, lambda fs: fs.cat_file(path, offset, offset + length))
            else:
                self.stat(key)
        except (NotFound, Unavailable):
            raise
        except StoreError as e:
            found = max(0, self.stat(key).length - offset)
            if found < length:
                raise short_read_error(key, self.url, offset, length, found) from e
            raise
        if len(data) != length:
            raise short_read_error(key, self.url, offset, length, len(data))
        into[:length] = data

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._list_folder(prefix, partial=False)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return self._list_folder(prefix, partial=True)

    def list_level(
        self, folder: str, prefix: str = "", *, partial: bool = False
    ) -> Iterator[Entry]:
        """See the function. ``partial``: return unfinished uploads instead of objects."""
        path = self.path(folder) if folder else (self._root + self.prefix).rstrip("/") or self._root
        infos: list[Any] = []
        with suppress(NotFound):
            infos = self.call("list", folder or ".", lambda fs: fs.ls(path, detail=True))
        for info in infos:
            found = info["name"].strip("/")
            name = found.rpartition("/")[2]
            if found == path.strip("/") or not name.startswith(prefix):
                continue  # a file is listed as its own content
            if info["type"] == "directory":
                yield Entry(name, "folder")
            elif is_partial(name) == partial:
                is_link = info.get("islink") or info["type"] == "link"
                key = f"{folder}/{name}" if folder else name
                yield (
                    Entry(name, "link")
                    if is_link
                    else Entry(name, "object", self.stat_of(key, info))
                )

    def _list_folder(self, folder: str, *, partial: bool) -> Iterator[Stat]:
        # A folder sorts as "name/", so that the objects are listed in the order of their keys.
        entries = self.list_level(folder, partial=partial)
        for name, entry in sorted((e.name + "/" * (e.kind == "folder"), e) for e in entries):
            key = f"{folder}/{name}" if folder else name
            if entry.kind == "folder":
                yield from self._list_folder(key[:-1], partial=partial)
            else:
                with suppress(NotFound):  # a link to a folder or to nothing
                    yield entry.stat or self.stat(key)


def open_fsspec(
    url: str, *, allow_weak: bool = False, timeout: float = 300.0, **options: Any
) -> FsspecStore:
    """Return the store at ``fsspec+PROTOCOL://REST``, which is ``PROTOCOL://REST`` for fsspec.

    ``allow_weak``: write although the file system promises nothing. ``timeout``: seconds for one
    call of it. The other options are those of the file system. Raises ``StoreError`` if fsspec does
    not know the protocol, or lacks a package for it.
    """
    check_option(TIMEOUT, timeout)
    check_option(switch("allow_weak"), allow_weak)
    inner, secrets = url.removeprefix("fsspec+"), secrets_in(options)
    protocol = _check_url(inner)
    try:
        import fsspec
    except ImportError as e:
        raise StoreError(f"{hide_secrets(url)} needs the package fsspec", todo=INSTALL) from e
    try:
        root = fsspec.get_filesystem_class(protocol)._strip_protocol(inner)
    except (ImportError, ValueError) as e:
        raise StoreError(
            f"fsspec cannot open {hide_secrets(url)}",
            found=shown(e, secrets),
            todo="Install the package for this protocol, or check the spelling",
        ) from None

    def connect() -> Any:
        from fsspec.dircache import DirCache

        fs, _ = fsspec.core.url_to_fs(inner, skip_instance_cache=True, **options)
        fs.dircache = DirCache(use_listings_cache=False)  # other processes change the files
        return fs

    return FsspecStore(url, root, connect, allow_weak, timeout, secrets)


def _check_url(url: str) -> str:
    """Return the protocol of a URL. Raises ``StoreError`` if it may contain credentials, because
    messages show it."""
    protocol, _, rest = url.partition("://")
    if not protocol or "::" in url:
        raise StoreError(
            "The URL does not name one file system",
            expected="fsspec+PROTOCOL://PATH",
            found=hide_secrets(f"fsspec+{url}"),
        )
    for pattern, part, option in ((_PASSWORD, "password", "password"), (_QUERY, "query", "NAME")):
        if pattern.match(rest):
            raise StoreError(
                f"The URL of a store must not contain a {part} (fsspec+{protocol}://...)",
                todo=f"Pass it as an option: limpet.open_store(URL, {option}=...)",
            )
    return protocol
