"""``limpet metrics``: a table, CSV, and JSON."""

import csv
import io

import pytest

import limpet
from limpet.format.names import METRICS_LOG
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from tests.cli.invoke import check_error_line, run_cli
from tests.trainings import flip_bit


def train(folder, last, log=True, **resume):
    options = {"save": EverySteps(5), "metrics_log": log, "quiet": True}
    with limpet.Checkpointer(folder, {"x": [0.0]}, **options) as ckpt:
        ckpt.resume(**resume)
        while ckpt.current_step < last:
            step = ckpt.current_step + 1
            odd = {"a,b\n\x1b[31m": float("nan")} if step % 4 == 0 else {}
            ckpt.step({"loss": 1 / step, "step": step, **odd})


def read_csv(folder):
    result = run_cli("metrics", folder, "--csv")
    assert result.err == ""
    return list(csv.reader(io.StringIO(result.out)))


def test_csv_has_a_line_for_each_step_and_the_current_lineage_first(tmp_path):
    train(tmp_path, 10)
    train(tmp_path, 7, at=5)
    header, *rows = read_csv(tmp_path)
    assert header == ["branch", "current", "step", "loss", "step", "a,b \\x1b[31m"]
    expected = [("0", "1", s) for s in range(1, 6)] + [("1", "1", s) for s in (6, 7)]
    expected += [("0", "0", s) for s in range(6, 11)]
    assert [(r[0], r[1], int(r[2])) for r in rows] == expected
    assert [float(r[3]) for r in rows] == [1 / step for *_, step in expected]
    assert [r[4] for r in rows] == [str(step) for *_, step in expected]
    assert [r[5] for r in rows] == ["nan" if step % 4 == 0 else "" for *_, step in expected]


def test_without_a_log_the_versions_have_lines(tmp_path):
    train(tmp_path, 12, log=False)
    Run(tmp_path).add_metrics(10, {"val": 2})
    header, *rows = read_csv(tmp_path)
    val = header.index("val")
    assert [(r[2], r[val]) for r in rows] == [("5", ""), ("10", "2"), ("12", "")]


def test_the_table_has_the_last_and_the_extreme_values(tmp_path):
    train(tmp_path, 10)
    train(tmp_path, 7, at=5)
    lines = [" ".join(line.split()) for line in run_cli("metrics", tmp_path).out.splitlines()]
    assert lines[0] == "branch state metric steps last step last smallest largest"
    assert "0 abandoned loss 5 10 0.1 0.1 0.1667" in lines
    assert "0 current loss 5 5 0.2 0.2 1" in lines
    assert "1 current step 2 7 7 6 7" in lines
    assert "0 current a,b \\x1b[31m 1 4 nan nan nan" in lines


def test_json(tmp_path):
    train(tmp_path, 2)
    document = run_cli("metrics", tmp_path, "--json").json
    loss = {"steps": [1, 2], "values": [1.0, 0.5]}
    (branch,) = document["branches"]
    assert (branch["branch"], branch["current"], branch["metrics"]["loss"]) == (0, True, loss)
    assert document["run"] == str(tmp_path)
    assert document["damaged"] == []


@pytest.mark.parametrize("option", [[], ["--csv"], ["--json"]])
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path, option):
    train(tmp_path, 10)
    assert run_cli("verify", tmp_path).code == 0
    flip_bit(Run(tmp_path).store, f"{METRICS_LOG}/0.1.1.json")
    verified = run_cli("verify", tmp_path)
    assert verified.code == 3
    assert f"{METRICS_LOG}/0.1.1.json" in verified.out
    copied = run_cli("copy", tmp_path, tmp_path / "copy")
    assert copied.code == 3
    assert f"{METRICS_LOG}/0.1.1.json" in copied.out + copied.err
    assert run_cli("verify", tmp_path / "copy").code == 0
    result = run_cli("metrics", tmp_path, *option)
    assert result.code == 3
    text = result.out + result.err
    assert f"{METRICS_LOG}/0.1.1.json" in text
    assert "is damaged" in text
    assert option == ["--json"] or "Load another version" not in text  # it is none
    assert "0.1" in text


def test_what_is_no_run_and_two_forms(tmp_path):
    check_error_line(run_cli("metrics", tmp_path / "none"), 4, "There is no run at")
    train(tmp_path, 2)
    error = "--csv cannot be combined with --json"
    check_error_line(run_cli("metrics", tmp_path, "--csv", "--json"), 2, error)


def test_a_run_that_has_logged_but_not_saved_yet(tmp_path):
    options = {"save": limpet.Never(), "metrics_log": True, "quiet": True}
    with limpet.Checkpointer(tmp_path, {"x": [0.0]}, **options) as ckpt:
        ckpt.step({"loss": 1.0})
    assert read_csv(tmp_path)[1:] == [["0", "1", "1", "1"]]


def test_a_copy_has_the_log_and_continues_it(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    train(source, 10)
    run_cli("copy", source, target)
    assert read_csv(target) == read_csv(source)
    train(source, 12)
    result = run_cli("copy", source, target)
    assert result.code == 0
    assert read_csv(target) == read_csv(source)
    train(target, 14)
    assert [r[2] for r in read_csv(target)[1:]] == [str(s) for s in range(1, 15)]
    names = {p.name for p in (target / METRICS_LOG).iterdir()}
    assert {n for n in names if n.startswith("0.3.")} == {"0.3.13.json"}
