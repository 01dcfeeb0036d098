"""A store in a folder of HDFS. The commit is a rename, which never replaces a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from limpet.errors import AlreadyExists, NotFound, StoreError
from limpet.storage.checks import is_partial, refuse_partial
from limpet.storage.hdfs.connection import HdfsOptions
from limpet.storage.hdfs.files import HdfsFiles, to_stat
from limpet.storage.hdfs.upload import HdfsAppender, put_small
from limpet.storage.sequential_upload import SequentialUpload
from limpet.storage.store import Entry, Stat, Upload
from limpet.text import hide_secrets

_URL = re.compile(r"(hdfs://[^/?#@]*)((?:/.*)?)", re.DOTALL)


class HdfsStore(HdfsFiles):
    """A store in a folder of HDFS. Creating it sends no request."""

    def put(self, key: str, length: int) -> Upload:
        self.path(key)
        refuse_partial(key, self.url)
        return SequentialUpload(self.url, key, length, HdfsAppender(self, key, length))

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        self.path(key)
        refuse_partial(key, self.url)
        try:
            return put_small(self, key, bytes(data))
        except AlreadyExists as e:
            return self.require_equal(key, data, e)

    def delete(self, key: str) -> None:
        path = self.path(key)
        self.connection.readers.forget(path)
        # first a question: of a server that does not answer, nothing is left that deletes it later
        view = self.for_cleanup()
        status = view.look_up(path, key)
        if status is not None and not status.isdir:
            view.delete_file(path, key)

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._list_files(prefix, partial=False)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return self._list_files(prefix, partial=True)

    def _list_files(self, prefix: str, *, partial: bool) -> Iterator[Stat]:
        # Each folder is a request of its own: one that is deleted meanwhile must not end the list.
        found = self._list(prefix)
        for status in sorted(found, key=lambda s: s.path + "/" if s.isdir else s.path):
            key = self._key(status)
            if status.isdir:
                yield from self._list_files(key, partial=partial)
            elif is_partial(key.rpartition("/")[2]) == partial:
                yield to_stat(key, status)

    def list_level(self, folder: str, prefix: str = "") -> Iterator[Entry]:
        """See the function."""
        for status in self._list(folder):
            key = self._key(status)
            name = key.rpartition("/")[2]
            if name.startswith(prefix) and not is_partial(name):
                if status.isdir:
                    yield Entry(name, "folder")
                else:
                    yield Entry(name, "object", to_stat(key, status))

    def _list(self, folder: str) -> Sequence[Any]:
        """Return the statuses of what is directly in a folder; nothing if it does not exist."""
        path = self.path(folder) if folder else self.folder or "/"
        try:
            found = self.call("list_status", "list", folder, lambda c: [*c.list_status(path)])
        except NotFound:
            return []
        return [status for status in found if status.path != path]  # the path may be a file

    def _key(self, status: Any) -> str:
        return str(status.path[len(self.folder) + 1 :])


def open_hdfs(url: str, **options: Any) -> HdfsStore:
    """Return the store at ``hdfs://NAMENODE:PORT/folder`` or ``hdfs://NAMESERVICE/folder``.

    ``hdfs:///folder`` is in the file system that ``fs.defaultFS`` names. For the options, see
    ``HdfsOptions``. Raises ``StoreError`` if the URL or an option is invalid, or if hdfs-native is
    not installed.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise StoreError(
            f"{hide_secrets(url)} does not name a folder in HDFS",
            expected="hdfs://NAMENODE:PORT/folder",
            todo="Users and other options are not part of the URL",
        )
    return HdfsStore(match[1], match[2], HdfsOptions.from_mapping(options))
