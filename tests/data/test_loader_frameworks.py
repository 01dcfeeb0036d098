"""What frameworks do with a ``limpet.DataLoader``."""

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
