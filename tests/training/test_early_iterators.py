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


def train(store, data, steps, *, before=lambda state: None, check=False, **more):
    """Resume, and make ``steps`` steps with the batches of ``data``. Return the last batch, and
    the differences that the resume has reported. ``before``: may make the iterator before it."""
    state = {"data": [data], "progress": limpet.Progress(), **more}
    differing = list[str]()

    def sink(name, fields):
        differing.extend(fields["differing"] if name == "resume_differs" else ())

    save = limpet.EverySteps(1)
    with limpet.attach(sink), limpet.Checkpointer(store, state, save=save, quiet=True) as ckpt:
        early = before(data)
        ckpt.resume(check=check)
        batches = iter(data) if early is None else early
        for _ in range(steps):
            batch = next(batches)
            ckpt.step()
    return values(batch), differing


@pytest.fixture
def store(make):
    store = MemoryStore()
    assert train(store, make(), 4) == ([7, 8], [])
    return store


def started(data):
    batches = iter(data)
    next(batches)
    return batches


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("before", [iter, started])
def test_an_iterator_from_before_is_reported_and_its_step_is_refused(make, store, before, check):
    """No step is made, so nothing is saved."""
    with pytest.raises(LimpetError, match=r"iterator of data/0 is older; call iter\(\) after"):
        train(store, make(), 1, before=before, check=check)
    assert limpet.Run(store).latest().step == 4


def look(data):
    for _ in data:
        break


def ask(data):
    data.state_dict()


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("before", [look, ask, lambda data: None])
def test_a_loader_that_was_used_before_goes_on_at_the_loaded_position(make, store, before, check):
    """Such as for a first look at a batch. All iterators of the nodes are one object, which after
    an earlier ``state_dict()`` ignores what is loaded."""
    if make is node_loader and before is ask:
        with pytest.raises(LimpetError, match="older"):
            train(store, make(), 1, before=before, check=check)
        return
    batch, differing = train(store, make(), 1, before=before, check=check)
    assert batch == [9, 10]
    assert differing == [] or (make is node_loader and before is look)


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


def test_a_loop_may_go_back_and_begin_a_new_iterator(make, store):
    data, seen = make(), []
    state = {"data": [data], "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
        ckpt.resume()
        for batch in data:
            seen.append(values(batch))
            ckpt.step()
            if len(seen) == 2:
                ckpt.save()
                ckpt.resume(at=5)
                break
        assert values(next(iter(data))) == seen[1]
