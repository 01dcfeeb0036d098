"""The metrics of every step: what a run keeps of them after crashes, rollbacks, and failures."""

import os
import time
from contextlib import suppress
from math import inf, nan

import numpy as np
import pytest
import torch

import limpet
from limpet import Preemption
from limpet.errors import LimpetError, NoSpace, Preempted, SaveFailed, StoreError
from limpet.format import records
from limpet.format.names import METRICS_LOG
from limpet.run import metrics_log
from limpet.run.metrics_log import MetricsLog, read
from limpet.run.policy import EverySteps, KeepLast, Never
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
from tests.forks import fork, wait
from tests.notices.announced import Announced
from tests.run.test_scaling import CountingFs
from tests.unreliable_stores import HookedStore

HOUR = 3600


def train(store, last, every=5, process=0, then=None, save=None, **resume):
    """Train to step ``last``; ``then`` gets the Checkpointer. Each step has metrics of its own, and
    ``process`` says which training made it."""
    options = {"metrics_log": True, "quiet": True, "save": save or EverySteps(every)}
    with limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt:
        ckpt.resume(**resume)
        while ckpt.current_step < last:
            step = ckpt.current_step + 1
            ckpt.step({"loss": 1 / step, "process": process})
        if then is not None:
            then(ckpt)


class Crash(Exception):
    pass


def crash(ckpt):
    raise Crash


def kill(ckpt):
    ckpt.wait()
    os._exit(0)


def curves(store, metric="process"):
    """Return the steps and values of a metric, by the branch and whether it is current."""
    pieces, problems = read(Run(store))
    assert problems == {}
    found = {}
    for branch, is_current, metrics in pieces:
        if metric in metrics:
            steps, values = metrics[metric]
            assert (steps.dtype, values.dtype) == (np.int64, np.float64)
            found[branch, is_current] = dict(zip(steps.tolist(), values.tolist(), strict=True))
    return found


def steps(first, last, value):
    return dict.fromkeys(range(first, last + 1), value)


def log_files(store):
    return [stat.key for stat in store.list(METRICS_LOG)]


# -- what is logged --------------------------------------------------------------------------------


def test_every_step_is_logged_with_its_values():
    store = MemoryStore()
    values = [0.5, -3, nan, inf, 2**62, torch.tensor(0.1), np.float32(0.1), torch.tensor([7])]
    with limpet.Checkpointer(store, {"x": [0.0]}, save=EverySteps(3), metrics_log=True) as ckpt:
        for value in values:
            ckpt.step({"a": value, "b/c,\n": 1})
        ckpt.step()  # has none
        ckpt.step({"only": 1.0})
    expected = [0.5, -3, nan, inf, 2.0**62, float(np.float32(0.1)), float(np.float32(0.1)), 7]
    np.testing.assert_equal([*curves(store, "a")[0, True].values()], expected)
    assert curves(store, "b/c,\n") == {(0, True): steps(1, 8, 1.0)}
    assert curves(store, "only") == {(0, True): {10: 1.0}}
    first = ["0.1.1.json", "0.1.10.json", "0.1.4.json", "0.1.7.json"]
    assert log_files(store) == [f"{METRICS_LOG}/{name}" for name in first]


def test_without_the_option_there_is_no_file_and_versions_have_their_metrics():
    store = MemoryStore()
    with limpet.Checkpointer(store, {"x": [0.0]}, save=EverySteps(2)) as ckpt:
        for step in range(5):
            ckpt.step({"loss": step + 1})
    Run(store).add_metrics(4, {"val": 0.5, "loss": 40.0})
    assert log_files(store) == []
    assert curves(store, "loss") == {(0, True): {2: 2.0, 4: 40.0, 5: 5.0}}
    assert curves(store, "val") == {(0, True): {4: 0.5}}


def test_metrics_that_are_added_later_count_for_their_step():
    """They are in the next file, whose first step is then that of the file before."""
    store = MemoryStore()
    with limpet.Checkpointer(store, {"x": [0.0]}, save=EverySteps(1), metrics_log=True) as ckpt:
        for step in range(1, 5):
            ckpt.step({"loss": step})
            ckpt.wait()
            ckpt.metrics({"val": 10 * step})
            ckpt.wait()
            ckpt.save({"late": 100 * step})
    for name, unit in (("loss", 1.0), ("val", 10.0), ("late", 100.0)):
        assert curves(store, name) == {(0, True): {step: step * unit for step in range(1, 5)}}


def test_no_step_waits_for_a_device_until_a_save():
    reads = []

    class Value:
        """A number on a device."""

        dtype, shape = "float32", ()

        def numel(self):
            return 1

        def detach(self):
            return self

        clone = detach

        def item(self):
            reads.append(1)
            return 1.0

    store = MemoryStore()
    with limpet.Checkpointer(store, {"x": [0.0]}, save=EverySteps(99), metrics_log=True) as ckpt:
        for _ in range(98):
            ckpt.step({"loss": Value()})
        assert not reads
        ckpt.step({"loss": Value()})
    assert curves(store, "loss") == {(0, True): steps(1, 99, 1.0)}


def test_tensors_are_read_together(monkeypatch):
    """On a device, each read costs a wait of its own."""
    made = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda values: made.append(len(values)) or stack(values))
    store = MemoryStore()
    with limpet.Checkpointer(store, {"x": [0.0]}, save=EverySteps(50), metrics_log=True) as ckpt:
        for step in range(100):
            half = torch.tensor([step], dtype=torch.bfloat16)
            ckpt.step({"a": torch.tensor(step / 3), "b": half, "c": torch.tensor(step)})
    assert made == [50] * 4  # of each dtype at each save
    found = {n: curves(store, n)[0, True] for n in "abc"}
    assert found["a"] == {s + 1: torch.tensor(s / 3).item() for s in range(100)}
    assert found["b"] == {s + 1: torch.tensor(s, dtype=torch.bfloat16).item() for s in range(100)}
    assert found["c"] == {s + 1: s for s in range(100)}


def test_a_file_is_written_every_minute_without_a_save():
    """The clock is that of the test. The thread that looks for save requests writes."""
    store, now = MemoryStore(), [0.0]
    with limpet.Checkpointer(store, {"x": [0.0]}, save=Never(), metrics_log=True) as ckpt:
        ckpt._saver.metrics_log._clock = lambda: now[0]
        ckpt._saver.metrics_log.read()
        for step in range(1, 151):
            now[0] += 1
            ckpt.step({"loss": float(step)})
            ckpt._watcher.poll()
            assert len(log_files(store)) == step // 60
        assert curves(store, "loss") == {(0, True): {s: float(s) for s in range(1, 121)}}
    assert curves(store, "loss") == {(0, True): {s: float(s) for s in range(1, 151)}}


# -- after a crash, a rollback, or a branch --------------------------------------------------------


def test_after_a_kill_the_steps_since_the_last_save_are_lost(tmp_path):
    """The training makes them again, and so are the metrics."""
    pid = fork(lambda: train(tmp_path, 13, process=1, then=kill))
    assert wait(pid, time.monotonic() + 60) == 0
    assert curves(LocalStore(tmp_path)) == {(0, True): steps(1, 10, 1)}
    train(tmp_path, 20, process=2)
    assert curves(LocalStore(tmp_path)) == {(0, True): {**steps(1, 10, 1), **steps(11, 20, 2)}}


def test_steps_that_are_made_again_count_once():
    """Of trainings that crash between saves, the last one of each step counts."""
    store, expected = MemoryStore(), {}
    for process, last in enumerate((13, 12, 18, 19, 16, 27)):
        saved = max(expected, default=0) // 5 * 5
        with suppress(Crash):
            train(store, last, process=process, then=crash)
        expected = {s: v for s, v in expected.items() if s <= saved}
        expected |= steps(saved + 1, last, process)
        assert curves(store) == {(0, True): expected}
    assert {*expected.values()} == {0, 2, 5}


def test_a_rollback_leaves_the_abandoned_steps_apart():
    store = MemoryStore()
    train(store, 20, process=0)
    train(store, 12, process=1, at=10)
    train(store, 8, process=2, at=5)
    train(store, 9, process=3)
    assert curves(store) == {
        (0, True): steps(1, 5, 0),
        (0, False): steps(6, 20, 0),
        (1, False): steps(11, 12, 1),
        (2, True): {**steps(6, 8, 2), 9: 3},
    }


def test_a_training_that_resumes_by_itself_goes_on_there():
    store = MemoryStore()

    def go_back(ckpt):
        ckpt.wait()
        ckpt.resume(at=10)
        ckpt.step({"process": 1})
        ckpt.resume()  # version_10 again: the step above is not saved
        ckpt.step({"process": 2})

    train(store, 18, then=go_back)
    assert curves(store) == {
        (0, False): steps(11, 18, 0),
        (0, True): steps(1, 10, 0),
        (1, True): {11: 2},
    }


@pytest.mark.parametrize("is_written", [True, False])
def test_a_program_that_goes_back_without_a_resume(is_written):
    """It has loaded an older state itself."""
    store, other, progress = MemoryStore(), MemoryStore(), limpet.Progress()
    options = {"save": Never(), "metrics_log": True}
    with limpet.Checkpointer(store, {"progress": progress}, **options) as ckpt:
        for value in (0, 0, 0, 0, 0, 1, 1):
            ckpt.step({"value": value})
            if ckpt.current_step == 2:
                limpet.save(other, {"progress": progress})
            if ckpt.current_step == 5 and not value:
                if is_written:
                    ckpt._saver.finish_log()
                limpet.load(other, into={"progress": progress})
    assert curves(store, "value")[0, True] == {**steps(1, 2, 0), **steps(3, 4, 1)}


def test_a_start_without_a_resume_changes_nothing_of_another_training():
    """It is refused at its first step, and must not write either."""
    store = MemoryStore()
    train(store, 10, process=1)
    options = {"save": EverySteps(2), "metrics_log": True}
    with (
        pytest.raises(LimpetError, match="holds versions of an earlier"),
        limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt,
    ):
        ckpt.step({"process": 2})
    assert curves(store) == {(0, True): steps(1, 10, 1)}


def test_a_training_that_was_replaced_writes_no_more():
    store = MemoryStore()
    train(store, 10, process=1)
    options = {"save": EverySteps(99), "metrics_log": True}
    with (
        pytest.raises(LimpetError, match="taken this run over"),
        limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt,
    ):
        ckpt.resume()
        ckpt.step({"process": 2})
        store.delete("writer.json")
        with Run(store).writer() as writer:
            writer.save({"x": [0.0]}, step=13, metrics={"process": 3})
            ckpt.step({"process": 2})
            ckpt.save()
    assert curves(store) == {(0, True): {**steps(1, 10, 1), 13: 3}}


# -- failures --------------------------------------------------------------------------------------


def failing(method="put_if_absent"):
    """Return a store in which calls for the log fail while ``is_failing`` has an item."""
    store, is_failing = HookedStore(MemoryStore()), [True]

    def before(called, key):
        if is_failing and called == method and key.startswith(METRICS_LOG):
            raise NoSpace("No space for the log")

    store.before = before
    return store, is_failing


@pytest.fixture
def unwritten():
    found = []
    with limpet.attach(lambda n, fields: n == "metrics_unwritten" and found.append(fields)):
        yield found


@pytest.mark.parametrize("method", ["put_if_absent", "list"])
def test_a_failure_is_told_once_and_the_metrics_are_written_later(unwritten, method):
    store, is_failing = failing(method)

    def recover(ckpt):
        ckpt.wait()
        is_failing.clear()
        ckpt.step({"process": 0})

    train(store, 20, then=recover)
    (event,) = unwritten
    assert isinstance(event["error"], NoSpace)
    assert [s.step for s in Run(store).snapshots()] == [5, 10, 15, 20, 21]
    assert curves(store) == {(0, True): steps(1, 21, 0)}


def test_a_failure_at_the_end_is_raised_and_the_versions_are_intact():
    store, _ = failing()
    with pytest.raises(NoSpace, match="The last metrics could not be logged") as raised:
        train(store, 7)
    assert raised.value.fields["committed"] == "version_7"
    assert Run(store).latest().step == 7
    assert Run(store).ended() == "finished"


def test_on_error_warn_makes_a_warning_of_it(unwritten):
    store, _ = failing()
    options = {"save": EverySteps(2), "metrics_log": True, "on_error": "warn"}
    with (
        pytest.warns(SaveFailed, match="No space for the log") as warned,
        limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt,
    ):
        ckpt.step({"loss": 1.0})
    assert not any("NOTHING WAS SAVED" in str(w.message) for w in warned)
    assert Run(store).latest().step == 1


def test_while_the_store_fails_only_so_many_steps_are_kept(monkeypatch, unwritten):
    monkeypatch.setattr(metrics_log, "_MOST_KEPT", 12)
    store, is_failing = failing()

    def recover(ckpt):
        ckpt.wait()
        is_failing.clear()

    train(store, 50, then=recover)
    assert curves(store)[0, True].keys() == {*range(5, 50, 5), *range(39, 51)}


def test_an_unknown_outcome_makes_no_step_count_twice():
    """The file is there although the call failed. The next one has its steps again."""
    store, outer = MemoryStore(), HookedStore(MemoryStore())
    outer.inner, failures = store, [1]

    def after(method, key):
        if method == "put_if_absent" and key.startswith(METRICS_LOG) and failures:
            failures.pop()
            raise StoreError("lost reply", outcome="unknown")

    outer.after = after
    train(outer, 12)
    assert len(log_files(store)) > 2
    assert curves(store) == {(0, True): steps(1, 12, 0)}


def test_after_a_notice_the_last_steps_are_logged():
    store, source = MemoryStore(), Announced()
    options = {"save": EverySteps(999), "metrics_log": True, "quiet": True}
    options["preemption"] = Preemption(notices=[source], exit_fn=lambda: None)
    with limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt:
        while not ckpt.should_stop:
            ckpt.step({"process": 0})
            if ckpt.current_step == 5:
                source.announce(20)
            time.sleep(0.001)
    last = Run(store).latest()
    assert last.metadata["reason"] == "preemption"
    assert curves(store) == {(0, True): steps(1, last.step, 0)}


@pytest.mark.slow
def test_after_a_notice_a_log_that_hangs_does_not_keep_the_process():
    """The version counts, and the exit code with it."""
    store, source, release = HookedStore(MemoryStore()), Announced(), []
    views = []

    def within(deadline):
        views.append(deadline)
        view = HookedStore(store.inner)

        def before(method, key):
            if key.startswith(METRICS_LOG):
                while not release:
                    time.sleep(0.01)
                    deadline.check()

        view.before = before
        return view

    store.within = within
    options = {"save": EverySteps(999), "metrics_log": True, "quiet": True}
    options["preemption"] = Preemption(notices=[source])
    began = time.monotonic()
    with (
        pytest.raises(Preempted) as left,
        limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt,
    ):
        while True:
            ckpt.step({"process": 0})
            if ckpt.current_step == 5:
                source.announce(10)
            time.sleep(0.001)
    assert time.monotonic() - began < 8
    assert (left.value.code, left.value.saved_step) == (75, left.value.step)
    assert log_files(store) == []
    assert views


class OnDevice:
    """A metric on a device that never answers."""

    device, dtype = torch.device("cuda"), "float32"

    def item(self):
        raise AssertionError("waited for the device")


def test_after_an_error_nothing_waits_for_a_device(unwritten):
    store = MemoryStore()
    with (
        suppress(Crash),
        limpet.Checkpointer(store, {"x": [0.0]}, save=EverySteps(99), metrics_log=True) as ckpt,
    ):
        ckpt.step({"a": 1.0})
        ckpt._saver.metrics_log.add(2, {"a": OnDevice()})
        ckpt.step({"a": 3.0})
        raise Crash
    assert curves(store, "a") == {(0, True): {1: 1.0, 2: 3.0}}


# -- files -----------------------------------------------------------------------------------------


def test_files_stay_small_and_are_never_changed(monkeypatch):
    store = MemoryStore()
    seen = {}
    name = "\x00" * 500  # each character has 6 bytes in JSON

    def remember(ckpt):
        seen.update({stat.key: stat for stat in store.list(METRICS_LOG)})

    with limpet.Checkpointer(store, {"x": [0.0]}, save=Never(), metrics_log=True) as ckpt:
        for step in range(1200):
            ckpt.step({name: step, "other": step})
            if step % 500 == 499:
                ckpt._saver.metrics_log.read()
                ckpt._watcher.poll()
                remember(ckpt)
    now = {stat.key: stat for stat in store.list(METRICS_LOG)}
    assert seen.items() <= now.items()
    assert all(stat.length <= records.MAX_RECORD for stat in now.values())
    assert len(now) >= 4
    assert curves(store, name) == {(0, True): {s + 1: float(s) for s in range(1200)}}


def test_retention_and_sweep_keep_the_log(tmp_path):
    store = LocalStore(tmp_path)
    options = {"keep": KeepLast(1), "metrics_log": True, "save": EverySteps(2)}
    with limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt:
        for step in range(9):
            ckpt.step({"loss": step})
    assert [s.step for s in Run(store).snapshots()] == [9]
    train(store, 2 + 9, process=1, at=9)
    partial = tmp_path / METRICS_LOG / ".0.1.1.json.0123.partial"
    partial.write_bytes(b"x")
    result = Run(store).sweep(grace=0, abandoned=True, now=time.time() + HOUR)
    assert result.removed == [f"{METRICS_LOG}/{partial.name}"]
    assert curves(store, "loss")[0, True].keys() == {*range(1, 12)}


def test_no_save_lists_the_log(tmp_path):
    """Its files are as many as the saves: a save would cost more with each one before it."""
    fs = CountingFs()
    options = {"save": EverySteps(1), "keep": KeepLast(1), "metrics_log": True}
    listed = []
    with limpet.Checkpointer(LocalStore(tmp_path, fs=fs), {"x": [0.0]}, **options) as ckpt:
        for step in range(40):
            ckpt.step({"loss": step})
            ckpt.wait()
            listed.append((METRICS_LOG in fs.folders, fs.counts["scandir"]))
            fs.take()
    assert [in_log for in_log, _ in listed[1:]] == [False] * 39
    assert listed[39][1] <= listed[10][1]


def test_only_rank_0_writes():
    store = MemoryStore()

    def rank(number):
        options = {"save": EverySteps(3), "metrics_log": True, "preemption": None}
        with limpet.Checkpointer(store, {"x": [0.0]}, **options) as ckpt:
            for _ in range(5):
                ckpt.step({"rank": number})

    with FakeGroup(2) as group:
        group.run(rank)
    assert curves(store, "rank") == {(0, True): steps(1, 5, 0)}
    assert len(log_files(store)) == 2


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_wrong_arguments_are_refused(value):
    with pytest.raises(LimpetError, match="metrics_log= must be True or False"):
        limpet.Checkpointer(MemoryStore(), {}, metrics_log=value)


def test_a_step_costs_little():
    """No step does more than append to a list: with a bound that a slow machine meets, too."""
    lock = object()
    log = MetricsLog(lock, is_on=True)
    metrics = {"loss": 0.5, "accuracy": 0.5}
    best = inf
    for _ in range(20):
        began = time.perf_counter()
        for step in range(400):
            log.add(step, metrics)
        best = min(best, (time.perf_counter() - began) / 400)
    assert best < 20e-6


@pytest.mark.parametrize("kind", ["bit", "newer", "other name", "too long", "empty"])
def test_a_damaged_file_is_named_and_the_others_count(kind):
    store = MemoryStore()
    train(store, 15)
    key = f"{METRICS_LOG}/0.1.6.json"
    raw = store.get(key, 1 << 20)
    store.delete(key)
    if kind == "other name":
        key = f"{METRICS_LOG}/0.1.7.json"
    wrong = {
        "bit": bytes([*raw[:-3], raw[-3] ^ 1, *raw[-2:]]),
        "newer": raw.replace(b'{"limpet":1,', b'{"limpet":2,'),
        "other name": raw,
        "too long": b"x" * (records.MAX_STEP_METRICS + 1),
        "empty": b"",
    }
    store.put_if_absent(key, wrong[kind])
    pieces, problems = read(Run(store))
    assert problems.keys() == {key}
    assert key in str(problems[key])
    (piece,) = pieces
    assert piece.curves["process"][0].tolist() == [1, 2, 3, 4, 5, 10, *range(11, 16)]
