"""The sinks for JSON lines and for logging."""

import json
import logging
import os
import re
import threading

import pytest

from limpet import sinks
from limpet.sinks import wording
from tests.sinks.sample_events import EVENTS, NO_SPACE, SAVED, read_json_lines
from tests.waiting import run_threads


def test_logging_records(caplog):
    sink = sinks.Logging("my.log")
    with caplog.at_level(logging.DEBUG, "my.log"):
        for name, fields in EVENTS.items():
            sink(name, fields)
    levels = {r.event: r.levelname for r in caplog.records}
    assert levels == {
        "saved": "INFO", "save_failed": "ERROR", "save_waited": "INFO",
        "began": "INFO", "stopped": "INFO", "finished": "INFO", "resume_checked": "INFO",
        "resume_differs": "WARNING", "options_replaced": "WARNING", "left_unsaved": "WARNING",
        "config_changed": "INFO",
        "taken_over": "INFO", "resumed": "INFO", "skipped": "WARNING", "deleted": "INFO",
        "pin_left": "WARNING", "read_again": "WARNING", "waiting": "WARNING",
        "worker_lost": "WARNING", "server_lost": "WARNING",
        "read_alone": "WARNING", "request_unseen": "WARNING", "not_agreed": "WARNING",
        "ranks_awaited": "WARNING", "notice": "WARNING", "preempted": "WARNING",
        "metrics_unwritten": "WARNING",
        "notice_source_failed": "WARNING", "platform_detected": "INFO",
    }  # fmt: skip
    first = caplog.records[0]
    assert first.getMessage() == (
        "saved step 1300: 1.31 GiB in 2.31 s, 581 MiB/s, blocked 12.3 ms, "
        "loss 0.2512, accuracy 0.91"
    )
    assert first.fields == SAVED
    assert wording.describe_event("saved", {"step": 1}) == "saved step 1"
    sink("platform_detected", {"sources": []})  # usual: no record
    assert len(caplog.records) == len(levels)
    [skipped] = [r.getMessage() for r in caplog.records if r.event == "skipped"]
    assert skipped == (
        "skipped version_1250: NoSpace: No space for shard-0. Expected 4096 bytes, found 1024."
    )


def test_each_event_is_one_line(tmp_path, monkeypatch):
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
    assert [line["event"] for line in read_json_lines(path)] == ["b", "c"]


def test_an_incomplete_last_line_is_terminated(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n{"event": "b')
    sinks.JsonLines(path)("c", {})
    first, second, third = path.read_bytes().splitlines()
    assert json.loads(first)["event"] == "a"
    assert second == b'{"event": "b'
    assert json.loads(third)["event"] == "c"


def test_threads_and_sinks_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    two_sinks = [sinks.JsonLines(path), sinks.JsonLines(path)]

    def run(thread):
        for n in range(50):
            two_sinks[n % 2]("a", {"thread": thread, "n": n, "filler": "x" * 10_000})

    run_threads(threading.Thread(target=run, args=(t,)) for t in range(8))
    written = [(t["thread"], t["n"]) for t in read_json_lines(path)]
    assert sorted(written) == [(t, n) for t in range(8) for n in range(50)]


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    sink = sinks.JsonLines(tmp_path / "events.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:7]))
    sink("a", {"x": 1})
    assert read_json_lines(tmp_path / "events.jsonl")[0]["x"] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full exists only on Linux")
def test_the_error_for_a_full_disk_names_the_file():
    sink = sinks.JsonLines("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        sink("a", {})
    assert not [f for f in os.listdir("/proc/self/fd") if _link_target(f) == "/dev/full"]


def _link_target(file):
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""


def test_an_invalid_path_is_an_error_at_once(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "events.jsonl", tmp_path):
        with pytest.raises(OSError, match=re.escape(str(tmp_path))):
            sinks.JsonLines(path)
