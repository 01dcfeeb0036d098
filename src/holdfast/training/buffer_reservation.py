"""The buffers of the first save, allocated before it is due."""

from __future__ import annotations

from threading import Thread
from typing import Any

import msgspec

from holdfast.buffers import BufferPool
from holdfast.engine.distributed.group import Group
from holdfast.engine.state.flatten import flatten
from holdfast.format.digest import digest
from holdfast.threads import start_thread


class BufferReservation:
    """Allocates the buffers that a state needs, on a thread.

    The first touch of new memory takes ten times as long as a copy into it.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._nbytes = 0
        self._thread: Thread | None = None

    def measure(self, state: Any, group: Group) -> str:
        """Determine how much buffer memory this rank needs for ``state``.

        Returns the digest of its tree, which shows whether other ranks have the same leaves.

        Leaves that all ranks have in full are divided among the ranks. Raises the errors of
        ``flatten`` if the state cannot be saved.
        """
        flat = flatten(state, group.rank)
        self._nbytes = 2 * self._pool.buffer_size + sum(
            int(leaf.source.nbytes) // (group.size if leaf.box.sizes == leaf.shape else 1)
            for leaf in flat.leaves
        )
        return digest(msgspec.msgpack.encode(flat.tree))

    def start(self) -> None:
        """Allocate the buffers, once. Call it at the first step that does not save: a save
        allocates its buffers itself, and would take longer while a thread does the same."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            thread = Thread(target=self._pool.preallocate, args=(nbytes,), name="holdfast-buffers")
            if start_thread(thread):  # otherwise, the first save allocates
                self._thread = thread

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()
