"""torchtitan's own ``Trainer``, on the CPU: killed and resumed, it ends with the same bits."""

import pickle
import re
import signal
from functools import partial
from pathlib import Path

import pytest

import limpet
from tests.frameworks import harness
from tests.frameworks.harness import Kill, Process, compare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(__file__).parents[2] / ".zoo" / "torchtitan").is_dir(),
        reason="torchtitan is not installed in .zoo",
    ),
]

MODULE = "tests.frameworks.torchtitan_trainings"
"""Imported by processes of the harness only: it changes what PyTorch says about devices."""


training = partial(harness.training, MODULE)


TRAIN = training("train")


@pytest.fixture(scope="module")
def process():
    process = Process(MODULE)
    yield process
    process.close()


def steps_of(run):
    return [snapshot.step for snapshot in limpet.Run(str(run)).snapshots()]


SIGTERM = Kill(5, signal=signal.SIGTERM)


def test_a_killed_training_ends_with_the_same_bits(process, tmp_path):
    """With dropout, and a data set and a validation that draw. No seed is set.

    torchtitan#4686: the loader continues at the step of the model, also if the newest version is
    damaged.
    """
    kills = [Kill(3), SIGTERM, Kill(mark="validation 9"), Kill(10, damage="flip")]
    process.check_exact(TRAIN, tmp_path, kills=kills)
    assert "trained 12 steps" in process.run(TRAIN, tmp_path / "whole")


def test_workers_of_the_loader_and_accumulated_batches(process, tmp_path):
    """What a data set draws in a worker, torchdata does not restore."""
    loader = {"num_workers": 2, "draws": False}
    process.check_exact(TRAIN, tmp_path, kills=[SIGTERM], loader=loader, accumulate=2)


PIPELINE = {"pipeline_parallel_degree": 2}
INTERLEAVED = {**PIPELINE, "pipeline_parallel_schedule": "Interleaved1F1B"}


def test_two_ranks_of_fsdp(process, tmp_path):
    """One rank is killed, or gets SIGTERM. There is time to agree on the step to leave."""
    process.check_exact(TRAIN, tmp_path, kills=[Kill(4), SIGTERM], ranks=2, steps=40, interval=3)


@pytest.mark.parametrize("parallelism", [PIPELINE, INTERLEAVED], ids=["1F1B", "interleaved"])
def test_two_ranks_of_a_pipeline(process, tmp_path, parallelism):
    process.check_exact(TRAIN, tmp_path, kills=[Kill(7)], ranks=2, parallelism=parallelism)


def test_ranks_with_the_same_layers_have_the_same_seed(process, tmp_path):
    """As torchtitan seeds them, for tensor parallelism; the stages of a pipeline differ."""
    seeds = []
    for name, parallelism in (("fsdp", {}), ("pipeline", PIPELINE)):
        text = process.run(TRAIN, tmp_path / name, ranks=2, steps=1, parallelism=parallelism)
        seeds.append(re.findall("seed: (.*)", text))
    assert [len(each) for each in seeds] == [2, 2]
    assert [len({*each}) for each in seeds] == [1, 2]


def test_a_pipeline_continues_on_another_number_of_ranks(process, tmp_path):
    """Each rank finds the state of its loader, although the version may have none of this rank."""
    run, loader = tmp_path / "run", {"draws": False}
    process.run(TRAIN, run, steps=2, loader=loader)
    process.run(TRAIN, run, steps=4, loader=loader, ranks=2, parallelism=PIPELINE)
    process.run(TRAIN, run, steps=6, loader=loader)
    for step, ranks in ((2, 1), (4, 2), (6, 1)):
        state = limpet.load(f"{run}@{step}")
        assert state["lr_scheduler"] == {"last_epoch": step}
        loaders = [pickle.loads(each["dp_rank_0"]) for each in state["dataloader"].values()]
        # 2 texts per step, and 2 in the buffer
        assert [each["dataset_state"]["at"] for each in loaders] == [2 * step + 2] * ranks


def test_another_number_of_data_parallel_ranks_is_refused(process, tmp_path):
    """torchtitan cannot divide the state of a loader. Without it, the training continues."""
    run = tmp_path / "run"
    process.run(TRAIN, run, ranks=2, steps=2)
    with pytest.raises(AssertionError, match="dataloader resharding is not supported"):
        process.run(TRAIN, run, steps=4)
    process.run(TRAIN, run, steps=4, exclude_from_loading=["dataloader"])
    assert steps_of(run) == [2, 4]


def test_torn_saves(process, tmp_path):
    """torchtitan#930: a state that changes after an asynchronous save, or a kill within it."""
    process.run(training("change_after_save"), tmp_path / "run")
    process.check_exact(TRAIN, tmp_path, kills=[Kill(4, waits=False), Kill(8, waits=False)])


def test_the_end_of_the_data_saves_no_canceled_step(process, tmp_path):
    """The trainer has counted the step that it cancels. With more data, it continues exactly."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    text = process.run(TRAIN, run, loader={"length": 16}, accumulate=2)
    assert "Ran out of data" in text
    assert steps_of(run) == [2]
    for each in (run, whole):
        process.run(TRAIN, each, steps=6, accumulate=2)
    compare(whole, run)


def test_options_are_refused(process, tmp_path):
    process.run(training("refuse"), tmp_path / "run")


def test_policies(process, tmp_path):
    run = tmp_path / "run"
    process.run(TRAIN, run, steps=5, interval=4, enable_first_step_checkpoint=True, keep_latest_k=0)
    assert steps_of(run) == [1, 4, 5]
    process.run(TRAIN, run, steps=9, interval=2, keep_latest_k=2)
    assert steps_of(run) == [8, 9]
    process.run(TRAIN, run, steps=12, load_only=True)
    assert steps_of(run) == [8, 9]


def test_what_is_loaded(process, tmp_path):
    run, copy, part = (tmp_path / name for name in ("run", "copy", "part"))
    process.run(TRAIN, run, steps=6)
    start = {"initial_load_path": f"{run}@4"}
    process.run(TRAIN, copy, steps=6, **start, initial_load_model_only=False)
    compare(run, copy)
    process.run(TRAIN, part, steps=2, **start)
    first, second = (limpet.load(f"{each}@2") for each in (run, part))
    assert first["train_state"] == second["train_state"]
    assert not first["model"]["lm_head.weight"].equal(second["model"]["lm_head.weight"])
    process.run(TRAIN, run, steps=6, load_step=4)
    compare(copy, run)
    assert limpet.Run(str(run)).latest().url.endswith("version_6.1")  # a branch
    process.run(TRAIN, part, steps=4, exclude_from_loading=["lr_scheduler"])
    assert limpet.load(f"{part}@4")["lr_scheduler"] == {"last_epoch": 2}
    with pytest.raises(AssertionError, match="has no version of step 5"):
        process.run(TRAIN, copy, steps=8, load_step=5)
