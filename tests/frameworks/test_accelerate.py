"""Trainings with Accelerate that are killed and resumed equal undisturbed ones."""

import signal
from functools import partial
from importlib.util import find_spec

import pytest
import torch

import limpet
from tests.frameworks import harness
from tests.frameworks.harness import Kill, Process
from tests.frameworks.samples import make_model

if find_spec("accelerate") is None:
    pytest.skip("accelerate is not installed", allow_module_level=True)

slow = pytest.mark.slow


MODULE = "tests.frameworks.accelerate_trainings"
"""Imported by processes of the harness only, because that takes seconds."""


training = partial(harness.training, MODULE)


@pytest.fixture(scope="module")
def process():
    process = Process(MODULE)
    yield process
    process.close()


WITHIN = [Kill(3), Kill(9)]
IN_RANKS = [Kill(2), Kill(mark="end of epoch 1")]
GROUPS = [Kill(1), Kill(4)]

CASES = {
    # at the end of an epoch, while a save goes on, after SIGTERM, and with a damaged version
    "plain": (
        [
            Kill(3),
            Kill(6, waits=False),
            Kill(mark="end of epoch 0"),
            Kill(9, damage="flip"),
            Kill(12, damage="truncate"),
            Kill(13, signal=signal.SIGTERM),
        ],
        {},
    ),
    "workers": (WITHIN, {"num_workers": 2, "persistent_workers": True, "mixed_precision": "bf16"}),
    "own loader, peeks": (WITHIN, {"own": True, "peeks": True}),
    "accumulation": (GROUPS, {"accumulation": 4, "save": 1}),
    "accumulation across epochs": (GROUPS, {"accumulation": 4, "save": 1, "spans": True}),
    # one batch is left over, and the next one was fetched ahead
    "one batch is left": (
        [Kill(2)],
        {"accumulation": 2, "save": 1, "spans": True, "batch_size": 8},
    ),
    "epochs end within steps": (
        [Kill(2)],
        {"accumulation": 4, "save": limpet.EveryEpoch(), "spans": True, "epochs": 4},
    ),
    # what is drawn after the last step, and again at the end of the epoch
    "validation after a step": ([Kill(6)], {"validates": True, "save": 1, "epochs": 2}),
    "scaler": (WITHIN, {"scales": True}),
    "epochs": ([Kill(9), Kill(mark="end of epoch 1")], {"dataset": "epochs", "num_workers": 1}),
    "stream": (WITHIN, {"dataset": "lines", "config": {"dispatch_batches": False}}),
    "seedable": ([Kill(8)], {"config": {"use_seedable_sampler": True}}),
    "stateful": ([Kill(8)], {"config": {"use_stateful_dataloader": True}, "num_workers": 1}),
}


@slow
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed(process, tmp_path, case):
    """Accelerate#3996, #3242 and #4233: a resume in a later epoch had the order of epoch 0, also of
    datasets with ``set_epoch``, and with ``use_seedable_sampler``. data#1437: a resume at the end
    of an epoch lost the next one ("plain")."""
    kills, options = CASES[case]
    process.check_exact(training("train"), tmp_path, kills=kills, **options)


SPLIT = {
    "batch_size": 8,
    "accumulation": 2,
    "save": 1,
    "config": {"split_batches": True, "even_batches": False},
}


@slow
@pytest.mark.parametrize("options", [{}, SPLIT], ids=["plain", "split, accumulation"])
def test_two_ranks(process, tmp_path, options):
    """Accelerate#4195: a resume of several processes had the order of epoch 0."""
    _, run = process.check_exact(training("train"), tmp_path, kills=IN_RANKS, ranks=2, **options)
    model = make_model()
    limpet.load(run.latest().url, into={"model": model}, keys="model")  # the names have no prefix
    limpet.export(run.latest().url, tmp_path / "hf", to="hf")
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())


@slow
def test_two_ranks_of_a_stream(process, tmp_path):
    options = {"dataset": "lines", "config": {"dispatch_batches": False}}
    process.check_exact(training("train"), tmp_path, kills=[Kill(4)], ranks=2, **options)


@slow
def test_two_ranks_of_fsdp2(process, tmp_path):
    process.check_exact(training("train_fsdp2"), tmp_path, kills=[Kill(5)], ranks=2)


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 4), ({"accumulation": 4}, 4), ({"spans": True}, 3)]
)
def test_the_last_group_of_an_epoch_is_shorter(process, tmp_path, options, steps):
    """Two epochs of 6 batches in groups of 4: the optimizer and the Checkpointer step as often."""
    options = {"accumulation": 4, "epochs": 2, **options}
    printed = process.run(training("train"), tmp_path / "run", **options)
    assert f"{steps} steps, {steps} of the optimizer" in printed


@slow
def test_several_models_and_optimizers(process, tmp_path):
    run, _ = process.check_exact(training("train_two"), tmp_path, kills=WITHIN)
    assert {key.split("/")[0] for key in [*run.latest().keys()]} >= {
        *("model", "model_1", "optimizer", "optimizer_1", "loader")
    }


def test_a_position_is_saved_again_before_a_batch(process, tmp_path):
    """Accelerate#4244: a save after a load, before the first batch, had the position before it."""
    first = tmp_path / "first"
    process.run(training("save_before_a_batch"), first, first=None)
    part = limpet.Run(str(first)).snapshots()[1].url  # within the first epoch
    process.check_exact(
        training("save_before_a_batch"), tmp_path, kills=[Kill(mark="saved"), Kill(5)], first=part
    )


@pytest.mark.parametrize(
    "name",
    ["batches", "device", "refused", "state", "save_state", "forgotten", "save_within_step"],
)
def test_check(process, tmp_path, name):
    process.run(training(f"check_{name}"), tmp_path / "run")


@pytest.mark.parametrize("name", ["batches", "buffers"])
def test_check_in_two_ranks(process, tmp_path, name):
    process.run(training(f"check_{name}"), tmp_path / "run", ranks=2)
