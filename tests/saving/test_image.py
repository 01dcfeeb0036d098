"""Many small leaves, which a save copies all at once, are saved exactly."""

import random

import pytest
import torch

import limpet
from tests.states import assert_same, unused_url

SIZES = (0, 1, 2, 7, 8, 64, 127, 128, 129, 600)


def random_tensor(r):
    """A contiguous or strided tensor, parameter, or array of up to 1,200 bytes."""
    size = r.choice(SIZES)
    data = torch.randint(-(2**15), 2**15, (size, 2), dtype=torch.int16)
    kind = r.randrange(8)
    if kind == 0:
        return data[:, 0]  # strided
    if kind == 1:
        return data[:, 1].numpy()
    if kind == 2:
        return data.numpy()[:, 0].copy()
    if kind == 3:
        return torch.nn.Parameter(data.to(torch.float32).flatten()[:size])
    return data.flatten()[:size].clone()


@pytest.mark.parametrize("seed", range(4))
def test_many_small_leaves_are_copied_exactly(monkeypatch, seed):
    for module in ("layout.shard_layout", "saving.image", "layout.read_plan"):
        monkeypatch.setattr(f"limpet.{module}.BLOCK_SIZE", 4096)  # pieces end within leaves
    r = random.Random(seed)
    state = {str(i): random_tensor(r) for i in range(3000)}
    snapshot = limpet.save(unused_url(), state)
    assert snapshot.verify().ok
    for name, value in limpet.load(snapshot.url).items():
        source = state[name]
        assert_same(source.detach() if isinstance(source, torch.Tensor) else source, value)
