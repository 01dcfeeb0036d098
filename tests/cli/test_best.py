"""``limpet best``: the best version of all runs in a folder."""

import pytest

from limpet.format.names import MANIFEST
from limpet.format.records import InexactEvaluation, Objective
from limpet.run.policy import EverySteps, KeepBest
from limpet.run.records import record_objective
from limpet.run.run import Run
from limpet.storage.open import open_store
from tests.cli.invoke import check_error_line, run_cli
from tests.trainings import flip_bit, train, training

FOLDER = "memory://best/runs"
NAN = float("nan")


def make_runs(name, values, modes=()):
    """Make a run for each list of values of ``val``, at steps 20, 40, ..., with recorded modes."""
    folder = f"memory://best-{name}/runs"
    for letter, numbers in zip("abcdef", values, strict=False):
        store = open_store(f"{folder}/{letter}")
        with training(store, EverySteps(20)) as (state, ckpt):
            train(state, ckpt, 20 * len(numbers))
        for step, value in enumerate(numbers, 1):
            if value is not None:
                Run(store).add_metrics(20 * step, {"val": value})
    for letter, mode in zip("abcdef", modes, strict=False):
        record_objective(open_store(f"{folder}/{letter}"), Objective("val", mode))
    return folder


def test_the_best_run_is_first_with_its_best_version():
    folder = make_runs("first", [[0.5, 0.4], [0.1, 0.9], [NAN, 0.3], [None]], ["min"])
    result = run_cli("best", folder, "--json")
    assert result.code == 0
    assert result.json == {
        "metric": "val",
        "mode": "min",
        "runs": [
            {"address": f"{folder}/{run}@{step}", "run": f"{folder}/{run}",
             "version": f"version_{step}", "value": value}
            for run, step, value in (("b", 20, 0.1), ("c", 40, 0.3), ("a", 40, 0.4))
        ],
        "problems": [],
    }  # fmt: skip
    lines = run_cli("best", folder, "--metric", "val", "--mode", "max").out.splitlines()
    assert lines[0].split() == ["version", "val", "(max)"]
    assert [line.split() for line in lines[1:]] == [
        [f"{folder}/b@40", "0.9"], [f"{folder}/a@20", "0.5"], [f"{folder}/c@40", "0.3"],
    ]  # fmt: skip
    for row in result.json["runs"]:
        assert run_cli("show", row["address"]).code == 0


def test_one_run():
    folder = make_runs("one", [[0.5, 0.4, 0.45]], ["min"])
    assert run_cli("best", f"{folder}/a", "--json").json["runs"] == [
        {"address": f"{folder}/a@40", "run": f"{folder}/a", "version": "version_40", "value": 0.4}
    ]
    assert run_cli("best", f"{folder}/a/", "--json").json["runs"][0]["address"] == f"{folder}/a@40"


def test_the_mode_of_a_policy_is_recorded(tmp_path):
    with training(tmp_path / "a", EverySteps(20), KeepBest(2, "loss", mode="max")) as (state, ckpt):
        train(state, ckpt, 60)
    found = run_cli("best", tmp_path, "--json").json
    assert (found["metric"], found["mode"]) == ("loss", "max")
    best = Run(tmp_path / "a").best("loss", "max")
    assert found["runs"][0]["address"] == f"{tmp_path}/a@{best.step}"


def test_of_equal_values_the_newest_version_and_run_is_first():
    folder = make_runs("equal", [[0.5, 0.5], [0.5]], ["min"])
    runs = run_cli("best", folder, "--json").json["runs"]
    assert [r["address"][len(folder) :] for r in runs] == ["/b@20", "/a@40"]


@pytest.mark.parametrize(
    ("modes", "options"),
    [((), ["--metric", "val"]), (("min", "max"), ["--metric", "val"]), ((), []),
     (("min", "max"), ["--metric", "val", "--json"])],
)  # fmt: skip
def test_a_mode_is_never_guessed(modes, options):
    folder = make_runs(f"mode-{len(modes)}-{len(options)}", [[0.5], [0.4]], modes)
    check_error_line(run_cli("best", folder, *options), 1, "--mode min|max")
    assert run_cli("best", folder, "--metric", "val", "--mode", "min").code == 0


def test_several_metrics_need_a_name():
    folder = make_runs("several", [[0.5]], ["min"])
    record_objective(open_store(f"{folder}/a"), Objective("other", "max"))
    check_error_line(run_cli("best", folder), 1, "val (min)", "other (max)")
    assert run_cli("best", folder, "--metric", "val").code == 0


def test_an_inexact_score_that_does_not_count_is_explained():
    folder = make_runs("inexact", [[None]], ["min"])
    run = Run(f"{folder}/a")
    record = {"metrics": {"val": 0.5}, "first_step": 20, "last_step": 30}
    run.put_record(InexactEvaluation, "training", 20, counts=False, **record)
    hint = "An inexact score of a training counts only with counts=True"
    check_error_line(run_cli("best", folder), 4, "has a value of val", hint)
    check_error_line(run_cli("best", f"{folder}/a"), 4, "has a value of val", hint)
    check_error_line(run_cli("show", f"{folder}/a@best"), 4, hint)
    run.put_record(InexactEvaluation, "training", 20, counts=True, **record)
    assert run_cli("best", folder).code == 0


def test_a_metric_with_both_modes_needs_one():
    folder = make_runs("both", [[0.5]], ["min"])
    record_objective(open_store(f"{folder}/a"), Objective("val", "max"))
    for place in (folder, f"{folder}/a"):
        check_error_line(run_cli("best", place), 1, "no single mode of val", "the modes val (both)")
    assert run_cli("best", folder, "--mode", "max").code == 0
    assert run_cli("ls", folder, "--json").json["runs"][0]["best"] == {}


def test_the_error_of_one_run_does_not_say_runs():
    folder = make_runs("singular", [[0.5]])
    error = (
        f"{folder}/a records no single metric. Found the metrics loss, val, and the modes (none)"
    )
    check_error_line(run_cli("best", f"{folder}/a"), 1, error)


@pytest.mark.parametrize("values", [[[None]], [[NAN]]])
def test_no_run_has_the_metric(values):
    folder = make_runs(f"none-{values[0][0]}", values, ["min"])
    result = run_cli("best", folder, "--json")
    assert (result.code, result.json["exit"]) == (4, 4)
    assert "No version" in result.err
    assert "loss" in result.err


def test_a_damaged_version_is_not_the_best_and_is_told():
    folder = make_runs("damaged", [[0.5, 0.1], [0.4]], ["min"])
    flip_bit(open_store(f"{folder}/a"), f"version_40/{MANIFEST}")
    result = run_cli("best", folder, "--json")
    assert result.json["runs"][0]["address"] == f"{folder}/b@20"
    assert result.json["problems"][0]["run"] == f"{folder}/a"
    assert "\na: " in run_cli("best", folder).out
    assert f"\n{folder}/a: " in run_cli("best", f"{folder}/a").out


def test_a_version_on_a_branch_has_an_address_that_opens(tmp_path):
    with training(tmp_path / "a", EverySteps(20)) as (state, ckpt):
        train(state, ckpt, 40)
    with training(tmp_path / "a", EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 40)
    Run(tmp_path / "a").add_metrics(40, {"val": 0.1})
    options = ["--metric", "val", "--mode", "min", "--json"]
    address = run_cli("best", tmp_path, *options).json["runs"][0]["address"]
    assert address == f"{tmp_path}/a@40.1"
    assert run_cli("show", address, "--json").json["branch"] == 1
