"""``PreemptionGuard`` with a function that saves, in a program without a Checkpointer. The numbers
are those of BEHAVIOURS.md, section A."""

import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

import limpet
from limpet.errors import LimpetError, Preempted
from limpet.notices.exit_status import read_records
from limpet.preemption import Preemption, PreemptionGuard
from limpet.sinks.wording import describe_event
from limpet.storage.memory import MemoryStore
from limpet.training import response
from tests.notices.announced import Announced
from tests.waiting import wait_until, wait_until_no_thread


class Program:
    """A program that saves by itself: a number that each call of ``train_step`` increments."""

    def __init__(self, saved=None, **settings):
        self.source, self.saves = Announced(), list[tuple[object, object]]()
        self.number, calls = (0, 0) if saved is None else saved
        self.saved = saved
        preemption = Preemption(notices=[self.source], **settings)
        self.guard = PreemptionGuard(save_fn=self.save, preemption=preemption)
        self.guard.total_run_calls = calls

    def save(self, *args, **kwargs):
        self.saves.append((args, kwargs))
        self.saved = self.number, self.guard.total_run_calls

    def train_step(self, by=1):
        self.number += by
        return self.number

    def announce(self, seconds=None, **options):
        self.source.announce(seconds, **options)
        wait_until(self.guard._response.agreement._proposals.qsize)

    def make_call(self, form):
        if form == "run":
            assert self.guard.run(self.train_step, by=1) == self.number
        elif form == "save_if_preempted":
            self.train_step()
            self.guard.save_if_preempted(self.number, reason="a notice")
        else:
            with self.guard.watch_scope():
                self.make_call(form.removeprefix("watch_scope "))


FORMS = ["run", "save_if_preempted", "watch_scope run", "watch_scope save_if_preempted"]


@pytest.mark.parametrize("form", FORMS)
def test_a_program_without_a_checkpointer_saves_by_itself_and_continues(form, capsys):
    """3, 9, 10, 11, 12, 13, 17, 28, 30: in one process, one life after the other."""
    saved, threads = None, {*threading.enumerate()}
    for life in range(3):
        program = Program(saved)
        assert program.guard.total_run_calls == (0, 4, 8)[life]
        with pytest.raises(Preempted) as left, program.guard as guard:
            for call in range(guard.total_run_calls, 100):
                if call % 4 == 3:
                    program.announce()
                program.make_call(form)
        calls = 4 * life + 4
        assert (left.value.code, left.value.step, left.value.saved_step) == (75, calls, None)
        assert len(program.saves) == 1
        if form.endswith("save_if_preempted") and "scope" not in form:
            assert program.saves == [((calls,), {"reason": "a notice"})]
        assert program.saved == (calls, calls)
        saved = program.saved
        line = f"limpet: stopped after step {calls} because of a test; save_fn has saved\n"
        assert capsys.readouterr().err == line
    wait_until_no_thread("limpet", earlier=threads)


def test_a_save_function_saves_twice_if_there_is_time():
    """4, 5: the program goes on in the grace period."""
    program = Program(grace=1000.0)
    with pytest.raises(Preempted), program.guard as guard:
        guard.run(program.train_step)
        program.announce(1000.0)
        guard.run(program.train_step)
        assert program.saved == (2, 2)
        for _ in range(3):
            guard.run(program.train_step)
        guard._ckpt._preemption._propose(response.LEAVE)
        guard.run(program.train_step)
    assert [program.saved, len(program.saves)] == [(6, 6), 2]


def test_a_notice_of_a_risk_saves_and_goes_on():
    program = Program()
    with program.guard as guard:
        guard.run(program.train_step)
        program.announce(stops=False)
        guard.run(program.train_step)
        guard.run(program.train_step)
    assert (program.saved, len(program.saves)) == ((2, 2), 1)


def test_a_scope_without_calls_leaves_at_its_end():
    program = Program()
    with pytest.raises(Preempted), program.guard as guard, guard.watch_scope():
        program.announce()
        assert program.saves == []
    assert len(program.saves) == 1


def test_an_exit_function_that_returns_lets_the_program_end_the_loop():
    """34"""
    program = Program(exit_fn=lambda: None)
    with program.guard as guard:
        assert not guard.should_stop
        while not guard.should_stop:
            if program.number == 2:
                program.announce()
            guard.run(program.train_step)
    assert program.saved == (3, 3)


@pytest.mark.parametrize("is_called", [False, True])
def test_no_message_names_a_run_or_a_version(is_called, monkeypatch, tmp_path):
    """14: also if the program ends first. What ``limpet run`` reads has no run either."""
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))
    lines = list[str]()

    def collect(name, fields):
        lines.append(f"{name} {fields} {describe_event(name, fields)}")

    program = Program()
    with limpet.attach(collect):
        try:
            with program.guard as guard:
                guard.run(program.train_step)
                if is_called:
                    program.announce()
                    guard.run(program.train_step)
        except Preempted as left:
            lines.append(left.reason)
    text = "\n".join(lines)
    assert not re.search(r"memory:|version|finished|resum|saved step|nothing is saved", text), text
    statuses = [r.status for r in read_records(str(tmp_path)) if r.status is not None]
    assert [(s.code, s.run, s.step, s.saved_step) for s in statuses] == (
        [(75, None, 2, None)] if is_called else []
    )


def test_a_save_function_that_fails_or_is_not_reached_is_no_save(monkeypatch, capsys):
    def fail():
        raise limpet.errors.NoSpace("The disk is full")

    source, ends = Announced(), list[str]()
    guard = PreemptionGuard(save_fn=fail, preemption=Preemption(notices=[source]))
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append(f"{code} {why}"))
    with pytest.raises(limpet.errors.NoSpace), guard:
        guard.run(int)
        source.announce()
        wait_until(lambda: guard._response.is_pending)
        guard._response._end_late()
        guard.run(int)
    assert ends[0].startswith("76 ")
    assert ends[0].endswith("Its last step is 1, and save_fn has not saved it")
    assert "of step" not in capsys.readouterr().err


def test_an_error_of_the_save_function_is_raised():
    def fail():
        raise ZeroDivisionError

    source = Announced()
    guard = PreemptionGuard(save_fn=fail, preemption=Preemption(notices=[source]))
    with pytest.raises(ZeroDivisionError), guard:
        guard.run(int)
        source.announce()
        wait_until(lambda: guard._response.is_pending)
        guard.run(int)


@pytest.mark.parametrize("seconds", [None, 1000.0])
def test_a_save_function_that_exits_with_zero_has_saved(seconds):
    """Exit code 0 would tell ``limpet run`` and schedulers that the training is complete."""
    source, calls = Announced(), list[int]()

    def save():
        calls.append(guard.total_run_calls)
        sys.exit()

    preemption = Preemption(notices=[source], grace=seconds)
    guard = PreemptionGuard(save_fn=save, preemption=preemption)
    with pytest.raises(Preempted) as left, guard:
        guard.run(int)
        source.announce(seconds)
        wait_until(lambda: guard._response.is_pending)
        guard.run(int)
        guard._response._propose(response.LEAVE)
        guard.run(int)
    assert left.value.code == 75
    assert calls == ([2] if seconds is None else [2, 3])


@pytest.mark.parametrize("code", [1, "a message"])
def test_an_exit_of_the_save_function_with_an_error_is_one(code):
    source = Announced()
    guard = PreemptionGuard(save_fn=lambda: sys.exit(code), preemption=Preemption(notices=[source]))
    with pytest.raises(SystemExit) as left, guard:
        source.announce()
        wait_until(lambda: guard._response.is_pending)
        guard.run(int)
    assert left.value.code == code


def test_invalid_arguments_are_refused_before_the_guard_watches():
    before = signal.getsignal(signal.SIGTERM)
    state = {"x": 1}
    ckpt = limpet.Checkpointer(MemoryStore(), state, preemption=None)
    for arguments, match in (
        ({}, "save_fn= must be a function"),
        ({"save_fn": 1}, "save_fn= must be a function"),
        ({"ckpt": {}}, "ckpt must be a Checkpointer"),
        ({"ckpt": int}, r"for a function, PreemptionGuard\(save_fn=FUNCTION\)"),
        ({"ckpt": ckpt, "save_fn": int}, "preemption= has the settings"),
        ({"ckpt": ckpt, "preemption": None}, "preemption= has the settings"),
        ({"save_fn": int, "preemption": 3}, "preemption= must be a limpet.Preemption"),
        ({"save_fn": int, "preemption": Preemption(save_fn=int)}, "without save_fn"),
    ):
        with pytest.raises(LimpetError, match=match):
            PreemptionGuard(**arguments)
    with pytest.raises(LimpetError, match="whose versions store it"):
        PreemptionGuard(ckpt).total_run_calls = 3
    guard = PreemptionGuard(save_fn=int, preemption=None)
    for calls in (-1, 1.5, "3", True, 2**70):
        with pytest.raises(LimpetError, match="total_run_calls must be a whole number from 0 to"):
            guard.total_run_calls = calls
        assert guard.total_run_calls == 0
    guard.run(int)
    with pytest.raises(LimpetError, match="before the first call"):
        guard.total_run_calls = 3
    guard.close()
    guard.close()
    with pytest.raises(LimpetError, match="closed"):
        guard.run(int)
    assert signal.getsignal(signal.SIGTERM) == before


PROGRAM = """
import json, os, pathlib, signal, sys
from limpet.preemption import PreemptionGuard
folder, rank, size, last = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
if size > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo", f"file://{folder}/{os.environ['LIFE']}", None, size, rank)
path = folder / f"{rank}.json"
saved = json.loads(path.read_text()) if path.exists() else [0, 0]

def save(*args):
    path.write_text(json.dumps([number, guard.total_run_calls]))

number, calls = saved
guard = PreemptionGuard(save_fn=save)
guard.total_run_calls = calls
while guard.total_run_calls < last:
    number += 1
    if rank == size - 1 and number == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    if number % 2:
        guard.run(int)
    else:
        guard.save_if_preempted("as an argument")
save()
"""


def run_program(folder, size, last, life=0):
    """Run the ranks, and return their exit codes, errors, and files."""
    code = ["-c", PROGRAM, folder, *map(str, ("{}", size, last))]
    processes = [
        subprocess.Popen(
            [sys.executable, *(str(w).replace("{}", str(rank)) if w == "{}" else w for w in code)],
            stderr=subprocess.PIPE,
            env={**os.environ, "LIFE": str(life)},
            text=True,
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    saved = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return [process.returncode for process in processes], errors, saved


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_leave_after_one_call_and_continue_there(size, tmp_path):
    """1, 2, 7: processes that share no store. The guard is never closed: the processes end all the
    same, also when the program is complete."""
    codes, errors, saved = run_program(tmp_path, size, 10**6)
    assert codes == [75] * size, errors
    [calls] = {*map(tuple, saved)}
    assert calls[0] == calls[1] >= 5
    line = f"limpet: stopped after step {calls[0]} because of SIGTERM; save_fn has saved\n"
    assert errors[0] == line
    codes, errors, saved = run_program(tmp_path, size, calls[0] + 7, life=1)
    assert (codes, errors) == ([0] * size, [""] * size)
    assert saved == [[calls[0] + 7] * 2] * size
