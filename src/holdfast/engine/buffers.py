"""The buffers that synchronous saves and loads of one process share."""

from __future__ import annotations

import os
from threading import Lock

from holdfast.storage.direct import Pool
from holdfast.words import MIB

BUDGET = 128 * MIB
"""Half of what a synchronous save or a load may use beyond the state, in bytes."""

_pool: Pool | None = None
_lock = Lock()


def shared_pool() -> Pool:
    """The process's pool; made when it is first asked for."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = Pool(BUDGET)
        return _pool


def _forget() -> None:
    """In a forked child the buffers are its parent's: where they are shared memory, whatever the
    child wrote into them would stand in the parent's files. And a lock may be held for ever."""
    global _pool, _lock
    _pool, _lock = None, Lock()


os.register_at_fork(after_in_child=_forget)
