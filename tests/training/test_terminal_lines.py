"""What a user sees on a terminal, without a sink."""

import gc
import os
import pty
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import limpet
from limpet import events
from limpet.errors import LimpetError
from limpet.settings import read_settings
from limpet.sinks.terminal import DefaultTerminal, Terminal, default_terminal
from tests.sinks.sample_events import EVENTS, SAVED, RecordingStream
from tests.waiting import check_at_once

TRAINING = """
import os, signal, sys
import limpet

def train(run, steps, failing_step=None, **options):
    state = {"weights": [0.0] * 4}
    save = limpet.EverySteps(2) | limpet.AtEnd()
    with limpet.Checkpointer(run, state, save=save, **options) as ckpt:
        ckpt.resume()
        while ckpt.current_step < steps:
            ckpt.step({"loss": 0.5})
            if ckpt.current_step == failing_step:
                raise ValueError("boom")
"""


def run_on_terminal(program, folder, *launcher, **variables):
    """Run a program with a pseudo terminal as stderr. Return its exit code and the lines."""
    (folder / "train.py").write_text(TRAINING + program)
    master, slave = pty.openpty()
    variables = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "xterm", **variables}
    process = subprocess.Popen(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        stderr=slave,
        env={**os.environ, **variables},
    )
    os.close(slave)
    output = b""
    try:
        while block := os.read(master, 65536):
            output += block
    except OSError:  # Linux: the last process has closed the terminal
        pass
    finally:
        os.close(master)
    return process.wait(60), output.decode().splitlines()


def without_figures(line):
    return re.sub(r", compared in .*", "", re.sub(r"^(saved step) +(\d+).*", r"\1 \2", line))


def test_a_training_shows_one_line_for_each_event(tmp_path):
    code, lines = run_on_terminal("train('a', 5)\ntrain('a', 8)\ntrain('b', 1)", tmp_path)
    assert code == 0
    assert [without_figures(line) for line in lines] == [
        "started a new training in a: it has no version yet",
        "saved step 2",  # the next one within a minute is not shown
        "finished: saved step 5 to a",
        "resumed step 5 from a/version_5",
        "saved step 6",
        "finished: saved step 8 to a",
        "started a new training in b: it has no version yet",
        "saved step 1",
        "finished: saved step 1 to b",
    ]


def test_the_lines_draw_no_random_numbers(tmp_path):
    """rich draws one when it is imported."""
    program = (
        "import random\n"
        "state = random.getstate()\n"
        "train('a', 3)\n"
        "train('b', 3)\n"
        "limpet.sinks.Terminal(sys.stdout)('saved', {'step': 1})\n"
        "assert 'rich.style' in sys.modules\n"
        "assert random.getstate() == state\n"
    )
    assert run_on_terminal(program, tmp_path)[0] == 0


def run_without_terminal(program, folder, **variables):
    """Run a program with a pipe as stderr. Return the lines of stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINING + program],
        cwd=folder,
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
        env={**os.environ, **variables},
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_without_a_terminal_the_begin_and_the_end_are_shown(tmp_path):
    """And rich, which draws a random number, is not imported."""
    program = """
train('a', 3)
train('a', 5)
save = limpet.EverySteps(2)
with limpet.Checkpointer('a', {"weights": [0.0] * 4}, save=save, at_end=False) as ckpt:
    ckpt.resume()
    ckpt.step()
    ckpt.step()
with limpet.Checkpointer('b', {"n": 1}, save=limpet.Never()) as ckpt:
    ckpt.resume()
    ckpt.step()
print('rich' in sys.modules)
"""
    out, lines = run_without_terminal(program, tmp_path)
    assert out == ["False"]
    assert lines == [
        "limpet: started a new training in a: it has no version yet",
        "limpet: finished: saved step 3 to a",
        "limpet: resumed step 3 from a/version_3",
        "limpet: finished: saved step 5 to a",
        "limpet: resumed step 5 from a/version_5",
        "limpet: finished at step 7 of a: the newest version is of step 6",
        "limpet: started a new training in b: it has no version yet",
        "limpet: finished at step 1 of b: nothing is saved",
    ]


def test_without_a_terminal_what_a_user_did_not_expect_is_shown(tmp_path):
    """A start with nothing left to do, an early stop, a metric that no version has, a lenient
    resume, and the end of a training that only added metrics."""
    program = """
train('a', 3)
train('a', 3)
stop = limpet.StopWhen("loss", patience=1)
keep = limpet.KeepBest(1, "vall") | limpet.KeepLast(1)
for _ in range(2):
    with limpet.Checkpointer('b', {"n": 1}, save=limpet.EverySteps(1), stop=stop) as ckpt:
        for _ in ckpt.steps(100):
            ckpt.step({"loss": 0.5})
with limpet.Checkpointer('c', {"n": 1}, save=limpet.EverySteps(1), keep=keep) as ckpt:
    for _ in ckpt.steps(4):
        ckpt.step({"val": 0.5})
assert [s.step for s in limpet.Run('c').snapshots()] == [1, 2, 3, 4]
for missing in ("keep", ["m/**"]):
    with limpet.Checkpointer('c', {"n": 1, "m": {"x": 2, "y": 3}}, save=limpet.Never()) as ckpt:
        ckpt.resume(missing=missing)
        ckpt.metrics({"late": 1.0})
"""
    _, lines = run_without_terminal(program, tmp_path)
    policy = "StopWhen(metric='loss', patience=1, mode='min', min_delta=0.0)"
    lenient = [
        "limpet: loaded 1 values of c/version_4; kept 2 missing in the snapshot: m (2 leaves)",
        "limpet: resumed step 4 from c/version_4",
        "limpet: finished without a new step: step 4 is the newest version of c",
    ]
    assert lines == [
        "limpet: started a new training in a: it has no version yet",
        "limpet: finished: saved step 3 to a",
        "limpet: resumed step 3 from a/version_3",
        "limpet: finished without a new step: step 3 is the newest version of a",
        "limpet: started a new training in b: it has no version yet",
        f"limpet: stopped by {policy}: saved step 2 to b",
        "limpet: resumed step 2 from b/version_2",
        f"limpet: stopped by {policy} without a new step: step 2 is the newest version of b",
        "limpet: started a new training in c: it has no version yet",
        "limpet: no version has vall, which a policy uses; they have val. Save the steps that have"
        " it, such as save=... | limpet.EveryEpoch(), or evaluate them",
        "limpet: finished: saved step 4 to c",
        *lenient,
        *lenient,
    ]


@pytest.mark.slow
def test_any_stderr(tmp_path):
    program = """
class Plain:  # as programs replace it
    def write(self, text): print("plain", text, end="")
    def flush(self): pass

train('a', 1)
real, sys.stderr = sys.stderr, Plain()
train('a', 2)
sys.stderr = None
train('a', 3)
sys.stderr = open(os.devnull, "w")
sys.stderr.close()
train('a', 4)
sys.stderr = real
train('a', 5, quiet=True)
with limpet.attach(lambda name, fields: None):
    train('a', 6)
train('a', 7)
"""
    out, lines = run_without_terminal(program, tmp_path)
    assert out == [
        "plain limpet: resumed step 1 from a/version_1",
        "plain limpet: finished: saved step 2 to a",
    ]
    assert lines == [
        "limpet: started a new training in a: it has no version yet",
        "limpet: finished: saved step 1 to a",
        "limpet: resumed step 6 from a/version_6",
        "limpet: finished: saved step 7 to a",
    ]
    assert run_without_terminal("train('a', 8)", tmp_path, LIMPET_QUIET="1") == ([], [])


def test_captured_output(capsys, tmp_path):
    with limpet.Checkpointer(tmp_path / "a", {"n": 1}, save=limpet.AtEnd()) as ckpt:
        for _ in ckpt.steps(2):
            ckpt.step()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("limpet: started a new training in ")
    assert re.fullmatch("limpet: finished: saved step 2 to .*/a", last)


def test_a_training_that_fails_says_so(tmp_path):
    code, lines = run_on_terminal("train('a', 5, failing_step=3)", tmp_path)
    assert code == 1
    end = "ended after step 3 of a: the newest version is of step 2. The cause is ValueError: boom"
    assert end in lines


def test_a_notice_and_the_exit_are_one_line_each(tmp_path):
    program = (
        "with limpet.Checkpointer('a', {'x': 1}) as ckpt:\n"
        "    ckpt.resume()\n"
        "    ckpt.step()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while True: ckpt.step()\n"
    )
    code, lines = run_on_terminal(program, tmp_path)
    assert code == 75
    starts = [re.split(r"[\d:]", line)[0].strip() for line in lines]
    assert starts == [
        "started a new training in a",
        "received a notice of SIGTERM",
        "saved step",
        "limpet",
    ], lines


@pytest.mark.parametrize(
    ("program", "variables"),
    [
        ("train('a', 5, quiet=True)", {}),
        ("train('a', 5)", {"LIMPET_QUIET": "1"}),
        ("limpet.attach(lambda name, fields: None)\ntrain('a', 5)", {}),
    ],
)
def test_the_lines_can_be_turned_off(program, variables, tmp_path):
    assert run_on_terminal(program, tmp_path, **variables) == (0, [])


def replace_stderr(monkeypatch):
    """Make stderr a terminal. Call it in the test: pytest replaces stderr after the fixtures."""
    stream = RecordingStream(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    return stream


def first_words(stream):
    return [" ".join(line.split()[:3]) for line in stream.writes]


def test_saves_of_a_run_are_shown_at_most_once_per_minute(monkeypatch):
    stream = replace_stderr(monkeypatch)
    now = [0.0]
    terminal = DefaultTerminal(clock=lambda: now[0])
    close = terminal.open("runs/a"), terminal.open("runs/b")
    for second in range(0, 130, 10):
        now[0] = float(second)
        events.emit("saved", **{**SAVED, "step": second})
        if second < 20:  # each run has its own minute, and a failure is always shown
            events.emit("saved", **{**SAVED, "step": second + 1, "run": "runs/b"})
            events.emit("save_failed", run="runs/a", step=second, error="x")
    for c in close:
        c()
    assert first_words(stream) == [
        "saved step 0", "saved step 1", "FAILED to save", "FAILED to save", "saved step 60",
        "saved step 120",
    ]  # fmt: skip


def test_lines_stop_with_the_last_training_and_never_show_a_quiet_one(monkeypatch):
    monkeypatch.setattr(events, "_defaults", {})  # trainings that other tests have left
    stream = replace_stderr(monkeypatch)
    terminal = DefaultTerminal()
    first, second = terminal.open("runs/a"), terminal.open("runs/a")
    events.emit("began", run="runs/quiet")
    first()
    events.emit("began", run="runs/a")
    with limpet.attach(lambda name, fields: None):
        events.emit("began", run="runs/a")
    events.emit("request_unseen", **EVENTS["request_unseen"])  # names no run
    second()
    events.emit("began", run="runs/a")
    assert first_words(stream) == ["started a new", "could not check"]


def test_a_discarded_checkpointer_shows_no_more_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(events, "_defaults", {})  # trainings that other tests have left
    terminal = DefaultTerminal()
    monkeypatch.setattr("limpet.training.checkpointer.default_terminal", terminal)
    ckpt: Any = limpet.Checkpointer(tmp_path, {"x": 1})
    assert terminal._runs
    del ckpt
    gc.collect()
    assert not terminal._runs


def test_a_closed_stderr_is_no_terminal(monkeypatch):
    stream = replace_stderr(monkeypatch)
    terminal = DefaultTerminal()
    close = terminal.open("runs/a")
    stream.close()
    events.emit("began", run="runs/a")
    monkeypatch.setattr(sys, "stderr", None)
    events.emit("began", run="runs/a")
    close()
    assert stream.writes == []


@pytest.mark.parametrize("value", ["", "yes", "2"])
def test_an_invalid_setting_is_an_error(value):
    with pytest.raises(LimpetError, match="LIMPET_QUIET"):
        read_settings({"LIMPET_QUIET": value})
    with pytest.raises(LimpetError, match="quiet"):
        limpet.Checkpointer("memory://a/run", {"x": 1}, quiet=1)


def test_runs_that_threads_open_and_close_at_once(capsys):
    """Each line is printed once, while the run is open, and not afterward."""
    terminal, names = DefaultTerminal(), ["a", "b"] * 2
    barrier = threading.Barrier(len(names))

    def open_and_close(name):
        barrier.wait()
        for number in range(3000):
            terminal.open(f"{name}{number % 3}")()
        opened.append(terminal.open(name))

    opened = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        check_at_once(open_and_close, [(name,) for name in names])
    finally:
        sys.setswitchinterval(interval)
        events.set_default(default_terminal)
    for close in opened:
        terminal("began", {"run": "a"})
        terminal("began", {"run": "b"})
        close()
    terminal("began", {"run": "a"})
    terminal("began", {"run": "b"})
    lines = capsys.readouterr().err.splitlines()
    assert 6 <= len(lines) <= 8
    assert all(line.startswith("limpet: started a new training in ") for line in lines)


def test_threads_whose_first_lines_come_at_once_share_one_terminal(monkeypatch):
    """Two would each show what is to be shown once, such as a skipped version."""
    made: list[Terminal] = []

    def make_slowly():
        made.append(Terminal(RecordingStream()))
        time.sleep(0.02)
        return made[-1]

    terminal = DefaultTerminal()
    close = terminal.open("a")
    events.set_default(default_terminal)
    monkeypatch.setattr("limpet.sinks.terminal.Terminal", make_slowly)
    monkeypatch.setattr("limpet.sinks.terminal._is_terminal", lambda stream: stream is sys.stderr)
    fields = {"run": "a", "version": "version_1", "error": "damaged"}
    check_at_once(terminal, [("skipped", fields)] * 4)
    close()
    assert [each._stream.getvalue() for each in made] == ["skipped version_1: damaged\n"]
