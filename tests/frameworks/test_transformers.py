"""A ``Trainer`` that is killed and resumed ends with the same bits as one that is not."""

import json
import re
import signal
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import limpet
from tests.forks import describe
from tests.frameworks import harness
from tests.frameworks.harness import Kill, Process

MODULE = "tests.frameworks.transformers_trainings"

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="not installed")


@pytest.fixture(scope="module")
def process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        process = Process(MODULE, "peft", "trl.trainer.sft_trainer")
    yield process
    process.close()


training = partial(harness.training, MODULE)


def read_log(run):
    """Return the log of the last version, without times."""
    entries = [json.loads(line) for line in run.latest()["trainer/log_history"].splitlines()]
    times = ("_runtime", "_per_second", "_time")
    return [{k: v for k, v in e.items() if not k.endswith(times)} for e in entries]


def check(process, name, folder, kills, **arguments):
    """Compare also the log, and what was printed: the loss of the whole training."""
    kills = [k if isinstance(k, Kill) else Kill(k) for k in kills]
    runs = process.check_exact(
        training(name), folder, kills=kills, ignore=("/log_history", "/seconds"), **arguments
    )
    logs, printed = [read_log(run) for run in runs], []
    assert logs[0] == logs[1]
    for run in runs:
        text = Path(f"{run.url.removeprefix('file://')}.output").read_text()
        printed.append(sorted(re.findall(r"trained to \d+: [\d.]+", text)))
    assert printed[0] == printed[1]
    assert printed[0]
    return runs


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.05}
BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
MIDDLE = [3, 11]
"""In the middle of each of the two epochs, which have 8 steps. Every second step is saved."""

CASES = {
    "max_steps": (
        "train",
        [5, 11],
        {"max_steps": 13, "save_steps": 0.25, "logging_steps": 0.2, "data_seed": 3},
    ),
    "evaluation by steps": (
        "train",
        [Kill(mark="evaluation 4"), 11],  # 6 is the best one, and 12 the third that is worse
        {**EVALUATED, "load_best_model_at_end": True, "patience": 3, "learning_rate": 0.2},
    ),
    "evaluation by epochs": (
        "train",
        [9, Kill(mark="evaluation 16")],
        {**BY_EPOCH, "load_best_model_at_end": True, "learning_rate": 0.5, "patience": 1,
         "num_train_epochs": 9},
    ),
    "best": (
        "train",
        MIDDLE,
        {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss",
         "eval_on_start": True, "include_num_input_tokens_seen": "all",
         "dataloader_drop_last": True},
    ),
    "plateau": (
        "train",
        MIDDLE,
        {**EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau", "bf16": True,
         "lr_scheduler_kwargs": {"patience": 0}},
    ),
    "scaler": ("train", MIDDLE, {"scaler": {"init_scale": 16.0, "growth_interval": 3}}),
    "balanced": ("train_lengths", MIDDLE, {"train_sampling_strategy": "batch_rebalance"}),
    "own order": ("train_in_own_order", [3, 5], {}),
    "short epochs": ("train_short_epochs", [5, 7], {"save_steps": 5}),
    "stream": (
        "train_stream",
        [2, 7],
        {"max_steps": 9, "gradient_accumulation_steps": 2, "save_steps": 1},
    ),
    "stream of two workers": (
        "train_stream",
        [7],
        {"max_steps": 9, "dataloader_num_workers": 2, **BY_EPOCH, "save_strategy": "steps"},
    ),
    "stream of Hugging Face": ("train_shuffled_stream", MIDDLE, {"max_steps": 13}),
    "lora": ("train_lora", MIDDLE, {}),
    "sft": ("train_sft", MIDDLE, {"eval_strategy": "steps", "eval_steps": 4}),
    "sft with lora": ("train_sft", [3], {"lora": True, "gradient_accumulation_steps": 3}),
    "sft with packing": ("train_sft", [3], {"packing": True}),
    "seq2seq": ("train_seq2seq", [3, 5], {"eval_strategy": "steps", "eval_steps": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_training_that_is_killed_resumes_exactly(process, tmp_path, case):
    name, kills, options = CASES[case]
    check(process, name, tmp_path, kills, **options)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_generators_are_exact(process, tmp_path, workers):
    """Transformers#39215, Transformers#46628: random augmentation, in the training process or in
    workers, whose generators a checkpoint of the Trainer does not have."""
    check(process, "train_augmented", tmp_path, MIDDLE, dataloader_num_workers=workers)


@pytest.mark.slow
def test_the_order_after_the_first_epoch_is_exact(process, tmp_path):
    """Transformers#40690: also right before the end of an epoch, and right after it."""
    check(process, "train", tmp_path, [8, 9, 15], save_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_remainder_of_accumulated_batches_is_exact(process, tmp_path, ranks):
    """8 or 4 batches, of which 3 make a step."""
    options = {"gradient_accumulation_steps": 3, "save_steps": 1}
    check(process, "train_augmented", tmp_path, [1, 3][ranks - 1 :], ranks=ranks, **options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_equal_lengths_are_exact(process, tmp_path, ranks):
    options = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 4}
    check(process, "train_lengths", tmp_path, [3], ranks=ranks, **options)


@pytest.mark.slow
def test_two_ranks_are_exact(process, tmp_path):
    """With DDP: the losses since the last log differ between the ranks."""
    kills = [3, Kill(mark="evaluation 4"), Kill(5, signal=signal.SIGTERM)]
    options = {**EVALUATED, "load_best_model_at_end": True, "num_train_epochs": 7}
    check(process, "train_augmented", tmp_path, kills, ranks=2, **options)


@pytest.mark.slow
def test_a_stream_of_two_ranks_is_exact(process, tmp_path):
    options = {"max_steps": 6, "save_steps": 1, "per_device_train_batch_size": 2}
    check(process, "train_stream", tmp_path, [4], ranks=2, **options)


@pytest.mark.slow
def test_one_rank_continues_the_training_of_two(process, tmp_path):
    """With twice as many batches per step, the number of the steps is the same."""
    run = tmp_path / "run"
    process.run(training("train"), run, ranks=2, kill=Kill(3))
    text = process.run(training("train"), run, gradient_accumulation_steps=2)
    assert "resumed step 2" in text
    assert "trained to 8:" in text
    trained = limpet.Run(str(run)).latest()
    assert (trained["loader/is_last"], trained["trainer/state/epoch"]) == (True, 2.0)


@pytest.mark.slow
def test_a_training_that_is_told_to_stop_exits_with_75(process, tmp_path):
    """It saves a step that ``save_steps`` does not say."""
    kills = [Kill(3, signal=signal.SIGTERM), Kill(16, signal=signal.SIGTERM)]
    _, killed = check(process, "train", tmp_path, kills, save_steps=100, num_train_epochs=4)
    reasons = [s.metadata["reason"] for s in killed.snapshots()]
    assert reasons == ["preemption", "preemption", "end"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_version_is_skipped(process, tmp_path, damage):
    """Transformers#35525, Transformers#35782: a Trainer tries to load an incomplete checkpoint
    again and again. With one bit flipped, it loads wrong weights."""
    _, killed = check(process, "train", tmp_path, [Kill(7, damage=damage)])
    assert [s.step for s in killed.snapshots()] == [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.slow
def test_a_version_that_was_not_finished_is_no_version(process, tmp_path):
    """Transformers#35525, Transformers#35782: a process is killed in the middle of a save."""
    run = tmp_path / "killed"
    process.run(training("train"), run, kill=Kill(7))
    (Path(limpet.Run(str(run)).latest().url) / "manifest.json").unlink()
    check(process, "train", tmp_path, [Kill(9, waits=False)])


@pytest.mark.slow
def test_a_resumed_training_begins_at_its_step(process, tmp_path):
    """TRL#3635: it begins at step 0."""
    process.run(training("train_sft"), tmp_path / "run", kill=Kill(7))
    before = read_log(limpet.Run(str(tmp_path / "run")))
    text = process.run(training("train_sft"), tmp_path / "run", kill=Kill(9))
    assert "resumed step 6" in text
    log = read_log(limpet.Run(str(tmp_path / "run")))
    assert [(e["step"], e["epoch"]) for e in log] == [(3, 0.3), (6, 0.6)]
    assert log == before[:2]


@pytest.mark.slow
def test_metrics_belong_to_the_step_at_which_they_were_measured(process, tmp_path):
    run = limpet.Run(str(tmp_path / "run"))
    process.run(training("train"), run.url, eval_strategy="steps", eval_steps=3, save_steps=1)
    found = {s.step: run.metrics(s.step).keys() for s in run.snapshots()}
    logged = {"loss", "grad_norm", "learning_rate", "epoch"}
    assert found.pop(16) <= {"eval_loss", "epoch"}  # newer releases evaluate the last step
    every_third = {step for step, names in found.items() if names}
    assert every_third == {3, 6, 9, 12, 15}
    assert all(found[step] == logged | {"eval_loss"} for step in every_third)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_strategy": "no"}, [16]),
        ({"save_strategy": "epoch"}, [8, 16]),
        ({"save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}, [15, 16]),
        ({"save_strategy": "best", **EVALUATED, "eval_steps": 6, "metric_for_best_model": "loss",
          "greater_is_better": True, "save_total_limit": 1}, None),
        ({"save_steps": 5, "limpet_options": {"save": limpet.AtSteps([7])}}, [7, 16]),
    ],
)  # fmt: skip
def test_the_arguments_of_the_trainer_decide(process, tmp_path, options, steps):
    run = limpet.Run(str(tmp_path / "run"))
    process.run(training("train"), run.url, **options)
    if steps is None:
        losses = {e["step"]: e["eval_loss"] for e in read_log(run) if "eval_loss" in e}
        assert losses.keys() - {16} == {6, 12}
        steps = sorted({max(losses, key=losses.get), 16})
    assert [s.step for s in run.snapshots()] == steps


@pytest.mark.slow
def test_the_best_version_is_loaded_and_exported(process, tmp_path):
    process.run(training("train_best"), tmp_path / "run")


@pytest.mark.slow
def test_a_stop_policy_ends_the_training(process, tmp_path):
    whole, _ = check(process, "train_stopped", tmp_path, [3])
    assert whole.latest().step < 70


@pytest.mark.slow
def test_a_training_that_was_stopped_stays_stopped(process, tmp_path):
    options = {**EVALUATED, "patience": 2, "metric_for_best_model": "loss", "num_train_epochs": 9}
    for name, given in {"train_stopped": {}, "train": options}.items():
        run = limpet.Run(str(tmp_path / name))
        process.run(training(name), run.url, **given)
        last = run.latest().step
        assert last < 70
        assert f"trained to {last}:" in process.run(training(name), run.url, **given)


@pytest.mark.slow
def test_the_state_before_an_exception_is_saved(process, tmp_path):
    """In the last step of an epoch, which has fewer batches than the others."""
    run = limpet.Run(str(tmp_path / "run"))
    text = process.run(training("train_until_an_exception"), run.url)
    assert "on purpose" in text
    assert [(s.step, s.metadata["reason"]) for s in run.snapshots()] == [(2, "exception")]


@pytest.mark.slow
def test_a_finished_training_may_get_more_steps(process, tmp_path):
    """``train()`` of an attached trainer may be called again: it resumes."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process.run(training("train_longer"), whole, steps=[13])
    process.run(training("train_longer"), parts, steps=[5, 5, 8])
    process.run(training("train_longer"), parts, steps=[8, 13])
    first, second = (dict(describe(limpet.load(f"{r}@latest"), "")) for r in (whole, parts))
    differing = {k for k in first | second if first.get(k) != second.get(k)}
    assert {k for k in differing if not k.endswith(("/seconds", "/passes"))} == set()


@pytest.mark.slow
def test_the_arguments_of_callbacks(process, tmp_path):
    """They are those of now, unless ``restore_callback_states_from_checkpoint`` is given."""
    restored = {"restore_callback_states_from_checkpoint": True}
    check(process, "train_counted", tmp_path, MIDDLE, **restored)
    run = tmp_path / "run"
    process.run(training("train_counted"), run, kill=Kill(5))
    assert "counts 19 9\n" in process.run(training("train_counted"), run, counts=(7, -3))
    text = process.run(training("train_counted"), run, counts=(0,), **restored)
    assert "counts 19\n" in text
    assert "warning: The trainer has no CountOfSteps_1: its state is not restored\n" in text


@pytest.mark.slow
def test_other_steps_are_refused(process, tmp_path):
    run = tmp_path / "run"
    process.run(training("train"), run, kill=Kill(5))
    for option in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        text = process.run(training("train_with_other_size"), run, **{option: 8})
        assert "keep the dataset and the samples of each step" in text
    half = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    text = process.run(training("train"), run, **half)
    assert "trained to 16:" in text


def test_what_is_refused(process, tmp_path):
    text = process.run(training("refuse"), tmp_path / "run")
    for line in [
        "DEEPSPEED: attach() supports DDP and FSDP2 of Accelerate, not DEEPSPEED",
        "MEGATRON_LM: attach() supports DDP and FSDP2 of Accelerate, not MEGATRON_LM",
        "XLA: attach() supports DDP and FSDP2 of Accelerate, not XLA",
        "FSDP: attach() supports DDP and FSDP2 of Accelerate, not FSDP1",
        "auto_find_batch_size: attach() does not support auto_find_batch_size=True",
        "enable_jit_checkpoint: attach() does not support enable_jit_checkpoint=True",
        "ignore_data_skip: attach() does not support ignore_data_skip=True",
        "option: Checkpointer has no argument every=",
        "resume: Checkpointer.resume has no argument from=",
        "object: attach() takes a transformers.Trainer that has no run",
        "twice: attach() takes a transformers.Trainer that has no run",
        "checkpoint: train(resume_from_checkpoint=) is refused: train() resumes its run",
        "search: A hyperparameter search is refused: a run has one training",
        "warning: transformers 6.1.0 is installed, but Limpet is tested with 5.3 to 5.24",
        f"warning: {tmp_path / 'run'} is the run and the output_dir: use different folders",
    ]:
        assert re.search(f"^{re.escape(line)}", text, re.M), (line, text)
