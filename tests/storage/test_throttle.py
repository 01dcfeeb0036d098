"""Requests are repeated until a deadline, and slow down when a server asks for it."""

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic, sleep

import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import Denied, Unavailable
from limpet.storage.throttle import MIN_PAUSE, RECOVERY, Throttle
from limpet.threads import in_parallel

NO_DEADLINE = Deadline("", math.inf)


class Clock:
    """A clock that advances only by sleeping. Jitter is always the largest possible."""

    def __init__(self):
        self.now = 100.0
        self.pauses = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def throttle(self, concurrency=8, uniform=lambda low, high: high, patience=math.inf):
        return Throttle(concurrency, patience, clock=self, sleep=self.sleep, uniform=uniform)

    def deadline(self, seconds):
        return Deadline.after(seconds, "the test", self)


@pytest.fixture
def clock():
    return Clock()


class Failing:
    """Fails with each of the errors, then returns "done"."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def slow_down(retry_after=None):
    return Unavailable("busy", throttled=True, retry_after=retry_after)


def test_a_request_is_repeated_with_growing_pauses(clock):
    throttle = clock.throttle()
    request = Failing(*(Unavailable("reset") for _ in range(8)))
    assert throttle.call("Get", clock.deadline(1000), request) == "done"
    assert clock.pauses == [0.5, *[1] * (1 + 2 + 4 + 8 + 16 + 20 + 20)]  # in steps of a second
    statistics = throttle.statistics()
    assert (statistics.retries, statistics.throttled, statistics.running) == (8, 0, 0)
    assert statistics.waited_seconds == sum(clock.pauses)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("retry_after", "least"), [(None, MIN_PAUSE), (0.0, 0.0), (3.0, 3.0), (40.0, 40.0)]
)
def test_a_busy_server_says_how_long_to_wait(clock, retry_after, least, share):
    """With full jitter: otherwise, all ranks that were refused return in the same moment."""
    throttle = clock.throttle(uniform=lambda low, high: low + share * (high - low))
    began = clock.now
    throttle.call("Put", clock.deadline(1000), Failing(slow_down(retry_after)))
    assert clock.now - began == pytest.approx(least + 0.5 * share, abs=0.01)


def test_one_refusal_does_not_stop_all_requests_for_a_day(clock):
    throttle = clock.throttle()
    with pytest.raises(Unavailable, match="busy"):
        throttle.call("Put", clock.deadline(1000), Failing(slow_down(86400.0)))
    began = clock.now
    throttle.call("Get", clock.deadline(1000), Failing())
    assert clock.now - began < 61


def test_all_requests_wait_while_one_was_told_to(clock):
    throttle = clock.throttle(uniform=lambda low, high: 0.0)
    with pytest.raises(Unavailable):  # it gives up at once, because it may not wait so long
        throttle.call("Put", clock.deadline(1), Failing(slow_down(5.0)))
    began = clock.now
    throttle.call("Get", clock.deadline(100), Failing())
    assert 5.0 <= clock.now - began < 5.1


def test_the_limit_halves_and_recovers_slowly(clock):
    throttle = clock.throttle(concurrency=32)
    limits = []
    for _ in range(4):
        throttle.call("Put", clock.deadline(1000), Failing(slow_down()))
        limits.append(throttle.statistics().concurrency)
        clock.now += RECOVERY
    # each success after a second gives one back
    assert limits == [17, 9, 5, 3]
    for _ in range(100):
        throttle.call("Put", NO_DEADLINE, Failing())
    assert throttle.statistics().concurrency == 4
    for _ in range(100):
        clock.now += RECOVERY
        throttle.call("Put", NO_DEADLINE, Failing())
    assert throttle.statistics().concurrency == 32


def test_many_refusals_at_once_halve_the_limit_once(clock):
    throttle = clock.throttle(concurrency=32)
    for _ in range(10):
        with pytest.raises(Unavailable):
            throttle.call("Put", clock.deadline(0.5), Failing(slow_down()))
        throttle._resume_at = 0  # the ten were in progress together
    assert throttle.statistics().concurrency == 16
    assert throttle.statistics().throttled == 10


def test_the_deadline_ends_the_tries(clock):
    throttle = clock.throttle()
    began = clock.now
    request = Failing(*(Unavailable("no answer", key="v/m") for _ in range(99)))
    with pytest.raises(
        Unavailable, match=r"no answer.*Gave up after 6 tries in .* s \(the test\)"
    ) as caught:
        throttle.call("Get", clock.deadline(30), request)
    assert clock.now - began <= 30
    assert (caught.value.key, caught.value.tries) == ("v/m", 6)
    assert not caught.value.is_outcome_unknown
    assert isinstance(caught.value.__cause__, Unavailable)


def test_a_server_that_is_away_is_waited_for_once(clock):
    """A save that fails makes several calls: the one that fails, and those that clean up."""
    throttle = clock.throttle(patience=60)
    began = clock.now
    requests = [Failing(*(Unavailable("no answer") for _ in range(99))) for _ in range(5)]
    for request in requests:
        with pytest.raises(Unavailable, match="Gave up after"):
            throttle.call("Put", clock.deadline(300), request)
    assert 30 < clock.now - began <= 60
    assert requests[0].calls >= 5
    assert requests[-1].calls == 1  # it is not waited for again
    throttle.call("Get", clock.deadline(300), Failing())  # it is back
    began = clock.now
    with pytest.raises(Unavailable):
        throttle.call("Put", clock.deadline(300), requests[0])
    assert 30 < clock.now - began <= 60


def test_an_error_after_an_unknown_outcome_has_an_unknown_outcome(clock):
    """The reply to the commit was lost, and then the credentials expired."""
    errors = [Unavailable("lost", outcome="unknown"), Denied("expired", key="m")]
    with pytest.raises(Denied, match="expired") as caught:
        clock.throttle().call("Put", clock.deadline(9), Failing(*errors))
    assert caught.value.is_outcome_unknown
    assert caught.value.key == "m"
    with pytest.raises(Denied) as caught:
        clock.throttle().call("Put", clock.deadline(9), Failing(slow_down(), Denied("expired")))
    assert not caught.value.is_outcome_unknown


def test_a_call_that_is_repeated_for_long_is_reported(clock):
    throttle, reports = clock.throttle(), []

    def call(tries):
        with limpet.attach(lambda name, fields: reports.append((clock.now, name, fields))):
            errors = [Unavailable("away", store="s3://b/run") for _ in range(tries)]
            throttle.call("Put", clock.deadline(1000), Failing(*errors))

    call(3)
    assert reports == []  # 3.5 s
    began = clock.now
    call(9)
    assert [round(at - began, 1) for at, _, _ in reports] == [7.5, 51.5]
    _, name, fields = reports[0]
    assert (name, fields["store"], fields["action"]) == ("waiting", "s3://b/run", "Put")
    assert "away" in str(fields["error"])
    assert fields["seconds"] == 1000 - 7.5


def test_a_pause_ends_soon_after_another_thread_has_failed():
    """Also one for which the server has asked. The request is not sent again."""
    pauses, calls, throttle = Event(), [], Throttle(8, sleep=lambda s: (pauses.set(), sleep(s)))

    def busy():
        calls.append(1)
        raise slow_down(20.0)

    def work(number):
        if number:
            pauses.wait(10)
            raise Denied("expired")
        throttle.call("Put", Deadline.after(60, "the test"), busy)

    began = monotonic()
    with pytest.raises(Denied):
        in_parallel(range(2), work, threads=2)
    assert monotonic() - began < 10
    assert len(calls) == 1


def test_the_number_of_requests_in_progress_is_limited():
    throttle, may_end, running, peak = Throttle(3), Event(), set(), []

    def request(number):
        running.add(number)
        peak.append(len(running))
        may_end.wait(10)
        running.discard(number)

    with ThreadPoolExecutor(8) as threads:
        calls = [
            threads.submit(throttle.call, "Get", NO_DEADLINE, lambda n=n: request(n))
            for n in range(8)
        ]
        while throttle.statistics().running < 3:
            pass
        may_end.set()
        for call in calls:
            call.result(10)
    assert max(peak) == 3
    assert throttle.statistics().running == 0


def test_an_interrupted_request_is_not_counted_as_running(clock):
    throttle = clock.throttle(concurrency=1)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            throttle.call("Get", NO_DEADLINE, Failing(KeyboardInterrupt()))
    assert throttle.call("Get", clock.deadline(1), Failing()) == "done"
