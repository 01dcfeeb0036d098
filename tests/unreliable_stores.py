"""A store that lets a test run code before and after each call, and make calls fail."""

from collections.abc import Callable, Iterator

from limpet.storage.store import Stat


class HookedStore:
    """A wrapper of ``inner`` that calls ``before(method, key)`` and ``after(method, key)`` around
    each call. Both may raise. An exception from ``after`` simulates a lost reply."""

    def __init__(self, inner):
        self.inner = inner
        self.before: Callable[[str, str], object] = lambda method, key: None
        self.after: Callable[[str, str], object] = lambda method, key: None

    @property
    def traits(self):
        return self.inner.traits

    @property
    def url(self):
        return self.inner.url

    def _call(self, method, key, *rest):
        self.before(method, key)
        found = getattr(self.inner, method)(key, *rest)
        self.after(method, key)
        return found

    def put(self, key, length):
        return HookedUpload(self, key, self._call("put", key, length))

    def put_if_absent(self, key, data):
        stat: Stat = self._call("put_if_absent", key, data)
        return stat

    def get(self, key, limit):
        data: bytes = self._call("get", key, limit)
        return data

    def get_range(self, key, offset, length, into):
        self._call("get_range", key, offset, length, into)

    def stat(self, key):
        stat: Stat = self._call("stat", key)
        return stat

    def list(self, prefix):
        found: Iterator[Stat] = self._call("list", prefix)
        return found

    def partials(self, prefix):
        found: Iterator[Stat] = self._call("partials", prefix)
        return found

    def delete(self, key):
        self._call("delete", key)


class HookedUpload:
    def __init__(self, store, key, inner):
        self.store, self.key, self.inner = store, key, inner

    def write_at(self, offset, data):
        self.store.before("write_at", self.key)
        self.inner.write_at(offset, data)
        self.store.after("write_at", self.key)

    def commit(self):
        self.store.before("commit", self.key)
        stat = self.inner.commit()
        self.store.after("commit", self.key)
        return stat

    def abort(self):
        self.inner.abort()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.abort()
