"""Correct programs that come close to the condition of each warning, with warnings as errors."""

from collections.abc import Callable

import numpy as np
import pytest

import limpet
from limpet import errors
from limpet.run.policy import AtEnd, EveryEpoch, EverySteps, Never
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
from tests.trainings import initial_state, train, trained_run

pytestmark = pytest.mark.filterwarnings("error")

Program = Callable[[], object]
PROGRAMS: dict[type[Warning], list[Program]] = {}


def close_to(category):
    def register(program):
        PROGRAMS.setdefault(category, []).append(program)
        return program

    return register


def run_steps(store, last, save, **options):
    state = initial_state()
    with limpet.Checkpointer(store, state, save=save, **options) as ckpt:
        ckpt.resume()
        train(state, ckpt, last)
    return ckpt


@close_to(errors.SkippedVersion)
def an_unfinished_save_is_newer():
    store = trained_run()
    for name in [key.key for key in store.list("version_60") if "manifest" in key.key]:
        store.delete(name)
    run_steps(store, 45, EverySteps(5))


@close_to(errors.SkippedVersion)
def a_person_goes_back():
    with limpet.Checkpointer(trained_run(), initial_state(), save=Never()) as ckpt:
        assert ckpt.resume(at=20)


@close_to(errors.SaveFailed)
def the_last_save_after_an_exception_succeeds():
    state = initial_state()
    with (
        pytest.raises(ZeroDivisionError),
        limpet.Checkpointer(MemoryStore(), state, save=limpet.OnException()) as ckpt,
    ):
        train(state, ckpt, 3)
        raise ZeroDivisionError


@close_to(errors.UnsavedSteps)
def the_last_step_is_due_by_the_policy():
    run_steps(MemoryStore(), 6, EverySteps(3))


@close_to(errors.UnsavedSteps)
def the_last_step_is_saved_at_the_end():
    run_steps(MemoryStore(), 7, EverySteps(3) | AtEnd()).close()


@close_to(errors.UnsavedSteps)
def nothing_is_to_be_saved():
    run_steps(MemoryStore(), 7, Never())


@close_to(errors.UnsavedSteps)
def a_finished_training_starts_again():
    store = MemoryStore()
    for _ in range(2):
        with limpet.Checkpointer(store, initial_state(), save=EveryEpoch()) as ckpt:
            for _ in ckpt.epochs(2):
                ckpt.step()


@close_to(errors.UnsavedSteps)
def an_idle_checkpointer_is_replaced():
    store, state = MemoryStore(), initial_state()
    first = limpet.Checkpointer(store, state, save=EverySteps(2))
    train(state, first, 2)
    limpet.Checkpointer(store, initial_state()).close()


@close_to(errors.InexactResume)
def values_per_rank_have_their_ranks_and_generators_may_have_others():
    store = MemoryStore()

    def make_state(rank):
        return {"seen": limpet.PerRank(np.full(3, rank)), "rng": limpet.RNG()}

    with FakeGroup(2) as group:
        group.run(lambda rank: limpet.save(store.at("a"), make_state(rank)))
        group.run(lambda rank: limpet.load(store.at("a"), into=make_state(rank)))
        group.run(lambda rank: limpet.save(store.at("b"), {"rng": limpet.RNG()}))
    with FakeGroup(3) as group:
        group.run(lambda rank: limpet.load(store.at("b"), into={"rng": limpet.RNG()}))


@close_to(errors.SinkFailed)
def a_sink_catches_its_own_errors_and_another_is_detached_by_its_owner():
    def catches(name, fields):
        try:
            raise ConnectionError(name)
        except ConnectionError:
            fields.clear()

    with limpet.attach(catches), limpet.attach(lambda name, fields: detach.close()) as detach:
        run_steps(MemoryStore(), 3, EverySteps(1))


@pytest.mark.parametrize(
    ("category", "program"),
    [(category, program) for category, found in PROGRAMS.items() for program in found],
    ids=lambda value: value.__name__,
)
def test_a_correct_program_causes_no_warning(category, program):
    program()


def test_each_warning_has_a_program():
    found = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, UserWarning)}
    assert found == PROGRAMS.keys()
    assert len(found) <= 6
