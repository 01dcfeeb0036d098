"""The cycle collector is on again after every way out."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import threads
from holdfast.threads import gc_paused


@pytest.fixture(autouse=True)
def _on_again() -> Iterator[None]:
    yield
    gc.enable()


def test_it_is_off_within_and_on_after() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_paused():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


LINES, FIRST = inspect.getsourcelines(threads.gc_paused.__wrapped__)
AFTER = next(i for i, line in enumerate(LINES) if line.strip() == "try:")


@pytest.mark.parametrize(
    "line",
    [
        FIRST + i
        for i, line in enumerate(LINES)
        if i > AFTER and line.strip() in ("gc.disable()", "yield", "gc.enable()")
    ],
)
def test_interrupted_before_any_line_it_is_on_after(line: int) -> None:
    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != threads.__file__:
            return None
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    with pytest.raises(KeyboardInterrupt):
        sys.settrace(trace)
        try:
            with gc_paused():
                pass
        finally:
            sys.settrace(before)
    assert gc.isenabled()
