"""The ranks that save or load together. One process is a group of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Lock, local
from typing import Any, Protocol, TypeVar

from holdfast.engine.distributed.collective import Collective, LocalCollective, StoreCollective
from holdfast.engine.distributed.kv import KeyValueStore, KVClient, Timeouts
from holdfast.engine.distributed.session import SessionKVClient
from holdfast.errors import HoldfastError, Unsupported
from holdfast.format.digest import digest
from holdfast.lazy_torch import torch_or_none
from holdfast.settings import read_settings

T = TypeVar("T")
U = TypeVar("U")

GroupSpec = Any
"""Who saves or loads: None for all ranks of torch.distributed, ``"alone"`` for this process only,
or a ``torch.distributed.ProcessGroup``."""


class Group(Protocol):
    """Ranks that act together. All of them call ``meet`` in the same order, from the thread that
    trains; the meeting may then go on in any thread."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def cache(self) -> dict[str, Any]:
        """What is remembered of one save for the next."""
        ...

    def collective(
        self, operation: str, timeout: float | None = None, cause: str = ""
    ) -> Collective:
        """A meeting for ``what`` ("the save of version_500"), the same on all ranks. ``within``:
        seconds that each wait may take, if others than usual; ``cause``: what has led this rank to
        it."""
        ...


class LocalGroup:
    """The group of one process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.cache: dict[str, Any] = {}

    def collective(
        self, operation: str, timeout: float | None = None, cause: str = ""
    ) -> Collective:
        return LocalCollective()


class StoreGroup:
    """Several ranks, which meet by a store that all of them reach. ``numbers``: of what they do
    together, the same on all ranks."""

    def __init__(
        self, kv: KVClient, size: int, sequence_numbers: Iterator[int] | None = None
    ) -> None:
        self.kv = kv
        self.rank = kv.rank
        self.size = size
        self.cache: dict[str, Any] = {}
        self._sequence_numbers = count(1) if sequence_numbers is None else sequence_numbers
        self._missed_last = False

    def collective(
        self, operation: str, timeout: float | None = None, cause: str = ""
    ) -> Collective:
        if self.size == 1:
            return LocalCollective()
        self.kv.start()
        while True:
            meeting = StoreCollective(
                self.kv, self.size, self.next_sequence_number(), operation, timeout, cause
            )
            missed = meeting.missed_operation()
            if missed is None or (missed == operation and not self._missed_last):
                self._missed_last = missed is not None
                with meeting:
                    meeting.join()
                return meeting
            meeting.close()  # it was not there, and the others have gone on to the next number

    def next_sequence_number(self) -> int:
        """The next number of what these ranks do together, by which their keys differ. All ranks
        ask in the same order, from the thread that trains."""
        return next(self._sequence_numbers)


def all_reduce(
    group: Group,
    operation: str,
    local_value: Callable[[], T],
    value_type: type[T],
    combine: Callable[[list[T]], U],
    result_type: type[U],
) -> U:
    """What ``decide`` makes on rank 0 of what ``said`` gives on each rank, on all ranks. Where one
    of them raises, all do."""
    meeting = group.collective(operation)
    try:
        with meeting:
            told = meeting.gather(local_value(), value_type)
            return meeting.broadcast(None if told is None else combine(told), result_type)
    finally:
        meeting.close()


def broadcast_from_first(
    group: Group,
    operation: str,
    on_first: Callable[[], T],
    value_type: type[T],
    on_each: Callable[[], object] = bool,
) -> T:
    """What ``do`` gives on rank 0, on all ranks, once ``each`` has been called on every one. Where
    one of them raises, all do."""
    return all_reduce(
        group, operation, lambda: on_each() is None, bool, lambda told: on_first(), value_type
    )


_local_group = LocalGroup()
_groups: dict[str, tuple[Any, int, StoreGroup]] = {}
"""The group of each name, with the store and the process that it was made for."""
_sequence_numbers: dict[str, Iterator[int]] = {}
"""They go on where torch.distributed is initialised anew: a meeting must not find what one of the
same number has left."""
_groups_lock = Lock()
_thread_local = local()


@contextmanager
def use_group(group: Group) -> Iterator[None]:
    """Within the context this thread is of another group: for ranks that are simulated."""
    before = getattr(_thread_local, "group", None)
    _thread_local.group = group
    try:
        yield
    finally:
        _thread_local.group = before


def current_group(spec: GroupSpec = None) -> Group:
    """The group that this process saves and loads with.

    Raises ``HoldfastError`` for a choice that is none, or that this process does not belong to.
    """
    if isinstance(spec, str) and spec != "alone":
        raise HoldfastError(
            "group= cannot be that",
            expected='None, "alone" or a torch.distributed.ProcessGroup',
            found=repr(spec)[:80],
        )
    if spec == "alone":
        return _local_group
    simulated: Group | None = getattr(_thread_local, "group", None)
    if simulated is not None:
        return simulated
    torch = torch_or_none()
    if torch is None or not torch.distributed.is_available():
        return _local_group
    if not torch.distributed.is_initialized():
        return _local_group
    ranks = torch.distributed.get_process_group_ranks(spec)
    if torch.distributed.get_rank() not in ranks:
        raise HoldfastError(
            "This rank is not in the group that saves or loads",
            expected=f"one of ranks {ranks[:8]}",
            found=f"rank {torch.distributed.get_rank()}",
            todo="Make the call on the ranks of the group only",
        )
    return _local_group if len(ranks) == 1 else _torch_group(torch, ranks)


def saving_group(spec: GroupSpec = None) -> Group:
    """As ``current_group``, for who is about to save.

    Raises ``HoldfastError`` in one of several processes of torchrun that do not know of one another
    yet: each would save what it has, under one name.
    """
    group = current_group(spec)
    started = read_settings().launched_world_size
    simulated = getattr(_thread_local, "group", None) is not None
    if spec is None and group.size == 1 and started > 1 and not simulated:
        torch = torch_or_none()
        if torch is None or not torch.distributed.is_initialized():
            raise HoldfastError(
                f"torchrun has started {started} processes, and torch.distributed is not"
                " initialised in this one",
                expected="torch.distributed.init_process_group() before the first save, and before"
                " a Checkpointer is made",
                found="a process that does not know of the others",
                todo='Call it first; group="alone" saves what this process has, for itself',
            )
    return group


def _torch_group(torch: Any, ranks: Sequence[int]) -> StoreGroup:
    """The group of these ranks, made once for as long as torch.distributed is initialised."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    name = f"holdfast/{digest(repr(list(ranks)).encode())[:12]}"
    with _groups_lock:
        found = _groups.get(name)
        if found is not None and found[0] is store and found[1] == os.getpid():
            return found[2]
        settings = read_settings()
        patience = Timeouts(settings.silent, settings.stuck)
        rank = list(ranks).index(torch.distributed.get_rank())
        connected = _connect_store(torch, store, name)
        within = partial(_prefix_store, torch, connected)
        board = SessionKVClient(connected, rank, len(ranks), patience, within)
        group = StoreGroup(board, len(ranks), _sequence_numbers.setdefault(name, count(1)))
        _groups[name] = store, os.getpid(), group
        return group


def _prefix_store(torch: Any, store: KeyValueStore, prefix: str) -> KeyValueStore:
    made: KeyValueStore = torch.distributed.PrefixStore(prefix, store)
    return made


def _connect_store(torch: Any, store: Any, name: str) -> KeyValueStore:
    """The store by a connection of its own, where it can give one."""
    if torch.distributed.get_backend() == "fake":
        raise Unsupported(
            "torch.distributed runs with a fake process group, whose ranks are not there",
            todo='Save with group="alone", or initialise a real process group',
        )
    clone = getattr(store, "clone", None)  # since PyTorch 2.7
    return _prefix_store(torch, store if clone is None else clone(), name)
