"""Trainings with Lightning Fabric that are killed and resumed equal undisturbed ones."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

import limpet
from tests.frameworks import harness
from tests.frameworks.harness import Kill, Process
from tests.frameworks.samples import make_model

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow


MODULE = "tests.frameworks.fabric_trainings"
"""Imported by processes of the harness only, because that takes seconds."""


training = partial(harness.training, MODULE)


@pytest.fixture(scope="module")
def process():
    process = Process(MODULE)
    yield process
    process.close()


CASES = {
    "plain": ([Kill(2), Kill(9, damage="flip"), Kill(mark="end of epoch 1")], {}),
    "workers": ([Kill(9)], {"num_workers": 2}),
    "accumulation": ([Kill(2), Kill(3)], {"accumulation": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed(process, tmp_path, case):
    kills, options = CASES[case]
    process.check_exact(training("train"), tmp_path, kills=kills, **options)


def test_two_ranks(process, tmp_path):
    kills = [Kill(2), Kill(mark="end of epoch 1")]
    _, run = process.check_exact(training("train"), tmp_path, kills=kills, ranks=2)
    model = make_model()
    limpet.load(run.latest().url, into={"model": model}, keys="model")  # the names have no prefix
    assert not torch.equal(model[1].running_mean, torch.zeros(6))
