"""A source that hangs does not delay the thread that polls it."""

import threading
import time

import pytest

from limpet.notices.notice import BoundedSource, Notice
from tests.notices.manual_clock import ManualClock


class Hanging(BoundedSource):
    """A source whose ``check`` hangs until it is released."""

    def __init__(self, clock):
        super().__init__("the slow source", 1.0, clock)
        self.poll_seconds = 0.05
        self.released = threading.Event()
        self.calls = 0
        self.answer: Notice | None = Notice("late", 30.0)

    def check(self):
        self.calls += 1
        self.released.wait(30)
        return self.answer


@pytest.fixture
def hanging():
    source = Hanging(ManualClock())
    yield source
    source.released.set()


def test_a_poll_of_a_source_that_hangs_raises_in_time(hanging):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="the slow source has not answered"):
        hanging.poll()
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize(("seconds", "left"), [(30.0, 18.0), (5.0, 0.0), (None, None)])
def test_the_seconds_of_a_late_answer_count_from_when_it_came(hanging, seconds, left):
    hanging.answer = Notice("late", seconds)
    with pytest.raises(TimeoutError):
        hanging.poll()
    hanging.released.set()
    assert hanging._call is not None
    assert hanging._call.wait(30)
    assert isinstance(hanging.clock, ManualClock)
    hanging.clock.advance(12)
    notice = hanging.poll()
    assert notice is not None
    assert (notice.seconds, notice.age) == (left, 12)
