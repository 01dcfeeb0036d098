"""The ranks that save or load together. One process is a group of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Lock, local
from typing import Any, Protocol, TypeVar

from holdfast.engine.distributed.collective import Alone, Assembly, Meeting
from holdfast.engine.distributed.kv import Board, KeyValues, Patience
from holdfast.engine.distributed.session import SessionBoard
from holdfast.errors import HoldfastError, Unsupported
from holdfast.format.digest import digest
from holdfast.lazy_torch import torch_or_none
from holdfast.settings import read_settings

T = TypeVar("T")
U = TypeVar("U")

Choice = Any
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
    def memory(self) -> dict[str, Any]:
        """What is remembered of one save for the next."""
        ...

    def meet(self, what: str, within: float | None = None, cause: str = "") -> Meeting:
        """A meeting for ``what`` ("the save of version_500"), the same on all ranks. ``within``:
        seconds that each wait may take, if others than usual; ``cause``: what has led this rank to
        it."""
        ...


class Solo:
    """The group of one process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    def meet(self, what: str, within: float | None = None, cause: str = "") -> Meeting:
        return Alone()


class Ranks:
    """Several ranks, which meet by a store that all of them reach. ``numbers``: of what they do
    together, the same on all ranks."""

    def __init__(self, board: Board, size: int, numbers: Iterator[int] | None = None) -> None:
        self.board = board
        self.rank = board.rank
        self.size = size
        self.memory: dict[str, Any] = {}
        self._numbers = count(1) if numbers is None else numbers
        self._late = False

    def meet(self, what: str, within: float | None = None, cause: str = "") -> Meeting:
        if self.size == 1:
            return Alone()
        self.board.start()
        while True:
            meeting = Assembly(self.board, self.size, self.number(), what, within, cause)
            missed = meeting.missed()
            if missed is None or (missed == what and not self._late):
                self._late = missed is not None
                with meeting:
                    meeting.come()
                return meeting
            meeting.close()  # it was not there, and the others have gone on to the next number

    def number(self) -> int:
        """The next number of what these ranks do together, by which their keys differ. All ranks
        ask in the same order, from the thread that trains."""
        return next(self._numbers)


def by_all(
    group: Group,
    what: str,
    said: Callable[[], T],
    kind: type[T],
    decide: Callable[[list[T]], U],
    made: type[U],
) -> U:
    """What ``decide`` makes on rank 0 of what ``said`` gives on each rank, on all ranks. Where one
    of them raises, all do."""
    meeting = group.meet(what)
    try:
        with meeting:
            told = meeting.gather(said(), kind)
            return meeting.share(None if told is None else decide(told), made)
    finally:
        meeting.close()


def by_first(
    group: Group, what: str, do: Callable[[], T], kind: type[T], each: Callable[[], object] = bool
) -> T:
    """What ``do`` gives on rank 0, on all ranks, once ``each`` has been called on every one. Where
    one of them raises, all do."""
    return by_all(group, what, lambda: each() is None, bool, lambda told: do(), kind)


_alone = Solo()
_known: dict[str, tuple[Any, int, Ranks]] = {}
"""The group of each name, with the store and the process that it was made for."""
_numbers: dict[str, Iterator[int]] = {}
"""They go on where torch.distributed is initialised anew: a meeting must not find what one of the
same number has left."""
_known_lock = Lock()
_own = local()


@contextmanager
def acting_as(group: Group) -> Iterator[None]:
    """Within the context this thread is of another group: for ranks that are simulated."""
    before = getattr(_own, "group", None)
    _own.group = group
    try:
        yield
    finally:
        _own.group = before


def current_group(choice: Choice = None) -> Group:
    """The group that this process saves and loads with.

    Raises ``HoldfastError`` for a choice that is none, or that this process does not belong to.
    """
    if isinstance(choice, str) and choice != "alone":
        raise HoldfastError(
            "group= cannot be that",
            expected='None, "alone" or a torch.distributed.ProcessGroup',
            found=repr(choice)[:80],
        )
    if choice == "alone":
        return _alone
    simulated: Group | None = getattr(_own, "group", None)
    if simulated is not None:
        return simulated
    torch = torch_or_none()
    if torch is None or not torch.distributed.is_available():
        return _alone
    if not torch.distributed.is_initialized():
        return _alone
    ranks = torch.distributed.get_process_group_ranks(choice)
    if torch.distributed.get_rank() not in ranks:
        raise HoldfastError(
            "This rank is not in the group that saves or loads",
            expected=f"one of ranks {ranks[:8]}",
            found=f"rank {torch.distributed.get_rank()}",
            todo="Make the call on the ranks of the group only",
        )
    return _alone if len(ranks) == 1 else _of_torch(torch, ranks)


def saving_group(choice: Choice = None) -> Group:
    """As ``current_group``, for who is about to save.

    Raises ``HoldfastError`` in one of several processes of torchrun that do not know of one another
    yet: each would save what it has, under one name.
    """
    group = current_group(choice)
    started = read_settings().started
    simulated = getattr(_own, "group", None) is not None
    if choice is None and group.size == 1 and started > 1 and not simulated:
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


def _of_torch(torch: Any, ranks: Sequence[int]) -> Ranks:
    """The group of these ranks, made once for as long as torch.distributed is initialised."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    name = f"holdfast/{digest(repr(list(ranks)).encode())[:12]}"
    with _known_lock:
        found = _known.get(name)
        if found is not None and found[0] is store and found[1] == os.getpid():
            return found[2]
        settings = read_settings()
        patience = Patience(settings.silent, settings.stuck)
        rank = list(ranks).index(torch.distributed.get_rank())
        connected = _connected(torch, store, name)
        within = partial(_prefixed, torch, connected)
        board = SessionBoard(connected, rank, len(ranks), patience, within)
        group = Ranks(board, len(ranks), _numbers.setdefault(name, count(1)))
        _known[name] = store, os.getpid(), group
        return group


def _prefixed(torch: Any, store: KeyValues, prefix: str) -> KeyValues:
    made: KeyValues = torch.distributed.PrefixStore(prefix, store)
    return made


def _connected(torch: Any, store: Any, name: str) -> KeyValues:
    """The store by a connection of its own, where it can give one."""
    if torch.distributed.get_backend() == "fake":
        raise Unsupported(
            "torch.distributed runs with a fake process group, whose ranks are not there",
            todo='Save with group="alone", or initialise a real process group',
        )
    clone = getattr(store, "clone", None)  # since PyTorch 2.7
    return _prefixed(torch, store if clone is None else clone(), name)
