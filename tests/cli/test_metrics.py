"""``limpet metrics``: a table, CSV, and JSON."""

import csv
import io

import pytest

import limpet
from limpet.format.names import METRICS_LOG
from limpet.run.policy import EverySteps
from tests.cli.invoke import check_error_line, run_cli


def train(folder, last, save=EverySteps(5), **resume):  # noqa: B008
    options = {"save": save, "metrics_log": True, "quiet": True}
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


def test_the_three_forms_have_the_current_lineage_and_the_abandoned_steps(tmp_path):
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
    lines = [" ".join(line.split()) for line in run_cli("metrics", tmp_path).out.splitlines()]
    assert lines[0] == "branch state metric steps last step last smallest largest"
    assert "0 abandoned loss 5 10 0.1 0.1 0.1667" in lines
    assert "0 current loss 5 5 0.2 0.2 1" in lines
    assert "1 current step 2 7 7 6 7" in lines
    assert "0 current a,b \\x1b[31m 1 4 nan nan nan" in lines
    document = run_cli("metrics", tmp_path, "--json").json
    found = [(b["branch"], b["current"], b["metrics"]["step"]) for b in document["branches"]]
    assert found[2] == (1, True, {"steps": [6, 7], "values": [6.0, 7.0]})
    assert [b[:2] for b in found] == [(0, False), (0, True), (1, True)]
    assert (document["run"], document["damaged"]) == (str(tmp_path), [])


def test_what_is_no_run_and_two_forms_and_a_run_without_a_version(tmp_path):
    check_error_line(run_cli("metrics", tmp_path / "none"), 4, "There is no run at")
    train(tmp_path, 1, save=limpet.Never())
    assert read_csv(tmp_path)[1:] == [["0", "1", "1", "1", "1"]]
    error = "--csv cannot be combined with --json"
    check_error_line(run_cli("metrics", tmp_path, "--csv", "--json"), 2, error)


@pytest.mark.parametrize("kind", ["bit", "newer", "other name", "empty"])
def test_a_damaged_file_is_named_and_the_others_count(tmp_path, kind):
    folder, copy = tmp_path / "a", tmp_path / "b"
    train(folder, 15)
    assert run_cli("verify", folder).code == 0
    path = folder / METRICS_LOG / "0.1.6.json"
    raw = path.read_bytes()
    path.unlink()
    path = path.with_name("0.1.7.json") if kind == "other name" else path
    changed = {
        "bit": bytes([*raw[:-3], raw[-3] ^ 1, *raw[-2:]]),
        "newer": raw.replace(b'{"limpet":1,', b'{"limpet":2,'),
        "empty": b"",
    }
    path.write_bytes(changed.get(kind, raw))
    key = f"{METRICS_LOG}/{path.name}"
    forms = [("metrics", folder, *option) for option in ([], ["--csv"], ["--json"])]
    for command in [("verify", folder), ("copy", folder, copy), *forms]:
        result = run_cli(*command)
        assert (result.code, key in result.out + result.err) == (3, True), (command, result)
    assert run_cli("verify", copy).code == 0
    for piece in (folder, copy):
        assert "Load another version" not in run_cli("metrics", piece).out  # it is none
        rows = csv.DictReader(io.StringIO(run_cli("metrics", piece, "--csv").out))
        assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 10, *range(11, 16)]


def test_a_copy_has_the_log_and_continues_it(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    for last in (10, 12):
        train(source, last)
        assert run_cli("copy", source, target).code == 0
        assert read_csv(target) == read_csv(source)
    train(target, 14)
    assert [r[2] for r in read_csv(target)[1:]] == [str(s) for s in range(1, 15)]
    names = {p.name for p in (target / METRICS_LOG).iterdir()}
    assert {n for n in names if n.startswith("0.3.")} == {"0.3.13.json"}
