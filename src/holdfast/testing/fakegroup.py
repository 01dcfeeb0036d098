"""Many ranks in one process: a thread each, over a store in memory that takes the place of the
TCPStore."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, TypeVar

from holdfast.engine.distributed.group import StoreGroup, use_group
from holdfast.engine.distributed.kv import KVClient, Timeouts

T = TypeVar("T")

QUICK_TIMEOUTS = Timeouts(silent=5.0, stuck=10.0)
"""For tests: seconds in which a thread that is alive has certainly run."""


class FakeStore:
    """A ``KeyValues`` in memory, for all ranks of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self.values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self.values[key]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        with self._lock:
            self.values.update((k, bytes(v)) for k, v in zip(keys, values, strict=True))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._lock:
            return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values.get(key, expected.encode())  # as the TCPStore does

    def add(self, key: str, number: int) -> int:
        with self._lock:
            made = int(self.values.get(key, b"0")) + number
            self.values[key] = str(made).encode()
            return made

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self.values.pop(key, None) is not None


class StoreView:
    """The store as one rank sees it. ``before(name, key)`` is called before each of its calls: it
    may raise, wait, or note them."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.before: Callable[[str, str], object] = lambda name, key: None

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def do(key: Any, *rest: Any) -> Any:
            self.before(name, key if isinstance(key, str) else " ".join(key))
            return call(key, *rest)

        return do

    def disconnect(self) -> None:
        """From now on the store does not know this rank, as if its process had been killed."""

        def refuse(name: str, key: str) -> None:
            raise ConnectionError("this rank was killed by a test")

        self.before = refuse


class FakeGroup:
    """``size`` ranks that save and load together::

        group = FakeGroup(4)
        group.run(lambda rank: holdfast.save("runs/a/version_1", state_of(rank)))

    ``views[rank]`` is the store as that rank sees it.
    """

    def __init__(self, size: int, timeouts: Timeouts = QUICK_TIMEOUTS) -> None:
        self.store = FakeStore()
        self.views = [StoreView(self.store) for _ in range(size)]
        boards = [KVClient(v, r, size, timeouts) for r, v in enumerate(self.views)]
        self.groups = [StoreGroup(board, size) for board in boards]

    def outcomes(self, work: Callable[[int], T]) -> list[T | BaseException]:
        """What ``work(rank)`` has returned or raised, on all ranks at a time."""
        made: list[Any] = [None] * len(self.groups)

        def act(rank: int) -> None:
            try:
                with use_group(self.groups[rank]):
                    made[rank] = work(rank)
            except BaseException as e:  # noqa: BLE001  (it is what the test asks for)
                made[rank] = e

        threads = [Thread(target=act, args=(r,), name=f"rank-{r}") for r in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What ``work(rank)`` has returned on each rank. Raises what the first has raised."""
        made = self.outcomes(work)
        results = []
        for outcome in made:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    def close(self) -> None:
        """End the ranks' threads."""
        for ranks in self.groups:
            ranks.kv.close()

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
