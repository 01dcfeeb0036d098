"""What all ranks do together once, such as a save: values gathered, shared, and dealt out.

Rank 0 gathers and decides. A rank that fails tells the others, who raise then too; one that dies or
hangs is missed by rank 0, and rank 0 by the others, within the bounds of ``Patience``. No
collective of the training's process group is ever called, so a meeting may go on in any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import msgspec

from holdfast.engine.distributed.error_report import DECIDED, Came, Told, encoded, raised, tell
from holdfast.engine.distributed.failure_detector import Vigil, tell_late
from holdfast.engine.distributed.kv import MANY, Board, Turn
from holdfast.errors import RankFailed

T = TypeVar("T")


class Meeting(Protocol):
    """All ranks call the same methods in the same order. Used as a context, also several times: an
    error in it is told to the others, and closes it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def first(self) -> Came:
        """Who came first."""
        ...

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

    def listen(self) -> None:
        """Raise what another rank has failed by, if one has."""
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
    first = Came(0, "", "")

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
    def listen(self) -> None: ...
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
    that each wait may take at most, if others than those of ``Patience``; ``cause``: what has led
    this rank to it, for the others to know."""

    def __init__(
        self,
        board: Board,
        size: int,
        number: int,
        what: str,
        within: float | None = None,
        cause: str = "",
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rank = board.rank
        self.first = Came(board.rank, what, cause)
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
        self._gathered: list[str] = []
        self._closed = False
        self._told_late = False

    # -- coming ----------------------------------------------------------------------------------

    def missed(self) -> str | None:
        """What the others have given up under this number since this rank did not come."""
        text = self._board.claimed(f"{self._name}/failed")
        if text in (None, DECIDED):
            return None
        told = msgspec.json.decode(text, type=Told)
        return told.during if told.fields.get("rank") == self.rank != told.rank else None

    def come(self) -> None:
        """Say what this rank does here. Raises ``RankFailed`` if another does something else."""
        mine = self.first
        there = self._board.claim(f"{self._name}/what", encoded(mine))
        self.first = first = msgspec.json.decode(there, type=Came)
        if first.what != self.what:
            self.listen()
            own, other = (f"{c.what}{c.cause and f' ({c.cause})'}" for c in (mine, first))
            raise RankFailed(
                "The ranks do different things at the same time",
                expected=f"{own}, as rank {self.rank} does",
                found=f"{other} on rank {first.rank}",
                todo='All ranks make the same calls in the same order; group="alone" saves or loads'
                " in one process only",
                rank=first.rank,
            )

    # -- the turns -------------------------------------------------------------------------------

    def gather(self, value: T, kind: type[T]) -> list[T] | None:
        self._turn += 1
        if self.rank:
            self._put({self._key(self.rank): value})
            return None
        keys, values = [self._key(r) for r in range(self.size)], [value]

        def done() -> bool:
            """Take what there is, in order of ranks."""
            while notes := self._board.looks(keys[len(values) : len(values) + MANY]):
                values.extend(msgspec.msgpack.decode(note, type=kind) for note in notes)
                self.advance()
            return len(values) == self.size

        self._await(done, lambda: range(len(values), self.size), self._key)
        self._gathered += keys[1:]
        return values

    def scatter(self, values: Sequence[T] | None, kind: type[T]) -> T:
        self._turn += 1
        if values is not None:
            self._put({self._key(r): values[r] for r in range(1, self.size)})
            return values[0]
        return self._receive(self._key(self.rank), kind, take=True)

    def share(self, value: T | None, kind: type[T]) -> T:
        self._turn += 1
        if self.rank == 0:
            if value is None:
                raise ValueError("rank 0 gives the value")
            self._put({self._key(0): value})
            return value
        return self._receive(self._key(0), kind, take=False)

    def _key(self, rank: int) -> str:
        """The key of a rank in this turn."""
        return f"{self._name}/{self._turn}/{rank}"

    def _put(self, values: Mapping[str, Any]) -> None:
        self.listen()
        self._given += values
        notes = {key: msgspec.msgpack.encode(value) for key, value in values.items()}
        self._given += self._board.put_all(notes)[len(notes) :]
        self._gathered.clear()

    def _receive(self, key: str, kind: type[T], take: bool) -> T:
        """What rank 0 gives. It has then taken all that this rank has given before, which this rank
        takes away: rank 0 alone would be long about it."""
        found: list[bytes] = []

        def done() -> bool:
            raw = self._board.look(key, take=take)
            found.extend([] if raw is None else [raw])
            return bool(found)

        self._await(done, lambda: (0,), lambda rank: key)
        self.advance()
        if self._given:
            self._board.forget(self._given)
            self._given.clear()
        return msgspec.msgpack.decode(found[0], type=kind)

    # -- waiting ---------------------------------------------------------------------------------

    def _await(
        self,
        done: Callable[[], bool],
        lacking: Callable[[], Sequence[int]],
        key: Callable[[int], str],
    ) -> None:
        """Until it is ``done``. ``lacking``: the ranks that may still have to put something under
        their ``key``. Raises what one of them has failed by."""
        first = 0.0002 + (self.size * 1e-5 if self.rank else 0)  # rank 0 needs that at least
        turn = (self._number, self._turn)
        self._wait(done, lacking, turn, lambda r: self._board.there([key(r)]), first)

    def until(self, lacking: Callable[[], Sequence[int]], number: int) -> None:
        def doze(seconds: float) -> None:  # to look there costs nothing, unlike to ask the store
            end = self._board.clock() + seconds
            while lacking() and self._board.clock() < end:
                self._pause(0.0005)

        turn = (self._number, self._turn, number)
        self._wait(lambda: not lacking(), lacking, turn, pause=doze)

    def _wait(
        self,
        done: Callable[[], bool],
        lacking: Callable[[], Sequence[int]],
        turn: Turn,
        came: Callable[[int], bool] = lambda rank: False,
        delay: float = 0.0002,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        vigil, began = Vigil(self._board, self.what, None, turn), self._board.clock()
        longest = self._board.patience.stuck if self._within is None else self._within
        # so that the store is not asked all the time by all
        rarest = 0.01 + (self.size * 2e-4 if self.rank else 0)  # 10,000 looks a second by all
        every = min(max(1.0, self.size / 2000), self._board.patience.silent / 4)
        look_at = began + every
        with self._board.waiting(turn):
            while not done():
                if (failed := self._failed()) is not None:
                    if done():  # it came before: all that it reaches go on and hear of it later,
                        return  # so that none misses the meeting in which that rank has failed
                    self._hear(failed)
                now = self._board.clock()
                if now >= look_at:
                    look_at, ranks = now + every, lacking()
                    if (lost := vigil.lost(ranks, came)) is not None:
                        raise lost
                    if not self._told_late and (late := vigil.late(ranks, came)):
                        self._told_late = True
                        tell_late(late, self.what, now - began, longest)
                over = self._within is not None and now >= began + self._within
                if over and (missed := [r for r in lacking() if not came(r)]):
                    raise vigil.error(missed, f"it within {longest:g} s", "that it has not come")
                (pause or self._pause)(delay)
                delay = min(delay * 1.5, rarest)

    def listen(self) -> None:
        """Raise what another rank has failed by, if one has."""
        self._hear(self._failed())

    def _failed(self) -> str | None:
        return self._board.claimed(f"{self._name}/failed")

    def _hear(self, text: str | None) -> None:
        if text is not None and text != DECIDED:
            self._heard = raised(text, self.rank, self.what)
            raise self._heard

    # -- the end ---------------------------------------------------------------------------------

    def decide(self) -> None:
        self._hear(self._board.claim(f"{self._name}/failed", DECIDED))
        self._decided = True

    def call_off(self, error: BaseException) -> bool:
        if self._heard is not None:
            return True
        self._heard = error
        told, before = (
            tell(error, self.rank, self.what, self._decided),
            DECIDED if self._decided else "",
        )
        try:
            return self._board.claim(f"{self._name}/failed", told, before) != DECIDED
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
        """Who has failed takes back what only rank 0 would take, and the last to leave what is left
        of it. Rank 0 takes nothing back: a rank that is late still goes as far as the others."""
        closed, self._closed = self._closed, True
        if closed:
            return
        try:
            if self._heard is not None:
                self._board.forget(self._given if self.rank else ())
            else:
                for key in self._gathered:  # nothing was given after that, so it is still there
                    self._board.look(key, take=True)
            if self._board.count(f"{self._name}/left") < self.size:
                return
            for turn in range(1, self._turn + 1):
                self._board.look(f"{self._name}/{turn}/0", take=True)
            if self._heard is not None or self._failed() not in (None, DECIDED):
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
