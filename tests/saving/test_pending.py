"""Asynchronous saves: the state may change, the process may exit or fork, and the writer may fail.
No save is lost, and every failure is reported."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import limpet
from limpet import events
from limpet.errors import CommitError, LimpetError, StoreError
from limpet.format.names import MANIFEST, WRITER_LOCK
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from tests.crash.promises import check_promises
from tests.interrupts import MOMENTS, SignalError, raise_at_start
from tests.pools import allocated_bytes, free_bytes
from tests.saving.child_scripts import SAVE, STEP, run_script
from tests.trainings import initial_state, state_after, states_equal, train
from tests.unreliable_stores import HookedStore


@pytest.fixture
def store(monkeypatch):
    """Return a store that every URL opens."""
    store = HookedStore(MemoryStore())
    monkeypatch.setattr("limpet.snapshot.location.open_store", lambda url: store)
    return store


def block_writes(store):
    """Block uploads until the returned event is set."""
    gate = threading.Event()
    store.before = lambda method, key: method == "put" and gate.wait(20)
    return gate


def refuse_writes(store):
    def refuse(method, key):
        if method == "put":
            raise StoreError(f"no write of {key}", key=key, store="memory://")

    store.before = refuse


def test_the_state_may_change_as_soon_as_the_call_returns(store):
    gate = block_writes(store)
    rows = np.arange(3_000_000, dtype=np.float64)  # three pieces, copied by several threads
    state = {
        "rows": rows,
        "strided": rows.reshape(1000, 3000)[:, ::7],
        "structured": np.ones(50, [("a", "<i4"), ("b", ">f8")]),
        "list": [1, {"a": (2.5, "x")}],
    }
    expected = {"rows": rows.copy(), "strided": state["strided"].copy()}
    pending = limpet.save_async("run/version_1", state, note={"lr": 0.1})
    pending.wait_staged()
    assert not pending.done
    rows[:] = -1
    state["structured"]["a"] = 7
    state["list"][1]["a"] = None
    state["list"].append("later")
    gate.set()
    pending.wait()
    loaded = limpet.load("run/version_1")
    assert np.array_equal(loaded["rows"], expected["rows"])
    assert np.array_equal(loaded["strided"], expected["strided"])
    assert loaded["structured"]["a"].tolist() == [1] * 50
    assert loaded["list"] == [1, {"a": (2.5, "x")}]


def test_tensors_may_change_as_soon_as_the_call_returns(store):
    torch = pytest.importorskip("torch")
    gate = block_writes(store)
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(4, 300)).sum().backward()
        optimizer.step()

    step()
    state = {"model": model, "optimizer": optimizer, "view": model.weight.detach().t()}
    weight = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    pending = limpet.save_async("run/version_1", state)
    step()
    gate.set()
    pending.wait()
    loaded = limpet.load("run/version_1")
    assert torch.equal(loaded["model"]["weight"], weight)
    assert torch.equal(loaded["view"], weight.t())
    assert not torch.equal(model.weight, weight)
    found = limpet.open("run/version_1")
    [key] = [k for k in found.keys() if k.endswith("weight/exp_avg")]  # noqa: SIM118
    assert torch.equal(found[key].read(), moment)


@pytest.mark.parametrize(
    ("start", "end", "code"),
    [
        (SAVE, "", 0), (STEP, "", 0), (SAVE, "sys.exit(3)", 3), (STEP, "sys.exit(0)", 0),
        (STEP, "raise ValueError('other')", 1),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_process_that_exits_immediately_finishes_its_save(tmp_path, start, end, code):
    done = run_script(tmp_path, f"{start}state['x'][:] = 0\n{end}")
    assert done.returncode == code, done.stderr
    assert "limpet" not in done.stderr
    snapshot = limpet.open(tmp_path / "run" / "version_1")
    assert snapshot.verify().ok
    assert np.array_equal(snapshot["x"].read(), np.arange(500_000))
    there = [s.key for s in LocalStore(tmp_path / "run").list("") if s.key != WRITER_LOCK]
    assert len(there) == 3  # the manifest, the shard, and the index; no pin is left


@pytest.mark.parametrize(
    ("start", "end"), [(SAVE, ""), (STEP, "sys.exit(0)"), (SAVE, "time.sleep(0.5)"), (STEP, "")]
)
@pytest.mark.slow
def test_an_unobserved_failure_ends_the_process_with_exit_code_1(tmp_path, start, end):
    done = run_script(tmp_path, f"break_writer()\n{start}print('trained')\n{end}")
    assert done.returncode == 1
    assert done.stdout == "trained\n"
    assert f"limpet: the save to {tmp_path}/run/version_1 failed" in done.stderr
    assert "NoSpace" in done.stderr
    assert check_promises(LocalStore(tmp_path / "run"), assume_dead_pins=False) == []


def test_exit_handlers_run_after_an_unobserved_failure(tmp_path):
    """Handlers that were registered before and after the save both run."""
    done = run_script(
        tmp_path,
        "import atexit, logging.handlers\n"
        "atexit.register(print, 'first')\n"
        "memory = logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout))\n"
        "logging.getLogger().addHandler(memory)\n"
        "logging.warning('logged')\n"
        f"break_writer()\n{SAVE}"
        "atexit.register(print, 'last')\n",
    )
    assert (done.returncode, done.stdout) == (1, "last\nfirst\nlogged\n")
    assert done.stderr.count("limpet: the save to") == 1


def test_a_failure_that_the_program_handled_is_not_reported_again(tmp_path):
    done = run_script(
        tmp_path,
        f"break_writer()\n{SAVE}"
        "try:\n    pending.wait()\nexcept limpet.errors.NoSpace:\n    print('seen')\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "seen\n", "")


def test_a_checkpointer_makes_its_saves_one_at_a_time():
    store = HookedStore(MemoryStore())
    order: list[str] = []
    running, most = 0, 0
    slow = threading.Event()

    def before(method, key):
        nonlocal running, most
        if method == "put":
            running += 1
            most = max(most, running)
            slow.wait(0.02)
        if method == "put_if_absent" and key.endswith(MANIFEST):
            order.append(key)
            running -= 1

    store.before = before
    state = initial_state()
    allocated = set()
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        for step in range(1, 12):
            train(state, ckpt, step)
            allocated.add(allocated_bytes(ckpt._saver._pool))
    assert order == [f"version_{step}/{MANIFEST}" for step in range(1, 12)]
    assert most == 1
    assert len(allocated) == 1  # one copy of the state, reused
    parents = [
        reader_of(s).manifest.parent.version
        for s in Run(store).snapshots()
        if reader_of(s).manifest.parent
    ]
    assert parents == [f"version_{step}" for step in range(1, 11)]
    store.before = lambda method, key: None
    assert check_promises(store) == list(range(1, 12))


def test_ten_saves_without_a_checkpointer_run_concurrently(store):
    gate = block_writes(store)
    pending = [limpet.save_async(f"run/version_{n}", state_after(n)) for n in range(1, 11)]
    assert not any(p.done for p in pending)
    gate.set()
    assert [p.wait().step for p in pending] == list(range(1, 11))
    assert check_promises(store) == list(range(1, 11))


@pytest.mark.parametrize("progress", [True, False])
def test_the_step_that_raises_an_earlier_failure_is_counted(progress):
    """The optimizer has made the step. If it were not counted, later versions would have wrong
    names."""
    store = HookedStore(MemoryStore())
    refuse_writes(store)
    state = initial_state()
    if not progress:
        state["progress"] = 0
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(2))
    ckpt.step()
    ckpt.step()
    ckpt._saver.pending._thread.join()
    with pytest.raises(StoreError, match="no write"):
        ckpt.step()
    assert ckpt.current_step == 3
    store.before = lambda method, key: None
    ckpt.step()
    ckpt.close()
    assert [s.step for s in Run(store).snapshots()] == [4]


def test_step_raises_if_no_save_thread_can_be_started(monkeypatch):
    store = MemoryStore()
    state = initial_state()
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(1))

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        with pytest.raises(CommitError, match="no thread can be started"):
            train(state, ckpt, 1)
    assert [s.key for s in store.list("")] == [WRITER_LOCK]
    assert free_bytes(ckpt._saver._pool) == allocated_bytes(ckpt._saver._pool) > 0
    train(state, ckpt, 2)
    ckpt.close()
    assert check_promises(store) == [2]


def test_a_save_succeeds_if_not_all_worker_threads_can_be_started(monkeypatch):
    start = threading.Thread.start

    def refuse(self):
        if self.name == "limpet-1":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr("threading.Thread.start", refuse)
    store = MemoryStore()
    assert limpet.save(store, {"x": np.arange(5_000_000)}).verify().ok


def test_an_interrupt_in_a_sink_releases_the_pin_and_the_buffers():
    store = MemoryStore()
    state = initial_state()
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(1))

    def sink(name, fields):
        if name == "staged":
            raise KeyboardInterrupt

    with events.attach(sink), pytest.raises(KeyboardInterrupt):
        train(state, ckpt, 1)
    assert [s.key for s in store.list("")] == [WRITER_LOCK]
    assert free_bytes(ckpt._saver._pool) == allocated_bytes(ckpt._saver._pool) > 0
    ckpt.close()


def test_a_save_is_finished_after_an_interrupted_wait():
    store = HookedStore(MemoryStore())
    gate = block_writes(store)
    state = initial_state()
    main, stopped = threading.get_ident(), threading.Event()

    def interrupt_once(number, frame):
        if not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    def send_sigint():
        # A signal that arrives right before the wait blocks has no effect until the next signal.
        while not stopped.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt_once)
    interrupt = threading.Thread(target=send_sigint)
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(1))
    try:
        with pytest.raises(KeyboardInterrupt), ckpt:
            train(state, ckpt, 1)
            try:
                interrupt.start()
                ckpt.wait()
            finally:
                assert ckpt._saver.pending is not None
                gate.set()
    finally:
        stopped.set()
        interrupt.join()
        signal.signal(signal.SIGINT, before)
    assert ckpt._saver.pending is None
    assert check_promises(store, [1]) == [1]


INTERRUPT_STEPS = """
import os, signal, threading, time
import limpet
from limpet.run.policy import EverySteps
from limpet.run.policy import KeepLast
from limpet.storage.memory import MemoryStore
from tests.crash.promises import check_promises
from tests.trainings import initial_state, train_step

def interrupted(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupted)
stopped = 0
for turn in range(80):
    store = MemoryStore()
    state = initial_state()
    try:
        with limpet.Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(2)) as ckpt:
            for _ in range(4):
                loss = train_step(state)
                signal.setitimer(signal.ITIMER_REAL, 0.0001 * (turn % 20 + 1))
                ckpt.step({"loss": loss})
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        stopped += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    deadline = time.monotonic() + 10
    # is_alive: if an interrupt stops the start of a thread, Python lists that thread forever
    while left := [t for t in threading.enumerate() if t.name[:8] == "limpet" and t.is_alive()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)
    check_promises(store)
assert stopped > 20, stopped
os._exit(0)
"""


@pytest.mark.slow
def test_a_step_survives_an_interrupt_at_any_moment():
    """The test runs in its own process. One of hundreds of interrupts may occur between the
    acquisition of a lock of Python's threading module and the ``with`` block that releases it.
    Then the process can no longer start or end a thread. So the process may hang, but not three
    times in a row."""
    for _ in range(3):
        try:
            done = subprocess.run(
                [sys.executable, "-c", INTERRUPT_STEPS],
                cwd=Path(__file__).parents[2],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except subprocess.TimeoutExpired:
            continue
        assert done.returncode == 0, done.stderr
        return
    pytest.fail("the process hung three times")


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_error_of_a_signal_handler_while_the_thread_of_a_save_starts_is_raised(
    monkeypatch, moment
):
    store, state = MemoryStore(), initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        train(state, ckpt, 2)
        raise_at_start(monkeypatch, "limpet-save", moment)
        with pytest.raises(SignalError):
            train(state, ckpt, 3)
        train(state, ckpt, 4)
    assert check_promises(store) == ([1, 2, 4] if moment == MOMENTS[0] else [1, 2, 3, 4])


def test_a_forked_child_cannot_wait_for_a_pending_save(store):
    pending = limpet.save_async("run/version_1", state_after(1))
    pending.wait()
    pending._pid += 1
    with pytest.raises(LimpetError, match="forked"):
        pending.wait()
    limpet.load("run/version_1", into=(loaded := initial_state()))
    assert states_equal(loaded, state_after(1))
