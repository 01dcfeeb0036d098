"""The harness finds an inexact resume, and accepts an exact one."""

import pytest
import torch

import limpet
from tests.frameworks.harness import Kill, Process, reach


def train(run, *, drawn=False):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.arange(160.0).reshape(40, 4) / 160
    data += torch.rand(()) * drawn  # other data in each process
    loader = limpet.DataLoader(data, batch_size=4, shuffle=True, seed=1)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with limpet.Checkpointer(run, state, save=limpet.EverySteps(2)) as ckpt:
        for epoch in ckpt.epochs(2):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                ckpt.step({"epoch": epoch})
            reach(f"end of epoch {epoch}")


KILLS = [Kill(3), Kill(6, damage="flip"), Kill(mark="end of epoch 0"), Kill(15, signal=15)]


@pytest.fixture(scope="module")
def process():
    process = Process()
    yield process
    process.close()


def test_an_exact_training_passes(process, tmp_path):
    process.check_exact(train, tmp_path, kills=KILLS)


def test_an_inexact_training_does_not(process, tmp_path):
    with pytest.raises(AssertionError, match="leaves differ"):
        process.check_exact(train, tmp_path, kills=KILLS[:1], drawn=True)


def test_a_training_that_does_not_end_as_it_should_fails(process, tmp_path):
    with pytest.raises(AssertionError, match=r"ended with \[0\]"):
        process.run(train, tmp_path / "run", kill=Kill(1000))
