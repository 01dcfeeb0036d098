"""An upload that collects an object in memory, for stores that write an object as a whole."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from limpet.buffers import as_byte_view
from limpet.storage.checks import WrittenRanges, ended_error
from limpet.storage.store import Stat, Upload


class BufferedUpload(Upload):
    """Collects the ``length`` bytes of an object, and passes them to ``create`` in ``commit``.

    ``url``: the store, for messages. ``create`` must not replace an object, and returns the status
    of the new one.
    """

    def __init__(self, url: str, key: str, length: int, create: Callable[[bytes], Stat]) -> None:
        self._url, self._key, self._create = url, key, create
        self._written = WrittenRanges(key, url, length)
        self._data = bytearray(length)
        self._lock = Lock()
        self._is_open = True

    def write_at(self, offset: int, *data: memoryview) -> None:
        for view in map(as_byte_view, data):
            with self._lock:
                self._require_open()
                with self._written.adding(offset, len(view)):
                    self._data[offset : offset + len(view)] = view
            offset += len(view)

    def commit(self) -> Stat:
        try:
            with self._lock:
                self._require_open()
                self._is_open = False
            self._written.require_complete()
            return self._create(bytes(self._data))
        finally:
            self.abort()

    def abort(self) -> None:
        with self._lock:
            self._is_open = False
            self._data = bytearray()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ended_error(self._key, self._url)
