"""Saves in which one file system call fails.

The save raises or it has committed; it is never half done. It keeps no buffers or threads, and the
next save works.
"""

import errno
import warnings
from collections.abc import Callable

import pytest

import limpet
from limpet.errors import LimpetError, SkippedVersion, StoreError
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.testing.crashfs import CrashFs
from limpet.testing.faults import Fault, FaultFs
from tests.crash.conftest import OpenedStore
from tests.crash.equal_states import CheckedStates, equal_bytes
from tests.crash.promises import check_promises
from tests.trainings import initial_state, state_after, states_equal, train

ROOT = "/a/run"
ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EACCES"]
MAX_CALLS = 2000


class Outcome:
    """What a training with a fault reports: the steps whose save returned, and the errors."""

    def __init__(self):
        self.committed: list[int] = []
        self.errors: list[LimpetError] = []

    @property
    def doubtful(self):
        """True if an error states that the outcome of a save is unknown."""
        return any(e.fields.get("outcome") == "unknown" for e in self.errors)


Work = Callable[[LocalStore, OpenedStore, Outcome], None]


def attempt(save, outcome):
    try:
        outcome.committed.append(save())
    except LimpetError as e:
        outcome.errors.append(e)


def one_save(store, opened, outcome):
    attempt(lambda: limpet.save(f"{ROOT}/version_1", state_after(1)).step or 0, outcome)


def one_async_save(store, opened, outcome):
    attempt(
        lambda: limpet.save_async(f"{ROOT}/version_1", state_after(1)).wait().step or 0, outcome
    )


def training(store, opened, outcome, **options):
    """Save three steps with ``step`` and ``save``. Retention keeps one version."""
    state = initial_state()
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(1), **options)

    def saved_by_step():
        train(state, ckpt, state["progress"].step + 1)
        snapshot = ckpt.wait()
        return snapshot.step or 0 if snapshot else 0

    attempt(saved_by_step, outcome)
    attempt(saved_by_step, outcome)
    attempt(lambda: ckpt.save().step or 0, outcome)
    try:
        ckpt.close()
    except LimpetError as e:
        outcome.errors.append(e)


WORKS = {"save": one_save, "save_async": one_async_save, "checkpointer": training}
CHECKED = {work: CheckedStates() for work in WORKS.values()}
"""Most calls leave the same states, whatever the error is."""


def faults(error):
    """Yield faults in which the n-th call fails, for n = 1, 2, and so on."""
    for at in range(1, MAX_CALLS):
        if error == "short":
            yield Fault("pwrite", at, short=100)
        elif error == "nothing":
            yield Fault("pwrite", at, short=0)
        elif error == "lost":
            yield Fault(None, at, errno.EIO, lost=True)
        elif error == "full":
            yield Fault(None, at, errno.ENOSPC, lasting=True)
        else:
            yield Fault(None, at, getattr(errno, error))


def run_all(work, error, pools, opened, *, every=1):
    """Run ``work`` with each fault until no fault fires, and return the number of runs."""
    with equal_bytes() as restart_ids:
        for number, fault in enumerate(faults(error)):
            if number % every:
                continue
            restart_ids()
            inner = CrashFs()
            fs = FaultFs(inner, fault)
            opened.store = store = LocalStore(ROOT, fs=fs)
            outcome = Outcome()
            work(store, opened, outcome)
            pools.assert_all_freed()
            check_errors(outcome, error)
            if CHECKED[work].add(inner, outcome.committed, outcome.doubtful):
                check_files(LocalStore(ROOT, fs=inner), work, outcome)
            if not fs.fired:
                assert outcome.errors == []
                return number
    pytest.fail(f"a fault still fires after {MAX_CALLS} calls")


def check_errors(outcome, error):
    for e in outcome.errors:
        assert ROOT in str(e) or e.fields.get("store"), e
        assert e.__cause__ is not None or e.what
    if error == "short":
        assert outcome.errors == [], "a short write is not an error"


def check_files(store, work, outcome):
    newest = max(outcome.committed, default=0)
    steps = check_promises(store, [newest] if newest else [])
    if not outcome.doubtful and work is not training:
        assert steps == outcome.committed


@pytest.mark.parametrize("error", ["EACCES", "ESTALE", "ETIMEDOUT", "EMFILE", "ENOMEM", "ENOTCONN"])
def test_resume_raises_on_errors_that_are_not_damage(error, pools):
    """The resume skips no intact version and starts no branch."""
    inner = CrashFs()
    with limpet.Checkpointer(
        LocalStore(ROOT, fs=inner), initial_state(), save=EverySteps(1)
    ) as ckpt:
        ckpt.step()
        ckpt.step()
    raised = 0
    for fault in faults(error):
        fs = FaultFs(inner, fault)
        ckpt = limpet.Checkpointer(LocalStore(ROOT, fs=fs), initial_state())
        try:
            resumed = ckpt.resume()
        except StoreError:
            raised += 1
        else:
            assert resumed is not None
            assert resumed.step == 2
        ckpt.close()
        pools.assert_all_freed()
        assert Run(LocalStore(ROOT, fs=inner)).branch() == 0
        if not fs.fired:
            break
    assert raised > 10


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_resume_skips_versions_that_the_disk_cannot_read(every, pools):
    """EIO at any call of a resume: the resume raises, or it loads a complete state. If it skips a
    version, it starts a branch, and the skipped version still exists."""
    outcomes, checked = set(), CheckedStates()
    with equal_bytes() as restart_ids:
        for fault in list(faults("EIO"))[::every]:
            restart_ids()
            inner = CrashFs()
            with limpet.Checkpointer(
                LocalStore(ROOT, fs=inner), initial_state(), save=EverySteps(1)
            ) as c:
                train(c.state, c, 2)
            fs = FaultFs(inner, fault)
            outcomes.add(resume_or_raise(LocalStore(ROOT, fs=fs), inner))
            pools.assert_all_freed()
            if checked.add(inner):
                check_promises(LocalStore(ROOT, fs=inner), [1])
            if not fs.fired:
                break
    assert outcomes == {"raised", 1, 2}


def resume_or_raise(store, inner):
    """Return the step of the version that a resume loaded, or "raised"."""
    state = initial_state()
    ckpt = limpet.Checkpointer(store, state)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SkippedVersion)
            resumed = ckpt.resume()
    except StoreError:
        return "raised"
    else:
        assert resumed is not None
        step = resumed.step or 0
        assert states_equal(state, state_after(step))
        assert Run(LocalStore(ROOT, fs=inner)).branch() == 2 - step
        return step
    finally:
        ckpt.close()


@pytest.mark.parametrize("name", WORKS)
def test_promises_hold_if_a_call_fails_with_eio(name, pools, opened):
    every = 13 if name == "checkpointer" else 5
    assert run_all(WORKS[name], "EIO", pools, opened, every=every) > 30


@pytest.mark.slow
@pytest.mark.parametrize("error", [*ERRORS, "lost", "full", "short", "nothing"])
@pytest.mark.parametrize("name", WORKS)
def test_promises_hold_if_any_call_fails_with_any_error(name, error, pools, opened):
    every = (3 if name == "checkpointer" else 1) * (2 if error in ("EDQUOT", "EACCES") else 1)
    run_all(WORKS[name], error, pools, opened, every=every)
