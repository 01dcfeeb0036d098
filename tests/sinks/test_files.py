"""Lines of JSON, and records of logging."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from pathlib import Path

import pytest

from holdfast import sinks
from holdfast.sinks import wording
from tests.sinks.sample_events import EVENTS, NO_SPACE, SAVED, read_json_lines


def test_records_of_the_standard_library(caplog: pytest.LogCaptureFixture) -> None:
    sink = sinks.Logging("my.log")
    with caplog.at_level(logging.DEBUG, "my.log"):
        for name, fields in EVENTS.items():
            sink(name, fields)
    levels = {r.event: r.levelname for r in caplog.records}
    assert levels == {
        "saved": "INFO",
        "save_failed": "ERROR",
        "save_skipped": "WARNING",
        "save_waited": "INFO",
        "began": "INFO",
        "stopped": "INFO",
        "left_unsaved": "WARNING",
        "resumed": "INFO",
        "skipped": "WARNING",
        "deleted": "INFO",
        "pin_left": "WARNING",
        "read_alone": "WARNING",
        "request_unseen": "WARNING",
        "not_agreed": "WARNING",
        "ranks_awaited": "WARNING",
        "structure_changed": "INFO",
    }
    first = caplog.records[0]
    assert first.getMessage() == (
        "saved step 1300: 1.31 GiB in 2.31 s, 581 MiB/s, blocked 12.3 ms, "
        "loss 0.2512, accuracy 0.91"
    )
    assert first.fields == SAVED
    assert wording.describe_event("saved", {"step": 1}) == "saved step 1"
    [skipped] = [r.getMessage() for r in caplog.records if r.event == "skipped"]
    assert skipped == (
        "skipped version_1250: NoSpace: No space for shard-0. Expected 4096 bytes, found 1024."
    )


def test_an_event_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sink = sinks.JsonLines("a/b/events.jsonl", clock=lambda: 1.5)
    monkeypatch.chdir("/")
    sink(
        "skipped",
        {"version": "version_1", "error": NO_SPACE, "time": 7, "\u5dee\udcff": float("nan")},
    )
    path = tmp_path / "a/b/events.jsonl"
    assert read_json_lines(path) == [
        {
            "time": "1970-01-01T00:00:01.500+00:00",
            "event": "skipped",
            "version": "version_1",
            "error": f"NoSpace: {NO_SPACE}",
            "\u5dee\udcff": "nan",
        }
    ]
    assert path.read_bytes().isascii()
    path.rename(tmp_path / "old")
    sink("b", {})
    sinks.JsonLines(path)("c", {})
    assert [told["event"] for told in read_json_lines(path)] == ["b", "c"]


def test_a_line_that_was_cut_short_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n{"event": "b')
    sinks.JsonLines(path)("c", {})
    first, second, third = path.read_bytes().splitlines()
    assert json.loads(first)["event"] == "a"
    assert second == b'{"event": "b'
    assert json.loads(third)["event"] == "c"


def test_eight_threads_and_two_sinks_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    both = [sinks.JsonLines(path), sinks.JsonLines(path)]

    def run(thread: int) -> None:
        for n in range(50):
            both[n % 2]("a", {"thread": thread, "n": n, "filler": "x" * 10_000})

    threads = [threading.Thread(target=run, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [(t["thread"], t["n"]) for t in read_json_lines(path)]
    assert sorted(told) == [(t, n) for t in range(8) for n in range(50)]


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sinks.JsonLines(tmp_path / "events.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:7]))
    sink("a", {"x": 1})
    assert read_json_lines(tmp_path / "events.jsonl")[0]["x"] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_a_full_disk_is_told_by_the_file_s_name() -> None:
    sink = sinks.JsonLines("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        sink("a", {})
    assert not [f for f in os.listdir("/proc/self/fd") if _target(f) == "/dev/full"]


def _target(file: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""


def test_a_file_that_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "events.jsonl", tmp_path):
        with pytest.raises(OSError, match=re.escape(str(tmp_path))):
            sinks.JsonLines(path)
