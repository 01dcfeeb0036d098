"""The metrics of every step: what a run keeps of them after crashes, rollbacks, and failures."""

import os
import time
from contextlib import suppress
from math import inf, nan
from threading import Event, Thread

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import LimpetError, NoSpace, Preempted, SaveFailed, StoreError
from limpet.format.names import MANIFEST, METRICS_LOG
from limpet.report.data import read_report
from limpet.run import metrics_log
from limpet.run.overview import list_versions, read_steps
from limpet.run.policy import EverySteps, KeepLast, Never
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
from tests.forks import fork, wait
from tests.notices.announced import Announced
from tests.run.test_scaling import CountingFs
from tests.unreliable_stores import HookedStore


def logged(store, save, **options):
    options = {"metrics_log": True, "quiet": True, **options}
    return limpet.Checkpointer(store, {"x": [0.0]}, save=save, **options)


def train(store, last, process=0, then=None, log=True, **resume):
    """Train to step ``last``, with a save every 5 steps; ``then`` gets the Checkpointer. The metric
    ``process`` says which training made a step."""
    with logged(store, EverySteps(5), metrics_log=log) as ckpt:
        ckpt.resume(**resume)
        while ckpt.current_step < last:
            ckpt.step({"loss": 1 / (ckpt.current_step + 1), "process": process})
        if then is not None:
            then(ckpt)


class Crash(Exception):
    pass


def crash(ckpt):
    raise Crash


def curves(store, metric="process"):
    """Return the steps and values of a metric, by the branch and whether it is current."""
    run = Run(store)
    result = list_versions(run, run.listing())
    versions = {e.version: e.metrics for e in result.entries}
    pieces, problems = read_steps(store, result.ends, versions, metrics_log.list_files(store))
    assert problems == {}
    found = {(p.branch, p.is_current): p.curves[metric] for p in pieces if metric in p.curves}
    return {k: dict(zip(s.tolist(), v.tolist(), strict=True)) for k, (s, v) in found.items()}


def steps(first, last, value):
    return dict.fromkeys(range(first, last + 1), value)


def log_files(store):
    return [stat.key.rpartition("/")[2] for stat in store.list(METRICS_LOG)]


# -- what is logged --------------------------------------------------------------------------------


def test_every_step_is_logged_with_its_values():
    store = MemoryStore()
    values = [0.5, -3, nan, inf, 2**62, torch.tensor(0.1), np.float32(0.1), torch.tensor([7])]
    with logged(store, EverySteps(3)) as ckpt:
        for value in values:
            ckpt.step({"a": value, "b/c,\n": 1})
        ckpt.step()  # has none
        ckpt.step({"only": 1.0})
    tenth = float(np.float32(0.1))
    found = [*curves(store, "a")[0, True].values()]
    np.testing.assert_equal(found, [0.5, -3, nan, inf, 2.0**62, tenth, tenth, 7])
    assert curves(store, "b/c,\n") == {(0, True): steps(1, 8, 1.0)}
    assert curves(store, "only") == {(0, True): {10: 1.0}}
    assert log_files(store) == ["0.1.1.json", "0.1.10.json", "0.1.4.json", "0.1.7.json"]


def test_without_the_option_there_is_no_file_and_versions_have_their_metrics():
    store = MemoryStore()
    for last in (7, 12):
        train(store, last, log=False)
    Run(store).add_metrics(10, {"val": 0.5, "process": 40.0})
    assert log_files(store) == []
    assert curves(store) == {(0, True): {5: 0, 7: 0, 10: 40.0, 12: 0}}
    assert curves(store, "val") == {(0, True): {10: 0.5}}


def test_metrics_that_are_added_later_count_for_their_step():
    """They are in the next file, whose first step is then that of the file before."""
    store = MemoryStore()
    with logged(store, EverySteps(1)) as ckpt:
        for step in range(1, 5):
            ckpt.step({"loss": step})
            ckpt.wait()
            ckpt.metrics({"val": 10 * step})
            ckpt.save({"late": 100 * step})
    for name, unit in (("loss", 1.0), ("val", 10.0), ("late", 100.0)):
        assert curves(store, name) == {(0, True): {step: step * unit for step in range(1, 5)}}


def test_no_step_waits_for_a_device_and_a_save_reads_all_together(monkeypatch):
    made, stack = [], torch.stack
    monkeypatch.setattr(torch, "stack", lambda values: made.append(len(values)) or stack(values))
    store = MemoryStore()
    with logged(store, EverySteps(50)) as ckpt:
        for step in range(100):
            half = torch.tensor([step], dtype=torch.bfloat16)
            ckpt.step({"a": torch.tensor(step / 3), "b": half, "c": torch.tensor(step)})
            assert made == [50] * ((step + 1) // 50 * 2)  # of each dtype
    expected = {
        "a": {s + 1: torch.tensor(s / 3).item() for s in range(100)},
        "b": {s + 1: torch.tensor(s, dtype=torch.bfloat16).item() for s in range(100)},
        "c": {s + 1: s for s in range(100)},
    }
    assert {name: curves(store, name)[0, True] for name in "abc"} == expected


def test_a_file_is_written_every_minute_without_a_save(monkeypatch):
    """The thread that looks for save requests writes it."""
    store, now = MemoryStore(), [0.0]
    monkeypatch.setattr(metrics_log, "monotonic", lambda: now[0])
    with logged(store, Never()) as ckpt:
        for step in range(1, 151):
            now[0] += 1
            ckpt.step({"process": 0})
            ckpt._watcher.poll()
            assert len(log_files(store)) == step // 60
        assert curves(store) == {(0, True): steps(1, 120, 0)}
    assert curves(store) == {(0, True): steps(1, 150, 0)}


def test_only_rank_0_writes():
    store = MemoryStore()

    def rank(number):
        with logged(store, EverySteps(3), preemption=None) as ckpt:
            for _ in range(5):
                ckpt.step({"process": number})
            assert number == 0 or not ckpt._saver.metrics_log._rows  # it would keep all

    with FakeGroup(2) as group:
        group.run(rank)
    assert curves(store) == {(0, True): steps(1, 5, 0)}
    assert len(log_files(store)) == 2


# -- after a crash, a rollback, or a branch --------------------------------------------------------


@pytest.mark.parametrize("log", [True, False], ids=["log", "no log"])
@pytest.mark.parametrize(("when", "kept"), [("before", 5), ("after", 10)])
def test_after_a_kill_at_a_commit_the_steps_since_the_last_save_are_lost(tmp_path, when, kept, log):
    """The log is written before the commit: no version has lost the metrics before it. The next
    training undoes what no version has, also without a log of its own."""
    store = HookedStore(LocalStore(tmp_path))

    def kill(method, key):
        if (method, key) == ("put_if_absent", "version_10/manifest.json"):
            os._exit(0)

    setattr(store, when, kill)
    assert wait(fork(lambda: train(store, 13, process=1)), time.monotonic() + 60) == 0
    assert [s.step for s in Run(tmp_path).snapshots()][-1] == kept
    assert curves(store.inner) == {(0, True): steps(1, 10, 1)}
    train(tmp_path, 20, process=2, log=log)
    again = steps(kept + 1, 20, 2)
    again = again if log else {step: 2 for step in again if step % 5 == 0}
    assert curves(store.inner) == {(0, True): {**steps(1, kept, 1), **again}}


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

    def go_back(ckpt):
        ckpt.wait()
        ckpt.resume(at=5)
        ckpt.step({"process": 3})
        ckpt.resume()  # version_5 again: the step above is not saved
        ckpt.step({"process": 4})

    train(store, 20, process=0)
    train(store, 12, process=1, at=10)
    train(store, 11, process=2, at=10, then=go_back)
    train(store, 9, process=5)
    assert curves(store) == {
        (0, True): steps(1, 5, 0),
        (0, False): steps(6, 20, 0),
        (1, False): steps(11, 12, 1),
        (2, False): {11: 2},
        (3, True): {6: 4, **steps(7, 9, 5)},
    }


@pytest.mark.parametrize("is_written", [True, False])
def test_a_program_that_goes_back_without_a_resume(is_written):
    """It has loaded an older state itself."""
    store, other, progress = MemoryStore(), MemoryStore(), limpet.Progress()
    options = {"save": Never(), "metrics_log": True}
    with limpet.Checkpointer(store, {"progress": progress}, **options) as ckpt:
        for value in (0, 0, 0, 0, 0, 1):
            ckpt.step({"process": value})
            if ckpt.current_step == 1:
                limpet.save(other, {"progress": progress})
            if is_written and ckpt.current_step in (2, 4, 5):
                ckpt._saver.finish_log()
            if ckpt.current_step == 5:
                limpet.load(other, into={"progress": progress})
    assert curves(store) == {(0, True): {1: 0, 2: 1}}


def test_a_training_that_may_not_write_logs_nothing(monkeypatch):
    """One is refused at its first step; another one is replaced, and goes on for a while."""
    monkeypatch.setattr(metrics_log, "_MOST_KEPT", 12)  # for when it has the run again
    store = MemoryStore()
    train(store, 10, process=1)
    refused = pytest.raises(LimpetError, match="holds versions of an earlier")
    with refused, logged(store, EverySteps(2)) as ckpt:
        ckpt.step({"process": 2})
    replaced = pytest.raises(LimpetError, match="taken this run over")
    with replaced, logged(store, EverySteps(99)) as ckpt:
        ckpt.resume()
        ckpt.step({"process": 2})
        store.delete("writer.json")
        with Run(store).writer() as writer:
            writer.save({"x": [0.0]}, step=13, metrics={"process": 3})
            for _ in range(20):
                ckpt.step({"process": 2})
            ckpt._saver.finish_log()
            assert len(ckpt._saver.metrics_log._rows) == 12
            ckpt.save()
    assert curves(store) == {(0, True): {**steps(1, 10, 1), 13: 3}}


def test_a_training_goes_on_after_another_one_has_come_and_gone():
    """The other one has logged, but saved nothing: it counts no more."""
    store = MemoryStore()
    with logged(store, EverySteps(5)) as ckpt:
        for step in range(1, 13):
            ckpt.step({"process": 1})
            if step == 7:
                ckpt.wait()
                store.delete("writer.json")
                with logged(HookedStore(store), Never(), at_end=False) as other:
                    other.resume()
                    for _ in range(9):
                        other.step({"process": 2})
                assert curves(store) == {(0, True): {**steps(1, 5, 1), **steps(6, 14, 2)}}
    assert curves(store) == {(0, True): steps(1, 12, 1)}


# -- failures --------------------------------------------------------------------------------------


def failing(when="before", method="put_if_absent"):
    """Return a store in which calls for the log fail while the list has an item: before they do
    anything, or after it, when their reply is lost."""
    store, is_failing = HookedStore(MemoryStore()), [True]

    def fail(called, key):
        if is_failing and called == method and key.startswith(METRICS_LOG):
            raise StoreError("No reply", outcome="unknown") if when == "after" else NoSpace("full")

    setattr(store, when, fail)
    return store, is_failing


PUT = "put_if_absent"


@pytest.mark.parametrize("fails", [("before", PUT), ("before", "list"), ("after", PUT)])
@pytest.mark.parametrize("kept", [100_000, 12])
def test_an_outage_is_told_once_and_the_metrics_are_written_later(monkeypatch, fails, kept):
    """While the store fails, only so many steps are kept."""
    monkeypatch.setattr(metrics_log, "_MOST_KEPT", kept)
    store, is_failing = failing(*fails)
    told = []

    def recover(ckpt):
        ckpt.wait()
        for is_failing[:] in ([], [True], []):
            ckpt.step({"process": 0})
            ckpt.save()

    with limpet.attach(lambda n, fields: n == "metrics_unwritten" and told.append(fields)):
        train(store, 50, then=recover)
    assert all(isinstance(event["error"], StoreError) for event in told)
    assert len(told) == (1 if fails[1] == "list" else 2)  # it is listed only before the first file
    versions = [*range(5, 51, 5), 51, 52, 53]
    assert [s.step for s in Run(store).snapshots()] == versions
    is_lost = kept < 50 and fails[0] == "before"
    expected = {*versions, *range(39, 54)} if is_lost else {*range(1, 54)}
    assert curves(store)[0, True].keys() == expected


def test_a_fault_in_the_log_prevents_no_commit():
    store = HookedStore(MemoryStore())

    def fail(method, key):
        if key.startswith(METRICS_LOG):
            raise MemoryError

    store.before = fail
    with suppress(MemoryError), logged(store, EverySteps(1)) as ckpt:
        ckpt.step({"process": 0})
        ckpt.wait()
    assert Run(store.inner).latest().step == 1


@pytest.mark.parametrize("timeout", [None, 600])
def test_the_log_takes_no_time_of_a_save_with_a_time_limit(timeout, monkeypatch):
    """Without a limit, it is written first, so that no kill after the commit loses it."""
    monkeypatch.setattr("limpet.training.saver.Saver.poll", lambda saver: None)
    store, keys = HookedStore(MemoryStore()), []
    store.before = lambda method, key: keys.append(key) if method == PUT else None
    with logged(store, EverySteps(1), save_timeout=timeout) as ckpt:
        ckpt.step({"process": 0})
        ckpt.wait()
    (log,) = (i for i, key in enumerate(keys) if key.startswith(METRICS_LOG))
    assert (log < keys.index(f"version_1/{MANIFEST}")) == (timeout is None)


def test_no_save_waits_for_a_thread_whose_store_hangs():
    store, hangs, goes_on, waited = HookedStore(MemoryStore()), Event(), Event(), []

    def before(method, key):
        if method == PUT and key.startswith(METRICS_LOG):
            hangs.set()
            waited.append(goes_on.wait(20))

    store.before = before
    with logged(store, Never()) as ckpt:
        ckpt.step({"process": 0})
        ckpt._saver.metrics_log.read()
        poll = Thread(target=ckpt._watcher.poll)
        poll.start()
        assert hangs.wait(60)
        assert ckpt.save().step == 1
        goes_on.set()
        poll.join()
    assert waited == [True]
    assert curves(store) == {(0, True): {1: 0}}


def test_a_failure_at_the_end_is_raised_and_the_versions_are_intact():
    store, _ = failing()
    with pytest.raises(NoSpace, match="The last metrics could not be logged") as raised:
        train(store, 7)
    assert raised.value.fields["committed"] == "version_7"
    assert Run(store).latest().step == 7
    assert Run(store).ended() == "finished"
    warns = pytest.warns(SaveFailed, match="^(?!NOTHING WAS SAVED).*full")
    with warns, logged(failing()[0], EverySteps(2), on_error="warn") as ckpt:
        ckpt.step({"loss": 1.0})


@pytest.mark.parametrize("hangs", [False, True])
def test_after_a_notice_the_last_steps_are_logged_unless_the_store_hangs(hangs):
    """Then the version counts, and the exit code with it."""
    store, source = HookedStore(MemoryStore()), Announced()

    def within(deadline):
        view = HookedStore(store.inner)

        def before(method, key):
            while hangs and key.startswith(METRICS_LOG):
                time.sleep(0.01)
                deadline.check()

        view.before = before
        return view

    store.within = within
    preemption = limpet.Preemption(notices=[source])
    left = pytest.raises(Preempted)
    with left as raised, logged(store, EverySteps(999), preemption=preemption) as ckpt:
        while True:
            ckpt.step({"process": 0})
            if ckpt.current_step == 5:
                began = time.monotonic()
                source.announce(10)
            time.sleep(0.001)
    assert time.monotonic() - began < 8
    assert (raised.value.code, raised.value.saved_step) == (75, raised.value.step)
    last = raised.value.step
    assert curves(store) == {(0, True): {last: 0} if hangs else steps(1, last, 0)}


class OnDevice:
    """A metric on a device that never answers."""

    device, dtype = torch.device("cuda"), "float32"

    def item(self):
        raise AssertionError("waited for the device")


def test_after_an_error_nothing_waits_for_a_device():
    store = MemoryStore()
    with suppress(Crash), logged(store, EverySteps(99)) as ckpt:
        ckpt.step({"a": 1.0})
        ckpt._saver.metrics_log.add(2, {"a": OnDevice()})
        ckpt.step({"a": 3.0})
        raise Crash
    assert curves(store, "a") == {(0, True): {1: 1.0, 2: 3.0}}


# -- files -----------------------------------------------------------------------------------------


def test_files_stay_small_and_are_never_changed():
    store, seen = MemoryStore(), {}
    name = "\x00" * 500  # each character has 6 bytes in JSON
    with logged(store, Never()) as ckpt:
        for step in range(1200):
            ckpt.step({name: step, "other": step})
            if step == 900:
                ckpt._saver.finish_log()
                seen = {stat.key: stat for stat in store.list(METRICS_LOG)}
    now = {stat.key: stat for stat in store.list(METRICS_LOG)}
    assert seen.items() <= now.items()
    assert all(stat.length <= 1 << 20 for stat in now.values())
    assert len(now) > len(seen) > 2
    assert curves(store, name) == {(0, True): {s + 1: float(s) for s in range(1200)}}


def test_retention_and_sweep_keep_the_log_and_no_save_lists_it(tmp_path):
    """Its files are as many as the saves: each save would cost more than the one before."""
    fs, listed = CountingFs(), []
    store = LocalStore(tmp_path, fs=fs)
    with logged(store, EverySteps(1), keep=KeepLast(1)) as ckpt:
        for _ in range(25):
            ckpt.step({"process": 0})
            ckpt.wait()
            listed.append((METRICS_LOG in fs.folders, fs.counts["scandir"]))
            fs.take()
    assert [s.step for s in Run(store).snapshots()] == [25]
    assert {in_log for in_log, _ in listed[1:]} == {False}
    assert listed[24][1] <= listed[10][1]
    partial = tmp_path / METRICS_LOG / ".0.1.1.json.0123.partial"
    partial.write_bytes(b"x")
    result = Run(store).sweep(grace=0, abandoned=True, now=time.time() + 3600)
    assert result.removed == [f"{METRICS_LOG}/{partial.name}"]
    assert curves(store) == {(0, True): steps(1, 25, 0)}


def test_a_page_reads_each_version_and_each_file_once():
    """Besides the contents of the newest version."""
    store, calls = HookedStore(MemoryStore()), list[tuple[str, str]]()
    train(store, 100)
    run = Run(store)
    result = list_versions(run, run.listing())
    store.before = lambda *call: calls.append(call)
    read_report(result, metrics_log.list_files(result.run.store), 0)
    files = [METRICS_LOG in key for _, key in calls]
    assert sum(files) == 1 + 20
    assert len(calls) - sum(files) < 15
