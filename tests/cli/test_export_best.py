"""``limpet evaluate --export-best DIR``."""

import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import limpet
from limpet.cli.exit_codes import EVALUATION_FAILED, EXISTS, NOT_FOUND, OTHER, USAGE
from limpet.cli.verbs import evaluate as verb
from limpet.errors import LimpetError
from limpet.run.run import Run
from limpet.threads import no_op
from tests.cli.invoke import check_error_line, run_cli

LOSSES = """
def setup(snapshot):
    return snapshot["loss"]

def evaluate(loss, batch):
    if loss < 0:
        raise ValueError("no loss")
    return {"loss": (loss * len(batch), len(batch))}

def dataset():
    return range(8)
"""
METRIC = ("--metric", "loss", "--mode", "min")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path


def save(**losses):
    """Save versions: ``v3=0.5`` is one of step 3 with this loss."""
    for version, loss in losses.items():
        step = int(version[1:])
        state = {"model": {"w": torch.full((3,), float(step))}, "loss": loss}
        limpet.save(f"run/version_{step}", state, step=step)


def evaluate(*more):
    own = ["evaluate", "run", "--with", "losses", "--data", "losses:dataset", "--workers", "0"]
    return run_cli(*own, *more)


def exported(folder, to="out"):
    return sorted(p.name for p in (folder / to).glob("step_*"))


def test_each_version_that_becomes_the_best_is_exported(folder):
    save(v1=0.5, v2=0.7, v3=0.4, v4=0.4, v5=0.6)
    done = evaluate("--all", *METRIC, "--export-best", "out")
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if "exported" in line] == [
        f"exported version_{i} to out/step_{i}" for i in (1, 3, 4)
    ]
    assert done.out.splitlines()[1] == "exported version_1 to out/step_1", "right after it"
    assert exported(folder) == ["step_1", "step_3", "step_4"]
    assert load_file(folder / "out/step_4/model.safetensors")["w"].tolist() == [4.0] * 3
    assert not [*(folder / "run").glob("pin-*")]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "hf"])
def test_the_formats_are_those_of_export(folder, kind):
    save(v1=0.5)
    assert evaluate(*METRIC, "--export-best", "a", "--to", kind).code == 0
    assert run_cli("export", "run@1", "b/step_1", "--to", kind).code == 0
    (a, b) = ({p.name: p.read_bytes() for p in (folder / to / "step_1").iterdir()} for to in "ab")
    assert a == b


def test_a_repeated_command_exports_nothing_twice_and_completes_what_is_missing(folder):
    save(v1=0.5)
    assert evaluate(*METRIC).code == 0
    missing = evaluate(*METRIC, "--export-best", "out")  # as if the first one had been killed
    assert "Nothing to evaluate" in missing.out
    assert "exported version_1 to out/step_1" in missing.out
    before = {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("*")}
    again = evaluate(*METRIC, "--export-best", "out", "--json")
    assert again.code == 0
    assert again.json["exported"] == {"version_1": "out/step_1"}
    assert "exported" not in evaluate(*METRIC, "--export-best", "out").out
    assert {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("*")} == before
    save(v2=0.9)
    assert "exported" not in evaluate(*METRIC, "--export-best", "out").out
    assert exported(folder) == ["step_1"]


def test_the_scores_of_the_training_count(folder):
    save(v1=0.5, v2=0.3)
    Run("run").add_metrics(1, {"loss": 0.1})
    done = evaluate(*METRIC, "--export-best", "out")
    assert done.code == 0
    assert exported(folder) == ["step_1"]
    assert evaluate("--metric", "loss", "--mode", "max", "--export-best", "out").code == 0
    assert exported(folder) == ["step_1", "step_2"], "an old export is kept"


def test_a_folder_of_exports_is_no_run(folder):
    save(v1=0.5, v2=0.4)
    assert evaluate("--all", *METRIC, "--export-best", "out").code == 0
    check_error_line(run_cli("ls", "out"), NOT_FOUND, "There is no run at out")
    before = sorted(folder.rglob("*"))
    check_error_line(run_cli("sweep", "out", "--grace", "0"), NOT_FOUND, "There is no run at ")
    assert sorted(folder.rglob("*")) == before
    assert [run["name"] for run in run_cli("ls", ".", "--json").json["runs"]] == ["run"]


def test_follow_exports_what_is_missing_at_once(folder):
    state = {"model": {"w": torch.ones(3)}, "loss": 0.5}
    with limpet.Checkpointer("run", state, save=limpet.EverySteps(1), quiet=True) as ckpt:
        ckpt.step()
    assert evaluate("--follow", *METRIC).code == 0
    done = evaluate("--follow", *METRIC, "--export-best", "out/")
    assert done.code == 0, done.err
    assert done.out.startswith("exported version_1 to out/step_1\n")


def test_what_is_worse_than_an_export_is_not_exported(folder):
    """Retention of the training deletes the best version while the command follows."""
    export = partial(verb._export_best, Run("run"), ("loss", "min"), "out", "hf", {}, [], no_op)
    for losses in ({"v1": 0.5}, {"v2": 0.7}, {"v3": 0.6}, {"v4": 0.4}):
        save(**losses)
        assert evaluate(*METRIC).code == 0
        Run("run").retain(limpet.KeepLast(1))
        export()
    assert exported(folder) == ["step_1", "step_4"]


@pytest.mark.parametrize("kind", ["a file", "a version"])
def test_the_folder_is_checked_before_the_work(folder, kind):
    save(v1=0.5, v2=0.4)
    (folder / "out").write_text("x")
    to = "out" if kind == "a file" else "run/version_2"
    result = evaluate("--all", *METRIC, "--export-best", to)
    check_error_line(result, USAGE, f"{to!r} is a file" if kind == "a file" else "another folder")
    assert Run("run").metrics(1) == {}
    assert not [*(folder / "run").rglob("step_*")]


def test_an_export_that_fails_loses_nothing(folder):
    save(v1=0.5, v2=0.4)
    other = folder / "out/step_1/model.safetensors"
    other.parent.mkdir(parents=True)
    other.write_text("of another program")
    check_error_line(evaluate("--all", *METRIC, "--export-best", "out"), EXISTS, "another file")
    assert Run("run").metrics(1) == {"loss": 0.5}
    assert not [*(folder / "run").glob("lease-*")]
    other.unlink()
    done = evaluate("--all", *METRIC, "--export-best", "out")
    assert done.code == 0
    assert exported(folder) == ["step_1", "step_2"]
    assert "exported version_2" in done.out


def test_exports_in_the_run_itself_are_not_its_versions(folder):
    save(v1=0.5)
    assert evaluate(*METRIC, "--export-best", "run").code == 0
    assert run_cli("sweep", "run", "--grace", "0").code == 0
    assert run_cli("verify", "run").code == 0
    assert exported(folder, "run") == ["step_1"]
    assert [v["step"] for v in run_cli("ls", "run", "--json").json["versions"]] == [1]


def test_the_address_of_a_version_is_refused(folder):
    save(v1=0.5)
    check_error_line(evaluate(*METRIC, "--export-best", "run@1"), EXISTS, "address of a version")


def test_a_misspelled_metric_stops_the_command_and_is_not_recorded(folder):
    save(v1=0.5, v2=0.4)
    result = evaluate("--all", "--metric", "lss", "--mode", "min")
    check_error_line(result, OTHER, "returns no metric lss", "it returns loss")
    assert Run("run").evaluations(1) == Run("run").evaluations(2) == {}
    assert not [*(folder / "run").glob("lease-*")]
    assert "lss" not in run_cli("ls", "run").out
    assert evaluate("--all", *METRIC).code == 0


def test_without_a_score_nothing_is_exported(folder):
    save(v1=-1.0)
    result = evaluate(*METRIC, "--export-best", "out")
    assert result.code == EVALUATION_FAILED
    assert exported(folder) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--export-best", "out"),
        ("--to", "hf"),
        (*METRIC, "--to", "torch"),
        (*METRIC, "--export-best", ""),
    ],
)
def test_usage(folder, options):
    save(v1=0.5)
    check_error_line(evaluate(*options), USAGE, "--export-best needs --metric and --mode")
    assert Run("run").metrics(1) == {}


def test_a_version_is_not_deleted_while_it_is_exported(folder, monkeypatch):
    save(v1=0.5, v2=0.9)
    assert evaluate("--all", *METRIC).code == 0
    found = []

    def prepare(*args, **kwargs):
        with pytest.raises(LimpetError, match="version_1"):
            Run("run").delete(1)
        found.append(args[1])
        return real(*args, **kwargs)

    real = verb.prepare
    monkeypatch.setattr(verb, "prepare", prepare)
    assert evaluate(*METRIC, "--export-best", "out").code == 0
    assert found == ["out/step_1"]
    Run("run").delete(1)
