"""The threads and the buffers of one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

from holdfast.buffers import Buffer, BufferPool, shared_pool
from holdfast.settings import read_settings
from holdfast.threads import in_parallel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Workers:
    """A few threads that take the next item each, the buffers that they share, and ``advance``,
    which is called after each item to show that the operation makes progress."""

    pool: BufferPool
    threads: int
    advance: Callable[[], object] = bool

    @classmethod
    def create(cls, pool: BufferPool | None = None, advance: Callable[[], object] = bool) -> Self:
        """Return workers with as many threads as ``HOLDFAST_THREADS`` says. Without a ``pool``,
        they use the one that the synchronous operations of the process share."""
        return cls(shared_pool() if pool is None else pool, read_settings().threads, advance)

    def each(self, items: Sequence[T], work: Callable[[T], None]) -> None:
        """Call ``work`` on every item. Raises the first error; then no further item is started."""
        in_parallel(items, work, min(self.threads, len(items)), self.advance)

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Borrow a buffer for the duration of a ``with`` block."""
        buffer = self.pool.acquire()
        try:
            yield buffer
        finally:
            self.pool.release(buffer)
