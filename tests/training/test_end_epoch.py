"""``end_epoch`` ends an epoch of any loader, and ``step`` counts several steps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.errors import LimpetError, PlanError, Preempted, SaveFailed, Unavailable
from limpet.preemption import Preemption, PreemptionGuard
from limpet.run.policy import AtEnd, EveryEpoch, EverySteps, Never
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.notices.announced import Announced
from tests.trainings import initial_state, train_step
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("error", "ignore::limpet.errors.UnsavedSteps")

BATCHES = 4
"""The number of batches in an epoch of ``SAMPLES`` samples."""

SAMPLES = 16


def make_loader(samples):
    return limpet.DataLoader(
        range(samples), SAMPLES // BATCHES, shuffle=True, seed=0, collate_fn=list
    )


class Training:
    """A training that resumes, and loops over epochs as the documents say."""

    def __init__(self, store, save, *, loader, **options):
        self.state = initial_state()
        self.progress: limpet.Progress = self.state["progress"]
        self.loader = make_loader(SAMPLES) if loader else None
        if self.loader is not None:
            self.state["loader"] = self.loader
        self.seen: list[tuple[int, list[int]]] = []
        self.ckpt = limpet.Checkpointer(store, self.state, save=save, **options)
        self.resumed = self.ckpt.resume()

    def epoch(self, stop_after=None):
        """Make one pass, or only its first steps."""
        batches: Iterator[list[int]] = (
            iter([[n] for n in range(BATCHES)]) if self.loader is None else iter(self.loader)
        )
        for number, batch in enumerate(batches, 1):
            self.seen.append((self.progress.epoch, batch))
            self.ckpt.step({"loss": train_step(self.state)})
            if number == stop_after:
                return

    def metrics(self, step):
        return Run(self.ckpt.run.store).metrics(Run(self.ckpt.run.store).find(step))

    def versions(self):
        self.ckpt.wait()
        return [v.step for v in Run(self.ckpt.run.store).line()]


def load(store, step):
    return limpet.load(store.at(f"version_{step}"))


@pytest.mark.parametrize(("every", "expected"), [(1, [4, 8, 12]), (2, [8]), (3, [12])])
def test_every_epoch_saves_at_the_end_of_an_epoch_of_any_loader(every, expected):
    store = MemoryStore()
    training = Training(store, EveryEpoch(every), loader=False)
    for number in range(3):
        training.epoch()
        training.ckpt.end_epoch({"val": 0.5 - number / 10})
        assert (training.progress.epoch, training.progress.step_in_epoch) == (number + 1, 0)
    assert training.versions() == expected
    state = load(store, expected[0])
    assert state["progress"]["epoch"] == every
    assert training.metrics(expected[0])["val"] == 0.5 - (every - 1) / 10
    assert "loss" in training.metrics(expected[0])
    training.ckpt.close()


def test_the_count_of_epochs_continues_after_a_restart():
    """``EveryEpoch(2)`` saves after epochs 2 and 4, also if the process restarts after epoch 3."""
    store = MemoryStore()
    first = Training(store, EveryEpoch(2) | EverySteps(6), loader=False)
    for _ in range(3):
        first.epoch()
        first.ckpt.end_epoch()
    assert first.versions() == [6, 8, 12]  # 12 by its number of steps, with the old epoch
    first.ckpt.close()
    second = Training(store, EveryEpoch(2), loader=False)
    assert second.progress.epoch == 3  # its end was recorded
    second.epoch()
    second.ckpt.end_epoch()
    assert second.versions() == [6, 8, 12, 16]
    second.ckpt.close()


def test_a_step_that_is_saved_gets_the_metrics_of_its_epoch_and_no_second_version():
    store = MemoryStore()
    with Training(store, EverySteps(4) | EveryEpoch(), loader=False).ckpt as ckpt:
        training = Training.__new__(Training)
        training.__dict__.update(ckpt=ckpt, state=ckpt.state, loader=None, seen=[])
        training.progress = ckpt.state["progress"]
        training.epoch()
        ckpt.end_epoch({"val": 0.25})
        assert training.versions() == [4]
        assert training.metrics(4)["val"] == 0.25
        assert load(store, 4)["progress"]["epoch"] == 0
        ckpt.step({"loss": train_step(ckpt.state)})  # nothing is left to be saved for the epoch
        assert training.versions() == [4]


@pytest.mark.parametrize("stop_after", range(1, BATCHES + 1))
@pytest.mark.parametrize("ended", [True, False])
def test_a_resume_continues_with_the_epoch_that_was_not_ended(stop_after, ended):
    """The version is saved within an epoch, at its last step, or after ``end_epoch``."""

    def loop(training):
        while training.progress.epoch < 3:
            training.epoch()
            training.ckpt.end_epoch()

    expected = Training(MemoryStore(), Never(), loader=True)
    loop(expected)
    store = MemoryStore()
    first = Training(store, Never(), loader=True)
    first.epoch()
    first.ckpt.end_epoch()
    first.epoch(stop_after)
    if ended and stop_after == BATCHES:
        first.ckpt.end_epoch()
    first.ckpt.save()
    first.ckpt.close()
    second = Training(store, Never(), loader=True)
    loop(second)
    assert first.seen + second.seen == expected.seen


def test_an_epoch_that_ends_early_counts_and_the_loader_begins_the_next():
    store = MemoryStore()
    training = Training(store, EveryEpoch(), loader=True)
    training.epoch(3)
    training.ckpt.end_epoch()
    training.epoch()
    assert training.versions() == [3]
    assert sorted(i for _, batch in training.seen[3:] for i in batch) == list(range(SAMPLES))
    training.ckpt.end_epoch()
    assert training.versions() == [3, 7]
    assert training.progress.epoch == 2
    training.ckpt.close()


@pytest.mark.parametrize("leftover", [0, 1])
def test_end_epoch_with_accumulated_gradients(leftover):
    """A step of three batches begins in one epoch, and ends in the next."""
    loader = make_loader(16 + leftover * 4)
    progress = limpet.Progress()
    store, count, waiting = MemoryStore(), 0, 0
    state = {"progress": progress, "loader": loader, "x": [1.0]}
    with limpet.Checkpointer(store, state, save=Never()) as ckpt:
        while progress.epoch < 3:
            for _ in loader:
                count, waiting = count + 1, waiting + 1
                if waiting == 3:
                    ckpt.step(batches=3)
                    waiting = 0
            ckpt.end_epoch()
        assert (count, progress.epoch) == (3 * len(loader), 3)
        ckpt.save()
    resumed = make_loader(16 + leftover * 4)
    state = {"progress": limpet.Progress(), "loader": resumed, "x": [0.0]}
    with limpet.Checkpointer(store, state, save=Never()) as ckpt:
        ckpt.resume()
        assert sum(1 for _ in resumed) == count % 3 + len(resumed)


@pytest.mark.parametrize("save", [EverySteps(1), EveryEpoch(), EverySteps(1) | EveryEpoch()])
@pytest.mark.parametrize("kill", range(1, 8))
def test_a_step_over_the_end_of_an_epoch_has_the_same_batches_after_a_resume(kill, save):
    """Of five batches in an epoch and two in a step, one waits for the next epoch. ``count``, which
    changes with each batch as buffers of BatchNorm do, is not saved with a batch without a step."""

    def train(store, kill=None):
        seen, waiting, loader = dict[int, Any](), [], make_loader(5 * 4)
        count = torch.zeros(1)
        state = {"loader": loader, "progress": limpet.Progress(), "count": count}
        with limpet.Checkpointer(store, state, save=save) as ckpt:
            for _ in ckpt.epochs(3):
                for batch in loader:
                    count += 1
                    waiting.append((batch, torch.rand(()).item(), count.item()))
                    if len(waiting) == 2:
                        ckpt.step(batches=2)
                        seen[ckpt.current_step] = waiting
                        waiting = []
                        if ckpt.current_step == kill:
                            break
                if ckpt.current_step == kill:
                    raise KeyboardInterrupt
        return seen

    store, expected = MemoryStore(), train(MemoryStore())
    for number in (kill, kill + 1):  # also right after the resume
        if number <= 7:
            with pytest.raises(KeyboardInterrupt):
                train(store, number)
    assert len(expected) == 7
    assert train(store).items() <= expected.items()


def test_batches_are_as_many_as_steps():
    loader, state = limpet.DataLoader(range(12)), initial_state()
    with limpet.Checkpointer(MemoryStore(), {**state, "loader": loader}, save=Never()) as ckpt:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        ckpt.step(steps=3)
        assert (ckpt.current_step, loader.state_dict()["at"]) == (3, 3)
        for _ in range(4):
            next(batches)
        ckpt.step(steps=2, batches=4)
        assert (ckpt.current_step, loader.state_dict()["at"]) == (5, 7)
        with pytest.raises(LimpetError, match="more batches"):
            ckpt.step(steps=2)
        assert (ckpt.current_step, loader.state_dict()["at"]) == (5, 7)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2", None])
def test_an_invalid_number_of_steps_counts_nothing(steps):
    with limpet.Checkpointer(MemoryStore(), initial_state(), save=Never()) as ckpt:
        with pytest.raises(LimpetError, match="steps= must be"):
            ckpt.step(steps=steps)
        assert ckpt.current_step == 0
        ckpt.step(steps=2)
        assert ckpt.current_step == 2


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 7),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_any_sequence_of_steps_and_epochs_saves_what_is_due(calls, every):
    store, progress = MemoryStore(), limpet.Progress()
    state = {"progress": progress, "x": [0.0]}
    expected, last, epochs, began = [], 0, 0, 0
    save = EverySteps(every) | EveryEpoch(2)
    with limpet.Checkpointer(store, state, save=save, at_end=False) as ckpt:
        step = 0
        for steps, ends in calls:
            ckpt.step(steps=steps)
            step += steps
            if step // every > last // every:
                expected.append(step)
                last = step
            if ends:
                ckpt.end_epoch()
                epochs, began = epochs + 1, step
                if epochs % 2 == 0 and last != step:
                    expected.append(step)
                    last = step
            assert (progress.step_in_epoch, progress.epoch) == (step - began, epochs)
        ckpt.wait()
    assert [v.step for v in Run(store).line()] == expected


class BrokenStore(MemoryStore):
    """Refuses shards while ``broken``."""

    broken = False

    def put(self, key, length):
        if self.broken:
            raise Unavailable("The server does not answer")
        return super().put(key, length)


def test_metrics_of_an_epoch_whose_save_failed_are_stored_by_the_next_save_of_the_step():
    store = BrokenStore()
    training = Training(store, EverySteps(4) | AtEnd(), loader=False, on_error="warn")
    store.broken = True
    training.epoch()
    with pytest.warns(SaveFailed):
        training.ckpt.end_epoch({"val": 0.5})
    store.broken = False
    assert training.progress.epoch == 1
    assert training.versions() == []
    training.ckpt.close()
    assert training.metrics(4)["val"] == 0.5
    assert load(store, 4)["progress"]["epoch"] == 1


def test_a_failed_save_is_raised_by_end_epoch_and_the_epoch_is_counted():
    store = BrokenStore()
    training = Training(store, EverySteps(4), loader=True)
    store.broken = True
    training.epoch()
    with pytest.raises(Unavailable):
        training.ckpt.end_epoch({"val": 0.5})
    store.broken = False
    assert training.progress.epoch == 1
    training.epoch()
    training.ckpt.end_epoch()
    assert training.versions() == [8]
    training.ckpt.close()


def test_the_step_cannot_be_set_after_the_first_one_and_the_epoch_never():
    training = Training(MemoryStore(), Never(), loader=False)
    training.progress.step = 2  # before the first step, as after an import
    training.epoch()
    training.ckpt.end_epoch()
    with pytest.raises(LimpetError, match=r"progress.step cannot be set: ckpt\."):
        training.progress.step = 5
    with pytest.raises(AttributeError):
        training.progress.epoch = 5  # type: ignore[misc]
    assert (training.progress.epoch, training.progress.step) == (1, 6)
    training.ckpt.close()


@pytest.mark.parametrize("count", [-1, 1.0, True, "2", None, 10**17])
@pytest.mark.parametrize("name", ["epoch", "step"])
def test_an_invalid_count_is_refused(name, count):
    progress = limpet.Progress()
    if name == "step":
        with pytest.raises(LimpetError, match=r"progress\.step must be a whole number, 0 or more"):
            progress.step = count
    with pytest.raises(PlanError, match="not the state of a Progress"):
        progress.load_state_dict({**progress.state_dict(), name: count})
    assert (progress.epoch, progress.step) == (0, 0)


@pytest.mark.parametrize("metrics", [{"val": "x"}, [1], {1: 2.0}])
def test_invalid_metrics_change_nothing(metrics):
    training = Training(MemoryStore(), EveryEpoch(), loader=True)
    training.epoch()
    with pytest.raises(PlanError):
        training.ckpt.end_epoch(metrics)
    assert training.progress.epoch == 0
    training.ckpt.end_epoch({"val": 1.0})
    assert training.progress.epoch == 1
    training.ckpt.close()


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_notice_before_end_epoch_saves_and_leaves_there(is_saved):
    """The metrics of the epoch are recorded in both cases, and no epoch is lost."""
    store, source = MemoryStore(), Announced()
    save = EverySteps(BATCHES if is_saved else 100)
    training = Training(store, save, loader=True, preemption=Preemption(notices=[source]))
    training.epoch()
    training.ckpt.wait()
    source.announce(60.0)
    wait_until(training.ckpt._preemption.agreement._proposals.qsize)
    with pytest.raises(Preempted) as raised:
        training.ckpt.end_epoch({"val": 0.5})
    assert raised.value.code == 75
    again = Training(store, Never(), loader=True)
    assert again.metrics(4)["val"] == 0.5
    assert again.progress.epoch == 1
    again.epoch()
    assert len(again.seen) == BATCHES
    again.ckpt.close()


def test_a_guarded_call_may_end_epochs():
    """The call is saved as a whole, at its end, with the epoch that it has ended."""
    store = MemoryStore()
    training = Training(store, EveryEpoch(), loader=False)
    guard = PreemptionGuard(training.ckpt)

    def run_epoch():
        training.epoch()
        training.ckpt.end_epoch({"val": 0.5})

    guard.run(run_epoch)
    assert training.versions() == [4]
    assert training.metrics(4)["val"] == 0.5
    guard.run(training.ckpt.end_epoch)  # it makes no step itself
    assert training.ckpt.current_step == 5
    training.ckpt.close()


def test_an_exception_after_end_epoch_saves_the_new_epoch(tmp_path):
    url = str(tmp_path / "run")
    with (
        pytest.raises(ValueError, match="stop"),
        limpet.Checkpointer(
            url, initial_state(), save=EverySteps(100) | limpet.OnException()
        ) as ckpt,
    ):
        ckpt.step()
        ckpt.end_epoch({"val": 1.0})
        raise ValueError("stop")
    [snapshot] = Run(url).snapshots()
    assert limpet.load(snapshot.url)["progress"]["epoch"] == 1
    assert snapshot.metadata["metrics"] == {"val": 1.0}


@pytest.mark.parametrize(("epoch", "expected"), [(0, 7), (3, 0)])
def test_a_progress_of_an_earlier_release_loads(epoch, expected):
    progress = limpet.Progress()
    store = MemoryStore()
    limpet.save(store, {"progress": {"epoch": epoch, "step": 7, "samples": 1}})
    limpet.load(store, into={"progress": progress})
    assert progress.step_in_epoch == expected
    assert progress.state_dict() == {"epoch": epoch, "step": 7, "samples": 1}
    progress.step += 2
    assert progress.step_in_epoch == expected + 2
    progress.end_epoch()
    again = limpet.Progress()
    again.load_state_dict(progress.state_dict())
    again.step += 1
    assert again.step_in_epoch == 1
