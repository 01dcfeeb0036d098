"""Random numbers that Limpet's calls draw, or an evaluation, do not change the training's.

A save, a load, and a step call code of the user, which may draw from the global generators at any
place: in ``state_dict``, in ``load_state_dict``, in hooks, in properties.
"""

import random
from collections.abc import Callable
from itertools import count, permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import limpet
from limpet.errors import LimpetError, PlanError, Unsupported
from limpet.generators import capture_states, restore_states
from limpet.storage.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _generators():
    before = capture_states()
    yield
    restore_states(before)


def draw():
    """Draw from every generator, also the numbers that it caches."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        float(np.random.random()),
        torch.randn(1).item(),
        torch.rand(1).item(),
    ]


def seed_all(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    draw()  # caches a second normal number


def upcoming():
    """The numbers that the training would draw next."""
    states = capture_states()
    try:
        return draw()
    finally:
        restore_states(states)


drawn = count()


def draw_here():
    next(drawn)
    draw()


class Methods:
    """An object whose methods draw."""

    def state_dict(self):
        draw_here()
        return {"a": 1, "t": torch.ones(2)}

    def load_state_dict(self, state):
        draw_here()


class CheckedMethods(Methods):
    def state_dict(self):
        draw_here()
        return {"a": 1}

    def check_state_dict(self, state):
        draw_here()


def module_with_hooks():
    module = nn.Linear(2, 2)
    module.register_state_dict_pre_hook(lambda *args: draw_here())
    module.register_state_dict_post_hook(lambda *args: draw_here())
    module.register_load_state_dict_pre_hook(lambda *args: draw_here())
    module.register_load_state_dict_post_hook(lambda *args: draw_here())
    return module


def optimizer_with_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.register_state_dict_pre_hook(lambda *args: draw_here())
    optimizer.register_state_dict_post_hook(lambda *args: draw_here())
    optimizer.register_load_state_dict_pre_hook(lambda *args: draw_here())
    optimizer.register_load_state_dict_post_hook(lambda *args: draw_here())
    return optimizer


MAKERS: dict[str, Callable[[], Any]] = {
    "methods": Methods,
    "check": CheckedMethods,
    "module hooks": module_with_hooks,
    "optimizer hooks": optimizer_with_hooks,
    "per rank": lambda: limpet.PerRank(Methods()),
    "replicated": lambda: limpet.Replicated([Methods()]),
    "nested": lambda: {"a": [{"b": (Methods(),)}]},
}

# modules draw their initial weights, which is not what the tests are about
drawing = pytest.mark.parametrize(
    "make", [limpet.isolated_rng()(make) for make in MAKERS.values()], ids=MAKERS
)


@pytest.fixture
def unchanged():
    """Assert that the test draws in user code, and that this does not change the generators."""
    seed_all(1)
    before, expected = next(drawn), upcoming()
    yield
    assert upcoming() == expected
    assert next(drawn) > before + 1, "nothing was drawn, so nothing was tested"


@drawing
@pytest.mark.usefixtures("unchanged")
def test_a_save_and_a_load(make):
    store, state = MemoryStore(), {"x": make(), "y": torch.ones(2)}
    expected = upcoming()
    limpet.save(store, state)
    assert upcoming() == expected
    limpet.load(store, into=state)
    assert upcoming() == expected
    limpet.load(store, into=state, keys="x")
    assert upcoming() == expected
    limpet.load(store, into=state, keys="y")
    assert upcoming() == expected
    with pytest.raises(PlanError):
        limpet.load(store, into=state | {"z": make()})
    assert upcoming() == expected
    limpet.save_async(MemoryStore(), state).wait()


@drawing
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "options",
    [
        {"save": limpet.EverySteps(2)},
        {"save": limpet.EverySteps(2), "overlap": True},
        {"save": limpet.EverySteps(2), "incremental": True},
        {"save": limpet.EverySteps(2) | limpet.OnException()},
    ],
    ids=["plain", "overlap", "incremental", "on exception"],
)
def test_every_call_of_a_checkpointer(make, options):
    store, state, expected = MemoryStore(), {"x": make(), "rng": limpet.RNG()}, upcoming()
    with limpet.Checkpointer(store, state, **options) as ckpt:
        assert ckpt.resume() is None
        for _ in range(5):
            ckpt.step()
            assert upcoming() == expected
        ckpt.save()
        assert upcoming() == expected
    random.seed(2)
    with limpet.Checkpointer(store, state, **options) as ckpt:
        ckpt.resume()
        assert upcoming() == expected
        ckpt.step()
        assert upcoming() == expected
        ckpt.resume(at=4)
        assert upcoming() == expected


@drawing
def test_a_save_after_an_exception(make):
    store, state = MemoryStore(), {"x": make(), "rng": limpet.RNG()}
    ckpt = limpet.Checkpointer(store, state, save=limpet.OnException())
    with pytest.raises(ZeroDivisionError), ckpt:
        ckpt.step()
        expected = upcoming()
        draw()
        after = upcoming()
        raise ZeroDivisionError
    assert upcoming() == after
    with limpet.Checkpointer(store, state) as ckpt:
        ckpt.resume()
        assert upcoming() == expected


def states_with_rng():
    for order in permutations(("x", "rng", "z")):
        members = {"x": Methods(), "rng": limpet.RNG(), "z": CheckedMethods()}
        yield {name: members[name] for name in order}
    yield {"a": {"rng": limpet.RNG(), "x": Methods()}, "z": Methods()}
    yield {"a": [Methods(), (limpet.RNG(), Methods())], "z": [Methods()]}
    yield {"first": limpet.RNG(), "x": Methods(), "second": [limpet.RNG()], "z": Methods()}
    yield {"rng": limpet.PerRank([limpet.RNG()]), "x": Methods()}
    yield {"rng": limpet.Replicated(limpet.RNG()), "x": limpet.PerRank(Methods())}
    yield {"rng": limpet.RNG(), "model": module_with_hooks(), "optimizer": optimizer_with_hooks()}
    yield {"trainer": Trainer(), "x": Methods()}


class Trainer:
    """An object that contains an ``RNG``."""

    def __init__(self):
        self.rng = limpet.RNG()

    def state_dict(self):
        draw_here()
        state = {"rng": self.rng.state_dict(), "n": 1}
        draw_here()
        return state

    def load_state_dict(self, state):
        draw_here()
        self.rng.load_state_dict(state["rng"])
        draw_here()


def reversed_order(value):
    if isinstance(value, dict):
        return {name: reversed_order(value[name]) for name in reversed(value)}
    return value


@pytest.mark.parametrize("state", list(states_with_rng()), ids="-".join)
@pytest.mark.parametrize("reorder", [False, True])
def test_the_generators_are_restored_last(state, reorder):
    """The order of the state at the load need not be that at the save."""
    store = MemoryStore()
    seed_all(2)
    expected = upcoming()
    limpet.save(store, state)
    assert draw() == expected
    seed_all(3)
    limpet.load(store, into=reversed_order(state) if reorder else state)
    assert draw() == expected
    run = MemoryStore()
    with limpet.Checkpointer(run, state) as ckpt:
        ckpt.step()
        ckpt.save()
        expected = upcoming()
    seed_all(4)
    with limpet.Checkpointer(run, state) as ckpt:
        ckpt.resume()
        assert draw() == expected


def test_a_part_without_the_rng_changes_no_generator_and_a_part_with_it_restores_them():
    store, state = MemoryStore(), {"rng": limpet.RNG(), "x": Methods(), "y": Methods()}
    seed_all(5)
    saved = upcoming()
    limpet.save(store, state)
    seed_all(6)
    live = upcoming()
    for keys in ("x", ["x", "y"], "y/**"):
        limpet.load(store, into=state, keys=keys)
        assert upcoming() == live
    limpet.load(store)
    assert upcoming() == live
    limpet.load(store, into=state, keys=["rng", "y"])
    assert upcoming() == saved


@pytest.mark.parametrize("form", ["torch", "tuples", "numpy dict"])
@pytest.mark.parametrize("thread", [False, True])
def test_an_object_may_restore_the_generators_itself(form, thread):
    """As the ``RNGState`` of torchsnapshot does. Loads used to support that."""

    class OwnState:
        def state_dict(self):
            if form == "torch":
                return {"rng_state": torch.get_rng_state()}
            numpy_state = np.random.get_state(legacy=form != "numpy dict")
            return {"all": [random.getstate(), {"np": numpy_state}]}

        def load_state_dict(self, state):
            if form == "torch":
                torch.set_rng_state(state["rng_state"])
            else:
                random.setstate(state["all"][0])
                np.random.set_state(state["all"][1]["np"])

    store, state = MemoryStore(), {"own": OwnState(), "a": Methods()}
    seed_all(9)
    saved = upcoming()
    limpet.save(store, state)
    seed_all(10)
    live = upcoming()
    run_in_thread(lambda: limpet.load(store, into=state), thread)
    own = [4, 5] if form == "torch" else [0, 1, 2, 3]
    loaded = upcoming()
    assert [loaded[i] for i in own] == [saved[i] for i in own]
    if not thread:  # in another thread, what other objects draw is not undone without an RNG
        assert loaded == [saved[i] if i in own else live[i] for i in range(6)]
    # an RNG decides, wherever it is
    for with_rng in ({"rng": limpet.RNG(), **state}, {**state, "rng": limpet.RNG()}):
        seed_all(11)
        expected = upcoming()
        version = MemoryStore()
        limpet.save(version, with_rng)
        seed_all(12)
        limpet.load(version, into=with_rng)
        assert upcoming() == expected


def run_in_thread(work, thread):
    from threading import Thread

    if not thread:
        work()
        return
    runner = Thread(target=work)
    runner.start()
    runner.join(60)
    assert not runner.is_alive()


def test_a_save_or_load_in_another_thread_does_not_rewind_the_training():
    """The main thread may draw meanwhile. Restoring would repeat its random numbers."""
    store = MemoryStore()

    class Meanwhile:
        def state_dict(self):
            seed_all(13)  # in the place of draws by the main thread
            return {"n": 1}

        def load_state_dict(self, state):
            seed_all(14)

    run_in_thread(lambda: limpet.save(store, {"x": Meanwhile()}), True)
    after_save = upcoming()
    run_in_thread(lambda: limpet.load(store, into={"x": Meanwhile()}), True)
    after_load = upcoming()
    seed_all(13)
    assert upcoming() == after_save
    seed_all(14)
    assert upcoming() == after_load


def test_resume_in_a_block_is_refused():
    store, state = MemoryStore(), {"rng": limpet.RNG()}
    with limpet.Checkpointer(store, state) as ckpt:
        with (
            limpet.isolated_rng(),
            pytest.raises(LimpetError, match="inside a block of isolated_rng"),
        ):
            ckpt.resume()
        assert ckpt.resume() is None


def test_training_in_a_block_is_refused_at_its_second_step():
    state = {"rng": limpet.RNG()}
    with limpet.Checkpointer(MemoryStore(), state) as ckpt:
        for _ in range(3):
            with limpet.isolated_rng():
                ckpt.step()
        with limpet.isolated_rng():
            ckpt.step()
            with (
                limpet.isolated_rng(),
                pytest.raises(LimpetError, match="Two steps of the training were in the same"),
            ):
                ckpt.step()
        ckpt.step()
        assert ckpt.current_step == 5


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        x = torch.arange(4.0) * (i + 1) / 6
        return x + torch.rand(4) + random.random(), x.sum()


class Training:
    """Four steps. ``place``: the loop evaluates before and after a step ("both"), or around it."""

    def __init__(self, place, workers, every):
        self.place, self.every = place, every
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sampler = limpet.ElasticSampler(6, 3, seed=1)
        self.loader = DataLoader(Points(), batch_sampler=self.sampler)
        self.validation = DataLoader(Points(), batch_size=3, shuffle=True, num_workers=workers)
        self.progress = limpet.Progress()
        self.state = {
            "rng": limpet.RNG(),
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "progress": self.progress,
        }
        self.history: dict[int, list[Any]] = {}

    def evaluate(self):
        with limpet.isolated_rng(), torch.no_grad():  # in training mode: dropout draws too
            losses = [self.loss(x, y).item() for x, y in self.validation]
            return sum(losses) + sum(draw())

    def loss(self, x, y):
        noisy = x + random.gauss(0, 0.1) + np.random.normal() * 0.1
        return (self.model(noisy).squeeze(1) - y).square().mean()

    def run(self, ckpt, last):
        while self.progress.epoch < 2:
            for x, y in self.loader:
                loss = self.loss(x, y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step(ckpt, loss.item())
                if self.progress.step == last:
                    return
            ckpt.end_epoch()

    def step(self, ckpt, loss):
        number = self.progress.step + 1
        record = self.history[number] = [loss]
        due = number % self.every == 0
        if self.place == "both" and due:
            record.append(self.evaluate())
        if self.place == "around" and due:
            with limpet.isolated_rng():
                record.append(self.evaluate())
                ckpt.step({"loss": loss})
                record.append(draw())
        else:
            ckpt.step({"loss": loss})
        if self.place in ("after", "both") and due:
            record.append(self.evaluate())
        record.append(upcoming())


def train(store, last, *arguments, save=100):
    training = Training(*arguments)
    options: Any = {"save": limpet.EverySteps(save)}
    with limpet.Checkpointer(store, training.state, **options) as ckpt:
        ckpt.resume()
        training.run(ckpt, last)
    return training


@pytest.mark.slow
@pytest.mark.parametrize("place", ["both", "around"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("every", [1, 3])
def test_a_loop_that_evaluates_resumes_exactly(place, workers, every):
    """Interrupted after each step, at which a version is saved or not."""
    seed_all(20)
    expected = train(MemoryStore(), 4, place, workers, every).history
    assert len(expected) == 4
    interruptions = [(save, stop) for save in (1, 2, 3) for stop in range(save, 5)]
    if workers:  # which draw as often wherever the training resumes: within an epoch, and after one
        interruptions = [(1, 1), (2, 3), (3, 3)]
    for save, stop in interruptions:
        seed_all(20)
        store = MemoryStore()
        first = train(store, stop, place, workers, every, save=save).history
        assert first == {step: expected[step] for step in range(1, stop + 1)}
        seed_all(21)  # a new process
        draw()
        second = train(store, 4, place, workers, every).history
        resumed_at = stop // save * save
        assert second == {step: expected[step] for step in range(resumed_at + 1, 5)}


def test_an_exception_in_an_evaluation_saves_the_generators_of_the_training():
    store, state = MemoryStore(), {"rng": limpet.RNG()}
    ckpt = limpet.Checkpointer(store, state, save=limpet.OnException())
    seed_all(22)
    with pytest.raises(ZeroDivisionError), ckpt:
        ckpt.step()
        with limpet.isolated_rng():
            draw()
            ckpt.step()
            draw()
            raise ZeroDivisionError
    expected = draw()
    seed_all(23)
    with limpet.Checkpointer(store, state) as resumed:
        resumed.resume()
        assert resumed.current_step == 2
        assert draw() == expected


def test_a_failed_save_inside_of_a_save_leaves_the_outer_isolation_open():
    """An object may have a Checkpointer of its own, whose save fails."""

    class SavesInside(Methods):
        def state_dict(self):
            state: dict[str, Any] = {"x": 1}
            with limpet.Checkpointer(MemoryStore(), state, save=limpet.Never()) as inner:
                inner.step()
                state["x"] = object()
                with pytest.raises(Unsupported):
                    inner.save()
            draw()
            return super().state_dict()

    seed_all(1)
    expected = upcoming()
    state = {"x": SavesInside(), "rng": limpet.RNG()}
    with limpet.Checkpointer(MemoryStore(), state, save=limpet.Never()) as ckpt:
        ckpt.step()
        ckpt.save()
        assert upcoming() == expected
