"""What all ranks do together once, such as a save: values gathered, shared, and dealt out.

Rank 0 gathers and decides. A rank that fails tells the others, who raise then too; one that dies or
hangs is missed by rank 0, and rank 0 by the others, within the bounds of ``Patience``. No
collective of the training's process group is ever called, so a meeting may go on in any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar

import msgspec

from holdfast import errors
from holdfast.engine.board import Board, Turn, Vigil
from holdfast.errors import (
    AlreadyExists,
    CommitError,
    FormatError,
    HoldfastError,
    NoSnapshot,
    NotFound,
    PlanError,
    RankFailed,
)

T = TypeVar("T")

_ALIKE = (PlanError, CommitError, FormatError, AlreadyExists, NoSnapshot, NotFound)
"""Errors of what the ranks do together: every rank raises the same. Others are of one rank."""


class Meeting(Protocol):
    """All ranks call the same methods in the same order. Used as a context, also several times: an
    error in it is told to the others, and closes it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, value: T, kind: type[T]) -> list[T] | None:
        """On rank 0 the values of all ranks, in order of ranks; None on the others."""
        ...

    def scatter(self, values: Sequence[T] | None, kind: type[T]) -> T:
        """Rank 0 gives one value for each rank; every rank gets its own."""
        ...

    def share(self, value: T | None, kind: type[T]) -> T:
        """Rank 0 gives a value, and every rank gets it."""
        ...

    def until(self, lacking: Callable[[], Sequence[int]], number: int) -> None:
        """Wait until ``lacking`` names no rank any more of which something is wanted that can be
        seen elsewhere. ``number``: of such waits, growing."""
        ...

    def decide(self) -> None:
        """On rank 0, right before what cannot be taken back. Raises what another rank has failed
        by; none that fails from now on calls anything off."""
        ...

    def call_off(self, error: BaseException) -> bool:
        """Tell the others what this rank has failed by. True if nothing is decided, nor will be;
        False if it may be, or nobody can be told."""
        ...

    def advance(self) -> None:
        """This rank gets on: it is not to be taken for stuck."""
        ...

    def close(self) -> None:
        """This rank has no more to do with it."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class Alone:
    """The meeting of one process."""

    rank = 0
    size = 1

    def gather(self, value: T, kind: type[T]) -> list[T] | None:
        return [value]

    def scatter(self, values: Sequence[T] | None, kind: type[T]) -> T:
        if values is None:
            raise ValueError("the only rank is rank 0, which gives the values")
        return values[0]

    def share(self, value: T | None, kind: type[T]) -> T:
        if value is None:
            raise ValueError("the only rank is rank 0, which gives the value")
        return value

    def until(self, lacking: Callable[[], Sequence[int]], number: int) -> None: ...
    def decide(self) -> None: ...
    def advance(self) -> None: ...
    def close(self) -> None: ...

    def call_off(self, error: BaseException) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class Assembly:
    """The meeting of several ranks, over their ``Board``. ``what`` is done: two ranks that do
    different things find that out at once. ``number``: the same on all ranks; ``within``: seconds
    that each wait may take at most, if others than those of ``Patience``."""

    def __init__(
        self,
        board: Board,
        size: int,
        number: int,
        what: str,
        within: float | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rank = board.rank
        self.size = size
        self.what = what
        self._board = board
        self._number = number
        self._name = str(number)
        self._within = within
        self._pause = pause
        self._turn = 0
        self._heard: BaseException | None = None
        self._decided = False
        self._given: list[str] = []
        self._closed = False
        self._longest = 0.01 + size * 2e-5  # so that the store is not asked all the time by all

    # -- coming ----------------------------------------------------------------------------------

    def missed(self) -> str | None:
        """What the others have given up under this number since this rank did not come."""
        text = self._board.claimed(f"{self._name}/failed")
        if text in (None, _DECIDED):
            return None
        told = msgspec.json.decode(text, type=Told)
        return told.during if told.fields.get("rank") == self.rank != told.rank else None

    def come(self) -> None:
        """Say what this rank does here. Raises ``RankFailed`` if another does something else."""
        there = self._board.claim(f"{self._name}/what", f"{self.rank} {self.what}")
        rank, _, what = there.partition(" ")
        if what != self.what:
            self._listen()
            raise RankFailed(
                "The ranks do different things at the same time",
                expected=f"{self.what}, as rank {self.rank} does",
                found=f"{what} on rank {rank}",
                todo='All ranks make the same calls in the same order; group="alone" saves or loads'
                " in one process only",
                rank=int(rank),
            )

    # -- the turns -------------------------------------------------------------------------------

    def gather(self, value: T, kind: type[T]) -> list[T] | None:
        keys = self._keys()
        if self.rank:
            self._put(keys[self.rank], value)
            return None
        self._await(range(1, self.size), keys)
        return [value, *(self._take(r, keys[r], kind) for r in range(1, self.size))]

    def scatter(self, values: Sequence[T] | None, kind: type[T]) -> T:
        keys = self._keys()
        if values is not None:
            for r in range(1, self.size):
                self._put(keys[r], values[r])
            return values[0]
        self._await((0,), [keys[self.rank]])
        return self._take(0, keys[self.rank], kind)

    def share(self, value: T | None, kind: type[T]) -> T:
        key = self._keys()[0]
        if self.rank == 0:
            if value is None:
                raise ValueError("rank 0 gives the value")
            self._put(key, value)
            return value
        self._await((0,), [key])
        return self._take(0, key, kind, keep=True)

    def _keys(self) -> list[str]:
        """The keys of the next turn, one for each rank."""
        self._turn += 1
        return [f"{self._name}/{self._turn}/{rank}" for rank in range(self.size)]

    def _put(self, key: str, value: Any) -> None:
        self._listen()
        self._given.append(key)
        self._board.put(key, msgspec.msgpack.encode(value))

    def _take(self, sender: int, key: str, kind: type[T], keep: bool = False) -> T:
        raw = self._board.look(key, take=not keep)
        if raw is None:
            self._listen()
            raise RankFailed(f"What rank {sender} has said of {self.what} is gone", rank=sender)
        self.advance()
        return msgspec.msgpack.decode(raw, type=kind)

    # -- waiting ---------------------------------------------------------------------------------

    def _await(self, ranks: Sequence[int], keys: list[str]) -> None:
        """Until these ranks have put what they have to. Raises what one of them has failed by."""
        waited = keys[1:] if len(keys) > 1 else keys

        def lacking() -> list[int]:
            pairs = zip(ranks, waited, strict=True)
            return [r for r, key in pairs if not self._board.there([key])]

        self._wait(lambda: self._board.there(waited), lacking, (self._number, self._turn))

    def until(self, lacking: Callable[[], Sequence[int]], number: int) -> None:
        self._wait(lambda: not lacking(), lacking, (self._number, self._turn, number))

    def _wait(
        self, done: Callable[[], bool], lacking: Callable[[], Sequence[int]], turn: Turn
    ) -> None:
        vigil = Vigil(self._board, self.what, None, turn)
        end = None if self._within is None else self._board.clock() + self._within
        look_at, delay = self._board.clock() + min(1.0, self._board.patience.silent / 4), 0.0002
        with self._board.waiting(turn):
            while not done():
                self._listen()
                if self._board.clock() >= look_at:
                    look_at = self._board.clock() + min(1.0, self._board.patience.silent / 4)
                    lost = vigil.lost(lacking())
                    if lost is not None:
                        raise lost
                if end is not None and self._board.clock() >= end:
                    for rank in lacking():
                        expected = f"it within {self._within:g} s"
                        raise vigil.error(rank, "", expected, "that it has not come")
                self._pause(delay)
                delay = min(delay * 1.5, self._longest)

    def _listen(self) -> None:
        """Raise what another rank has failed by, if one has."""
        self._hear(self._board.claimed(f"{self._name}/failed"))

    def _hear(self, text: str | None) -> None:
        if text is not None and text != _DECIDED:
            self._heard = _raised(text, self.rank, self.what)
            raise self._heard

    # -- the end ---------------------------------------------------------------------------------

    def decide(self) -> None:
        self._hear(self._board.claim(f"{self._name}/failed", _DECIDED))
        self._decided = True

    def call_off(self, error: BaseException) -> bool:
        if self._heard is not None:
            return True
        self._heard = error
        told, before = (
            _told(error, self.rank, self.what, self._decided),
            _DECIDED if self._decided else "",
        )
        try:
            return self._board.claim(f"{self._name}/failed", told, before) != _DECIDED
        except RankFailed as unheard:
            error.add_note(f"The other ranks could not be told: {unheard}")
            return False

    def advance(self) -> None:
        self._board.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.call_off(error)
            self.close()

    def close(self) -> None:
        """Who has failed takes back what it has said, the last to leave what is left of it."""
        closed, self._closed = self._closed, True
        if closed:
            return
        try:
            for key in self._given if self._heard is not None else ():
                self._board.look(key, take=True)
            if self._board.count(f"{self._name}/left") < self.size:
                return
            for turn in range(1, self._turn + 1):
                self._board.look(f"{self._name}/{turn}/0", take=True)
            if self._heard is not None:
                self._clear()
            self._board.forget([f"{self._name}/{note}" for note in ("what", "left", "failed")])
        except RankFailed:
            return  # the store is gone, and all that is in it

    def _clear(self) -> None:
        """Take away what was given and not taken, since the meeting has failed. Of the turns that
        this rank has not come to, something is left of each."""
        turn, found = 0, True
        while found or turn < self._turn:
            turn += 1
            keys = [f"{self._name}/{turn}/{rank}" for rank in range(self.size)]
            taken = [self._board.look(key, take=True) for key in keys]  # all, also after the first
            found = any(note is not None for note in taken)


class Told(msgspec.Struct, frozen=True):
    """An error on its way to the other ranks. ``kind``: the name of its class; ``fields``: those of
    plain values, and of keys; ``during``: what they do together."""

    rank: int
    during: str
    kind: str
    what: str
    expected: str | None
    found: str | None
    todo: str | None
    fields: dict[str, str | int | float | bool | tuple[str, ...] | None]


_LONGEST = 4000

_DECIDED = "decided"
"""Stands where an error would, once rank 0 has decided: who comes first has its way."""


def _told(error: BaseException, rank: int, during: str, decided: bool) -> str:
    fields: dict[str, Any] = {"outcome": "unknown"} if decided else {}
    said: list[Any] = [str(error), None, None, None]
    if isinstance(error, HoldfastError):
        fields = {k: v for k, v in error.fields.items() if _is_short(v)}
        said = [error.what, error.expected, error.found, error.todo]
    what, expected, found, todo = (None if s is None else str(s)[:_LONGEST] for s in said)
    told = Told(rank, during, type(error).__name__, what or "", expected, found, todo, fields)
    return msgspec.json.encode(told).decode()


def _is_short(value: Any) -> bool:
    """Whether a field of an error is sent with it."""
    if type(value) is tuple:
        return len(value) <= _LONGEST and all(type(key) is str for key in value)
    return isinstance(value, str | int | float | bool | None)


def _raised(text: str, rank: int, what: str) -> HoldfastError:
    """What this rank raises, since another has failed."""
    told = msgspec.json.decode(text, type=Told)
    kind = getattr(errors, told.kind, None)
    cause: Exception
    if isinstance(kind, type) and issubclass(kind, HoldfastError):
        fields = {"rank": told.rank, **told.fields}
        same = kind(told.what, expected=told.expected, found=told.found, todo=told.todo, **fields)
        if issubclass(kind, _ALIKE):
            same.add_note(f"Told by rank {told.rank}")
            return same
        cause = same
    else:
        cause = RuntimeError(f"{told.kind}: {told.what}")
    end = "" if told.fields.get("committed") else ", which came to nothing"
    failed = RankFailed(
        f"Rank {told.rank} has failed in {what}{end}. {told.kind}: {told.what}",
        expected=told.expected,
        found=told.found,
        todo=told.todo or "Look at that rank's log",
        **{**told.fields, "rank": told.rank},
    )
    failed.__cause__ = cause
    return failed
