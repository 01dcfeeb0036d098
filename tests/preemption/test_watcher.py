"""The watcher of notices: when it polls, what it reports, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast.errors import HoldfastError
from holdfast.preemption.notice import Notice
from holdfast.preemption.watcher import NoticeWatcher


class Source:
    """A source whose polls return or raise ``results``, and then nothing."""

    interval = 0.001

    def __init__(self, *results: Any, name: str = "a test") -> None:
        self.name = name
        self.results = list(results)
        self.polls = 0

    def poll(self) -> Notice | None:
        self.polls += 1
        result = self.results.pop(0) if self.results else None
        if isinstance(result, Exception):
            raise result
        return result


class WakingSource(Source):
    interval = 3600.0
    started: list[Callable[[], object]]
    closed = 0

    def start(self, wake: Callable[[], object]) -> None:
        self.started = [wake]

    def close(self) -> None:
        self.closed += 1


class Response:
    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def on_notice(self, notice: Notice) -> None:
        self.notices.append(notice)


@pytest.fixture
def failures() -> Iterator[list[tuple[str, str]]]:
    found: list[tuple[str, str]] = []

    def sink(name: str, fields: dict[str, Any]) -> None:
        if name == "notice_source_failed":
            found.append((fields["source"], str(fields["error"])))

    with holdfast.attach(sink):
        yield found


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def watcher_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "holdfast-notices"]


def test_notices_of_all_sources_are_passed_on() -> None:
    response = Response()
    first, second = Source(None, Notice("a")), Source(Notice("b", 3.0))
    watcher = NoticeWatcher([first], response.on_notice, lambda: [second])
    watcher.start()
    wait_for(lambda: len(response.notices) == 2)
    watcher.close()
    assert sorted(n.source for n in response.notices) == ["a", "b"]
    assert not watcher_threads()


def test_a_source_that_is_woken_is_polled_at_once() -> None:
    response, source = Response(), WakingSource()
    watcher = NoticeWatcher([source], response.on_notice)
    watcher.start()
    wait_for(lambda: source.polls == 1)
    source.results.append(Notice("SIGTERM"))
    source.started[0]()
    wait_for(lambda: response.notices)
    watcher.close()
    assert source.closed == 1


def test_an_outage_is_reported_once_and_the_source_is_polled_on(
    failures: list[tuple[str, str]],
) -> None:
    down = [OSError("down")] * 3
    source = Source(*down, None, OSError("down again"), Notice("late"))
    response = Response()
    watcher = NoticeWatcher([source], response.on_notice)
    watcher.start()
    wait_for(lambda: response.notices)
    watcher.close()
    assert failures == [("a test", "down"), ("a test", "down again")]


def test_another_error_ends_only_that_source_and_close_raises_it(
    failures: list[tuple[str, str]],
) -> None:
    broken, good = Source(KeyError("x"), name="broken"), Source(None, None, Notice("good"))
    response = Response()
    watcher = NoticeWatcher([broken, good], response.on_notice)
    watcher.start()
    wait_for(lambda: response.notices)
    assert broken.polls == 1
    with pytest.raises(KeyError):
        watcher.close()
    watcher.close()
    assert failures == [("broken", "'x'")]


def test_an_error_of_the_detection_is_raised_by_close_and_does_not_end_the_watch(
    failures: list[tuple[str, str]],
) -> None:
    response, source = Response(), Source(None, None, Notice("a"))

    def detect() -> list[Source]:
        raise ValueError("no platform")

    watcher = NoticeWatcher([source], response.on_notice, detect)
    watcher.start()
    wait_for(lambda: response.notices)
    assert failures == [("the detection of the platform", "no platform")]
    with pytest.raises(ValueError, match="no platform"):
        watcher.close()


def test_a_source_that_cannot_start_is_reported(failures: list[tuple[str, str]]) -> None:
    class Refusing(WakingSource):
        def start(self, wake: Callable[[], object]) -> None:
            raise HoldfastError("No handler could be installed")

    response, other = Response(), Source(Notice("other"))
    watcher = NoticeWatcher([Refusing(), other], response.on_notice)
    watcher.start()
    wait_for(lambda: response.notices)
    watcher.close()
    assert failures == [("a test", "No handler could be installed.")]


def test_nothing_keeps_a_response_that_nobody_closed() -> None:
    response, source = Response(), WakingSource()
    watcher = NoticeWatcher([source], response.on_notice)
    watcher.start()
    wait_for(lambda: source.polls)
    del response
    gc.collect()
    wait_for(lambda: not watcher_threads())


def test_without_threads_each_source_is_reported(
    failures: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.preemption.watcher.start_thread", lambda thread: False)
    response = Response()
    watcher = NoticeWatcher([Source(name="a"), Source(name="b")], response.on_notice)
    watcher.start()
    watcher.close()
    assert [name for name, _ in failures] == ["a", "b"]
