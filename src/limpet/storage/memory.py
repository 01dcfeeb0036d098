"""A store in the memory of this process, and the reference implementation for other stores."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from copy import copy
from functools import partial
from threading import Lock

from limpet.buffers import as_byte_view
from limpet.errors import NotFound, StoreError
from limpet.storage.store import (
    Entry,
    Stat,
    Traits,
    Upload,
    check_key,
    check_range,
    exists_error,
    short_read_error,
    too_long_error,
)
from limpet.storage.uploads import BufferedUpload

Objects = dict[str, tuple[bytes, float]]


class MemoryStore:
    """A store that keeps objects as bytes. Its views, by ``at``, share its lock and objects."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._folder = ""
        self._lock = Lock()
        self._objects: Objects = {}
        self._partials: Objects = {}

    def at(self, folder: str) -> MemoryStore:
        """Return a store for the keys below ``folder``. It shares the objects."""
        view = copy(self)
        view._folder += check_key(folder, self.url) + "/"
        return view

    def shares_objects_with(self, other: MemoryStore) -> bool:
        """Return True if both are views of one store."""
        return self._objects is other._objects

    @property
    def traits(self) -> Traits:
        return Traits(name="memory", alignment=1, durable=False, in_memory=True)

    @property
    def url(self) -> str:
        return f"memory://{self._name}/{self._folder}".rstrip("/")

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        return _MemoryUpload(self, check_key(key, self.url), length)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        return self._put_object(check_key(key, self.url), data, accept_existing=True)

    def get(self, key: str, limit: int) -> bytes:
        data, _ = self._find(key)
        if len(data) > limit:
            raise too_long_error(key, self.url, limit, len(data))
        return data

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        view = as_byte_view(into)
        check_range(key, self.url, offset, length, len(view))
        data = self._find(key)[0][offset : offset + length]
        if len(data) < length:
            raise short_read_error(key, self.url, offset, length, len(data))
        view[:length] = data

    def stat(self, key: str) -> Stat:
        data, modified = self._find(key)
        return Stat(key, len(data), modified)

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._list_prefix(prefix, self._objects)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return self._list_prefix(prefix, self._partials)

    def list_level(self, folder: str, prefix: str = "") -> Iterator[Entry]:
        start = self._folder + (check_key(folder, self.url) + "/" if folder else "")
        found: dict[str, Entry] = {}
        with self._lock:
            for path, (data, modified) in self._objects.items():
                name, slash, _ = path[len(start) :].partition("/")
                if path.startswith(start) and name.startswith(prefix):
                    stat = Stat(path[len(self._folder) :], len(data), modified)
                    found[name] = Entry(name, "folder") if slash else Entry(name, "object", stat)
        return iter(found.values())

    def delete(self, key: str) -> None:
        path = self._folder + check_key(key, self.url)
        with self._lock:
            self._objects.pop(path, None)
            self._partials.pop(path, None)

    def _find(self, key: str) -> tuple[bytes, float]:
        path = self._folder + check_key(key, self.url)
        with self._lock:
            entry = self._objects.get(path)
        if entry is None:
            raise NotFound(f"There is no {key} in {self.url}", key=key, store=self.url)
        return entry

    def _list_prefix(self, prefix: str, objects: Objects) -> Iterator[Stat]:
        start = self._folder + (check_key(prefix, self.url) + "/" if prefix else "")
        skip = len(self._folder)
        with self._lock:
            stats = [
                Stat(path[skip:], len(data), modified)
                for path, (data, modified) in objects.items()
                if path.startswith(start)
            ]
        return iter(sorted(stats, key=lambda stat: stat.key))

    def _put_object(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        accept_existing: bool,
        partial_key: str | None = None,
    ) -> Stat:
        """Add an object atomically, where equal bytes may exist if ``accept_existing``.
        ``partial_key``: of the unfinished upload, which must exist and is removed."""
        path, new = self._folder + key, (bytes(data), time.time())
        with self._lock:
            if partial_key is not None and self._partials.pop(partial_key, None) is None:
                raise StoreError(f"The upload of {key} was removed", key=key, store=self.url)
            existing = self._objects.setdefault(path, new)
            if existing is not new and not (accept_existing and existing[0] == data):
                raise exists_error(key, self.url)
        return Stat(key, len(data), existing[1])


class _MemoryUpload(BufferedUpload):
    """An upload that ``partials`` shows until it ends, and that can be deleted until then."""

    def __init__(self, store: MemoryStore, key: str, length: int) -> None:
        folder, _, name = (store._folder + key).rpartition("/")
        self._partial_key = f"{folder}/.{name}.{secrets.token_hex(8)}.partial".lstrip("/")
        self._store = store
        put = partial(store._put_object, accept_existing=False, partial_key=self._partial_key)
        super().__init__(store.url, key, length, partial(put, key))
        with store._lock:
            store._partials[self._partial_key] = (b"", time.time())

    def abort(self) -> None:
        super().abort()
        with self._store._lock:
            self._store._partials.pop(self._partial_key, None)
