"""Runs the checkpoint and resume tests of the frameworks themselves, with Limpet in place of their
checkpoints, and prints a table: ``make test-upstream ARGS="lightning=FOLDER accelerate=FOLDER"``.

FOLDER has the sources of the release that is installed, with its tests. This is also the plugin of
pytest that replaces the checkpoints:

- **Lightning**: each ``Trainer`` gets ``Versions``. Its tests read its files, so these are still
  written, but ``ckpt_path=`` resumes from the version of the step at which the file was written.
- **Transformers**: each ``Trainer`` is attached to a run in its ``output_dir``, in the same way.
- **Accelerate**: ``save_state`` and ``load_state`` save and load snapshots.
"""

import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "lightning": (
        "tests/tests_pytorch/loops/test_loops.py",
        "tests/tests_pytorch/models/test_restore.py",
        "tests/tests_pytorch/checkpointing/test_trainer_checkpoint.py",
        "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
    ),
    "transformers": (
        "tests/trainer/test_trainer_checkpointing.py",
        "tests/trainer/test_trainer_callback.py",
        "tests/trainer/test_trainer_data.py",
    ),
    "accelerate": ("tests/test_state_checkpointing.py",),
}
"""By framework: the files of its tests that save and resume."""

NOT_APPLICABLE = {
    "lightning": {
        "test_fit_can_fail_during_validation": "a validation that failed is repeated with its step",
        "test_workers_are_shutdown": "needs its own DataLoader, whose iterator is another one",
        "test_fit_loop_save_and_restore_dataloaders": "a loader that is no DataLoader is refused",
        "test_trainer_properties_restore_ckpt_path": "the state of a removed callback is refused",
        "test_callbacks_state_fit_ckpt_path": "copies all callbacks, also the open Checkpointer",
        "test_restarting_mid_epoch_raises_warning": "expects a warning that a resume is not exact",
        "test_finetuning_with_ckpt_path": "the state of a removed callback is refused",
        "test_hpc_restore_attempt": "resumes from the file of another training",
        "test_strict_loading": "expects a call of load_state_dict(strict=...)",
    },
    "transformers": {
        "test_auto_batch_size_with_resume": "auto_find_batch_size is refused",
        "test_compare_trainer_and_checkpoint_args": "other samples in a step are refused",
        "test_dataloader_without_dataset": "a loader that is no DataLoader is refused",
        "test_missing_stateful_callback_warning": "expects a warning in the log of Transformers",
    },
    "accelerate": {},
}
"""By framework, and by the beginning of the name of a test: why it does not apply to Limpet."""

_framework = os.environ.get("UPSTREAM_FRAMEWORK", "")


@pytest.fixture(autouse=_framework == "lightning")
def _lightning(tmp_path_factory):
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fit_loop import _FitLoop

    import limpet
    from limpet.integrations.lightning import Versions

    files = {}  # by path of a checkpoint: the run and the step of its version
    fit, save_checkpoint = Trainer.fit, Trainer.save_checkpoint

    def fit_with_limpet(trainer, *args, ckpt_path=None, **kwargs):
        run, at = tmp_path_factory.mktemp("run") / "run", None
        if ckpt_path is not None:
            found = files.get(str(ckpt_path))
            if found is None:  # not of a training of this test
                return fit(trainer, *args, ckpt_path=ckpt_path, **kwargs)
            run, at = found
        trainer.limpet_run = run
        versions = Versions(run, save=limpet.EverySteps(1), resume={"at": at}, quiet=True)
        trainer.callbacks.insert(0, versions)
        try:
            return fit(trainer, *args, **kwargs)
        finally:
            trainer.callbacks.remove(versions)

    def save_and_note(trainer, path, *args, **kwargs):
        save_checkpoint(trainer, path, *args, **kwargs)
        if hasattr(trainer, "limpet_run"):
            files[str(path)] = trainer.limpet_run, trainer.global_step

    with pytest.MonkeyPatch.context() as patch:
        # the position in the data is in the version
        patch.setattr(_FitLoop, "on_save_checkpoint", lambda loop: {})
        patch.setattr(Trainer, "fit", fit_with_limpet)
        patch.setattr(Trainer, "save_checkpoint", save_and_note)
        yield


@pytest.fixture(autouse=_framework == "transformers")
def _transformers(tmp_path_factory):
    from transformers import Trainer

    from limpet.integrations import transformers as module

    runs = {}  # by output_dir: the run of its last training
    train = Trainer.train

    def train_with_limpet(trainer, resume_from_checkpoint=None, **kwargs):
        found, folder = resume_from_checkpoint, os.path.abspath(trainer.args.output_dir)
        run, resume = tmp_path_factory.mktemp("run") / "run", {}
        if found and found is not True:
            source, _, step = found.rpartition("/checkpoint-")
            resume = {"at": int(step)} if os.path.isdir(found) else {}
        elif found:
            source = folder
        if found:
            run = runs.get(source)
        is_other = found and found is not True and not resume
        if run is None or is_other or isinstance(trainer, module._Attached):
            return train(trainer, found, **kwargs)  # not of a training of this test
        runs[folder], original = run, type(trainer)
        module.attach(trainer, run, resume=resume, quiet=True)
        try:
            return trainer.train(**kwargs)
        finally:
            trainer.__class__ = original

    with pytest.MonkeyPatch.context() as patch:
        # the tests read the files, so these are still written, but they are not loaded
        patch.delattr(module._Attached, "_save_checkpoint")
        patch.setattr(Trainer, "_load_best_model", lambda trainer: None)
        patch.setattr(Trainer, "train", train_with_limpet)
        yield


@pytest.fixture(autouse=_framework == "accelerate")
def _accelerate():
    from accelerate import accelerator as module

    import limpet

    def members(models, optimizers, schedulers, scaler):
        state = {"models": models, "optimizers": [o.optimizer for o in optimizers]}
        state |= {"schedulers": [s.scheduler for s in schedulers], "rng": limpet.RNG()}
        return {k: v for k, v in (state | {"scaler": scaler}).items() if v}

    def save(folder, weights, optimizers, schedulers, dataloaders, index, step, scaler, **_):
        limpet.save(f"{folder}/state", members(weights, optimizers, schedulers, scaler))
        return folder

    def load(folder, models, optimizers, schedulers, dataloaders, index, scaler, *_, **__):
        limpet.load(f"{folder}/state", into=members(models, optimizers, schedulers, scaler))
        return {}

    def save_one(member, folder, index, **_):
        limpet.save(f"{folder}/registered_{index}", {"member": member})

    def load_one(member, folder, index):
        limpet.load(f"{folder}/registered_{index}", into={"member": member})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save_accelerator_state", save)
        patch.setattr(module, "load_accelerator_state", load)
        patch.setattr(module, "save_custom_state", save_one)
        patch.setattr(module, "load_custom_state", load_one)
        yield


def read_outcomes(framework, folder, *, with_limpet):
    """Run the tests of a framework. Return by name whether a test has passed."""
    report, tests = folder / "build-upstream.xml", [folder / name for name in FILES[framework]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "upstream", f"--junit-xml={report}", "--tb=line", *tests]
    # not that of this project: some of these tests are in a package with the name of ours
    paths = [ROOT / "src", Path(__file__).parent, folder, folder / "tests"]
    paths.append(os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "UPSTREAM_FRAMEWORK": framework if with_limpet else "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    done = subprocess.run(command, cwd=folder, env=environment, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"The tests of {framework} in {folder} cannot be run")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {part.tag for part in case}
        if "skipped" not in kinds:
            name = f"{case.get('classname')}.{case.get('name')}"
            outcomes[name] = not kinds & {"failure", "error"}
    return outcomes


def find_reason(framework, name):
    """Return why a test does not apply, or None."""
    name = name.split("[")[0].split(".")[-1]
    reasons = NOT_APPLICABLE[framework]
    return next((reason for begin, reason in reasons.items() if name.startswith(begin)), None)


def main():
    failed, lines, notes = [], [], []
    for argument in sys.argv[1:]:
        framework, _, folder = argument.partition("=")
        without = read_outcomes(framework, Path(folder).resolve(), with_limpet=False)
        found = read_outcomes(framework, Path(folder).resolve(), with_limpet=True)
        run = [name for name, passed in without.items() if passed]
        lost = [name for name in run if not found.get(name)]
        failed += [name for name in lost if find_reason(framework, name) is None]
        reasons = Counter(find_reason(framework, name) for name in lost)
        passed, release = len(run) - len(lost), version(framework)
        lines.append(f"| {framework} {release} | {len(run)} | {passed} | {reasons.total()} |")
        notes += [f"| {framework} | {count} | {reason} |" for reason, count in reasons.items()]
    print("\n| | tests | pass with Limpet | do not apply |\n|---|---|---|---|", *lines, sep="\n")
    print("\n| | tests | why they do not apply |\n|---|---|---|", *notes, sep="\n")
    if failed:
        print("\nFAILED with Limpet:", *failed, sep="\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
