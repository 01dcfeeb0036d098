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

from holdfast.engine.distributed.error_report import (
    COMMIT_BEGUN,
    Arrival,
    ErrorReport,
    decode_error,
    encode_error,
    encode_json,
)
from holdfast.engine.distributed.failure_detector import FailureDetector, emit_stragglers
from holdfast.engine.distributed.kv import MAX_BATCH_KEYS, KVClient, WaitPosition
from holdfast.errors import RankFailed

T = TypeVar("T")


class Collective(Protocol):
    """All ranks call the same methods in the same order. Used as a context, also several times: an
    error in it is told to the others, and closes it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def first_arrival(self) -> Arrival:
        """Who came first."""
        ...

    def gather(self, value: T, value_type: type[T]) -> list[T] | None:
        """On rank 0 the values of all ranks, in order of ranks; None on the others."""
        ...

    def scatter(self, values: Sequence[T] | None, value_type: type[T]) -> T:
        """Rank 0 gives one value for each rank; every rank gets its own."""
        ...

    def broadcast(self, value: T | None, value_type: type[T]) -> T:
        """Rank 0 gives a value, and every rank gets it."""
        ...

    def wait_for_ranks(self, pending_ranks: Callable[[], Sequence[int]], wait_number: int) -> None:
        """Wait until ``lacking`` names no rank any more of which something is wanted that can be
        seen elsewhere. ``number``: of such waits, growing."""
        ...

    def begin_commit(self) -> None:
        """On rank 0, right before what cannot be taken back. Raises what another rank has failed
        by; none that fails from now on calls anything off."""
        ...

    def raise_if_aborted(self) -> None:
        """Raise what another rank has failed by, if one has."""
        ...

    def abort(self, error: BaseException) -> bool:
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


class LocalCollective:
    """The meeting of one process."""

    rank = 0
    size = 1
    first_arrival = Arrival(0, "", "")

    def gather(self, value: T, value_type: type[T]) -> list[T] | None:
        return [value]

    def scatter(self, values: Sequence[T] | None, value_type: type[T]) -> T:
        if values is None:
            raise ValueError("the only rank is rank 0, which gives the values")
        return values[0]

    def broadcast(self, value: T | None, value_type: type[T]) -> T:
        if value is None:
            raise ValueError("the only rank is rank 0, which gives the value")
        return value

    def wait_for_ranks(
        self, pending_ranks: Callable[[], Sequence[int]], wait_number: int
    ) -> None: ...
    def begin_commit(self) -> None: ...
    def raise_if_aborted(self) -> None: ...
    def advance(self) -> None: ...
    def close(self) -> None: ...

    def abort(self, error: BaseException) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class StoreCollective:
    """The meeting of several ranks, over their ``Board``. ``what`` is done: two ranks that do
    different things find that out at once. ``number``: the same on all ranks; ``within``: seconds
    that each wait may take at most, if others than those of ``Patience``; ``cause``: what has led
    this rank to it, for the others to know."""

    def __init__(
        self,
        kv: KVClient,
        size: int,
        sequence_number: int,
        operation: str,
        timeout: float | None = None,
        cause: str = "",
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rank = kv.rank
        self.first_arrival = Arrival(kv.rank, operation, cause)
        self.size = size
        self.operation = operation
        self._kv = kv
        self._sequence_number = sequence_number
        self._key_prefix = str(sequence_number)
        self._timeout = timeout
        self._sleep = sleep
        self._op_number = 0
        self._failure: BaseException | None = None
        self._commit_begun = False
        self._written_keys: list[str] = []
        self._gathered_keys: list[str] = []
        self._closed = False
        self._stragglers_reported = False

    # -- coming ----------------------------------------------------------------------------------

    def missed_operation(self) -> str | None:
        """What the others have given up under this number since this rank did not come."""
        text = self._kv.get_text(f"{self._key_prefix}/failed")
        if text in (None, COMMIT_BEGUN):
            return None
        told = msgspec.json.decode(text, type=ErrorReport)
        return told.operation if told.fields.get("rank") == self.rank != told.rank else None

    def join(self) -> None:
        """Say what this rank does here. Raises ``RankFailed`` if another does something else."""
        mine = self.first_arrival
        there = self._kv.compare_and_set(f"{self._key_prefix}/what", encode_json(mine))
        self.first_arrival = first = msgspec.json.decode(there, type=Arrival)
        if first.operation != self.operation:
            self.raise_if_aborted()
            own, other = (f"{c.operation}{c.cause and f' ({c.cause})'}" for c in (mine, first))
            raise RankFailed(
                "The ranks do different things at the same time",
                expected=f"{own}, as rank {self.rank} does",
                found=f"{other} on rank {first.rank}",
                todo='All ranks make the same calls in the same order; group="alone" saves or loads'
                " in one process only",
                rank=first.rank,
            )

    # -- the turns -------------------------------------------------------------------------------

    def gather(self, value: T, value_type: type[T]) -> list[T] | None:
        self._op_number += 1
        if self.rank:
            self._put({self._key(self.rank): value})
            return None
        keys, values = [self._key(r) for r in range(self.size)], [value]

        def done() -> bool:
            """Take what there is, in order of ranks."""
            while notes := self._kv.get_many(keys[len(values) : len(values) + MAX_BATCH_KEYS]):
                values.extend(msgspec.msgpack.decode(note, type=value_type) for note in notes)
                self.advance()
            return len(values) == self.size

        self._wait_for_keys(done, lambda: range(len(values), self.size), self._key)
        self._gathered_keys += keys[1:]
        return values

    def scatter(self, values: Sequence[T] | None, value_type: type[T]) -> T:
        self._op_number += 1
        if values is not None:
            self._put({self._key(r): values[r] for r in range(1, self.size)})
            return values[0]
        return self._receive(self._key(self.rank), value_type, delete=True)

    def broadcast(self, value: T | None, value_type: type[T]) -> T:
        self._op_number += 1
        if self.rank == 0:
            if value is None:
                raise ValueError("rank 0 gives the value")
            self._put({self._key(0): value})
            return value
        return self._receive(self._key(0), value_type, delete=False)

    def _key(self, rank: int) -> str:
        """The key of a rank in this turn."""
        return f"{self._key_prefix}/{self._op_number}/{rank}"

    def _put(self, values: Mapping[str, Any]) -> None:
        self.raise_if_aborted()
        self._written_keys += values
        notes = {key: msgspec.msgpack.encode(value) for key, value in values.items()}
        self._written_keys += self._kv.put_all(notes)[len(notes) :]
        self._gathered_keys.clear()

    def _receive(self, key: str, value_type: type[T], delete: bool) -> T:
        """What rank 0 gives. It has then taken all that this rank has given before, which this rank
        takes away: rank 0 alone would be long about it."""
        found: list[bytes] = []

        def done() -> bool:
            raw = self._kv.try_get(key, delete=delete)
            found.extend([] if raw is None else [raw])
            return bool(found)

        self._wait_for_keys(done, lambda: (0,), lambda rank: key)
        self.advance()
        if self._written_keys:
            self._kv.delete(self._written_keys)
            self._written_keys.clear()
        return msgspec.msgpack.decode(found[0], type=value_type)

    # -- waiting ---------------------------------------------------------------------------------

    def _wait_for_keys(
        self,
        is_done: Callable[[], bool],
        pending_ranks: Callable[[], Sequence[int]],
        key_of: Callable[[int], str],
    ) -> None:
        """Until it is ``done``. ``lacking``: the ranks that may still have to put something under
        their ``key``. Raises what one of them has failed by."""
        first = 0.0002 + (self.size * 1e-5 if self.rank else 0)  # rank 0 needs that at least
        turn = (self._sequence_number, self._op_number)
        self._wait(is_done, pending_ranks, turn, lambda r: self._kv.has_all([key_of(r)]), first)

    def wait_for_ranks(self, pending_ranks: Callable[[], Sequence[int]], wait_number: int) -> None:
        def doze(seconds: float) -> None:  # to look there costs nothing, unlike to ask the store
            end = self._kv.clock() + seconds
            while pending_ranks() and self._kv.clock() < end:
                self._sleep(0.0005)

        turn = (self._sequence_number, self._op_number, wait_number)
        self._wait(lambda: not pending_ranks(), pending_ranks, turn, sleep=doze)

    def _wait(
        self,
        is_done: Callable[[], bool],
        pending_ranks: Callable[[], Sequence[int]],
        position: WaitPosition,
        has_arrived: Callable[[int], bool] = lambda rank: False,
        delay: float = 0.0002,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        vigil, began = FailureDetector(self._kv, self.operation, None, position), self._kv.clock()
        longest = self._kv.timeouts.stuck if self._timeout is None else self._timeout
        # so that the store is not asked all the time by all
        rarest = 0.01 + (self.size * 2e-4 if self.rank else 0)  # 10,000 looks a second by all
        every = min(max(1.0, self.size / 2000), self._kv.timeouts.silent / 4)
        look_at = began + every
        with self._kv.waiting(position):
            while not is_done():
                if (failed := self._read_failure()) is not None:
                    if is_done():  # it came before: all that it reaches go on and hear of it later,
                        return  # so that none misses the meeting in which that rank has failed
                    self._raise_failure(failed)
                now = self._kv.clock()
                if now >= look_at:
                    look_at, ranks = now + every, pending_ranks()
                    if (lost := vigil.failed(ranks, has_arrived)) is not None:
                        raise lost
                    if not self._stragglers_reported and (
                        late := vigil.stragglers(ranks, has_arrived)
                    ):
                        self._stragglers_reported = True
                        emit_stragglers(late, self.operation, now - began, longest)
                over = self._timeout is not None and now >= began + self._timeout
                if over and (missed := [r for r in pending_ranks() if not has_arrived(r)]):
                    raise vigil.make_error(
                        missed, f"it within {longest:g} s", "that it has not come"
                    )
                (sleep or self._sleep)(delay)
                delay = min(delay * 1.5, rarest)

    def raise_if_aborted(self) -> None:
        """Raise what another rank has failed by, if one has."""
        self._raise_failure(self._read_failure())

    def _read_failure(self) -> str | None:
        return self._kv.get_text(f"{self._key_prefix}/failed")

    def _raise_failure(self, text: str | None) -> None:
        if text is not None and text != COMMIT_BEGUN:
            self._failure = decode_error(text, self.rank, self.operation)
            raise self._failure

    # -- the end ---------------------------------------------------------------------------------

    def begin_commit(self) -> None:
        self._raise_failure(self._kv.compare_and_set(f"{self._key_prefix}/failed", COMMIT_BEGUN))
        self._commit_begun = True

    def abort(self, error: BaseException) -> bool:
        if self._failure is not None:
            return True
        self._failure = error
        told, before = (
            encode_error(error, self.rank, self.operation, self._commit_begun),
            COMMIT_BEGUN if self._commit_begun else "",
        )
        try:
            return (
                self._kv.compare_and_set(f"{self._key_prefix}/failed", told, before) != COMMIT_BEGUN
            )
        except RankFailed as unheard:
            error.add_note(f"The other ranks could not be told: {unheard}")
            return False

    def advance(self) -> None:
        self._kv.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(error)
            self.close()

    def close(self) -> None:
        """Who has failed takes back what only rank 0 would take, and the last to leave what is left
        of it. Rank 0 takes nothing back: a rank that is late still goes as far as the others."""
        closed, self._closed = self._closed, True
        if closed:
            return
        try:
            if self._failure is not None:
                self._kv.delete(self._written_keys if self.rank else ())
            else:
                for (
                    key
                ) in self._gathered_keys:  # nothing was given after that, so it is still there
                    self._kv.try_get(key, delete=True)
            if self._kv.increment(f"{self._key_prefix}/left") < self.size:
                return
            for turn in range(1, self._op_number + 1):
                self._kv.try_get(f"{self._key_prefix}/{turn}/0", delete=True)
            if self._failure is not None or self._read_failure() not in (None, COMMIT_BEGUN):
                self._delete_leftovers()
            self._kv.delete([f"{self._key_prefix}/{note}" for note in ("what", "left", "failed")])
        except RankFailed:
            return  # the store is gone, and all that is in it

    def _delete_leftovers(self) -> None:
        """Take away what was given and not taken, since the meeting has failed. Of the turns that
        this rank has not come to, something is left of each."""
        turn, found = 0, True
        while found or turn < self._op_number:
            turn += 1
            keys = [f"{self._key_prefix}/{turn}/{rank}" for rank in range(self.size)]
            taken = [
                self._kv.try_get(key, delete=True) for key in keys
            ]  # all, also after the first
            found = any(note is not None for note in taken)
