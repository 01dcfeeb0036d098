"""The watcher of notices: when it polls, what it reports, and how it ends."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import limpet
from limpet.errors import LimpetError
from limpet.notices.call import CallNotice
from limpet.notices.notice import Notice
from limpet.notices.signals import SignalNotice
from limpet.notices.watcher import NoticeWatcher
from tests.waiting import wait_until


class Source:
    """A source whose polls return or raise ``results``, and then nothing."""

    interval = 0.001

    def __init__(self, *results, name="a test"):
        self.name = name
        self.results = list(results)
        self.polls = 0

    def poll(self):
        self.polls += 1
        result = self.results.pop(0) if self.results else None
        if isinstance(result, Exception):
            raise result
        return result


class WakingSource(Source):
    interval = 3600.0
    started: list[Callable[[], object]]
    closed = 0

    def start(self, wake):
        self.started = [wake]

    def close(self):
        self.closed += 1


class Response:
    def __init__(self):
        self.notices: list[Notice] = []

    def on_notice(self, notice):
        self.notices.append(notice)


@pytest.fixture
def failures():
    found: list[tuple[str, str]] = []

    def sink(name, fields):
        if name == "notice_source_failed":
            found.append((fields["source"], str(fields["error"])))

    with limpet.attach(sink):
        yield found


def watcher_threads():
    return [t for t in threading.enumerate() if t.name == "limpet-notices"]


def test_notices_of_all_sources_are_passed_on():
    response = Response()
    first, second = Source(None, Notice("a")), Source(Notice("b", 3.0))
    watcher = NoticeWatcher([first], response.on_notice, lambda: [second])
    watcher.start()
    wait_until(lambda: len(response.notices) == 2)
    watcher.close()
    assert sorted(n.source for n in response.notices) == ["a", "b"]
    assert not watcher_threads()


def test_a_signal_that_comes_just_before_the_end_is_passed_on():
    """Its thread is not woken before the end."""
    response, source, polled = Response(), WakingSource(), Source()
    watcher = NoticeWatcher([source, polled], response.on_notice)
    watcher.start()
    wait_until(lambda: source.polls == 1 and polled.polls)
    source.results.append(Notice("SIGTERM"))
    watcher.close()
    polls = polled.polls
    assert response.notices == [Notice("SIGTERM")]
    assert source.closed == 1
    watcher.close()
    assert len(response.notices) == 1
    assert polled.polls == polls


def test_a_source_whose_last_poll_fails_is_closed():
    """Otherwise, its handlers of signals would stay."""
    response, source = Response(), WakingSource()
    watcher = NoticeWatcher([source], response.on_notice)
    watcher.start()
    wait_until(lambda: source.polls == 1)
    source.results.append(KeyError("x"))
    watcher.close()
    assert source.closed == 1
    with pytest.raises(KeyError):
        watcher.raise_error()


def test_an_outage_is_reported_once_and_the_source_is_polled_on(failures):
    down = [OSError("down")] * 3
    source = Source(*down, None, OSError("down again"), Notice("late"))
    response = Response()
    watcher = NoticeWatcher([source], response.on_notice)
    watcher.start()
    wait_until(lambda: response.notices)
    watcher.close()
    assert failures == [("a test", "down"), ("a test", "down again")]


class Hanging(Source):
    """A source that breaks the rule: its poll does not return until it is released."""

    def __init__(self, *results):
        super().__init__(*results, name="hanging")
        self.released = threading.Event()

    def poll(self):
        result = super().poll()
        self.released.wait(30)
        return result


@pytest.fixture
def hanging():
    source = Hanging(Notice("hanging"))
    yield source
    source.released.set()
    wait_until(lambda: not watcher_threads())


def test_sources_that_hang_delay_neither_a_signal_nor_the_end(hanging):
    """Three functions that hang, and a source that does not even return in time."""
    functions = [CallNotice(lambda: hanging.released.wait(30) and None) for _ in range(3)]
    signals, response = SignalNotice(signal.SIGUSR1), Response()
    watcher = NoticeWatcher([signals, *functions, hanging], response.on_notice)
    watcher.start()
    wait_until(lambda: hanging.polls and all(f._call is not None for f in functions))
    sent_at = time.monotonic()
    signal.raise_signal(signal.SIGUSR1)
    wait_until(lambda: response.notices)
    seen_at = time.monotonic()
    watcher.close()
    assert response.notices[0].source == "SIGUSR1"
    assert seen_at - sent_at < 0.5
    assert time.monotonic() - seen_at < 2


def test_a_notice_that_comes_after_the_end_is_dropped(hanging):
    """The training has ended: it must not leave once more, or be kept in memory."""
    response = Response()
    watcher = NoticeWatcher([hanging], response.on_notice)
    watcher.start()
    wait_until(lambda: hanging.polls)
    watcher.close()
    hanging.released.set()
    wait_until(lambda: not watcher_threads())
    assert not response.notices
    assert hanging.polls == 1


class Broken(Source):
    """A source whose attributes raise, or are of a wrong type."""

    def __init__(self, **attributes):
        super().__init__(name="broken")
        self.__dict__.update(attributes)

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name != "__dict__" and isinstance(value, BaseException):
            raise value
        return value


BAD_NOTICES: list[Any] = [
    *(True, False, 30, "SIGTERM", [], Notice),
    *(Notice("x", "30"), Notice("x", True), Notice("x", float("nan")), Notice("x", [])),
    *(Notice(None), Notice("x", 1.0, "no"), Notice("x", stops=None), Notice("x", age=None)),
]


@pytest.mark.parametrize("found", BAD_NOTICES, ids=repr)
def test_what_is_no_valid_notice_ends_only_that_source(failures, found):
    """The signals must go on: without the thread, SIGTERM would be swallowed."""
    bad = Source(found, name="broken")
    signals = WakingSource()
    error = pass_a_notice_beside(bad, signals, failures)
    assert isinstance(error, LimpetError)
    assert "something else than a notice" in str(error)
    assert bad.polls == 1


@pytest.mark.parametrize(
    "error", [KeyError("x"), AttributeError("x"), SystemExit(3), KeyboardInterrupt(), OSError("x")]
)
def test_an_error_of_any_kind_ends_only_that_source(failures, error):
    raised = pass_a_notice_beside(Broken(interval=error), WakingSource(), failures)
    assert error in (raised, raised.__cause__)

    def poll():
        raise error

    if not isinstance(error, OSError):  # which is an outage
        failures.clear()
        raised = pass_a_notice_beside(Broken(poll=poll), WakingSource(), failures)
        assert error in (raised, raised.__cause__)


def pass_a_notice_beside(bad, good, failures):
    """Watch a bad source and a good one, and return the error of the bad one."""
    response = Response()
    watcher = NoticeWatcher([bad, good], response.on_notice)
    watcher.start()
    wait_until(lambda: failures)
    good.results.append(Notice("SIGTERM"))
    good.started[0]()
    wait_until(lambda: response.notices)
    watcher.close()
    with pytest.raises(Exception) as raised:
        watcher.raise_error()
    watcher.raise_error()
    assert [name for name, _ in failures] == ["broken"]
    assert not watcher_threads()
    return raised.value


def test_a_source_that_cannot_be_closed_keeps_no_other_one_open():
    class Stuck(WakingSource):
        def close(self):
            raise OSError("Bad file descriptor")

    good = WakingSource()
    response = Response()
    watcher = NoticeWatcher([Stuck(), good], response.on_notice)
    watcher.start()
    watcher.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        watcher.raise_error()
    assert good.closed == 1
    assert not watcher_threads()


def test_an_error_of_the_detection_is_raised_at_the_end_and_does_not_end_the_watch(failures):
    response, source = Response(), Source(None, None, Notice("a"))

    def detect():
        raise ValueError("no platform")

    watcher = NoticeWatcher([source], response.on_notice, detect)
    watcher.start()
    wait_until(lambda: response.notices)
    assert failures == [("the detection of the platform", "no platform")]
    watcher.close()
    with pytest.raises(ValueError, match="no platform"):
        watcher.raise_error()


def test_a_source_that_cannot_start_is_reported(failures):
    class Refusing(WakingSource):
        def start(self, wake):
            raise LimpetError("No handler could be installed")

    response, other = Response(), Source(Notice("other"))
    watcher = NoticeWatcher([Refusing(), other], response.on_notice)
    watcher.start()
    wait_until(lambda: response.notices)
    watcher.close()
    assert failures == [("a test", "No handler could be installed.")]


def test_without_threads_each_source_is_reported(failures, monkeypatch):
    monkeypatch.setattr("limpet.notices.watcher.start_thread", lambda thread: False)
    response = Response()
    sources = [Source(name="a"), Source(name="b")]
    watcher = NoticeWatcher(sources, response.on_notice, lambda: [Source()])
    watcher.start()
    watcher.close()
    assert [name for name, _ in failures] == ["a", "b", "the detection of the platform"]
