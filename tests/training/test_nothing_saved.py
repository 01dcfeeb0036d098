"""Without a version, every message says that nothing is saved, and none is about a step 0."""

import gc
import threading
import warnings

import pytest

import limpet
from limpet.errors import NoSpace, Preempted
from limpet.notices.exit_status import read_records
from limpet.notices.final_code import Ended, decide
from limpet.run.policy import AtEnd, EverySteps, Never
from limpet.sinks.wording import describe_event
from limpet.storage.memory import MemoryStore
from limpet.training import response, step_savepoint
from tests.notices.announced import Announced
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until, wait_until_no_thread


class Training:
    """A training of a disk that is full from its first step on."""

    def __init__(self, has_version, save, **options):
        self.store, self.source, self.is_full = HookedStore(MemoryStore()), Announced(), False
        self.store.before = self._fail_if_full
        self.has_version = has_version
        options = {"preemption": limpet.Preemption(notices=[self.source]), **options}
        self.ckpt = limpet.Checkpointer(self.store, {"x": [1.0]}, save=save, **options)

    def _fail_if_full(self, method, key):
        if method == "put" and self.is_full:
            raise NoSpace("The disk is full")

    def step(self, count=3):
        if self.has_version:
            self.ckpt.save()
        self.is_full = True
        for _ in range(count):
            self.ckpt.step()


def end_with_unsaved_steps(has_version):
    training = Training(has_version, EverySteps(10**9))
    with pytest.raises(SystemExit), training.ckpt:
        training.step()
        raise SystemExit(0)


def end_without_saves(has_version):
    training = Training(has_version, Never())
    training.step()
    training.ckpt.close()


def raise_an_error(has_version):
    training = Training(has_version, AtEnd())
    with pytest.raises(ValueError, match="boom"), training.ckpt:
        training.step()
        raise ValueError("boom")


def fail_to_save(has_version):
    training = Training(has_version, EverySteps(3) | AtEnd(), on_error="warn")
    with training.ckpt:
        training.step(6)


def leave_without_a_save(has_version):
    training = Training(has_version, EverySteps(10**9))
    with pytest.raises(Preempted) as left, training.ckpt:
        training.step()
        training.source.announce()
        while True:
            training.ckpt.step()
    assert left.value.saved_step == (0 if has_version else None)


def leave_before_the_first_step(has_version):
    training = Training(has_version, Never())
    with pytest.raises(Preempted) as left, training.ckpt:
        training.ckpt.resume()
        training.step(0)
        training.source.announce()
        wait_until(lambda: training.ckpt._preemption.is_pending)
        training.ckpt._begin_call()
        while True:
            training.ckpt._end_call()
    assert left.value.step == 0


def take_over(has_version):
    training = Training(has_version, EverySteps(10**9))
    training.step()
    with limpet.Checkpointer(training.store, {"x": [1.0]}, save=Never()):
        pass


def discard(has_version):
    training = Training(has_version, EverySteps(10**9), preemption=None)
    training.step()
    training.store.before = lambda method, key: None  # it refers to the training
    del training
    gc.collect()


def do_not_return_in_time(has_version):
    training = Training(has_version, Never())
    with training.ckpt:
        training.step()
        training.source.announce()
        wait_until(lambda: training.ckpt._preemption.is_pending)
        training.ckpt._preemption._end_late()


ENDS: list[str] = []

CASES = [
    end_with_unsaved_steps,
    end_without_saves,
    raise_an_error,
    fail_to_save,
    leave_without_a_save,
    leave_before_the_first_step,
    take_over,
    discard,
    do_not_return_in_time,
]


@pytest.mark.parametrize("has_version", [False, True], ids=["no version", "version 0"])
@pytest.mark.parametrize("case", CASES)
def test_messages_without_a_version(case, has_version, tmp_path, monkeypatch, capfd, poll_often):
    """Of warnings, events, lines on stderr, the status for ``limpet run``, and what that prints."""
    ENDS.clear()
    monkeypatch.setattr(response, "end_process", lambda code, why: ENDS.append(why))
    monkeypatch.setattr(step_savepoint, "SHARE", 0.0)
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))
    threads = {*threading.enumerate()}
    texts: list[str] = []

    def describe(event, fields):
        if event in ("finished", "preempted", "left_unsaved"):
            texts.append(describe_event(event, fields))

    with warnings.catch_warnings(record=True) as caught, limpet.attach(describe):
        warnings.simplefilter("always")
        case(has_version)
        gc.collect()
    wait_until_no_thread("limpet", earlier=threads)
    texts += [str(w.message) for w in caught if w.category.__module__ == "limpet.errors"]
    statuses = [r.status for r in read_records(str(tmp_path)) if r.status is not None]
    decisions = [decide(Ended(0), [r]) for r in read_records(str(tmp_path))]
    texts += [*ENDS, *(s.why for s in statuses), *(d.why for d in decisions if "step" in d.why)]
    texts += [line for line in capfd.readouterr().err.splitlines() if "limpet:" in line]
    text = "\n".join(texts)
    assert text
    if has_version:
        said = ("of step 0", "since step 0", "Steps 1 to 3 are", "step 0, which is saved")
        assert any(s in text for s in said)
        assert "othing is saved" not in text
        assert all(s.saved_step == 0 for s in statuses)
    else:
        said = ("othing is saved", "there is no version:", "all steps", "with code 75")
        assert all(any(s in line for s in said) for line in texts)
        assert "step 0" not in text
        assert all(s.saved_step is None for s in statuses)
