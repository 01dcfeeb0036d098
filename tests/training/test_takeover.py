"""A cell of a notebook that creates a Checkpointer is run again."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet import events
from limpet.errors import LimpetError, NoSpace, SaveFailed, UnsavedSteps
from limpet.run.policy import AtEnd, EverySteps, Never, OnException
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.fakegroup import FakeGroup
from tests.trainings import initial_state, train
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until_no_thread

CELL = """
import numpy as np, limpet
progress, weights = limpet.Progress(), np.zeros(5)
ckpt = limpet.Checkpointer("runs/a", {"weights": weights, "progress": progress}, save=SAVE)
snapshot = ckpt.resume()
print("resumed from", snapshot and snapshot.step)
for _ in range(6):
    weights += 1
    ckpt.step()

"""


def start(store, last_step, **options):
    """Do what the cell does: create a Checkpointer, resume, and train."""
    state = initial_state()
    ckpt = Checkpointer(store, state, **{"save": EverySteps(4), **options})
    ckpt.resume()
    train(state, ckpt, last_step)
    return ckpt


def run_interpreter(folder, source, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        input=source,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.slow
def test_a_cell_can_be_run_again_in_an_interactive_session(tmp_path):
    cell = CELL.replace("SAVE", "limpet.EverySteps(4)")
    done = run_interpreter(tmp_path, cell * 3 + "old = ckpt\nprint(ckpt.current_step)\n", "-i")
    assert done.stdout.split("\n")[:4] == [
        "resumed from None",
        "resumed from 4",
        "resumed from 8",
        "14",
    ]
    notices = [line for line in done.stderr.splitlines() if "taken the run over" in line]
    assert [line.partition("UnsavedSteps: ")[2].partition(" are")[0] for line in notices] == [
        "Steps 5 to 6",
        "Steps 9 to 10",
    ]
    # the end of the process without close() is reported as one line, too
    assert "Steps 13 to 14 are not in any version of" in done.stderr
    assert "runs/a: the process ended" in done.stderr
    assert [s.step for s in Run(tmp_path / "runs" / "a").snapshots()] == [4, 8, 12]


@pytest.mark.slow
def test_the_end_of_the_process_shows_no_traceback(tmp_path):
    """Neither for unsaved steps nor for a save that is in flight, with warnings as errors."""
    source, flags = CELL.replace("SAVE", "limpet.EverySteps(3)"), ("-W", "error", "-c")
    done = run_interpreter(tmp_path, "", *flags, source.replace("range(6)", "range(7)"))
    assert "weakref" not in done.stderr
    assert "Step 7 is not in any version of" in done.stderr
    assert "runs/a: the process ended" in done.stderr
    run_interpreter(tmp_path, "", *flags, source.replace("range(6)", "range(3)"))
    assert [s.step for s in Run(tmp_path / "runs" / "a").snapshots()] == [3, 6, 9]


def as_link(path):
    link = path.with_name("link")
    link.symlink_to(path, target_is_directory=True)
    return link


SPELLINGS: dict[str, Callable[[Path], Any]] = {
    "text": str,
    "relative": os.path.relpath,
    "link": as_link,
    "store": lambda path: limpet.open_store(str(path)),
    "url": Path.as_uri,
    "slash": lambda path: f"{path.parent}//{path.name}/",
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_the_same_run_may_be_spelled_differently(tmp_path, spell):
    path = tmp_path / "run"
    old = start(path, 6)
    with pytest.warns(UnsavedSteps, match=r"^Steps 5 to 6 are not .* continue from step 4"):
        new = start(spell(path), 7)
    assert new.current_step == 7
    with pytest.raises(LimpetError, match=r"newer one of this process .* use the newer one"):
        old.step()
    new.close()


def test_views_of_one_store_in_memory_are_one_run():
    store = MemoryStore()
    old = start(store.at("a"), 6)
    with start(store.at("b"), 3) as other:  # another run
        old.wait()
        with pytest.warns(UnsavedSteps):
            start(store.at("a"), 5).close()
        other.save()
    assert not start(MemoryStore().at("a"), 1).close()


def gated_store():
    """Return a store, its front in which the commit of step 4 waits for an event, and the event."""
    memory, gate = MemoryStore(), threading.Event()
    store = HookedStore(memory)

    def before(method, key):
        if key.endswith("version_4/manifest.json") and method == "put_if_absent":
            gate.wait(30)

    store.before = before
    return memory, store, gate


def test_nothing_that_may_belong_to_no_step_is_saved():
    """Although the policy has ``AtEnd``: a cell may be interrupted in the middle of a step."""
    store = MemoryStore()
    start(store, 6, save=EverySteps(4) | AtEnd())
    with pytest.warns(UnsavedSteps, match="Steps 5 to 6"):
        new = Checkpointer(store, initial_state())
    new.close()
    assert [s.step for s in Run(store).snapshots()] == [4]
    assert not Run(store).ended()


def test_what_an_exception_would_save_is_saved():
    """In a ``with`` block that is still open, such as that of another thread."""
    store, state = MemoryStore(), initial_state()
    with Checkpointer(store, state, save=EverySteps(4) | OnException()) as old:
        train(state, old, 6)
        state["weights"] += 1  # a half step
        new = Checkpointer(store, initial_state())
        assert new.resume().step == 6
    new.close()


def test_a_training_without_unsaved_steps_ends_silently():
    store, seen = MemoryStore(), list[Any]()
    old = start(store, 4)
    with events.attach(lambda name, fields: seen.append((name, fields))):
        new = start(store, 4)
    assert ("taken_over", {"run": store.url, "step": 4, "saved": 4}) in seen
    old.close()  # does nothing
    new.save()
    new.close()
    never = start(MemoryStore(), 3, save=Never())
    Checkpointer(never.run.store, initial_state()).close()


def test_a_notice_is_shown_each_time():
    """By default, Python shows a warning with the same text only once per line."""
    store = MemoryStore()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        kept = [start(store, 2) for _ in range(3)]  # else the garbage collector may warn first
    assert [str(w.message)[:14] for w in shown] == ["Steps 1 to 2 a", "Steps 1 to 2 a"]
    assert {w.filename for w in shown} == {__file__}
    kept[-1].close()


def test_a_failed_save_of_the_earlier_one_is_reported_and_does_not_stop_the_new_one():
    store = HookedStore(MemoryStore())

    def before(method, key):
        if key.endswith("version_4/manifest.json") and method == "put_if_absent":
            raise NoSpace("The disk is full")

    store.before = before
    old = start(store, 4)  # the failure of a save is raised at the next step
    with (
        pytest.warns(SaveFailed, match="The disk is full"),
        pytest.warns(UnsavedSteps, match="Steps 1 to 4"),
    ):
        new = Checkpointer(store, initial_state())
    store.before = lambda method, key: None
    assert new.resume() is None
    new.close()
    old.close()


def test_a_discarded_checkpointer_still_completes_its_save(poll_often):
    earlier = {*threading.enumerate()}
    memory, store, gate = gated_store()
    start(store, 4)  # nothing refers to it anymore
    gc.collect()
    threading.Timer(0.05, gate.set).start()
    new = start(store, 5)
    assert new.save().step == 5
    assert [s.step for s in Run(memory).snapshots()] == [4, 5]
    gc.collect()  # until the discarded one is collected, it watches signals: it was never closed
    new.close()
    wait_until_no_thread("limpet", earlier=earlier)


def test_an_invalid_new_one_leaves_the_earlier_one_open(tmp_path):
    old = start(tmp_path / "a", 2)
    with pytest.raises(LimpetError, match="must be"):
        Checkpointer(tmp_path / "a", initial_state(), on_error="later")
    assert old.save().step == 2
    old.close()


def test_an_interrupt_in_the_middle_of_a_step_is_taken_over_from():
    store, state = HookedStore(MemoryStore()), initial_state()
    old = Checkpointer(store, state, save=EverySteps(2))

    def interrupt(method, key):
        if key == "writer.json":
            raise KeyboardInterrupt

    store.before = interrupt
    with pytest.raises(KeyboardInterrupt) as interrupted:  # which keeps the frames of the call
        train(state, old, 2)
    store.before = lambda method, key: None
    train(state, old, 3)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        store.before = lambda method, key: interrupt(method, "writer.json")
        train(state, old, 4)
    store.before = lambda method, key: None
    with pytest.warns(UnsavedSteps):
        new = start(store, 4)
    new.close()
    assert interrupted


def test_a_training_of_another_thread_is_not_closed():
    """The error names it. Its own thread may close it, and then there is no error."""
    store, state = MemoryStore(), initial_state()
    begun, go_on = threading.Event(), threading.Event()

    def work():
        with Checkpointer(store, state, save=EverySteps(4)) as ckpt:
            train(state, ckpt, 5)
            begun.set()
            go_on.wait(30)
            train(state, ckpt, 8)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(30)
    with pytest.raises(LimpetError, match="by another thread, which has made it"):
        start(store, 4)
    go_on.set()
    thread.join()
    assert [s.step for s in Run(store).snapshots()] == [4, 8]
    start(store, 9, save=Never()).close()


def test_a_call_in_another_thread_is_not_ended():
    memory, gate, reached = MemoryStore(), threading.Event(), threading.Event()
    store, state = HookedStore(memory), initial_state()
    old = Checkpointer(store, state, save=EverySteps(9))

    def before(method, key):
        if threading.current_thread() is thread and method == "put_if_absent":
            reached.set()
            gate.wait(30)

    store.before = before
    thread = threading.Thread(target=train, args=(state, old, 1))
    thread.start()
    reached.wait(30)
    with pytest.raises(LimpetError, match=r"in use .* call of step\(\) in another thread"):
        Checkpointer(store, initial_state())
    gate.set()
    thread.join()
    assert old.save().step == 1  # it was left open
    old.close()


def test_a_sink_cannot_replace_the_training_that_called_it():
    store, found = MemoryStore(), list[LimpetError]()

    def sink(name, fields):
        if name == "began":
            with pytest.raises(LimpetError, match=r"call of resume\(\) in this thread") as e:
                Checkpointer(store, initial_state())
            found.append(e.value)

    with events.attach(sink):
        old = start(store, 1)
    assert len(found) == 1
    old.save()
    old.close()


def test_each_rank_of_a_job_takes_over_from_itself_only(tmp_path):
    """The ranks of one job may share a process."""

    def work(rank):
        steps = []
        for last_step in (4, 5, 7):  # the cell runs three times
            ckpt = start(tmp_path / "run", last_step, save=EverySteps(2))
            steps.append(ckpt.current_step)
        ckpt.close()
        return steps

    with FakeGroup(2) as group, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert group.run(work) == [[4, 5, 7], [4, 5, 7]]
    unsaved = {str(w.message)[:8] for w in shown if w.category is UnsavedSteps}
    assert unsaved == {"Step 5 i"}
    assert [s.step for s in Run(tmp_path / "run").snapshots()] == [2, 4, 6, 7]


@pytest.mark.slow
def test_a_forked_process_does_not_close_the_training_of_its_parent(tmp_path):
    source = CELL.replace("SAVE", "limpet.EverySteps(4)") + (
        "import os\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        other = limpet.Checkpointer('runs/a', {'progress': limpet.Progress()})\n"
        "    finally:\n"
        "        os._exit(0)\n"
        "os.wait()\n"
        "ckpt.step(); print(ckpt.save().step); ckpt.close()\n"
    )
    done = run_interpreter(tmp_path, "", "-c", source)
    assert done.stdout.split()[-1] == "7"
    assert done.stderr.splitlines() == [  # of the parent only
        "limpet: started a new training in runs/a: it has no version yet",
        "limpet: finished: saved step 7 to runs/a",
    ]
