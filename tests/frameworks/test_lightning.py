"""Trainings with Lightning that are killed and resumed end with the bits of undisturbed ones."""

import re
from pathlib import Path
from signal import SIGTERM

import pytest

import limpet
from tests.frameworks import lightning_trainings as trainings
from tests.frameworks.harness import Kill, Process, compare


@pytest.fixture(scope="module")
def process():
    process = Process("tests.frameworks.lightning_trainings")
    yield process
    process.close()


KILLS = {
    "plain": [Kill(3), Kill(5), Kill(mark="epoch 1"), Kill(7), Kill(10)],
    "validation": [
        Kill(3), Kill(mark="before validation after step 5"), Kill(5),
        Kill(mark="validation after step 10"), Kill(10),
    ],
    "every epoch": [Kill(6), Kill(mark="validation after step 10")],
    "every third step": [Kill(5), Kill(mark="before validation after step 10")],
    "workers": [Kill(3), Kill(5)],
    "accumulation": [Kill(1), Kill(2), Kill(mark="validation after step 4")],
    "accumulation by epoch": [Kill(4), Kill(6)],
    "validation in mid-epoch": [
        Kill(2), Kill(mark="before validation after step 4"), Kill(5),
        Kill(mark="validation after step 7"),
    ],
    "validation between the batches of a step": [
        Kill(1), Kill(mark="before validation after step 2"), Kill(3)
    ],
    "validation by batches": [Kill(4), Kill(5), Kill(mark="validation after step 8")],
    "validation by epochs": [Kill(3), Kill(12), Kill(mark="epoch 3")],
    "plateau": [Kill(3), Kill(5), Kill(8), Kill(10)],
    "plateau of a mean": [Kill(3), Kill(5), Kill(8)],
    "early stopping": [Kill(3), Kill(4)],
    "early stopping at an epoch": [Kill(3), Kill(5), Kill(8)],
    "early stopping of Limpet": [Kill(3), Kill(5)],
    "manual": [Kill(2), Kill(8)],
    "manual, carried": [Kill(4), Kill(6)],
    "dict": [Kill(2), Kill(3), Kill(4), Kill(5), Kill(7)],
    "shortest": [Kill(2), Kill(3), Kill(4)],
    "limited": [Kill(2), Kill(3), Kill(4)],
    "maximum steps": [Kill(3), Kill(5), Kill(8)],
    "overfitted": [Kill(1), Kill(2)],
    "skipping": [Kill(1), Kill(2), Kill(4)],
    "one cycle": [Kill(3), Kill(5)],  # estimated_stepping_batches: see Lightning#20550
    "reloaded": [Kill(2), Kill(3), Kill(8)],
    "scaler": [Kill(3), Kill(5)],
    "callback": [Kill(3), Kill(5)],
    "finetuning": [Kill(7), Kill(12), Kill(17)],
    "average": [Kill(3), Kill(5)],
    "stream": [Kill(3), Kill(5)],
    "sampler": [Kill(3), Kill(5)],
}  # fmt: skip


@pytest.mark.parametrize("setup", KILLS)
def test_a_killed_training_is_exact(setup, process, memory):
    # after skipped batches, Lightning counts one more, for the axis of its loggers
    ignore = ["_batches_that_stepped"] if setup == "skipping" else []
    process.check_exact(trainings.train, memory, kills=KILLS[setup], setup=setup, ignore=ignore)


def test_two_ranks_whose_buffers_differ_are_exact(process, memory):
    kills = [Kill(2), Kill(3), Kill(4), Kill(5, signal=SIGTERM)]
    process.check_exact(trainings.train_ranks, memory, ranks=2, kills=kills)


def test_after_sigterm_the_training_saves_and_exits_and_resumes_exactly(process, memory):
    places = [Kill(2), Kill(mark="validation after step 5"), Kill(7)]
    kills = [kill._replace(signal=SIGTERM) for kill in places]
    run = process.check_exact(trainings.train, memory, setup="every epoch", kills=kills)[1]
    assert [s.metadata["reason"] for s in run.snapshots()].count("preemption") == 3


def test_a_damaged_version_is_skipped(process, memory):
    """Lightning#21431: a truncated file ends each start. Here, the version before is loaded."""
    kills = [Kill(4, damage="truncate"), Kill(8, damage="flip")]
    process.check_exact(trainings.train, memory, setup="validation", kills=kills)


def test_a_kill_during_saves_leaves_whole_versions(process, memory):
    """Lightning#19970, Lightning#20953: files are torn by a kill, or by steps during a save."""
    run = f"{memory}/run"
    for step in (3, 7):
        process.run(trainings.train_weighed, run, kill=Kill(step, waits=False))
        for snapshot in limpet.Run(run).snapshots():
            model = snapshot.load(keys="model")["model"]
            parameters = [v for k, v in model.items() if k.endswith(("weight", "bias"))]
            weight = sum(v.double().sum().item() for v in parameters)
            assert snapshot.verify().ok
            found = limpet.Run(run).metrics(snapshot.step)["weight"]
            assert weight == pytest.approx(found, abs=1e-4)


def test_a_resume_neither_repeats_nor_skips_a_validation(process, memory):
    """Lightning#20277, Lightning#20288: a validation after a resume is repeated, or cut short."""
    run = f"{memory}/run"
    outputs = [
        process.run(trainings.train_weighed, run, kill=kill)
        for kill in (Kill(4), Kill(5), Kill(mark="before validation after step 9"), None)
    ]
    numbers = [[int(n) for n in re.findall(r"validated at step (\d+)", o)] for o in outputs]
    assert numbers == [[2, 4], [], [7], [9]]
    assert ["tried" in output for output in outputs] == [True, False, False, False]
    measured = {step for step in range(1, 11) if "val_loss" in limpet.Run(run).metrics(step)}
    assert measured == {2, 4, 7, 9}


def test_a_metric_is_that_of_its_own_step(process, memory):
    run = f"{memory}/run"
    process.run(trainings.train, run, setup="validation by epochs")
    metrics = {step: limpet.Run(run).metrics(step) for step in range(1, 21)}
    assert [s for s in metrics if "val_loss" in metrics[s]] == [10, 20]
    assert [s for s in metrics if "loss_epoch" in metrics[s]] == [5, 10, 15, 20]
    assert [s % 5 for s in metrics if "seldom" in metrics[s]] == [1, 4] * 4
    assert limpet.Run(run).best("val_loss", mode="min").step in (10, 20)


def test_logs_of_a_batch_belong_to_its_step_although_a_validation_precedes_that(process, memory):
    """Two batches make a step, and a validation follows each batch. Batches 0 and 3 log a value."""
    run = f"{memory}/run"
    process.run(trainings.train, run, setup="validation between the batches of a step")
    metrics = [limpet.Run(run).metrics(step) for step in range(1, 7)]
    assert ["seldom" in found for found in metrics] == [True, True, False] * 2
    assert all("val_loss" in found for found in metrics)


def test_an_epoch_that_is_left_early_is_followed_by_the_next(process, memory):
    process.run(trainings.train, f"{memory}/run", setup="limited")
    loader = limpet.load(f"{memory}/run@latest", keys="loader")["loader"]
    assert (loader["epoch"], loader["at"]) == (1, 12)


def test_other_callbacks_begin_with_what_is_loaded_and_end_after_the_last_save(process, memory):
    run, arguments = f"{memory}/run", {"setup": "callback", "save": limpet.AtSteps([3])}
    process.run(trainings.train, run, kill=Kill(4), **arguments)
    assert "begins with 3 of 3" in process.run(trainings.train, run, **arguments)
    newest = limpet.load(f"{run}@latest")
    assert newest["progress"]["step"] == 10
    assert newest["model"]["layers.0.bias"].any()


def test_loaders_are_reloaded_in_the_same_epochs_after_a_resume(process, memory):
    """Lightning#21492: the epoch of the last reload is forgotten."""
    run = f"{memory}/run"
    outputs = [
        process.run(trainings.train_reloaded, run, kill=kill) for kill in (Kill(4), Kill(9), None)
    ]
    # epochs 0 and 1 have 3 steps each, and epochs 2 and 3 have 5
    epochs = [[int(n) for n in re.findall(r"loader of epoch (\d+)", o)] for o in outputs]
    assert epochs == [[0], [0, 0, 2], [0, 2]]


def test_a_changed_number_of_ranks_sees_the_same_batches(process, memory):
    for run, numbers in (("whole", [(1, None)]), ("changed", [(2, 2), (1, 5), (3, 7), (2, None)])):
        for ranks, step in numbers:
            kill = None if step is None else Kill(step)
            place = f"{memory}/{run}"
            process.run(trainings.train_changing_ranks, place, ranks=ranks, kill=kill)
    whole, changed = (limpet.load(f"{memory}/{run}@latest") for run in ("whole", "changed"))
    assert whole["progress"] == changed["progress"]
    for name, value in whole["model"].items():
        assert value.allclose(changed["model"][name], rtol=1e-3, atol=1e-5), name


def test_the_batch_size_may_change_between_epochs_only(process, memory):
    """Lightning counts the batches of an epoch: it would skip samples, or end too early."""
    run = f"{memory}/run"
    process.run(trainings.train_batches, run, kill=Kill(3), batch_size=4)
    with pytest.raises(AssertionError, match="begun with 4 samples of all ranks in a batch, not 2"):
        process.run(trainings.train_batches, run, batch_size=2)
    process.run(trainings.train_batches, run, kill=Kill(5), batch_size=4)
    process.run(trainings.train_batches, run, batch_size=2)
    assert limpet.load(f"{run}@latest", keys="progress")["progress"]["step"] == 5 + 10


def test_fsdp2_is_exact(process, memory):
    kills = [Kill(2), Kill(5)]
    process.check_exact(trainings.train_sharded, memory, ranks=2, kills=kills)


def test_a_longer_training_continues_within_the_epoch(process, memory):
    """It ends as one that was that long from the start, although Lightning has ended the epoch."""
    arguments = {"setup": "validation", "max_epochs": -1}
    process.run(trainings.train, f"{memory}/whole", max_steps=8, **arguments)
    for steps in (3, 3, 5, 8):
        process.run(trainings.train, f"{memory}/longer", max_steps=steps, **arguments)
    compare(f"{memory}/whole", f"{memory}/longer")


@pytest.mark.parametrize("interrupts", [False, True])
def test_the_last_step_before_an_exception_is_saved(process, memory, interrupts):
    run = f"{memory}/run"
    output = process.run(trainings.train_until_error, run, interrupts=interrupts)
    assert f"ended by {'SystemExit' if interrupts else 'ZeroDivisionError'}" in output
    newest = limpet.Run(run).latest()
    assert (newest.step, newest.metadata["reason"]) == (3, "exception")


REFUSED = {
    "option": "Checkpointer has no argument saves=",
    "resume": "Checkpointer.resume has no argument until=",
    "total": "total_batch_size= must be",
    "twice": "Each fit() needs one Versions of its own",
    "two": "Each fit() needs one Versions of its own",
    "ckpt_path": "Versions resumes by itself: remove ckpt_path= from fit()",
    "batches": "elastic() takes a DataLoader, not Tensor",
    "max_size": 'CombinedLoader(mode="max_size") is refused',
    "own total": "total_batch_size= must be given to the limpet.DataLoader",
    "swa": "StochasticWeightAveraging is refused with Versions: use Weight",
    "finder": "LearningRateFinder is refused with Versions: use a Tuner before fit()",
    "DeepSpeedStrategy": "DeepSpeedStrategy is refused with Versions: use FSDP2",
    "FSDPStrategy": "FSDPStrategy is refused with Versions: use FSDP2",
    "OwnMegatron": "MegatronStrategy is refused",
    "logger": "and the folder of a logger: use different folders",
    "XLAStrategy": "XLAStrategy is refused",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_exact_is_refused_before_the_first_step(process, memory, what):
    output = process.run(trainings.refuse, f"{memory}/run", what=what)
    assert "refused: " in output
    assert REFUSED[what] in output


def test_a_reload_with_other_loaders_is_an_error(process, memory):
    with pytest.raises(AssertionError, match="has given another number of loaders"):
        process.run(trainings.reload_more, f"{memory}/run")


def test_evaluations_and_a_trial_save_nothing(process, memory):
    process.run(trainings.save_nothing, f"{memory}/run")
    assert not Path(memory, "run").exists()


def test_warnings(process, memory):
    """Lightning says of a loader with a position that it is not resumable, unless it finds it."""
    run = f"{memory}/run"
    first = process.run(trainings.warn, run, what="")
    again = process.run(trainings.warn, run, what="")
    assert limpet.Run(run).latest().step == 3
    assert "resum" not in first + again
    text = "lightning 3.1.0 is installed, but Limpet is tested with 2.5 to 2.6"
    assert process.run(trainings.warn, run, what="release").count(text) == 1
    assert "use different folders" not in first
    assert "the dirpath of ModelCheckpoint: use different folders" in process.run(
        trainings.warn, f"{memory}/b", what="files"
    )
