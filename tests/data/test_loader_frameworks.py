"""What frameworks do with a ``limpet.DataLoader``."""

from itertools import chain, islice

import pytest
import torch
from torch.utils.data import TensorDataset

import limpet

SAMPLES = TensorDataset(torch.arange(12))


def make_loader(**options):
    return limpet.DataLoader(SAMPLES, batch_size=4, shuffle=True, seed=1, **options)


def read(loader):
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize(
    ("at", "drop_last", "expected"), [(12, False, "next"), (10, True, "next"), (8, False, "rest")]
)
def test_a_framework_that_has_ended_the_epoch_gets_no_empty_rest(at, drop_last, expected):
    """Lightning passes the number of its epoch to the sampler before each pass."""
    whole, loader, epochs = make_loader(), make_loader(drop_last=drop_last), []
    for epoch in range(3):
        whole.begin_epoch(epoch)
        epochs.append(read(whole))
    is_last = expected == "next"
    state = loader.state_dict() | {"epoch": 1, "at": at, "length": 12, "is_last": is_last}
    loader.load_state_dict(state)
    loader.sampler.set_epoch(1)
    loader.sampler.set_epoch(2)
    assert read(loader) == {"next": epochs[2], "rest": epochs[1][2:]}[expected]
    loader.load_state_dict(state)
    loader.sampler.set_epoch(1)  # a framework that has not ended it
    assert read(loader) == {"next": [], "rest": epochs[1][2:]}[expected]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_stream_of_hugging_face_is_exact(workers, is_shuffled):
    """Its state lacks the content of a shuffle buffer."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"number": [*range(40)]})

    def make():
        stream = table.to_iterable_dataset(num_shards=2)
        stream = stream.shuffle(seed=3, buffer_size=8) if is_shuffled else stream
        return limpet.DataLoader(stream, batch_size=4, num_workers=workers, seed=1)

    def read_some(loader, batches=None):
        found = []
        for batch in islice(loader, batches):
            found.append(batch["number"].tolist())
            loader.count(1)
        return found

    whole, begun, resumed = make(), make(), make()
    epochs = [read_some(whole), read_some(whole)]
    assert sorted(chain.from_iterable(epochs[0])) == [*range(40)]
    assert (epochs[0] != epochs[1]) == is_shuffled
    first = read_some(begun, 5)
    resumed.load_state_dict(begun.state_dict())
    assert [first + read_some(resumed), read_some(resumed)] == epochs
