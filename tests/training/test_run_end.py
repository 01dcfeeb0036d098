"""The end of a run is recorded, so that nobody waits for more versions."""

import pytest

from limpet.errors import Denied, Preempted, SaveFailed
from limpet.format.names import Version
from limpet.notices.exit_status import forget_done
from limpet.run.policy import AtEnd, EverySteps, Never, StopWhen
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.training.test_preemption import Training
from tests.trainings import initial_state, train, training
from tests.unreliable_stores import HookedStore

pytestmark = pytest.mark.filterwarnings("error")

STOP = StopWhen("val_loss", patience=2)
STOPPED = f"stopped by {STOP}"


def ends(store):
    return [s.key for s in store.list("") if s.key.endswith(".ended.json")]


def evaluate(store, **scores):
    for version, score in scores.items():
        Run(store).add_metrics(int(version[1:]), {"val_loss": score})


@pytest.mark.parametrize("save", [EverySteps(1), EverySteps(2) | AtEnd(), AtEnd()])
def test_a_normal_end_is_recorded_and_counts_until_there_is_a_newer_version(save):
    store = MemoryStore()
    run = Run(store)
    assert run.ended() is None
    with training(store, save) as (state, ckpt):
        train(state, ckpt, 3)
        ckpt.wait()
        assert run.ended() is None
    assert run.ended() == "finished"
    with training(store, save) as (state, ckpt):
        ckpt.resume()
        assert run.ended() == "finished"
        train(state, ckpt, 4)
        ckpt.save()
        assert run.ended() is None
    assert run.ended() == "finished"
    assert Run(store).ended() == "finished"


def test_the_end_is_recorded_once():
    store = MemoryStore()
    for _ in range(3):
        with training(store, Never()) as (state, ckpt):
            if ckpt.resume() is None:
                ckpt.save()
            train(state, ckpt, 2)  # no version holds these steps
    assert len(ends(store)) == 1
    assert Run(store).metrics(0) == {}


def test_a_restart_without_a_step_records_nothing():
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 2)
        raise ZeroDivisionError
    with training(store, EverySteps(1)) as (_, ckpt):
        ckpt.resume()
    assert Run(store).ended() is None


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.filterwarnings("ignore::limpet.errors.UnsavedSteps")
def test_an_exception_is_not_an_end(error):
    store = MemoryStore()
    with pytest.raises(type(error)), training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 2)
        raise error
    assert (Run(store).ended(), ends(store)) == (None, [])
    ckpt = Checkpointer(store, initial_state(), save=EverySteps(1))
    ckpt.resume()
    ckpt.step()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        ckpt.close()  # as in a finally block
    assert (Run(store).ended(), ends(store)) == (None, [])


@pytest.mark.parametrize("returns", [False, True])
def test_a_preemption_is_not_an_end(returns):
    store = MemoryStore()
    leaving = Training(store, AtEnd(), **({"exit_fn": lambda: None} if returns else {}))
    try:
        with leaving.ckpt:
            leaving.train(10_000, at={3: leaving.source.announce})
    except Preempted:
        assert not returns
    forget_done()
    assert len(Run(store).line()) >= 1
    assert (Run(store).ended(), ends(store)) == (None, [])


def test_a_stopped_run_says_so_and_a_restart_stops_at_once():
    """The last version is committed before its score comes, so it cannot store the stop."""
    store, state = MemoryStore(), initial_state()
    with Checkpointer(store, state, save=EverySteps(1), stop=STOP) as ckpt:
        train(state, ckpt, 4)
        ckpt.wait()
        evaluate(store, v2=1.0, v3=2.0, v4=3.0)
        ckpt._watcher.poll()
        ckpt.save()
        assert ckpt.should_stop
        assert Run(store).open(Version(4)).metadata["training"]["stop"]["scores"] == []
    assert Run(store).ended() == STOPPED
    for key in [s.key for s in store.list("") if "eval-metrics" in s.key]:
        store.delete(key)  # the record of the end is enough
    with Checkpointer(store, initial_state(), stop=STOP) as ckpt:
        ckpt.resume()
        assert ckpt.should_stop
    larger = StopWhen("val_loss", patience=9)
    with Checkpointer(store, state := initial_state(), stop=larger) as ckpt:
        ckpt.resume()
        assert not ckpt.should_stop, "a larger patience continues the training"
        train(state, ckpt, 5)
    assert Run(store).ended() == "finished"
    with Checkpointer(store, initial_state(), stop=STOP) as ckpt:
        ckpt.resume()
        assert not ckpt.should_stop, "the end of version 4 does not count any more"


def test_going_back_to_a_version_at_which_the_training_ended_is_not_an_end():
    store, state = MemoryStore(), initial_state()
    with Checkpointer(store, state, save=EverySteps(1), stop=STOP) as ckpt:
        train(state, ckpt, 3)
        ckpt.wait()
        evaluate(store, v1=1.0, v2=2.0, v3=3.0)
        ckpt._watcher.poll()
        ckpt.step()
        ckpt.wait()
    assert Run(store).ended() == STOPPED
    with Checkpointer(store, initial_state(), stop=StopWhen("val_loss", patience=9)) as ckpt:
        ckpt.resume()
        ckpt.step()
    assert Run(store).ended() == "finished"
    with Checkpointer(store, initial_state(), stop=StopWhen("other")) as ckpt:
        ckpt.resume(at=4)
        assert not ckpt.should_stop
        assert Run(store).ended() is None


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_an_end_that_cannot_be_recorded_is_reported(choice):
    store = HookedStore(MemoryStore())

    def fail(method, key):
        if method == "put_if_absent" and key.endswith(".ended.json"):
            raise Denied(f"Cannot create {key}")

    store.before, told = fail, "version_2 was saved, but the end of the training could not be"
    ckpt = Checkpointer(store, state := initial_state(), save=EverySteps(1), on_error=choice)
    train(state, ckpt, 2)
    if choice == "raise":
        with pytest.raises(Denied, match=told):
            ckpt.close()
    else:
        with pytest.warns(SaveFailed, match=told):
            ckpt.close()
    assert Run(store.inner).ended() is None
    assert Run(store.inner).line() == [Version(1), Version(2)]


def test_a_damaged_record_of_the_end_is_no_end():
    store = MemoryStore()
    with training(store, AtEnd()) as (state, ckpt):
        train(state, ckpt, 1)
    [key] = ends(store)
    raw = store.get(key, 1 << 20)
    store.delete(key)
    store.put_if_absent(key, raw.replace(b"finished", b"finishes"))
    assert Run(store).ended() is None
