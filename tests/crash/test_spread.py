"""A training that spreads its shards, and in which any file system call fails or is the last."""

import pytest

import limpet
from limpet.run.policy import EverySteps, KeepLast
from limpet.storage.local.store import LocalStore
from limpet.testing.crashfs import CrashFs
from limpet.testing.faults import FaultFs
from tests.crash.equal_states import CheckedStates, equal_bytes
from tests.crash.promises import check_promises
from tests.crash.test_nth_call import ROOT, Outcome, faults
from tests.crash.test_nth_call import training as train_with_faults
from tests.crash.test_power import cut_everywhere
from tests.spread_stores import shards_in, spread_over
from tests.trainings import initial_state, train


def training(store, done):
    """Create the run, save three steps, and keep two versions."""
    state = initial_state()
    store = spread_over(store, 4)
    with limpet.Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(2)) as ckpt:
        for step in (1, 2, 3):
            train(state, ckpt, step)
            ckpt.wait()
            done.append(step)


def check_run(store, done):
    """Check the promises, also of a training that continues without the option."""
    check_promises(store, done[-1:])
    shards = shards_in(store)
    assert sum(not key.startswith("spread-") for key in shards) <= 2  # those of check_promises


@pytest.mark.parametrize(
    ("every", "choices"), [(29, 2), pytest.param(9, 3, marks=pytest.mark.slow)]
)
def test_promises_hold_after_a_power_cut(every, choices, pools, opened):
    states = cut_everywhere(training, check_run, pools, opened, every=every, choices=choices)
    assert states > 10


@pytest.mark.parametrize("error", ["EIO", "full"])
@pytest.mark.parametrize("every", [23, pytest.param(11, marks=pytest.mark.slow)])
def test_promises_hold_if_calls_fail(every, error, pools, opened):
    checked = CheckedStates()
    with equal_bytes() as restart_ids:
        for fault in list(faults(error))[::every]:
            restart_ids()
            inner = CrashFs()
            fs = FaultFs(inner, fault)
            outcome = Outcome()
            train_with_faults(spread_over(LocalStore(ROOT, fs=fs), 4), opened, outcome)
            pools.assert_all_freed()
            if checked.add(inner, outcome.committed):
                check_run(LocalStore(ROOT, fs=inner), outcome.committed[-1:])
            if not fs.fired:
                assert outcome.errors == []
                return
    pytest.fail("a fault still fires")
