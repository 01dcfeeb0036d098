"""``limpet evaluate``."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import limpet
from limpet import events
from limpet.cli.exit_codes import EVALUATION_FAILED, EXISTS, NOT_FOUND, OTHER, USAGE
from limpet.cli.verbs import evaluate as verb
from limpet.errors import Denied
from limpet.run.lease import list_leases
from limpet.run.run import Run
from limpet.tasks import RemoteQueue
from tests.cli.invoke import run_cli
from tests.cli.supervised import is_alive, wait_until

SCORING = """
import time
import torch

def setup(state):
    model = torch.nn.Linear(4, 2)
    model.load_state_dict(state["model"])
    return model

def evaluate(model, batch):
    inputs, labels = batch
    loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    return {"val/loss": (loss, len(labels))}

def dataset():
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, torch.arange(100) % 2)
"""

SLOW = "import os\n" + SCORING.replace(
    "    inputs, labels",
    "    open(f'evaluating.{os.getpid()}', 'w').close()\n    time.sleep(0.1)\n    inputs, labels",
    1,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder
    (tmp_path / "scoring.py").write_text(SCORING)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "failing.py").write_text(SCORING.replace("model(inputs)", "missing(inputs)"))
    return tmp_path


def save(folder, step):
    torch.manual_seed(step)
    state = {"model": torch.nn.Linear(4, 2)}
    limpet.save(folder / "run" / f"version_{step}", state, step=step)


def arguments(*more, module="scoring", run="run"):
    own = ["evaluate", run, "--with", module, "--data", f"{module}:dataset"]
    return [*own, "--keys", "model/**", "--workers", "0", *more]


def command(*more, module="scoring"):
    return [sys.executable, "-m", "limpet", *arguments(*more, module=module)]


def evaluate(*more, module="scoring"):
    return run_cli(*arguments(*more, module=module))


def test_all_versions_are_evaluated_and_the_objective_is_recorded(folder):
    for step in (10, 20):
        save(folder, step)
    metric = ["--metric", "val/loss", "--mode", "min"]
    done = evaluate("--all", *metric, "--json")
    assert done.code == 0, done.err
    versions = done.json["versions"]
    assert [v["version"] for v in versions] == ["version_10", "version_20"]
    assert Run(folder / "run").metrics(20) == versions[1]["metrics"]
    assert len([*(folder / "run").glob("objective-*.json")]) == 1
    again = evaluate("--all")
    assert "Nothing to evaluate" in again.out
    assert again.code == 0


TRAINING = """
import torch
import limpet

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer, "progress": limpet.Progress()}
with limpet.Checkpointer("run", state, save=limpet.EverySteps(5), quiet=True) as ckpt:
    for epoch in range(2):
        for _ in range(5):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            ckpt.step()
        ckpt.end_epoch({"train_acc": 0.5})
    ckpt.save({"test_acc": 0.25})
"""


@pytest.mark.parametrize("selection", [("--all",), ("--follow",), ()])
def test_metrics_that_the_training_adds_are_no_evaluation(folder, selection):
    """The end of an epoch added its metrics to the version that was saved at its last step, under
    the name of the evaluation: it had a record of each version, and evaluated none."""
    exec(TRAINING, {})
    run = Run(folder / "run")
    added = {5: {"train_acc": 0.5}, 10: {"train_acc": 0.5, "test_acc": 0.25}}
    assert {step: run.metrics(step) for step in (5, 10)} == added
    done = evaluate(*selection, "--json")
    assert done.code == 0, done.err
    versions = {v["step"]: v["metrics"] for v in done.json["versions"]}
    assert [*versions] == ([5, 10] if selection == ("--all",) else [10])
    for step, metrics in versions.items():
        assert metrics.keys() == {"val/loss"}
        assert run.metrics(step) == added[step] | metrics
        assert run.evaluations(step).keys() == {"metrics", "evaluation"}
    assert run.best("val/loss") is not None


def test_a_misspelled_module_is_an_error_also_if_nothing_is_to_be_evaluated(folder):
    save(folder, 10)
    assert evaluate().code == 0
    done = evaluate(module="nowhere")
    assert (done.code, done.out) == (OTHER, "")
    assert "nowhere:setup cannot be imported" in done.err
    done = evaluate("--data", "scoring:datset")
    assert (done.code, done.out) == (OTHER, "")
    assert "scoring:datset cannot be imported" in done.err


def test_a_failure_has_its_own_exit_code_and_names_the_cause(folder):
    save(folder, 10)
    done = evaluate(module="failing")
    assert done.code == EVALUATION_FAILED
    assert "FAILED" in done.out
    assert "NameError: name 'missing' is not defined" in " ".join(done.out.split())
    again = evaluate(module="failing")
    assert "Nothing to evaluate" in again.out
    assert "it failed on version_10 (--retry" in " ".join(again.out.split())
    assert again.code == EVALUATION_FAILED, "a job that is started again is not green"


def test_a_version_that_cannot_be_evaluated_at_all_is_named_once(folder):
    for step in (10, 20):
        save(folder, step)
    (folder / "run" / "version_20" / "manifest.json").write_text("garbage")
    done = evaluate()
    lines = done.out.splitlines()
    assert lines[0].startswith("version_20  FAILED: version_20/manifest.json is damaged")
    assert lines[1].startswith("version_10  val/loss ")
    assert (len(lines), done.err, done.code) == (2, "", EVALUATION_FAILED)


@pytest.mark.slow
def test_a_command_that_waits_for_a_run_says_so(folder):
    with (folder / "errors").open("w") as errors:
        own = subprocess.Popen(command("--follow"), cwd=folder, stderr=errors)
    wait_until(lambda: "waiting" in (folder / "errors").read_text())
    own.send_signal(signal.SIGINT)
    own.wait(30)
    lines = (folder / "errors").read_text().splitlines()
    waiting = "limpet: waiting for a new version of run (Ctrl-C stops it)"
    assert lines == [waiting, "limpet: interrupted"]


def test_bad_input_is_one_line(folder):
    assert evaluate().code == NOT_FOUND
    save(folder, 10)
    for options, code in (
        (("--metric", "val/loss"), USAGE),
        (("--name", "a/b"), OTHER),
        (("--name", "metrics"), OTHER),
        (("--workers", "-1"), OTHER),
        (("--connect", "127.0.0.1:1"), USAGE),
        (("--listen", "127.0.0.1:0"), USAGE),
    ):
        done = evaluate(*options)
        assert done.code == code
        assert len(done.err.splitlines()) == 1, done.err


@pytest.mark.slow
def test_an_evaluator_that_is_killed_leaves_no_workers_and_another_one_takes_over(folder):
    save(folder, 10)
    first = subprocess.Popen(
        command("--follow", "--workers", "2", "--batch-size", "1", module="slow"), cwd=folder
    )
    store = Run(folder / "run").store
    wait_until(lambda: [*folder.glob("evaluating.*")])
    children = _children_of(first.pid)
    first.kill()
    first.wait()
    done = evaluate()
    assert done.code == 0, done.err
    assert len(children) == 2
    wait_until(lambda: not any(map(is_alive, children)))
    assert list_leases(store) == []


@pytest.mark.slow
def test_an_interrupt_ends_it_and_its_lease(folder):
    save(folder, 10)
    own = subprocess.Popen(
        command("--follow", "--batch-size", "1", module="slow"),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    store = Run(folder / "run").store
    wait_until(lambda: list_leases(store))
    own.send_signal(signal.SIGINT)
    _, errors = own.communicate(timeout=30)
    assert own.returncode == 130
    assert errors.splitlines() == ["limpet: interrupted"]
    assert list_leases(store) == []


def _children_of(pid):
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("address", ["run/version_10", "run@10", "run@latest"])
def test_a_version_is_not_followed(folder, address):
    """The command waited for versions of a run at that place, and wrote its lease there."""
    save(folder, 10)
    before = sorted(folder.rglob("*"))
    done = run_cli(*arguments("--follow", run=address))
    assert done.code == EXISTS
    assert "not of a run" in done.err or "the address of a version" in done.err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_evaluation_is_named_on_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with verb._printed_events():
        events.emit("evaluation_started", url="run/version_5", evaluation="e")
    shown = capsys.readouterr().err
    assert shown == ("limpet: evaluating run/version_5\n" if is_terminal else "")


SECRET = "0123456789abcdef" * 4


@contextmanager
def started(folder, *arguments, **environ):
    """A command, which is killed at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "limpet", "evaluate", *arguments],
        cwd=folder,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_workers_of_other_machines_connect_with_a_secret(folder):
    """One of them hangs, and loses its lease."""
    save(folder, 10)
    (folder / "secret").write_text(f"{SECRET}\n")
    listen = ["--listen", "127.0.0.1:0", "--secret-file", "secret", "--workers", "0"]
    own = [*arguments("--task-time", "3s", "--batch-size", "5", module="slow")[1:], *listen]
    with started(folder, *own) as evaluation:
        line = evaluation.stderr.readline()
        address = line.removeprefix("limpet: workers can connect to ").strip()
        assert address.startswith("127.0.0.1:"), line
        with pytest.raises(Denied, match="does not know the secret"):
            RemoteQueue.connect(f"tcp://{address}/{SECRET[::-1]}")
        with started(folder, "--connect", address, LIMPET_SECRET=SECRET) as hanging:
            wait_until((folder / f"evaluating.{hanging.pid}").exists)
            hanging.send_signal(signal.SIGSTOP)
            with started(folder, "--connect", address, LIMPET_SECRET=SECRET) as worker:
                output, errors = evaluation.communicate(timeout=300)
                assert evaluation.returncode == 0, errors
                hanging.send_signal(signal.SIGCONT)
                for process in (hanging, worker):
                    out, err = process.communicate(timeout=100)
                    assert (process.returncode, out) == (0, "")
                    assert "working for the evaluation" in err
                    assert err.endswith("limpet: the evaluation has ended\n")
    assert SECRET not in line + errors + output
    assert output.startswith("version_10  val/loss ")
    assert Run(folder / "run").metrics(10).keys() == {"val/loss"}


def test_a_secret_is_needed_and_never_shown(folder):
    save(folder, 10)
    (folder / "secret").write_text("short")
    done = evaluate("--listen", "127.0.0.1:0", "--secret-file", "secret")
    assert done.code == OTHER
    assert "16 to 256" in done.err
    assert "short" not in done.err
