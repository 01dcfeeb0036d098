"""The sink for terminals."""

import re
import sys
import threading
import warnings
from typing import Any

import pytest
from rich.cells import cell_len

import limpet
from limpet import events, sinks
from limpet.errors import SinkFailed
from tests.sinks.sample_events import EVENTS, NO_SPACE, SAVED, RecordingStream
from tests.waiting import run_threads

LINE = (
    "saved step  1300  1.31 GiB in  2.31 s  blocked 12.3 ms   581 MiB/s  loss 0.2512, accuracy 0.91"
)


def lines(*sample, **options):
    """Return the lines that a terminal shows for these events. Each write is one line."""
    stream = RecordingStream(**options)
    sink = sinks.Terminal(stream)
    for name, fields in sample:
        sink(name, fields)
    assert all(w.endswith("\n") and w.count("\n") == 1 for w in stream.writes)
    assert stream.flushes == len(stream.writes)
    return [w[:-1] for w in stream.writes]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_each_save_is_one_line():
    more = {**SAVED, "step": 1400, "referred": 5 << 30, "reason": "request", "metrics": {}}
    assert lines(("saved", SAVED), ("saved", more)) == [
        LINE,
        "saved step  1400  1.31 GiB in  2.31 s  blocked 12.3 ms   581 MiB/s  + 5.00 GiB referred"
        "  request",
    ]


def test_only_rank_0_shows_events_of_all_ranks(monkeypatch):
    assert lines(("saved", SAVED)) == [LINE]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    for rank, shown in enumerate([[LINE], [], []]):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        assert lines(("saved", SAVED), ("deleted", EVENTS["deleted"])) == shown


def test_the_first_rank_that_reports_a_wait_shows_it(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    event = {"what": "the load of a", "ranks": [0, 1, 3], "count": 3}
    for first, shown in ((True, ["waited for ranks 0, 1, 3 in the load of a"]), (False, [])):
        assert lines(("ranks_awaited", {**event, "first": first})) == shown


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("save_failed", "FAILED to save step 1400: NoSpace: No space for shard-0. Expected 4096 "
                        "bytes, found 1024. Free space."),
        ("save_waited", "waited 1.20 s to save step 1400: another save was in progress"),
        ("began", "started a new training in runs/a: it has no version yet"),
        ("stopped", "stopped at step 1500: val_loss no longer improved, its best value was 0.2312"),
        ("resume_checked", "resumed exactly: 1.31 GiB as in runs/a/version_1200, compared in "
                           "210 ms"),
        ("resume_differs", "resumed with differences from runs/a/version_1200: scaler/scale, "
                           "tracker/values"),
        ("finished", "finished at step 1512 of runs/a: the newest version is of step 1500"),
        ("left_unsaved", "left the steps after 1500 up to 1512 unsaved"),
        ("taken_over", "closed an earlier Checkpointer of runs/a"),
        ("resumed", "resumed step 1200 from runs/a/version_1200: 64 samples per "
                    "step, was 128"),
        ("config_changed", "resumed with another config: lr 0.001 -> 0.0001, dropout 0.1 (new)"),
        ("options_replaced", "resumed the options of runs/a/version_1200. lr: the script has "
                             "0.0001, had 0.001; the version's 0.00042 is in use"),
        ("pin_left", "could not remove the pin pin-1.json: timeout"),
        ("waiting", "waiting for up to 4.83 min to write manifest.json in s3://b/runs/a: NoSpace: "
                    "No space for shard-0. Expected 4096 bytes, found 1024."),
        ("read_alone", "read runs/a/version_1200 without shared memory: rank 2 cannot map it"),
        ("request_unseen", "could not check runs/a for save requests or scores: timeout"),
        ("not_agreed", "could not agree on save 3, stop: Rank 2 has died"),
        ("notice", "received a notice of SIGTERM: the process must end in 29.8 s"),
        ("preempted", "left after step 1512 because of SIGTERM, with code 76, 3.10 s before the "
                      "deadline; the newest version is of step 1500: NoSpace: No space for "
                      "shard-0. Expected 4096 bytes, found 1024."),
        ("notice_source_failed", "could not watch the AWS metadata server for notices: timeout"),
        ("platform_detected", "watching the AWS metadata server, Slurm's time limit for notices"),
        ("ranks_awaited", "waited 31.2 s for ranks 3, 5 and 4 more in the save of version_5, and "
                          "keeps waiting for up to 10.0 min. Call it on all ranks"),
    ],
)  # fmt: skip
def test_each_other_event_is_one_line(name, line):
    assert lines((name, EVENTS[name])) == [line]
    assert lines(("staged", EVENTS["staged"]), ("unknown_event", {})) == []


@pytest.mark.parametrize(
    ("url", "step", "branch", "line"),
    [
        (
            "runs/a/version_1200.1",
            1200,
            2,
            "resumed step 1200 from runs/a/version_1200.1, branch 2",
        ),
        ("memory://a/version_0", 0, 0, "resumed step 0 from memory://a/version_0"),
        ("runs/a/version_80", 0, 0, "started at step 0 with state from runs/a/version_80"),
        ("runs/a/version_80", 8, 0, "started at step 8 with state from runs/a/version_80"),
        ("snap", 0, 0, "started at step 0 with state from snap"),
    ],
)
def test_a_resume_and_a_start_from_another_run_differ_in_words(url, step, branch, line):
    assert lines(("resumed", {"url": url, "step": step, "branch": branch})) == [line]


def test_only_noticeable_waits_are_shown():
    waits: list[dict[str, Any]] = [
        {"step": n, **more}
        for n, more in enumerate(
            ({"seconds": 0.0}, {"seconds": 0.0999}, {"seconds": 0.1}, {}, {"seconds": "x"})
        )
    ]
    assert lines(*(("save_waited", fields) for fields in waits)) == [
        "waited 100 ms to save step 2: another save was in progress",
        "waited to save step 3: another save was in progress",
        "waited to save step 4: another save was in progress",
    ]


def test_the_advice_for_a_skipped_version_is_omitted():
    (line,) = lines(("skipped", EVENTS["skipped"]))
    assert line == (
        "skipped version_1250: NoSpace: No space for shard-0. Expected 4096 bytes, found 1024."
    )
    (line,) = lines(("skipped", {"version": "version_1", "error": "as text"}))
    assert line == "skipped version_1: as text"


def test_the_line_of_the_next_save_names_deleted_versions():
    deletions = [("deleted", {"version": f"version_{n}.1"}) for n in range(5)]
    shown = lines(*deletions[:3], ("saved", SAVED), *deletions, ("saved", SAVED), ("saved", SAVED))
    assert shown == [f"{LINE}  deleted 0.1, 1.1, 2.1", f"{LINE}  deleted 5 versions", LINE]


def test_a_damaged_version_is_shown_once():
    other = {"version": "version_7", "error": NO_SPACE}
    sample = [("skipped", EVENTS["skipped"])] * 3 + [("skipped", other)]
    assert [x.partition(":")[0] for x in lines(*sample)] == [
        "skipped version_1250",
        "skipped version_7",
    ]


def test_control_characters_do_not_reach_the_terminal():
    metrics = {"loss\x1b[31m": 1.5, "a\nb": "\r\x07x", "n" * 5000: 1}
    for name, fields in EVENTS.items():
        odd = dict.fromkeys(fields, "\x1b]0;x\x07\n\x9b") | {"metrics": metrics}
        for line in lines(("deleted", odd), (name, odd), ("saved", odd)):
            assert line.isprintable()
            assert len(line) < 400


def test_only_the_first_of_many_metrics_are_shown():
    (line,) = lines(("saved", {**SAVED, "metrics": {f"m{n}": n / 3 for n in range(100_000)}}))
    assert line.endswith("  m0 0, m1 0.3333, m2 0.6667, m3 1, 99996 more")


ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("width", [20, 40, 57, 60, 75, 80, 81, 100, 132, 200])
def test_the_line_of_a_save_fits_the_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    wide = {**SAVED, "metrics": {"\u640d\u5931": 0.25, "\u7cbe\u5ea6" * 9: 0.5}, "referred": 1}
    sample = [("deleted", EVENTS["deleted"]), ("saved", wide), ("saved", SAVED)]
    for line in lines(*sample, is_terminal=True):
        shown = ANSI.sub("", line)
        assert shown.startswith(LINE[: min(width, 60) - 1])
        assert cell_len(shown) <= width
    (failed,) = lines(("save_failed", EVENTS["save_failed"]), is_terminal=True)
    assert "Free space." in failed  # a failure is never shortened
    (piped,) = lines(("saved", SAVED))
    assert piped == LINE


def test_color_is_used_only_on_terminals_that_support_it(monkeypatch):
    assert "\x1b[32msaved" in lines(("saved", SAVED), is_terminal=True)[0]
    assert "\x1b[1;31m" in lines(("save_failed", EVENTS["save_failed"]), is_terminal=True)[0]
    assert "\x1b" not in lines(("saved", SAVED))[0]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in lines(("saved", SAVED), is_terminal=True)[0]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in lines(("saved", SAVED), is_terminal=True)[0]


def test_an_ascii_terminal_shows_other_characters_escaped():
    (line,) = lines(("saved", {**SAVED, "metrics": {"\u640d": 0.5, "\udcff": 1}}), encoding="ascii")
    assert line.endswith("  \\u640d 0.5, \\udcff 1")


def test_the_current_stderr_is_used(monkeypatch):
    sink = sinks.Terminal()
    for _ in range(2):
        stream = RecordingStream()
        monkeypatch.setattr(sys, "stderr", stream)
        sink("saved", SAVED)
        assert stream.getvalue() == f"limpet: {LINE}\n"
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    sink("saved", SAVED)


class BrokenStream(RecordingStream):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_stream_that_fails_detaches_only_its_sink():
    closed = RecordingStream()
    closed.close()
    for stream in (closed, BrokenStream()):
        with limpet.attach(sinks.Terminal(stream)), pytest.warns(SinkFailed, match="Terminal"):
            events.emit("saved", **SAVED)


def screen(written):
    """Return what a terminal shows: ``\\r`` goes back, and new text replaces old."""
    shown = []
    for line in written.split("\n"):
        row = ""
        for part in line.split("\r"):
            row = part + row[len(part) :]
        shown.append(row.rstrip())
    return shown


def test_a_tqdm_bar_stays_intact(monkeypatch):
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    stream = RecordingStream()
    monkeypatch.setattr(sys, "stderr", stream)
    with tqdm(total=3, desc="training", mininterval=0, ncols=60) as bar:
        for _ in range(3):
            bar.update()
            sinks.Terminal()("saved", {**SAVED, "metrics": {}})
            assert screen(stream.getvalue())[-1].startswith("training:")
    shown = screen(stream.getvalue())
    line = f"limpet: {LINE.rpartition('  loss')[0]}"
    assert [x for x in shown if "saved" in x] == [line] * 3
    assert sum("training" in x for x in shown) == 1


def test_threads_do_not_mix_their_lines():
    stream = RecordingStream()
    with warnings.catch_warnings(), limpet.attach(sinks.Terminal(stream)):
        warnings.simplefilter("error")

        def run():
            for _ in range(20):
                events.emit("deleted", version="version_1")
                events.emit("saved", **SAVED)

        run_threads(threading.Thread(target=run) for _ in range(8))
    assert len(stream.writes) == 160
    assert all(w.startswith(LINE) for w in stream.writes)
    deleted = [re.search(r"deleted (.*)\n", w) for w in stream.writes]
    counts = [
        int(m[1].split()[0]) if "versions" in m[1] else len(m[1].split(",")) for m in deleted if m
    ]
    assert sum(counts) == 160
