"""The ranks that save or load together. One process is a group of one."""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from threading import RLock, current_thread, local
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

from limpet.arguments import require, whole
from limpet.deadline import Deadline
from limpet.errors import LimpetError, RankFailed, Unsupported
from limpet.format.digest import digest
from limpet.lazy_torch import import_torch, torch_or_none
from limpet.ranks.collective import Collective, LocalCollective, StoreCollective
from limpet.ranks.error_report import ARRIVAL
from limpet.ranks.kv import (
    STRAGGLER_SECONDS,
    KeyValueStore,
    KVClient,
    Timeouts,
    emit_stragglers,
    innermost,
    interrupter_of,
)
from limpet.settings import read_settings
from limpet.threads import no_op

T = TypeVar("T")
U = TypeVar("U")

_TWIN_NUMBERS = 1 << 32
"""The distance between the first sequence numbers of a group's twins, which no group reaches."""

_TRAINING_NUMBERS = _TWIN_NUMBERS * _TWIN_NUMBERS
"""The first sequence number of the ranks that train, in a group with members."""

_MAX_MISSED = 10_000
"""The maximum number of operations that a rank may have missed."""

LEAVING = "the end of the training's part in the group"
"""The operation by which the ranks that train let the members go."""

_LEAVING_SECONDS = 2.0
"""How long the end of the process that serves a store waits for ranks that still read from it, and
the end of a training for its members."""

GroupSpec = Any
"""The ranks that save or load: None for all ranks of torch.distributed, ``"alone"`` for only this
process, a ``torch.distributed.ProcessGroup``, or a ``limpet.Group``."""


class Group(AbstractContextManager["Group", None]):
    """The ranks that save and load together. One process is a group of one.

    Processes without ``torch.distributed``, such as Ray actors, join one, and pass it as ``group=``
    to ``limpet.save``, ``save_async``, ``load``, ``Run.writer``, or ``Checkpointer``. All of them
    make the same calls in the same order::

        with limpet.Group.join("10.0.0.1:29500", rank, size=3) as group:
            limpet.save("runs/a/version_100", state, group=group)

    ``address``: ``"HOST:PORT"``, with the port that rank 0 serves; ``rank``: the number of this
    process, from 0 to ``size - 1``. ``join`` and ``close`` are for programs; the other methods are
    for Limpet. All ranks call ``collective`` in the same order from the training thread. The
    collective may then continue in any thread.
    """

    # ``kv``: how several ranks communicate. ``cache``: the data that a save keeps for the next one.
    # ``members``: the number of the last ranks that only take part in saves and restores.
    # ``training``: the group of the other ranks, if this is one of them and there are members.
    def __init__(self, kv: KVClient | None = None, size: int = 1, address: str = "") -> None:
        self.kv = kv
        self.rank = 0 if kv is None else kv.rank
        self.size = size
        self.address = address
        self.cache: dict[str, Any] = {}
        self.members = 0
        self.training: Group | None = None
        self._sequence_numbers = count(1)
        self._missed_last = False
        self._collectives: WeakSet[StoreCollective] = WeakSet()

    def __repr__(self) -> str:
        return f"<Group {self.address} rank {self.rank} of {self.size}>"

    @classmethod
    def join(
        cls, address: str, rank: int, size: int, *, members: int = 0, name: str = "group"
    ) -> Group:
        """Become ``rank`` of the ``size`` ranks of a group.

        Rank 0 serves ``address``, ``"HOST:PORT"`` with a name or number of its host that the others
        can reach, until its process ends. With port 0, it serves a free port, which the attribute
        ``address`` then has. The other ranks wait until rank 0 serves. No rank waits for the others
        here: the first operation does, and raises ``RankFailed`` with the number of a rank that
        does not join within the time limits (``LIMPET_STUCK``, ``LIMPET_SILENT``).

        The last ``members`` of the ranks are members of a training that the others make: they use
        a ``limpet.Member``, and the others a ``Checkpointer``.

        After the loss of a rank, the others close the group and join again under a new ``name``,
        perhaps with another ``size`` and other ranks. The address stays the same unless rank 0 was
        lost. Anyone who can reach the address can take part, as for ``torch.distributed``.

        Raises ``LimpetError`` for an invalid argument, an address that cannot be served, a rank
        that has joined under this name before, another ``size`` or other ``members`` than those of
        an earlier rank, or if PyTorch is not installed; and ``RankFailed`` if rank 0 does not serve
        the address.
        """
        host, _, text = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        host, port = host.strip("[]"), whole(int(text), 0, 65535) if text.isdecimal() else None
        if not host or port is None:
            raise LimpetError(f'address must be "HOST:PORT"; found {address!r}')
        number, ranks = whole(rank) or 0, whole(size) or 0
        is_rank = whole(rank, 0, ranks - 1) is not None
        require("rank", is_rank, "a number from 0 to size - 1", (rank, size))
        is_members = whole(members, 0, ranks - 1) is not None
        require("members", is_members, "a number from 0 to size - 1", members)
        if number and not port:
            raise LimpetError("Only rank 0 can join at port 0; pass the address of its group")
        torch = import_torch("limpet.Group uses the TCPStore of PyTorch")
        settings = read_settings()
        timeouts = Timeouts(settings.silent, settings.stuck)
        server = None if number else _serve(torch, host, port, timeouts)
        if server is None:
            _await_server(host, port, timeouts)
        else:
            port = server.store.port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        prefix = f"limpet/joined/{name}"
        shape = f"{ranks} with members={members}" if members else f"{ranks}"
        client = _enter(torch, host, port, prefix, number, shape, timeouts)
        if ranks == 1:
            return cls(address=address)
        kv = KVClient(torch.distributed.PrefixStore(prefix, client), number, ranks, timeouts)
        kv.interrupt = interrupter_of(repr(client))
        group = cls(kv, ranks, address)
        group.members, others = int(members), ranks - int(members)
        if members and number < others:
            group.training = training = Group(kv, others) if others > 1 else Group()
            training._sequence_numbers = count(_TRAINING_NUMBERS)
        if server is not None:
            served = (group, group.training) if group.training else (group,)
            server.groups += [(prefix, each._sequence_numbers) for each in served]
        kv.start()
        if group.training is not None:
            atexit.register(group.close)  # so that the members learn of a regular end
        return group

    def collective(
        self,
        operation: str,
        timeout: float | None = None,
        error: BaseException | None = None,
        deadline: Deadline | None = None,
    ) -> Collective:
        """Start a collective. ``operation``: the same on all ranks, such as "the save of
        version_500"; ``timeout``: of each wait, in seconds; ``error``: with which this rank's
        training has ended, if it started the collective because of that."""
        kv = self.kv
        if kv is None or self.size == 1:
            return LocalCollective(deadline)
        kv.start()
        for _ in range(_MAX_MISSED):
            collective = StoreCollective(
                kv, self.size, self.next_sequence_number(), operation, timeout, error, deadline
            )
            try:
                kv.await_session(collective.exceeded)
                missed_operation = collective.missed_operation()
            except RankFailed as e:
                kv.set_when_joined(*collective.encode_failure(e))  # rank 0 must not wait later
                raise
            if missed_operation is None or (
                missed_operation == operation and not self._missed_last
            ):
                self._missed_last = missed_operation is not None
                self._collectives.add(collective)
                with collective:
                    collective.join()
                return collective
            collective.close()  # the others gave up on this rank and continue with the next number
        raise RankFailed(
            f"This rank could not join {operation}",
            expected=f"at most {_MAX_MISSED} operations that the other ranks aborted without it",
            found="more",
            todo="Restart the job from the last committed version",
            rank=self.rank,
            lost=True,
        )

    def next_sequence_number(self) -> int:
        """Return the number of the next operation, on all ranks in the same order."""
        return next(self._sequence_numbers)

    def await_operation(self, timeout: float) -> str | None:
        """Wait until another rank has begun the next operation, and return its name, or None after
        ``timeout`` seconds. For a member, which begins no operation by itself."""
        if self.kv is None:
            return None
        self._missed_last = False  # the operation is the one of this number, whatever was before
        number, end, delay = self.next_sequence_number(), self.kv.clock() + timeout, 0.0002
        self._sequence_numbers = count(number)
        while (arrival := self.kv.get_text(f"{number}/first_arrival")) is None:
            if self.kv.clock() >= end:
                return None
            time.sleep(delay)
            delay = min(delay * 1.5, 0.01 + self.size * 2e-4)  # see ``StoreCollective._wait``
        return ARRIVAL.decode(arrival).operation

    def end_training(self) -> None:
        """Let the members learn that the training leaves the group. Rank 0 waits for that, though
        not for long: afterward, its process may end, which serves the store."""
        with (
            suppress(RankFailed),  # a rank is lost or late, or this group was closed before
            closing(self.collective(LEAVING, _LEAVING_SECONDS)) as collective,
            collective,
        ):
            collective.gather(True, bool)

    def declare_ended(self, rank: int) -> None:
        """Let the operations that wait for a rank fail now: its process has surely ended."""
        with suppress(RankFailed):  # this group was closed before
            if self.kv is not None:
                self.kv.declare_ended(rank)

    def twin(self) -> Group:
        """Return a group of the same ranks, whose operations another thread begins. All ranks call
        this in the same order from the training thread."""
        twin = Group(self.kv, self.size)
        twin._sequence_numbers = count(self.next_sequence_number() * _TWIN_NUMBERS)
        return twin

    def close(self) -> None:
        """Leave the group, after the saves in progress. The others then do not wait for this rank:
        an operation without it fails at once.

        The wait ends when this rank makes no progress for ``timeouts.silent`` seconds.
        """
        kv = self.kv
        if kv is None:
            return
        progress, progress_at = kv.progress, kv.clock()
        try:
            # A thread of Limpet must not wait for itself: the garbage collector may call this.
            while (
                kv.clock() - progress_at < kv.timeouts.silent
                and not current_thread().name.startswith("limpet-")
                and any(not collective.closed for collective in list(self._collectives))
            ):
                time.sleep(0.01)
                if kv.progress != progress:
                    progress, progress_at = kv.progress, kv.clock()
            if self.training is not None:
                self.end_training()
        finally:
            atexit.unregister(self.close)
            kv.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def all_reduce(
    group: Group,
    operation: str,
    local_value: Callable[[], T],
    value_type: type[T],
    combine: Callable[[list[T]], U],
    result_type: type[U],
) -> U:
    """Gather ``local_value()`` of each rank, apply ``combine`` on rank 0, and return the result on
    all. If one rank raises an error, all ranks do."""
    with closing(group.collective(operation)) as collective, collective:
        values = collective.gather(local_value(), value_type)
        return collective.broadcast(None if values is None else combine(values), result_type)


def broadcast_from_first(
    group: Group,
    operation: str,
    on_first: Callable[[], T],
    value_type: type[T],
    on_each: Callable[[], object] = no_op,
    deadline: Deadline | None = None,
) -> T:
    """Call ``on_each`` on all ranks, then ``on_first`` on rank 0, and return its result on all. If
    one rank raises an error, all ranks do."""
    with closing(group.collective(operation, deadline=deadline)) as collective, collective:
        on_each()
        all_are_here = collective.gather(True, bool)
        return collective.broadcast(None if all_are_here is None else on_first(), value_type)


@contextmanager
def failing_together(
    group: Group, operation: str, deadline: Deadline | None, *, as_raised: bool = False
) -> Iterator[None]:
    """Send an error of the block, which precedes an operation of all ranks, to the others, which
    would wait there for this rank. ``as_raised``: they raise the same error."""
    try:
        yield
    except BaseException as e:
        with suppress(RankFailed):  # the other ranks know already that a rank failed
            collective = group.collective(operation, None, e if as_raised else None, deadline)
            collective.abort(e, as_raised=as_raised)
            collective.close()
        raise


# -- groups without torch.distributed ------------------------------------------------------------


@dataclass
class _Server:
    """The TCPStore that this process serves as rank 0, until it ends. ``groups``: for each, the
    prefix of its keys, and the numbers of its operations."""

    store: Any
    pid: int
    groups: list[tuple[str, count[int]]] = field(default_factory=list)

    def await_others(self) -> None:
        """Wait until the others, which may still read, have left this rank's last operations."""
        if self.pid != os.getpid():
            return
        end = time.monotonic() + _LEAVING_SECONDS
        for prefix, numbers in self.groups:
            following = next(numbers)
            for number in range(max(1, following - 64), following):
                while self.store.check([f"{prefix}/{number}/left"]) and time.monotonic() < end:
                    time.sleep(0.005)


_servers: dict[tuple[int, str, int], _Server] = {}
"""The servers of this process, by process, host, and port."""


def _serve(torch: Any, host: str, port: int, timeouts: Timeouts) -> _Server:
    """Return the server of this process at an address; ``LimpetError`` if there can be none."""
    if (server := _servers.get((os.getpid(), host, port))) is None:
        limit = timedelta(seconds=timeouts.silent)
        try:
            store = torch.distributed.TCPStore(
                host, port, None, True, limit, wait_for_workers=False
            )
        except RuntimeError as e:
            raise LimpetError(
                f"Rank 0 cannot serve {host}:{port}",
                expected="a host name or number of this machine, and a free port",
                found=str(e).partition("\n")[0][:200],
            ) from e
        server = _servers[os.getpid(), host, store.port] = _Server(store, os.getpid())
        atexit.register(server.await_others)
    return server


def _await_server(host: str, port: int, timeouts: Timeouts) -> None:
    """Wait until rank 0 serves an address, or raise ``RankFailed`` after ``timeouts.stuck``."""
    began, is_reported = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as e:
            error, waited = e, time.monotonic() - began
        if waited > timeouts.stuck:
            raise _unserved_error(host, port, f"it to join within {timeouts.stuck:g} s", error)
        if waited > STRAGGLER_SECONDS and not is_reported:
            is_reported = True
            what, left = f"the group at {host}:{port}", timeouts.stuck - waited
            emit_stragglers([0], what, waited, left, True, "")
        time.sleep(0.05)


def _enter(
    torch: Any, host: str, port: int, prefix: str, rank: int, shape: str, timeouts: Timeouts
) -> Any:
    """Return a connection to the store, in which this process has become a rank of a group of this
    size and number of members, as text."""
    limit = timedelta(seconds=timeouts.silent)
    try:
        client = torch.distributed.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        first = client.compare_set(f"{prefix}/size", "", shape).decode()
        is_taken = first == shape and client.add(f"{prefix}/joined/{rank}", 1) > 1
    except RuntimeError as e:
        expected = f"a response within {timeouts.silent:g} s"
        raise _unserved_error(host, port, expected, e) from e
    if first != shape:
        raise LimpetError(f"size must be {first}, as on the rank that joined first; found {shape}")
    if is_taken:
        raise LimpetError(
            f"Rank {rank} has joined this group before",
            todo="After a loss, close the group on all ranks, and join with a new name=",
        )
    return client


def _unserved_error(host: str, port: int, expected: str, error: Exception) -> RankFailed:
    return RankFailed(
        f"Rank 0 does not serve the group at {host}:{port}",
        expected=expected,
        found=str(error).partition("\n")[0][:200],
        todo="Check the log of rank 0, and that this host can reach the address",
        rank=0,
        lost=True,
    )


# -- groups with torch.distributed ---------------------------------------------------------------

_groups: WeakKeyDictionary[Any, dict[tuple[int, str], Group]] = WeakKeyDictionary()
"""By the default process group of an initialization: the groups by process and name."""
_groups_lock = RLock()  # the garbage collector may end a group in the thread that creates one
_thread_local = local()
"""Its ``group``, if any, is that of the thread's calls: tests simulate ranks with it."""


def current_group(spec: GroupSpec = None) -> Group:
    """Return the group with which this process saves and loads. Raises ``LimpetError`` for an
    invalid ``spec``, or a group without this process."""
    torch = torch_or_none()
    has_groups = torch is not None and torch.distributed.is_available()
    kinds = (Group, torch.distributed.ProcessGroup) if has_groups else (Group,)
    is_alone = isinstance(spec, str) and spec == "alone"
    if not (spec is None or is_alone or isinstance(spec, kinds)):
        expected = 'None, "alone", a torch.distributed.ProcessGroup, or a limpet.Group'
        require("group=", False, expected, spec)
    if isinstance(spec, Group):
        return spec
    if is_alone:
        return Group()
    simulated: Group | None = getattr(_thread_local, "group", None)
    if simulated is not None:
        return simulated
    if not has_groups or not torch.distributed.is_initialized():
        return Group()
    ranks = torch.distributed.get_process_group_ranks(spec)
    if torch.distributed.get_rank() not in ranks:
        raise LimpetError(
            f"Rank {torch.distributed.get_rank()} is not in the group that saves or loads: only its"
            f" ranks may make this call, {ranks[:8]}"
        )
    return Group() if len(ranks) == 1 else _torch_group(torch, ranks)


def saving_group(spec: GroupSpec = None) -> Group:
    """Return the ``current_group`` for a save. Raises ``LimpetError`` if torchrun started several
    processes without torch.distributed: each would save its own state under one name."""
    group = current_group(spec)
    world_size = read_settings().launched_world_size
    simulated = getattr(_thread_local, "group", None) is not None
    if spec is None and group.size == 1 and world_size > 1 and not simulated:
        torch = torch_or_none()
        if torch is None or not torch.distributed.is_initialized():
            raise LimpetError(
                f"torchrun started {world_size} processes, but torch.distributed is not initialized"
                " in this one: call torch.distributed.init_process_group() first, or pass"
                ' group="alone" to save only the state of this process'
            )
    return group


def _torch_group(torch: Any, ranks: Sequence[int]) -> Group:
    """Return the group of these ranks, created once per initialization of torch.distributed. Only
    the default group may keep the store: it would serve old keys to the next initialization."""
    from torch.distributed import distributed_c10d

    default_group = distributed_c10d._get_default_group()
    store = distributed_c10d._get_default_store()
    name = f"limpet/{digest(repr(list(ranks)).encode())[:12]}"
    with _groups_lock:
        groups = _groups.setdefault(default_group, {})
        group = groups.get((os.getpid(), name))
        if group is None:
            settings = read_settings()
            connection: KeyValueStore = _connect_store(torch, store, name)
            kv = KVClient(
                connection,
                list(ranks).index(torch.distributed.get_rank()),
                len(ranks),
                Timeouts(settings.silent, settings.stuck),
                with_prefix=lambda prefix: torch.distributed.PrefixStore(prefix, connection),
            )
            kv.interrupt = _interrupter_of_own(connection, store)
            kv.start()  # from its first call on, a rank sends heartbeats, such as during imports
            group = groups[os.getpid(), name] = Group(kv, len(ranks))
            # destroy_process_group ends the default group, and with it this group
            finalize(default_group, _close_group, group, store, os.getpid()).atexit = False
        return group


def _close_group(group: Group, store: Any, pid: int) -> None:
    """Close a group. Until then, its finalizer keeps the ``store`` for the saves in progress."""
    if pid == os.getpid():
        group.close()


def _connect_store(torch: Any, store: Any, name: str) -> Any:
    """Return the store, with a prefix, over a separate connection, if it supports that."""
    if torch.distributed.get_backend() == "fake":
        raise Unsupported(
            "torch.distributed uses a fake process group, whose other ranks do not exist",
            todo='Save with group="alone", or initialize a real process group',
        )
    clone = getattr(store, "clone", None)  # since PyTorch 2.7
    return torch.distributed.PrefixStore(name, store if clone is None else clone())


def _interrupter_of_own(connection: Any, store: Any) -> Callable[[], bool]:
    """Return ``interrupter_of`` a connection that is not that of the training's ``store``."""
    own = repr(innermost(connection))
    return interrupter_of("" if own == repr(innermost(store)) else own)
