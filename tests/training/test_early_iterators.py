"""Loaders of torchdata whose iterator was created before ``resume``."""

import gc

import pytest
import torch

import limpet
from limpet.errors import LimpetError
from limpet.storage.memory import MemoryStore

stateful = pytest.importorskip("torchdata.stateful_dataloader")
nodes = pytest.importorskip("torchdata.nodes")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 40:
            self.next += 1
            yield self.next
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def loader(data=None, **options):
    data = list(range(1, 41)) if data is None else data
    return stateful.StatefulDataLoader(data, 2, generator=torch.Generator(), **options)


def node_loader():
    return nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(1, 41)), 2))


LOADERS = {
    "map": loader,
    "stream": lambda: loader(Stream()),
    "workers": lambda: loader(Stream(), num_workers=1),
    "persistent": lambda: loader(num_workers=1, persistent_workers=True),
    "nodes": node_loader,
}


@pytest.fixture(params=LOADERS.values(), ids=LOADERS)
def make(request, monkeypatch):
    # otherwise, a stopped worker is detected only after 5 s
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(stateful.worker, "MP_STATUS_CHECK_INTERVAL", 0.05)
    yield request.param
    gc.collect()


def values(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def train(store, data, steps, *, before=lambda state: None, check=False, wrap=list):
    """Resume, make ``steps`` steps with the batches of ``data``, and return the last batch.
    ``before``: may make the iterator before it."""
    state = {"data": wrap([data]), "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1), quiet=True) as ckpt:
        early = before(data)
        ckpt.resume(check=check)
        batches = iter(data) if early is None else early
        for _ in range(steps):
            batch = next(batches)
            ckpt.step()
    return values(batch)


@pytest.fixture
def store(make):
    store = MemoryStore()
    assert train(store, make(), 4) == [7, 8]
    return store


def started(data):
    batches = iter(data)
    next(batches)
    return batches


REFUSED = r"iterator of data/0 is older than the position .* call iter\(\) after resume"


@pytest.mark.parametrize("before", [iter, started])
def test_a_resume_is_refused_while_an_earlier_iterator_exists(make, store, before):
    """No step is made, so nothing is saved."""
    with pytest.raises(LimpetError, match=REFUSED):
        train(store, make(), 1, before=before)
    assert limpet.Run(store).latest().step == 4


def test_an_iterator_of_a_loader_in_a_per_rank_value_is_found(make):
    store = MemoryStore()
    train(store, make(), 4, wrap=limpet.PerRank)
    with pytest.raises(LimpetError, match=REFUSED):
        train(store, make(), 1, before=iter, wrap=limpet.PerRank)


def look(data):
    for _ in data:
        break


def ask(data):
    data.state_dict()


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("before", [look, ask, lambda data: None])
def test_a_loader_that_was_used_before_goes_on_at_the_loaded_position(make, store, before, check):
    """Such as for a first look at a batch. All iterators of the nodes are one object, so that a
    loader of these must be new."""
    if make is node_loader and before in (look, ask):
        with pytest.raises(LimpetError, match=REFUSED):
            train(store, make(), 1, before=before, check=check)
    else:
        assert train(store, make(), 1, before=before, check=check) == [9, 10]


def test_a_loader_that_the_first_steps_do_not_use_is_no_error(make, store):
    """Such as that of a validation."""
    state = {"validation": make(), "progress": limpet.Progress()}
    with limpet.Checkpointer(store.at("more"), state, save=limpet.EverySteps(1)) as ckpt:
        next(iter(state["validation"]))
        ckpt.step()
    state = {"validation": make(), "progress": limpet.Progress()}
    with limpet.Checkpointer(store.at("more"), state, save=limpet.EverySteps(1)) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.step()
        assert values(next(iter(state["validation"]))) == [3, 4]


def test_a_training_may_go_back_after_its_loop(make, store):
    if make is node_loader:
        pytest.skip("all its iterators are one object")
    data, seen = make(), []
    state = {"data": [data], "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
        ckpt.resume()
        for batch in data:
            seen.append(values(batch))
            ckpt.step()
            if len(seen) == 2:
                break
        ckpt.resume(at=5)
        assert values(next(iter(data))) == seen[1]


def test_a_resume_within_the_loop_is_refused(make, store):
    data = make()
    state = {"data": [data], "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
        ckpt.resume()
        for _ in data:
            ckpt.step()
            with pytest.raises(LimpetError, match=REFUSED):
                ckpt.resume()
            break
