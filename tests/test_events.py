"""The one call of telemetry: sinks come, go and fail at any moment, and cost no save."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import events
from holdfast.errors import HoldfastError, SinkFailed
from holdfast.storage.memory import MemoryStore

ROOT = Path(holdfast.__file__).parent
TABLE = re.compile(r"^\| `(\w+)` \| .* \| (.*) \|$", re.MULTILINE)


@pytest.fixture(autouse=True)
def alone():
    """No sink is left attached by another test, nor by this one."""
    assert not events._attached
    yield
    events._attached.clear()


def documented() -> dict[str, set[str]]:
    text = (ROOT.parents[1] / "docs" / "events.md").read_text()
    return {m[1]: set(re.findall(r"`(\w+)`", m[2])) for m in TABLE.finditer(text)}


def emitted() -> list[tuple[str, set[str], str]]:
    """Every call of ``emit`` in the sources: event, fields, where."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "emit":
                event, where = node.args[0], f"{file.name}:{node.lineno}"
                assert isinstance(event, ast.Constant), f"{where}: no plain name"
                assert all(k.arg for k in node.keywords), f"{where}: ** hides the fields"
                found.append((event.value, {str(k.arg) for k in node.keywords}, where))
    return found


def test_the_table_of_events_is_what_the_code_emits() -> None:
    table = documented()
    for event, fields, where in emitted():
        assert table.get(event) == fields, f"docs/events.md tells another {event} than {where}"
    assert set(table) == {event for event, _, _ in emitted()}


# -- coming and going --------------------------------------------------------------------------


class Told(list):  # type: ignore[type-arg]
    """A sink that keeps what it is told."""

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        self.append((name, fields))


def test_a_sink_is_told_while_its_context_lasts() -> None:
    told = Told()
    events.emit("before")
    with holdfast.attach(told):
        events.emit("within", step=1)
    events.emit("after")
    assert told == [("within", {"step": 1})]


def test_what_is_no_sink_is_refused_at_once() -> None:
    wrong: list[tuple[Any, str]] = [
        (holdfast.sinks.Terminal, "Terminal is not a sink"),
        (Told, "found a class. Call it: attach(Told())."),
        (None, "None is not a sink. Expected a callable: sink(name, fields)."),
        ("events.jsonl", "'events.jsonl' is not a sink"),
    ]
    for given, words in wrong:
        with pytest.raises(HoldfastError) as e:
            holdfast.attach(given)
        assert words in str(e.value)
    assert not events._attached


def test_close_detaches_as_well_and_twice_is_once() -> None:
    told = Told()
    attached = holdfast.attach(told)
    events.emit("a")
    attached.close()
    attached.close()
    events.emit("b")
    assert [name for name, _ in told] == ["a"]


def test_a_sink_that_is_attached_twice_is_told_twice_until_one_leaves() -> None:
    told = Told()
    with holdfast.attach(told):
        with holdfast.attach(told):
            events.emit("a")
        events.emit("b")
    assert [name for name, _ in told] == ["a", "a", "b"]


def test_the_block_s_own_error_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), holdfast.attach(Told()):
        raise ZeroDivisionError
    assert not events._attached


def test_each_sink_has_its_own_fields() -> None:
    told = Told()
    with holdfast.attach(lambda name, fields: fields.clear()), holdfast.attach(told):
        events.emit("a", step=1)
    assert told == [("a", {"step": 1})]


def test_a_sink_may_attach_another_and_detach_itself() -> None:
    told = Told()

    def first(name: str, fields: dict[str, Any]) -> None:
        itself.close()
        holdfast.attach(told)

    itself = holdfast.attach(first)
    events.emit("a")
    events.emit("b")
    assert [name for name, _ in told] == ["b"]


# -- failing -----------------------------------------------------------------------------------


def broken(name: str, fields: dict[str, Any]) -> None:
    raise OSError(28, "No space left on device", "events.jsonl")


def test_a_sink_that_raises_is_detached_and_told_once_and_the_others_go_on() -> None:
    told = Told()
    with holdfast.attach(broken), holdfast.attach(told):
        with pytest.warns(SinkFailed, match=r"broken was detached.*'a' \(OSError.*No space") as seen:
            events.emit("a")
        events.emit("b")
    assert [name for name, _ in told] == ["a", "b"]
    # it shows the sink's own line
    assert [(w.filename, w.lineno) for w in seen] == [
        (__file__, broken.__code__.co_firstlineno + 1)
    ]


def test_a_sink_that_fails_a_second_time_is_told_again() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            with holdfast.attach(broken):
                events.emit("a")
    assert len(seen) == 2


@pytest.mark.parametrize("sink", [[].append, type("Odd", (), {"__call__": None})()])
def test_what_is_no_sink_is_told_too(sink: Any) -> None:
    with holdfast.attach(sink), pytest.warns(SinkFailed, match="TypeError"):
        events.emit("a")


def test_where_warnings_are_errors_the_hook_of_threads_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooked: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with holdfast.attach(broken):
            events.emit("a")
    (args,) = hooked
    assert args.exc_type is SinkFailed
    assert isinstance(args.exc_value.__cause__, OSError)


def test_nothing_is_raised_where_it_cannot_even_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: object, **kwargs: object) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(warnings, "showwarning", closed)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with holdfast.attach(broken):
            events.emit("a")
            assert not events._attached


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_without_words_is_told() -> None:
    def sink(name: str, fields: dict[str, Any]) -> None:
        raise Unsayable

    with holdfast.attach(sink), pytest.warns(SinkFailed, match="Unsayable"):
        events.emit("a")


def test_ctrl_c_comes_through_and_the_sink_stays() -> None:
    calls: list[str] = []

    def interrupted(name: str, fields: dict[str, Any]) -> None:
        calls.append(name)
        raise KeyboardInterrupt

    with holdfast.attach(interrupted):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                events.emit("a")
    assert calls == ["a", "a"]


def test_a_sink_that_fails_on_two_threads_at_once_is_told_once() -> None:
    both = threading.Barrier(2)

    def sink(name: str, fields: dict[str, Any]) -> None:
        both.wait(10)
        raise OSError("full")

    with warnings.catch_warnings(record=True) as seen, holdfast.attach(sink):
        warnings.simplefilter("always")
        threads = [threading.Thread(target=events.emit, args=("a",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 1


def test_eight_threads_emit_while_sinks_come_and_go() -> None:
    told = Told()
    start = threading.Barrier(10)
    failures: list[BaseException] = []
    shaky: list[int] = []

    def failing(name: str, fields: dict[str, Any]) -> None:
        raise OSError("full")

    def run(body: Any) -> None:
        try:
            start.wait()
            for _ in range(300):
                body()
        except BaseException as e:
            failures.append(e)

    def come_and_go() -> None:
        with holdfast.attach(lambda name, fields: shaky.append(1)):
            events.emit("mine")

    with warnings.catch_warnings(record=True) as seen, holdfast.attach(told):
        warnings.simplefilter("always")
        holdfast.attach(failing)
        bodies = [lambda: events.emit("a", x=1)] * 8 + [come_and_go] * 2
        threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert [w.category for w in seen] == [SinkFailed]
    assert sum(name == "a" for name, _ in told) == 8 * 300
    assert len(shaky) >= 600
    assert not events._attached


@pytest.mark.parametrize("background", [False, True])
def test_a_sink_that_fails_at_any_event_costs_no_save(background: bool) -> None:
    names = Told()
    with holdfast.attach(names):
        holdfast.save(MemoryStore(), {"x": np.arange(10)}, step=1)
    assert len(names) == 2
    for at in range(len(names)):
        calls = iter(range(99))

        def sink(name: str, fields: dict[str, Any], at: int = at, calls: Any = calls) -> None:
            if next(calls) == at:
                raise OSError("full")

        save = holdfast.save_async if background else holdfast.save
        with warnings.catch_warnings(record=True) as seen, holdfast.attach(sink):
            warnings.simplefilter("always")
            made = save(MemoryStore(), {"x": np.arange(10)}, step=1)
            snapshot = made.wait() if isinstance(made, holdfast.Pending) else made
        assert snapshot.verify().ok
        assert [w.category for w in seen] == [SinkFailed]
