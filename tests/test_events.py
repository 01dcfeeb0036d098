"""Test ``events.emit``. Sinks can attach, detach, or fail at any time without failing a save."""

import ast
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import limpet
from limpet import events
from limpet.errors import LimpetError, SinkFailed
from limpet.storage.memory import MemoryStore
from tests.waiting import run_threads

ROOT = Path(limpet.__file__).parent
TABLE = re.compile(r"^\| `(\w+)` \| .* \| (.*) \|$", re.MULTILINE)


@pytest.fixture(autouse=True)
def no_attached_sinks():
    """Assert that no other test left a sink attached, and detach the sinks of this test."""
    assert not events._attached
    yield
    events._attached.clear()


def documented():
    text = (ROOT.parents[1] / "docs" / "events.md").read_text()
    return {m[1]: set(re.findall(r"`(\w+)`", m[2])) for m in TABLE.finditer(text)}


def emitted():
    """Return the event, the fields, and the source line of every ``emit`` call in the sources."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "emit":
                event, where = node.args[0], f"{file.name}:{node.lineno}"
                assert isinstance(event, ast.Constant), f"{where}: the event name is not a literal"
                assert all(k.arg for k in node.keywords), f"{where}: ** hides the fields"
                found.append((event.value, {str(k.arg) for k in node.keywords}, where))
    return found


def test_event_table_matches_the_emitted_events():
    table = documented()
    for event, fields, where in emitted():
        assert table.get(event) == fields, f"docs/events.md and {where} differ on {event}"
    assert set(table) == {event for event, _, _ in emitted()}


class RecordingSink(list):
    """A sink that records the events it receives."""

    def __call__(self, name, fields):
        self.append((name, fields))


def test_sink_receives_events_only_inside_its_context():
    received = RecordingSink()
    events.emit("before")
    with limpet.attach(received):
        events.emit("within", step=1)
    events.emit("after")
    assert received == [("within", {"step": 1})]


def test_attach_refuses_values_that_are_not_sinks():
    wrong: list[tuple[Any, str]] = [
        (limpet.sinks.Terminal, "Terminal is not a sink"),
        (RecordingSink, "found a class. Call it: attach(RecordingSink())."),
        (None, "None is not a sink. Expected a callable: sink(name, fields)."),
        ("events.jsonl", "'events.jsonl' is not a sink"),
    ]
    for given, words in wrong:
        with pytest.raises(LimpetError) as e:
            limpet.attach(given)
        assert words in str(e.value)
    assert not events._attached


def test_close_detaches_and_can_be_called_twice():
    received = RecordingSink()
    attached = limpet.attach(received)
    events.emit("a")
    attached.close()
    attached.close()
    events.emit("b")
    assert [name for name, _ in received] == ["a"]


def test_each_sink_receives_its_own_copy_of_the_fields():
    received = RecordingSink()
    with limpet.attach(lambda name, fields: fields.clear()), limpet.attach(received):
        events.emit("a", step=1)
    assert received == [("a", {"step": 1})]


def test_sink_can_attach_another_sink_and_detach_itself():
    received = RecordingSink()

    def sink(name, fields):
        attached.close()
        limpet.attach(received)

    attached = limpet.attach(sink)
    events.emit("a")
    events.emit("b")
    assert [name for name, _ in received] == ["b"]


def failing_sink(name, fields):
    raise OSError(28, "No space left on device", "events.jsonl")


def test_failing_sink_is_detached_with_one_warning_and_other_sinks_continue():
    received = RecordingSink()
    with limpet.attach(failing_sink), limpet.attach(received):
        match = r"failing_sink was detached.*'a' \(OSError.*No space"
        with pytest.warns(SinkFailed, match=match) as seen:
            events.emit("a")
        events.emit("b")
    assert [name for name, _ in received] == ["a", "b"]
    # the warning shows the line in the sink
    assert [(w.filename, w.lineno) for w in seen] == [
        (__file__, failing_sink.__code__.co_firstlineno + 1)
    ]


def test_sink_that_fails_again_after_a_new_attach_warns_again():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            with limpet.attach(failing_sink):
                events.emit("a")
    assert len(seen) == 2


def test_threading_excepthook_is_called_if_warnings_are_errors(monkeypatch):
    hooked: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with limpet.attach(failing_sink):
            events.emit("a")
    (args,) = hooked
    assert args.exc_type is SinkFailed
    assert isinstance(args.exc_value.__cause__, OSError)


def test_emit_does_not_raise_if_the_warning_cannot_be_shown(monkeypatch):
    def closed(*args, **kwargs):
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(warnings, "showwarning", closed)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with limpet.attach(failing_sink):
            events.emit("a")
            assert not events._attached


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_error_whose_str_raises_is_reported():
    def sink(name, fields):
        raise UnprintableError

    with limpet.attach(sink), pytest.warns(SinkFailed, match="UnprintableError"):
        events.emit("a")


def test_keyboard_interrupt_propagates_and_the_sink_stays_attached():
    calls: list[str] = []

    def interrupted(name, fields):
        calls.append(name)
        raise KeyboardInterrupt

    with limpet.attach(interrupted):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                events.emit("a")
    assert calls == ["a", "a"]


def test_sink_that_fails_on_two_threads_at_once_warns_once():
    both = threading.Barrier(2)

    def sink(name, fields):
        both.wait(10)
        raise OSError("full")

    with warnings.catch_warnings(record=True) as seen, limpet.attach(sink):
        warnings.simplefilter("always")
        run_threads(threading.Thread(target=events.emit, args=("a",)) for _ in range(2))
    assert len(seen) == 1


def test_threads_emit_while_other_threads_attach_and_detach_sinks():
    received = RecordingSink()
    start = threading.Barrier(10)
    failures: list[BaseException] = []
    short_lived: list[int] = []

    def fail(name, fields):
        raise OSError("full")

    def run(function):
        try:
            start.wait()
            for _ in range(300):
                function()
        except BaseException as e:
            failures.append(e)

    def attach_and_detach():
        with limpet.attach(lambda name, fields: short_lived.append(1)):
            events.emit("mine")

    with warnings.catch_warnings(record=True) as seen, limpet.attach(received):
        warnings.simplefilter("always")
        limpet.attach(fail)
        functions = [lambda: events.emit("a", x=1)] * 8 + [attach_and_detach] * 2
        run_threads(threading.Thread(target=run, args=(function,)) for function in functions)
    assert not failures
    assert [w.category for w in seen] == [SinkFailed]
    assert sum(name == "a" for name, _ in received) == 8 * 300
    assert len(short_lived) >= 600
    assert not events._attached


@pytest.mark.parametrize("background", [False, True])
def test_sink_that_fails_at_any_event_does_not_fail_the_save(background):
    recorded = RecordingSink()
    with limpet.attach(recorded):
        limpet.save(MemoryStore(), {"x": np.arange(10)}, step=1)
    assert len(recorded) == 2
    for at in range(len(recorded)):
        calls = iter(range(99))

        def sink(name, fields, at=at, calls=calls):
            if next(calls) == at:
                raise OSError("full")

        save = limpet.save_async if background else limpet.save
        with warnings.catch_warnings(record=True) as seen, limpet.attach(sink):
            warnings.simplefilter("always")
            result = save(MemoryStore(), {"x": np.arange(10)}, step=1)
            snapshot = result.wait() if isinstance(result, limpet.Pending) else result
        assert snapshot.verify().ok
        assert [w.category for w in seen] == [SinkFailed]
