"""Operations that all ranks perform together, such as a save, with gather, scatter, and broadcast.

Rank 0 is the coordinator. A rank that fails notifies the others, which then raise an error too. If
one dies or hangs, rank 0 detects it, and the others detect it of rank 0, within ``Timeouts``. No
collective of the training's process group is called, so one may continue in any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, TypeVar

import msgspec

from limpet.deadline import Deadline
from limpet.errors import RankFailed
from limpet.ranks import error_report
from limpet.ranks.failure_detector import FailureDetector
from limpet.ranks.kv import CALL_ALONE, CALL_ON_ALL, MAX_BATCH_KEYS, KVClient, emit_stragglers

T = TypeVar("T")
SAVE_FN = "save_fn"  # the operation after it: all ranks call it, and some may take long


def late_seconds(deadline: Deadline, rank: int) -> float:
    """Return for how long ``rank`` waits for others after a deadline: one that has failed cleans up
    first, and rank 0 tells the others which one is late."""
    return (3 if rank else 2) * deadline.cleanup_seconds


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_decoders_lock = Lock()


def _decoder_of(value_type: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return a type's decoder, made by one thread: two that make one at once crash the process."""
    with _decoders_lock:
        if value_type not in _decoders:
            _decoders[value_type] = msgspec.msgpack.Decoder(value_type)
        return _decoders[value_type]


class StoreCollective(AbstractContextManager["StoreCollective", None]):
    """The collective of several ranks, over their ``KVClient``. ``sequence_number``, ``operation``:
    the same on all. ``late_seconds``: after the ``deadline``, for a failed rank to say why."""

    def __init__(
        self,
        kv: KVClient,
        size: int,
        sequence_number: int,
        operation: str,
        timeout: float | None = None,
        error: BaseException | None = None,
        deadline: Deadline | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rank = kv.rank
        cause = "" if error is None else error_report.describe_cause(error)
        self._raised = "" if error is None else error_report.encode_raised(error, kv.rank)
        self.first_arrival = error_report.Arrival(kv.rank, operation, cause, self._raised)
        self.size = size
        self.operation = operation
        self._kv = kv
        self._sequence_number = sequence_number
        self._failed_key = f"{sequence_number}/failed"
        self._timeout = timeout
        self._deadline = deadline
        self._sleep = sleep
        self._op_number = 0
        self._failed = False  # not the error, whose traceback would keep this object alive
        self._commit_begun = False
        self._written_keys: list[str] = []
        self._gathered_keys: list[str] = []
        self.closed = False
        self._left = False
        self._stragglers_reported = False
        can_be_alone = operation.startswith(("the save of ", "the load of ", "the opening of "))
        self._todo = CALL_ALONE if can_be_alone else CALL_ON_ALL * (operation != SAVE_FN)
        """What to do about a rank that does not come; empty once all are known to have joined."""

    # -- joining ---------------------------------------------------------------------------------

    def missed_operation(self) -> str | None:
        """Return the operation that the others aborted because this rank was missing, or None."""
        text = self._read_failure()
        if text in (None, error_report.COMMIT_BEGUN):
            return None
        report = error_report.ERROR_REPORT.decode(text)
        return report.operation if report.fields.get("rank") == self.rank != report.rank else None

    def join(self) -> None:
        """Join. Raises ``RankFailed``, or the error of its training, if a rank runs another one."""
        own_arrival = self.first_arrival
        stored = self._kv.compare_and_set(
            f"{self._sequence_number}/first_arrival", error_report.encode_json(own_arrival)
        )
        self.first_arrival = first = error_report.ARRIVAL.decode(stored)
        if first.operation != self.operation:
            if not first.raised:
                self.raise_if_aborted()
            own, other = (
                f"{arrival.operation}{arrival.cause and f' ({arrival.cause})'}"
                for arrival in (own_arrival, first)
            )
            mismatch = RankFailed(
                "The ranks run different operations at the same time",
                expected=f"{own}, as on rank {self.rank}",
                found=f"{other} on rank {first.rank}",
                todo="Make the same calls in the same order on all ranks; to save or load in one"
                ' process only, pass group="alone"',
                rank=first.rank,
            )
            self.abort(mismatch, as_raised=bool(self._raised))
            raise error_report.decode_raised(first.raised) if first.raised else mismatch

    # -- data exchange ---------------------------------------------------------------------------

    def gather(self, value: T, value_type: type[T]) -> list[T] | None:
        """Return the values of all ranks in rank order on rank 0, and None on other ranks."""
        self._op_number += 1
        if self.rank:
            self._put({self._key(self.rank): value})
            return None
        keys, values = [self._key(r) for r in range(self.size)], [value]
        decoder = _decoder_of(value_type)

        def is_done() -> bool:
            """Read the available values in rank order."""
            while raw_values := self._kv.get_many(keys[len(values) : len(values) + MAX_BATCH_KEYS]):
                values.extend(map(decoder.decode, raw_values))
                self._kv.advance()
            return len(values) == self.size

        self._wait_for_keys(is_done, lambda: range(len(values), self.size), self._key)
        self._gathered_keys += keys[1:]
        return values

    def scatter(self, values: Sequence[T] | None, value_type: type[T]) -> T:
        """Return this rank's value of the ``values`` that rank 0 passes, one for each rank."""
        self._op_number += 1
        if values is not None:
            self._put({self._key(r): values[r] for r in range(1, self.size)})
            return values[0]
        return self._receive(self._key(self.rank), value_type, delete=True)

    def broadcast(self, value: T | None, value_type: type[T]) -> T:
        """Return the value that rank 0 passes."""
        self._op_number += 1
        if self.rank == 0:
            if value is None:
                raise ValueError("Rank 0 must pass the value")
            self._put({self._key(0): value})
            return value
        return self._receive(self._key(0), value_type, delete=False)

    def _key(self, rank: int) -> str:
        """Return the key of a rank in the current operation."""
        return f"{self._sequence_number}/{self._op_number}/{rank}"

    def _put(self, values: Mapping[str, Any]) -> None:
        self.raise_if_aborted()
        self._written_keys += values
        encoded = {key: msgspec.msgpack.encode(value) for key, value in values.items()}
        self._written_keys += self._kv.put_all(encoded)[len(encoded) :]
        self._gathered_keys.clear()

    def _receive(self, key: str, value_type: type[T], delete: bool) -> T:
        """Receive a value from rank 0, then delete the keys that this rank has written, which rank
        0 has read: it would need too long for all of them."""
        received: list[bytes] = []

        def is_done() -> bool:
            raw = self._kv.try_get(key, delete=delete)
            received.extend([] if raw is None else [raw])
            return bool(received)

        self._wait_for_keys(is_done, lambda: (0,), lambda rank: key)
        self._kv.advance()
        if self._written_keys:
            self._kv.delete(self._written_keys)
            self._written_keys.clear()
        return _decoder_of(value_type).decode(received[0])

    # -- waiting ---------------------------------------------------------------------------------

    def _wait_for_keys(
        self,
        is_done: Callable[[], bool],
        pending_ranks: Callable[[], Sequence[int]],
        key_of: Callable[[int], str],
    ) -> None:
        """Wait until ``is_done``, for ``pending_ranks``; raises the error of a rank that failed."""
        # Rank 0 needs at least this long to reply.
        initial_delay = 0.0002 + (self.size * 1e-5 if self.rank else 0)
        self._wait(
            is_done,
            pending_ranks,
            (self._sequence_number, self._op_number),
            lambda r: self._kv.has_all([key_of(r)]),
            initial_delay,
        )
        self._todo = ""

    def wait_for_ranks(self, pending_ranks: Callable[[], Sequence[int]], wait_number: int) -> None:
        """Wait until ``pending_ranks``, a condition outside the store, returns no ranks.
        ``wait_number``: the number of the wait, which increases with each such wait."""

        def poll_locally(seconds: float) -> None:  # this check is cheap, unlike a store request
            end = self._kv.clock() + seconds
            while pending_ranks() and self._kv.clock() < end:
                self._sleep(0.0005)

        self._wait(
            lambda: not pending_ranks(),
            pending_ranks,
            (self._sequence_number, self._op_number, wait_number),
            sleep=poll_locally,
        )

    def _wait(
        self,
        is_done: Callable[[], bool],
        pending_ranks: Callable[[], Sequence[int]],
        position: tuple[int, ...],
        has_arrived: Callable[[int], bool] = lambda rank: False,
        delay: float = 0.0002,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        detector = FailureDetector(self._kv, self.operation, None, position, self._todo)
        started_at = self._kv.clock()
        # This limits the load of the store to 10,000 requests per second from all ranks.
        max_delay = 0.01 + (self.size * 2e-4 if self.rank else 0)
        check_interval = min(max(1.0, self.size / 2000), self._kv.timeouts.silent / 4)
        next_check_at = started_at + check_interval
        with self._kv.waiting(position):
            while not is_done():
                self._kv.raise_peer_error()
                if (failure := self._read_failure()) is not None:
                    # The value may have arrived before the failure. All ranks that it reaches
                    # continue and learn of the failure later, so that none of them misses the
                    # collective in which that rank failed.
                    if is_done():
                        return
                    self._raise_failure(failure)
                now = self._kv.clock()
                if now >= next_check_at:
                    next_check_at, ranks = now + check_interval, pending_ranks()
                    if (error := detector.failed(ranks, has_arrived)) is not None:
                        raise error
                    if not self._stragglers_reported and (
                        stragglers := detector.stragglers(ranks, has_arrived)
                    ):
                        self._stragglers_reported = True
                        key, own = f"{self._sequence_number}/first_report", str(self.rank)
                        first, waited = self._kv.compare_and_set(key, own) == own, now - started_at
                        left = detector.seconds_left(stragglers)
                        left = left if self._timeout is None else self._timeout - waited
                        if (end := self._deadline) is not None:
                            left = min(left, end.seconds_left + late_seconds(end, self.rank))
                        emit_stragglers(stragglers, self.operation, waited, left, first, self._todo)
                expected = self.exceeded(now - started_at)
                if expected and (missing := [r for r in pending_ranks() if not has_arrived(r)]):
                    raise detector.make_error(missing, expected, "that it has not arrived")
                (sleep or self._sleep)(delay)
                # in a long wait, at most 5 % longer
                delay = min(delay * 1.5, max(max_delay, min(0.1, (now - started_at) / 20)))

    def exceeded(self, waited: float) -> str:
        """Return the limit that a wait of so many seconds exceeds, or an empty string."""
        deadline = self._deadline
        late = 0.0 if deadline is None else late_seconds(deadline, self.rank)
        if deadline is not None and deadline.clock() >= deadline.at + late:
            return f"it to arrive in the time for {deadline.purpose}"
        if deadline is None and self._kv.clock() >= self._kv.give_up_at:
            return "it to arrive in a third of the time until this process must leave"
        if self._timeout is not None and waited >= self._timeout:
            return f"it to arrive within {self._timeout:g} s"
        return ""

    def raise_if_aborted(self) -> None:
        """Raise the error of another rank if one has failed."""
        self._raise_failure(self._read_failure())

    def _read_failure(self) -> str | None:
        return self._kv.get_text(self._failed_key)

    def _raise_failure(self, text: str | None) -> None:
        if text is not None and text != error_report.COMMIT_BEGUN:
            self._failed = True
            raise error_report.decode_error(text, self.operation)

    # -- the end ---------------------------------------------------------------------------------

    def begin_commit(self) -> None:
        """Mark the point of no return, on rank 0 directly before the commit: raises the error of a
        rank that has failed, and later failures do not abort."""
        self._raise_failure(self._kv.compare_and_set(self._failed_key, error_report.COMMIT_BEGUN))
        self._commit_begun = True

    def abort(self, error: BaseException, *, as_raised: bool = False) -> bool:
        """Send this rank's error, or that of its training, to the others. Returns False if the
        commit may have begun, or they cannot be notified; True if it never will."""
        if self._failed:
            return True
        self._failed = True
        report = error_report.encode_error(error, self.rank, self.operation, self._commit_begun)
        report = self._raised if as_raised else report
        expected = error_report.COMMIT_BEGUN if self._commit_begun else ""
        try:
            found = self._kv.compare_and_set(self._failed_key, report, expected)
            return found != error_report.COMMIT_BEGUN
        except RankFailed as store_error:
            error.add_note(f"The other ranks could not be notified: {store_error}")
            return False

    def encode_failure(self, error: RankFailed) -> tuple[str, str]:
        """Return the key and the value by which this rank reports an error to the other ranks."""
        report = error_report.encode_error(error, self.rank, self.operation, commit_begun=False)
        return self._failed_key, report

    def advance(self) -> None:
        """Record progress: this rank is not stuck. ``Unavailable``: the deadline has passed."""
        self._kv.advance()
        if self._deadline is not None:
            self._deadline.check()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(error)
            self.close()

    def close(self) -> None:
        """End the collective for this rank and delete its keys; the last rank deletes the others.
        After a failure, rank 0 keeps what it sent: a late rank gets as far as the others."""
        was_left, self._left = self._left, True
        if was_left:
            return
        try:
            self._delete_keys()
        except RankFailed:
            return  # the store is gone with all its keys
        finally:
            self.closed = True

    def _delete_keys(self) -> None:
        """Delete the keys that no other rank needs anymore."""
        if self._failed:
            self._kv.delete(self._written_keys if self.rank else ())
        else:
            # Rank 0 sent nothing after the last gather, so the gathered values still exist.
            for key in self._gathered_keys:
                self._kv.try_get(key, delete=True)
        if self._kv.increment(f"{self._sequence_number}/left") < self.size:
            return
        for op_number in range(1, self._op_number + 1):
            self._kv.try_get(f"{self._sequence_number}/{op_number}/0", delete=True)
        if self._failed or self._read_failure() not in (None, error_report.COMMIT_BEGUN):
            self._delete_leftovers()
        names = "first_arrival", "left", "failed", "first_report"
        self._kv.delete([f"{self._sequence_number}/{name}" for name in names])

    def _delete_leftovers(self) -> None:
        """Delete values that no rank read because the collective failed. Each operation has left at
        least one, so the search ends at the first one without."""
        op_number, found = 0, True
        while found or op_number <= self._op_number:
            op_number += 1
            # A list, because ``any`` over a generator would stop at the first value.
            deleted = [
                self._kv.try_get(f"{self._sequence_number}/{op_number}/{rank}", delete=True)
                for rank in range(self.size)
            ]
            found = any(value is not None for value in deleted)


class LocalCollective(nullcontext[None]):
    """The collective of one process, with the methods of ``StoreCollective``."""

    rank = 0
    size = 1
    first_arrival = error_report.Arrival(0, "", "", "")

    def __init__(self, deadline: Deadline | None = None) -> None:
        super().__init__()
        self._deadline = deadline

    def advance(self) -> None:
        if self._deadline is not None:
            self._deadline.check()

    def gather(self, value: T, value_type: type[T]) -> list[T] | None:
        return [value]

    def scatter(self, values: Sequence[T] | None, value_type: type[T]) -> T:
        if values is None:
            raise ValueError("Rank 0 must pass the values")
        return values[0]

    def broadcast(self, value: T | None, value_type: type[T]) -> T:
        if value is None:
            raise ValueError("Rank 0 must pass the value")
        return value

    def wait_for_ranks(
        self, pending_ranks: Callable[[], Sequence[int]], wait_number: int
    ) -> None: ...
    def begin_commit(self) -> None: ...

    raise_if_aborted = close = begin_commit  # no other rank can fail

    def abort(self, error: BaseException, *, as_raised: bool = False) -> bool:
        return True


Collective = LocalCollective | StoreCollective
"""A collective operation. All ranks call the same methods in the same order.

It is a context manager that may be entered several times. An error within the context is sent to
the other ranks and closes the collective.
"""


def await_all(collective: Collective) -> None:
    """Wait until all ranks are here. An error of one rank reaches all."""
    all_are_here = collective.gather(True, bool)
    collective.broadcast(None if all_are_here is None else True, bool)
