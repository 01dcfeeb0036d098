"""``limpet show``."""

import os
from typing import Any

import numpy as np
import pytest
import torch

import limpet as hf
from limpet.cli.verbs.show import render
from limpet.errors import MissingLeaf
from limpet.format.names import Version
from limpet.format.records import FailedEvaluation
from limpet.loading.snapshot import reader_of
from limpet.run.lease import LeaseHolder
from limpet.run.run import Run
from limpet.snapshot.tree_rows import iter_tree_rows
from tests.cli.invoke import check_error_line, run_cli
from tests.forging import small_state


def test_header_and_tree(run):
    result = run_cli("show", f"{run}/version_40")
    assert result.code == 0
    for part in ("step     40", "version_20", "cadence", "1 shard", "not checked"):
        assert part in result.out
    assert "array float32 [1000]" in result.out
    assert "3.91 KiB" in result.out
    assert "  bias" in result.out


def test_json_keys_are_stable(run):
    report = run_cli("show", f"{run}/version_40", "--json", "--layout").json
    assert list(report) == [
        "snapshot", "step", "branch", "created", "writer", "attempt", "digest", "parent", "reason",
        "metrics", "note", "config", "evaluations", "statistics", "shards",
        "bytes", "referred_bytes", "bases", "chain", "intact", "problem",
        "bytes_checked", "leaves", "tables", "values", "collapsed",
    ]  # fmt: skip
    weights = next(leaf for leaf in report["leaves"] if leaf["key"] == "weights")
    assert weights["boxes"][0].pop("at") > 0
    assert weights == {
        "key": "weights",
        "kind": "array",
        "dtype": "float32",
        "shape": [1000],
        "bytes": 4000,
        "tied": None,
        "boxes": [{"shard": 0, "offsets": [0], "sizes": [1000]}],
    }
    assert {"key": "progress/step", "value": 40} in report["values"]
    assert report["parent"]["version"] == "version_20"


def test_each_evaluation_is_shown_with_its_state(run):
    opened = Run(run)
    opened.add_metrics(40, {"accuracy": 0.75}, "val")
    opened.put_record(FailedEvaluation, "robust", 40, cause="records 0 to 31: no data")
    lease = LeaseHolder(opened.store, "slow")
    lease.acquire()
    lease.protect([Version(40)])
    result = run_cli("show", f"{run}/version_40")
    document = run_cli("show", f"{run}/version_40", "--json").json
    listed = run_cli("ls", run, "--json").json["versions"]
    lease.release()
    for line in (
        "evaluation  accuracy 0.75 (val)",
        "evaluation  FAILED (robust): records 0 to 31: no data",
        f"evaluation  PENDING (slow): process {os.getpid()} on ",
    ):
        assert line in result.out
    (entry,) = (v for v in listed if v["version"] == "version_40")
    assert document["evaluations"] == entry["evaluations"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_every_kind_of_node(empty_url):
    hf.save(f"{empty_url}/version_7", small_state(), step=7)
    result = run_cli("show", f"{empty_url}/version_7")
    assert result.code == 0
    assert "float32 [2, 3] = weight" in result.out
    assert "bytes [4096]" in result.out
    assert "array >u2 [2]" in result.out
    report = run_cli("show", f"{empty_url}/version_7", "--json").json
    values = {v["key"]: v["value"] for v in report["values"]}
    assert values["plain/nan"] == "nan"
    assert values["plain/inf"] == ["inf", "-inf"]
    assert values["plain/long"] == hex(1 << 70)
    assert values["plain/numpy"] == 1.5


def test_keys_select_leaves(run):
    report = run_cli("show", f"{run}/version_40", "--json", "--keys", "small/**").json
    assert [leaf["key"] for leaf in report["leaves"]] == ["small/bias"]
    assert report["values"] == []
    result = run_cli("show", f"{run}/version_40", "--keys", "small/*")
    assert "small/bias" in result.out
    assert "weights" not in result.out


def test_a_key_within_a_plain_list_selects_the_list(run):
    report = run_cli("show", f"{run}/version_40", "--json", "--keys", "history/0").json
    assert [v["key"] for v in report["values"]] == ["history"]


def test_keys_that_match_nothing_are_an_error(run):
    result = run_cli("show", f"{run}/version_40", "--keys", "modle/**")
    assert result.code == 6
    assert "weights" in result.err


def test_depth_limits_the_tree(run):
    result = run_cli("show", f"{run}/version_40", "--depth", "1")
    assert "small" in result.out
    assert "bias" not in result.out
    assert run_cli("show", f"{run}/version_40", "--depth", "0").code == 2


def test_a_shard_of_wrong_length_is_reported(tmp_path):
    hf.save(tmp_path / "snap", {"a": np.zeros(10)})
    [shard] = (tmp_path / "snap").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "has the wrong length" in run_cli("show", tmp_path / "snap").out
    assert run_cli("show", tmp_path / "snap", "--json").json["intact"] is False


def test_control_characters_do_not_reach_the_terminal(empty_url):
    state = {"\x1b[31mred\x1b]0;title\x07": 1, "[bold]x[nope]": "\x1b[2J", "line\nbreak": 2}
    hf.save(empty_url, state, note={"\x1b[1m": "\x1b[5m"})
    result = run_cli("show", empty_url)
    assert "\x1b" not in result.out
    assert "[bold]x[nope]" in result.out


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_wraps_no_row(empty_url, monkeypatch, width):
    name = "layers.0.attention.a_very_long_name_of_a_projection.weight"
    hf.save(empty_url, {"model": {name: torch.zeros(3, 4)}, "text": "long " * 50})
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run_cli("show", empty_url).out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert sum("float32" in line for line in lines) == 1
    assert any("float32 [3, 4]" in line and line.rstrip().endswith("48 B") for line in lines)


def test_containers_show_their_number_of_leaves(empty_url):
    one = {"deep": [{"x": np.zeros(3), "n": 1, "more": [np.zeros(1), 2]}], "none": {}}
    hf.save(empty_url, {"one": one, "two": [np.zeros(2)], "net": torch.nn.Linear(2, 2)})
    lines = [line.split(maxsplit=1) for line in run_cli("show", empty_url).out.splitlines()]
    report = {arguments[0]: arguments[1] for arguments in lines if len(arguments) > 1}
    assert report["one"].startswith("dict, 4 leaves ")
    assert report["deep"].startswith("list, 4 leaves ")
    assert report["more"].startswith("list, 2 leaves ")
    assert report["two"].startswith("list, 1 leaf ")
    assert report["net"].startswith("dict, 2 leaves ")
    assert report["none"] == "dict, empty"


def test_each_row_is_looked_at_a_few_times_whatever_the_number_of_containers(empty_url):
    hf.save(empty_url, {"parts": [{"x": np.zeros(1), "n": {"of": i}} for i in range(500)]})

    class Rows(list[Any]):
        looked_at = 0

        def __iter__(self):
            for row in super().__iter__():
                self.looked_at += 1
                yield row

    snapshot = hf.open(empty_url)
    rows = Rows(iter_tree_rows(reader_of(snapshot)))
    render(reader_of(snapshot), rows, None, None)
    assert len(rows) == 2001
    assert rows.looked_at <= 10 * len(rows)


@pytest.mark.parametrize("verb", ["show", "ls", "verify", "diff", "copy", "sweep"])
def test_no_line_ends_with_spaces_in_a_pipe(run, empty_url, verb):
    hf.save(f"{run}/version_80", {"text": "long " * 50, "n": 1, "x": np.zeros(3)})
    arguments = {
        "show": [f"{run}/version_80"],
        "diff": [f"{run}/version_80", f"{run}/version_60"],
        "copy": [run, empty_url],
    }
    result = run_cli(verb, *arguments.get(verb, [run]))
    assert result.out.endswith("\n")
    assert [line for line in result.out.splitlines() if line != line.rstrip()] == []


def test_patterns_show_full_keys(run):
    """Error messages of ``load`` refer to this command for the valid keys."""
    shown = run_cli("show", f"{run}/version_20", "--keys", "**").out.splitlines()
    first = [line.split()[0] for line in shown if line]
    assert {"weights", "small/bias", "progress/step"} <= set(first)


def test_show_respects_depth_in_json(tmp_path):
    state = {"model": {"fc": {"w": np.zeros(4), "n": 1}, "b": np.zeros(2)}, "step": 7}
    hf.save(tmp_path / "version_1", state, step=1)

    def shown(*options):
        document = run_cli("show", tmp_path / "version_1", "--json", *options).json
        keys = [[row["key"] for row in document[kind]] for kind in ("leaves", "values")]
        return keys[0], keys[1], document["collapsed"]

    everything = ["model/fc/w", "model/b"], ["model/fc/n", "step"]
    fc = {"key": "model/fc", "kind": "dict", "leaves": 2, "bytes": 32}
    model = {"key": "model", "kind": "dict", "leaves": 3, "bytes": 48}
    assert shown() == (*everything, [])
    assert shown("--depth", 1) == ([], ["step"], [model])
    assert shown("--depth", 2) == (["model/b"], ["step"], [fc])
    assert shown("--depth", 3) == shown("--depth", 9) == (*everything, [])


def test_the_config_is_shown_with_one_line_for_each_value(empty_url):
    config = {"lr": 3e-4, "optim": {"betas": (0.9, 0.99)}, "name\n": "a\x1b[31m", "db": "x://u:p@h"}
    with hf.Checkpointer(empty_url, {"x": 1}, config=config) as ckpt:
        ckpt.step()
    for address in (empty_url, f"{empty_url}@1"):
        result = run_cli("show", address)
        assert result.code == 0
        lines = [line.split() for line in result.out.splitlines()]
        assert [line for line in lines if line and line[0].startswith("config")] == [
            ["config.lr", "0.0003"],
            ["config.optim.betas", "(0.9,", "0.99)"],
            ["config.name", r"'a\x1b[31m'"],
            ["config.db", "'x://...@h'"],
        ]
    document = run_cli("show", empty_url, "--json").json
    assert document["config"] == {
        "lr": 3e-4, "optim": {"betas": [0.9, 0.99]}, "name\n": "a\x1b[31m", "db": "x://...@h",
    }  # fmt: skip


def test_a_version_without_a_config_shows_none(run):
    assert "config" not in run_cli("show", run).out
    assert run_cli("show", run, "--json").json["config"] is None


@pytest.mark.parametrize("keys", [[f"layer{i}" for i in range(1000)], "layer"])
def test_a_message_about_keys_is_short(run, keys):
    words = [keys] if isinstance(keys, str) else keys
    options = [word for key in words for word in ("--keys", key)]
    check_error_line(run_cli("show", f"{run}@20", *options), 6, "keys like layer")
    with pytest.raises(MissingLeaf, match="keys like layer") as caught:
        hf.load(f"{run}@20", keys=keys)
    assert len(str(caught.value)) < 500
