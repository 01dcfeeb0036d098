"""A store that lets a test run code before and after each call, and make calls fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from limpet.storage.store import Stat, Store, Traits, Upload


class HookedStore:
    """A wrapper of ``inner`` that calls ``before(method, key)`` and ``after(method, key)`` around
    each call. Both may raise. An exception from ``after`` simulates a lost reply."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.before: Callable[[str, str], object] = lambda method, key: None
        self.after: Callable[[str, str], object] = lambda method, key: None

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    @property
    def url(self) -> str:
        return self.inner.url

    def _call(self, method: str, key: str, *rest: Any) -> Any:
        self.before(method, key)
        found = getattr(self.inner, method)(key, *rest)
        self.after(method, key)
        return found

    def put(self, key: str, length: int) -> Upload:
        return HookedUpload(self, key, self._call("put", key, length))

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        stat: Stat = self._call("put_if_absent", key, data)
        return stat

    def get(self, key: str, limit: int) -> bytes:
        data: bytes = self._call("get", key, limit)
        return data

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        self._call("get_range", key, offset, length, into)

    def stat(self, key: str) -> Stat:
        stat: Stat = self._call("stat", key)
        return stat

    def list(self, prefix: str) -> Iterator[Stat]:
        found: Iterator[Stat] = self._call("list", prefix)
        return found

    def partials(self, prefix: str) -> Iterator[Stat]:
        found: Iterator[Stat] = self._call("partials", prefix)
        return found

    def delete(self, key: str) -> None:
        self._call("delete", key)


class HookedUpload:
    def __init__(self, store: HookedStore, key: str, inner: Upload) -> None:
        self.store, self.key, self.inner = store, key, inner

    def write_at(self, offset: int, data: memoryview) -> None:
        self.store.before("write_at", self.key)
        self.inner.write_at(offset, data)
        self.store.after("write_at", self.key)

    def commit(self) -> Stat:
        self.store.before("commit", self.key)
        stat = self.inner.commit()
        self.store.after("commit", self.key)
        return stat

    def abort(self) -> None:
        self.inner.abort()

    def __enter__(self) -> HookedUpload:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()
