"""Repeats the requests to a server that is busy or unreachable, until a deadline.

A ``Throttle`` for each server limits the requests in progress: a refusal for the rate halves the
limit, which recovers by one per second (TCP's additive increase, multiplicative decrease). Pauses
have full jitter, so that many clients do not return at once. (M. Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015.)
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Lock
from typing import TypeVar

from limpet import events
from limpet.deadline import Deadline
from limpet.errors import StoreError, Unavailable
from limpet.threads import is_canceled

T = TypeVar("T")

MIN_PAUSE = 1.0
"""The least pause, in seconds, after a refusal for the rate, unless the server said how long."""

RECOVERY = 1.0
"""Seconds after which the limit changes again: down, or up by one request."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 20.0
"""The largest pause after the first failure of a request, and after many, in seconds."""

_LONGEST_HOLD = 60.0
"""The longest time for which one refusal stops all requests, in seconds, whatever the server asks
for: a maintenance page may ask for a day."""

_FORGOTTEN = 120.0
"""Seconds after the last failure from which on the server no longer counts as failing."""

_REPORTED = (5.0, 30.0)
"""Seconds for which a call is repeated until the event ``waiting`` reports it, and between two."""

_SLICE = 1.0
"""Seconds of a pause after which it is checked whether the operation has failed."""

_POLL = 0.005
"""Seconds between two looks at whether a request may start.

A ``Condition`` would not do: an exception of a signal handler can leave its lock acquired.
"""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a process has requested from one server.

    ``requests``: the number of requests by operation, also of those that failed; ``retries``: the
    repeated calls; ``throttled``: the refusals for their rate; ``waited_seconds``: the sum of the
    pauses of all threads; ``running``: the calls in progress; ``concurrency``: the largest number
    that may be in progress now.
    """

    requests: dict[str, int]
    retries: int
    throttled: int
    waited_seconds: float
    running: int
    concurrency: int


def store_statistics(store: object) -> dict[str, float]:
    """Return the statistics of a store's server as numbers by name; empty if it has none."""
    method: Callable[[], Statistics] | None = getattr(store, "statistics", None)
    if method is None:
        return {}
    found = asdict(method())
    found["requests"] = sum(found["requests"].values())
    return {f"store_{name}": value for name, value in found.items()}


class Throttle:
    """The limit of the requests to one server, and their statistics. ``patience``: seconds after
    the last success from which on none is repeated: the calls of a save must not each wait anew."""

    def __init__(
        self,
        concurrency: int,
        patience: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._max_limit = self._limit = concurrency
        self._patience = patience
        self._failing_since: float | None = None
        self._failed_at = self._reported_at = -math.inf
        self._clock, self._sleep, self._uniform = clock, sleep, uniform
        self._lock = Lock()
        self._running: set[object] = set()
        self._resume_at = self._changed_at = clock()
        self._requests: dict[str, int] = {}
        self._retries = self._throttled = 0
        self._waited = 0.0

    def statistics(self) -> Statistics:
        return Statistics(
            dict(self._requests),
            self._retries,
            self._throttled,
            self._waited,
            len(self._running),
            self._limit,
        )

    def call(self, action: str, deadline: Deadline, request: Callable[[], T]) -> T:
        """Return what ``request`` returns. While it raises ``Unavailable``, repeat it.

        ``action``: "write manifest.json", for the event ``waiting``. Fields of the error:
        ``throttled``, if the server refused the request for its rate; ``retry_after``, the pause
        that the server asked for, in seconds; ``outcome``, "unknown" if the request may have had an
        effect; ``is_final``, if it cannot be repeated.

        Raises the last error, with the number of tries, when the deadline, or the patience with a
        server that has not done anything since, does not leave the time for another one. Its
        outcome is unknown if that of any try was. Other errors are raised at once.
        """
        began, tries, is_unknown = self._clock(), 0, False
        while True:
            tries += 1
            with self._slot(deadline):
                try:
                    result = request()
                    self._recover()
                    return result
                except Unavailable as e:
                    if e.fields.get("is_final"):
                        self._note_failure(began)
                        raise
                    error = e
                except StoreError as e:
                    if e.fields.get("status"):  # the server has answered
                        self._recover()
                    if is_unknown and not e.is_outcome_unknown:
                        raise e.with_advice(outcome="unknown") from e
                    raise
            since = self._note_failure(self._clock())
            is_unknown |= error.is_outcome_unknown
            pause = self._uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(tries, 20)))
            if error.fields.get("throttled"):
                asked = error.fields.get("retry_after")
                pause += MIN_PAUSE if asked is None else float(asked)
                self._slow_down(min(pause, _LONGEST_HOLD))
            left = min(deadline.seconds_left, since + self._patience - self._clock())
            if left > pause and not is_canceled():
                self._report(action, error, self._clock() - began, left)
                self._pause(pause, is_retry=True)
            if left <= pause or is_canceled():
                raise _gave_up(error, tries, self._clock() - began, deadline, is_unknown) from error

    def _report(self, action: str, error: StoreError, seconds: float, left: float) -> None:
        """Report a call that has been repeated for a while, unless one was reported lately."""
        first, next_one = _REPORTED
        with self._lock:
            now = self._clock()
            if seconds < first or now - self._reported_at < next_one:
                return
            self._reported_at = now
        store = error.fields.get("store", "")
        events.emit("waiting", store=store, action=action, error=error, seconds=left)

    @contextmanager
    def _slot(self, deadline: Deadline) -> Iterator[None]:
        """Count a call as running, as soon as the limit allows it or the deadline passes."""
        token = object()
        try:
            while not self._start(token, deadline):
                self._pause(_POLL)
            yield
        finally:
            self._running.discard(token)

    def _start(self, token: object, deadline: Deadline) -> bool:
        with self._lock:
            may_start = len(self._running) < self._limit and self._clock() >= self._resume_at
            if may_start or not deadline.seconds_left or is_canceled():
                self._running.add(token)
                return True
        return False

    def count(self, operation: str) -> None:
        """Count a request of a call."""
        with self._lock:
            self._requests[operation] = self._requests.get(operation, 0) + 1

    def _pause(self, seconds: float, *, is_retry: bool = False) -> None:
        with self._lock:
            self._waited += seconds
            self._retries += is_retry
        while seconds > _SLICE:
            if is_canceled():
                return
            self._sleep(_SLICE)
            seconds -= _SLICE
        self._sleep(seconds)

    def _slow_down(self, pause: float) -> None:
        with self._lock:
            now = self._clock()
            self._throttled += 1
            self._resume_at = max(self._resume_at, now + pause)
            if now - self._changed_at >= RECOVERY or self._limit == self._max_limit:
                self._limit = max(1, self._limit // 2)
                self._changed_at = now

    def _note_failure(self, since: float) -> float:
        """Note that the server has failed since a time of the clock. Return the time of its first
        failure since the last success."""
        with self._lock:
            now = self._clock()
            if self._failing_since is None or now - self._failed_at > _FORGOTTEN:
                self._failing_since = since
            self._failed_at = now
            return self._failing_since

    def _recover(self) -> None:
        with self._lock:
            self._failing_since = None
            now = self._clock()
            if self._limit < self._max_limit and now - self._changed_at >= RECOVERY:
                self._limit += 1
                self._changed_at = now


def _gave_up(
    error: Unavailable, tries: int, seconds: float, deadline: Deadline, is_unknown: bool
) -> StoreError:
    how_often = "1 try" if tries == 1 else f"{tries} tries"
    fields = {"outcome": "unknown"} if is_unknown else {}
    return error.with_advice(  # type: ignore[return-value]
        f"Gave up after {how_often} in {seconds:.1f} s ({deadline.purpose})."
        " Check the network and the server, then try again",
        tries=tries,
        **fields,
    )
