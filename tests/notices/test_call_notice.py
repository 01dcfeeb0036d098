"""What a function of the user may return."""

import threading
import time
from functools import partial

import pytest

from limpet.errors import LimpetError
from limpet.notices.call import CallNotice
from limpet.notices.notice import Notice


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, None),
        (False, None),
        (True, Notice("the queue")),
        (12, Notice("the queue", 12.0)),
        (1.5, Notice("the queue", 1.5)),
        (0, Notice("the queue", 0.0)),
        (-3, Notice("the queue", 0.0)),
        (Notice("mine", 3, stops=False), Notice("mine", 3, stops=False)),
    ],
)
def test_results_of_a_function(result, expected):
    assert CallNotice(lambda: result, name="the queue").poll() == expected


@pytest.mark.parametrize("result", ["yes", float("nan"), float("inf"), b"", [], object()])
def test_another_result_is_an_error_and_not_a_notice(result):
    with pytest.raises(OSError, match=r"the queue returned .*Expected None, a bool"):
        CallNotice(lambda: result, name="the queue").poll()


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("x"), SystemExit(3)])
def test_an_error_of_the_function_is_an_outage(error):
    def fail():
        raise error

    source = CallNotice(fail, name="the queue")
    with pytest.raises(OSError, match="the queue failed") as caught:
        source.poll()
    assert caught.value.__cause__ is error


def test_the_name_is_that_of_the_function():
    assert CallNotice(time.monotonic).name == "the function monotonic"
    assert CallNotice(partial(int, "3")).name == "the function partial"


def test_it_is_not_called_on_the_thread_that_polls():
    threads = []
    CallNotice(lambda: threads.append(threading.current_thread())).poll()
    assert threads != [threading.current_thread()]


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(LimpetError, match="function must be a function without parameters"):
        CallNotice("function")
