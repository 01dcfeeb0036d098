"""Many ranks in one process: one thread per rank, and a store in memory as the TCPStore."""

from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, TypeVar

from limpet.ranks import group as groups
from limpet.ranks.group import Group
from limpet.ranks.kv import KVClient, Timeouts
from tests.waiting import run_threads

T = TypeVar("T")

QUICK_TIMEOUTS = Timeouts(silent=5.0, stuck=10.0)
"""Timeouts for tests, in seconds: long enough that every live thread has run."""


class FakeStore:
    """A ``KeyValueStore`` in memory that all ranks of one process share."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self._lock = Lock()

    def set(self, key, value):
        with self._lock:
            self.values[key] = bytes(value)

    def get(self, key):
        with self._lock:
            return self.values[key]

    def multi_set(self, keys, values):
        with self._lock:
            self.values.update((k, bytes(v)) for k, v in zip(keys, values, strict=True))

    def multi_get(self, keys):
        with self._lock:
            return [self.values[key] for key in keys]

    def check(self, keys):
        with self._lock:
            return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        with self._lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values.get(key, expected.encode())  # as the TCPStore does

    def add(self, key, number):
        with self._lock:
            total = int(self.values.get(key, b"0")) + number
            self.values[key] = str(total).encode()
            return total

    def delete_key(self, key):
        with self._lock:
            return self.values.pop(key, None) is not None


class StoreView:
    """The store of one rank.

    ``before(name, key)`` runs before each call of the store. It can raise, wait, or record it.
    """

    def __init__(self, store):
        self._store = store
        self.before: Callable[[str, str], object] = lambda name, key: None

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def call_with_hook(key, *args):
            self.before(name, key if isinstance(key, str) else " ".join(key))
            return call(key, *args)

        return call_with_hook

    def disconnect(self):
        """Make every later call fail, as if the process of this rank had been killed."""

        def refuse(name, key):
            raise ConnectionError("this rank was killed by a test")

        self.before = refuse


class FakeGroup:
    """A group of ``size`` ranks that save and load together::

        group = FakeGroup(4)
        group.run(lambda rank: limpet.save("runs/a/version_1", state_of(rank)))

    ``views[rank]`` is the ``StoreView`` of that rank.
    """

    def __init__(self, size, timeouts=QUICK_TIMEOUTS):
        self.store = FakeStore()
        self.views = [StoreView(self.store) for _ in range(size)]
        clients = [KVClient(v, r, size, timeouts) for r, v in enumerate(self.views)]
        self.groups = [Group(client, size) for client in clients]

    def outcomes(self, work):
        """Call ``work(rank)`` on all ranks concurrently, and return each result or exception."""
        outcomes: list[Any] = [None] * len(self.groups)

        def run_rank(rank):
            groups._thread_local.group = self.groups[rank]
            try:
                outcomes[rank] = work(rank)
            except BaseException as e:
                outcomes[rank] = e

        run_threads(
            Thread(target=run_rank, args=(r,), name=f"rank-{r}") for r in range(len(self.groups))
        )
        return outcomes

    def run(self, work):
        """Call ``work(rank)`` on all ranks concurrently, and return the results.

        Raises the exception of the lowest rank that failed.
        """
        results = []
        for outcome in self.outcomes(work):
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    def close(self):
        """Stop the background threads of the ranks."""
        for group in self.groups:
            group.kv.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
