"""The ranks that save or load together. One process is a group of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Lock, local
from typing import Any, TypeVar

from holdfast.engine.distributed.collective import Collective, LocalCollective
from holdfast.engine.distributed.kv import KeyValueStore, KVClient, Timeouts
from holdfast.engine.distributed.session import SessionKVClient
from holdfast.engine.distributed.store_collective import StoreCollective
from holdfast.errors import HoldfastError, Unsupported
from holdfast.format.digest import digest
from holdfast.lazy_torch import torch_or_none
from holdfast.settings import read_settings
from holdfast.threads import no_op

T = TypeVar("T")
U = TypeVar("U")

GroupSpec = Any
"""The ranks that save or load: None for all ranks of torch.distributed, ``"alone"`` for only this
process, or a ``torch.distributed.ProcessGroup``."""


@dataclass(eq=False)
class LocalGroup:
    """The group of one process, with the interface of ``StoreGroup``."""

    rank = 0
    size = 1
    cache: dict[str, Any] = field(default_factory=dict)

    def collective(
        self, operation: str, timeout: float | None = None, cause: str = ""
    ) -> Collective:
        return LocalCollective()


class StoreGroup:
    """A group of several ranks, which communicate over a key-value store.

    ``sequence_numbers``: the numbers of the group's operations, the same on all ranks; ``cache``:
    the data that a save keeps for the next save.
    """

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
        """Start a collective.

        ``operation``: a description that is the same on all ranks, such as "the save of
        version_500"; ``timeout``: the maximum duration of each wait in seconds, if it differs from
        the default; ``cause``: the reason why this rank started the operation.
        """
        if self.size == 1:
            return LocalCollective()
        self.kv.start()
        while True:
            collective = StoreCollective(
                self.kv, self.size, self.next_sequence_number(), operation, timeout, cause
            )
            missed_operation = collective.missed_operation()
            if missed_operation is None or (
                missed_operation == operation and not self._missed_last
            ):
                self._missed_last = missed_operation is not None
                with collective:
                    collective.join()
                return collective
            collective.close()  # the others gave up on this rank and continue with the next number

    def next_sequence_number(self) -> int:
        """Return the number of the group's next operation, which makes its keys unique.

        All ranks call this in the same order from the training thread.
        """
        return next(self._sequence_numbers)


Group = LocalGroup | StoreGroup
"""Ranks that act together.

All ranks call ``collective`` in the same order from the training thread. The collective may then
continue in any thread.
"""


def all_reduce(
    group: Group,
    operation: str,
    local_value: Callable[[], T],
    value_type: type[T],
    combine: Callable[[list[T]], U],
    result_type: type[U],
) -> U:
    """Gather ``local_value()`` of each rank, apply ``combine`` on rank 0, and return the result.

    All ranks get the same result. If one rank raises an error, all ranks do.
    """
    with closing(group.collective(operation)) as collective, collective:
        values = collective.gather(local_value(), value_type)
        return collective.broadcast(None if values is None else combine(values), result_type)


def broadcast_from_first(
    group: Group,
    operation: str,
    on_first: Callable[[], T],
    value_type: type[T],
    on_each: Callable[[], object] = no_op,
) -> T:
    """Call ``on_each`` on all ranks, then ``on_first`` on rank 0, and return its result.

    All ranks get the same result. If one rank raises an error, all ranks do.
    """
    return all_reduce(
        group, operation, lambda: on_each() is None, bool, lambda values: on_first(), value_type
    )


_local_group = LocalGroup()
_groups: dict[str, tuple[Any, int, StoreGroup]] = {}
"""By name: the store and the process that the group was created for, and the group."""
_sequence_numbers: dict[str, Iterator[int]] = {}
"""The numbers continue if torch.distributed is initialized again, because a collective must not
find keys that another collective with the same number has left."""
_groups_lock = Lock()
_thread_local = local()


@contextmanager
def use_group(group: Group) -> Iterator[None]:
    """Make this thread use another group within the context, to simulate ranks."""
    previous = getattr(_thread_local, "group", None)
    _thread_local.group = group
    try:
        yield
    finally:
        _thread_local.group = previous


def current_group(spec: GroupSpec = None) -> Group:
    """Return the group with which this process saves and loads.

    Raises ``HoldfastError`` for an invalid ``spec``, or for a group without this process.
    """
    if isinstance(spec, str) and spec != "alone":
        raise HoldfastError(
            "Invalid value for group=",
            expected='None, "alone", or a torch.distributed.ProcessGroup',
            found=repr(spec)[:80],
        )
    if spec == "alone":
        return _local_group
    simulated: Group | None = getattr(_thread_local, "group", None)
    if simulated is not None:
        return simulated
    torch = torch_or_none()
    if (
        torch is None
        or not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
    ):
        return _local_group
    ranks = torch.distributed.get_process_group_ranks(spec)
    if torch.distributed.get_rank() not in ranks:
        raise HoldfastError(
            "This rank is not in the group that saves or loads",
            expected=f"one of ranks {ranks[:8]}",
            found=f"rank {torch.distributed.get_rank()}",
            todo="Make this call only on the ranks of the group",
        )
    return _local_group if len(ranks) == 1 else _torch_group(torch, ranks)


def saving_group(spec: GroupSpec = None) -> Group:
    """Return the same group as ``current_group``, for a caller that is about to save.

    Raises ``HoldfastError`` if torchrun started several processes and torch.distributed is not
    initialized in this one: each process would save its own state under the same name.
    """
    group = current_group(spec)
    world_size = read_settings().launched_world_size
    simulated = getattr(_thread_local, "group", None) is not None
    if spec is None and group.size == 1 and world_size > 1 and not simulated:
        torch = torch_or_none()
        if torch is None or not torch.distributed.is_initialized():
            raise HoldfastError(
                f"torchrun started {world_size} processes, but torch.distributed is not initialized"
                " in this one",
                expected="a call of torch.distributed.init_process_group() before the first save"
                " and before the creation of a Checkpointer",
                found="no process group",
                todo='Call init_process_group() first, or pass group="alone" to save only the state'
                " of this process",
            )
    return group


def _torch_group(torch: Any, ranks: Sequence[int]) -> StoreGroup:
    """Return the group of these ranks, created once per initialization of torch.distributed."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    name = f"holdfast/{digest(repr(list(ranks)).encode())[:12]}"
    with _groups_lock:
        cached = _groups.get(name)
        if cached is not None and cached[0] is store and cached[1] == os.getpid():
            return cached[2]
        settings = read_settings()
        connection: KeyValueStore = _connect_store(torch, store, name)
        kv = SessionKVClient(
            connection,
            list(ranks).index(torch.distributed.get_rank()),
            len(ranks),
            Timeouts(settings.silent, settings.stuck),
            lambda prefix: torch.distributed.PrefixStore(prefix, connection),
        )
        group = StoreGroup(kv, len(ranks), _sequence_numbers.setdefault(name, count(1)))
        _groups[name] = store, os.getpid(), group
        return group


def _connect_store(torch: Any, store: Any, name: str) -> Any:
    """Return the store over a separate connection, if the store supports that.

    ``name``: a prefix before all keys.
    """
    if torch.distributed.get_backend() == "fake":
        raise Unsupported(
            "torch.distributed uses a fake process group, whose other ranks do not exist",
            todo='Save with group="alone", or initialize a real process group',
        )
    clone = getattr(store, "clone", None)  # since PyTorch 2.7
    return torch.distributed.PrefixStore(name, store if clone is None else clone())
