"""``holdfast show``."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import holdfast as hf
from holdfast.cli.tree_rows import iter_tree_rows
from holdfast.cli.verbs.show import fitting_depth
from tests.cli.invoke import run_cli
from tests.forging import small_state


def test_shows_header_and_tree(run: str) -> None:
    answer = run_cli("show", f"{run}/version_40")
    assert answer.code == 0
    for part in ("step     40", "version_20", "cadence", "1 shard", "not checked"):
        assert part in answer.out
    assert "array float32 [1000]" in answer.out
    assert "3.9 KiB" in answer.out
    assert "  bias" in answer.out


def test_json_keys_are_stable(run: str) -> None:
    told = run_cli("show", f"{run}/version_40", "--json", "--layout").json
    assert list(told) == [
        "snapshot", "step", "branch", "created", "writer", "attempt", "digest", "parent", "reason",
        "metrics", "note", "statistics", "shards", "bytes", "referred_bytes", "bases", "chain",
        "intact", "problem", "bytes_checked", "leaves", "values",
    ]  # fmt: skip
    weights = next(leaf for leaf in told["leaves"] if leaf["key"] == "weights")
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
    assert {"key": "progress/step", "value": 40} in told["values"]
    assert told["parent"]["version"] == "version_20"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_every_kind_of_node_is_shown(elsewhere: str) -> None:
    hf.save(f"{elsewhere}/version_7", small_state(), step=7)
    answer = run_cli("show", f"{elsewhere}/version_7")
    assert answer.code == 0
    assert "float32 [2, 3] = weight" in answer.out
    assert "bytes [4096]" in answer.out
    assert "array >u2 [2]" in answer.out
    told = run_cli("show", f"{elsewhere}/version_7", "--json").json
    values = {v["key"]: v["value"] for v in told["values"]}
    assert values["plain/nan"] == "nan"
    assert values["plain/inf"] == ["inf", "-inf"]
    assert values["plain/long"] == hex(1 << 70)
    assert values["plain/numpy"] == 1.5


def test_keys_choose(run: str) -> None:
    told = run_cli("show", f"{run}/version_40", "--json", "--keys", "small/**").json
    assert [leaf["key"] for leaf in told["leaves"]] == ["small/bias"]
    assert told["values"] == []
    answer = run_cli("show", f"{run}/version_40", "--keys", "small/*")
    assert "small/bias" in answer.out
    assert "weights" not in answer.out


def test_keys_reach_the_elements_of_a_list_that_is_one_value(run: str) -> None:
    told = run_cli("show", f"{run}/version_40", "--json", "--keys", "history/0").json
    assert [v["key"] for v in told["values"]] == ["history"]


def test_keys_that_match_nothing_are_an_error(run: str) -> None:
    answer = run_cli("show", f"{run}/version_40", "--keys", "modle/**")
    assert answer.code == 6
    assert "weights" in answer.err


def test_depth_cuts_and_says_so(run: str) -> None:
    answer = run_cli("show", f"{run}/version_40", "--depth", "1")
    assert "small" in answer.out
    assert "bias" not in answer.out
    assert "--all" in answer.out
    assert run_cli("show", f"{run}/version_40", "--depth", "0").code == 2


def test_a_long_tree_is_cut_to_the_levels_that_fit(elsewhere: str) -> None:
    state = {f"block{i}": {str(j): np.zeros(1) for j in range(10)} for i in range(8)}
    snapshot = hf.save(elsewhere, state)
    assert fitting_depth(list(iter_tree_rows(snapshot))) == 1
    assert fitting_depth(list(iter_tree_rows(snapshot))[:30]) is None


def test_a_shard_of_another_length_is_told(tmp_path: Path) -> None:
    hf.save(tmp_path / "snap", {"a": np.zeros(10)})
    [shard] = (tmp_path / "snap").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "has the wrong length" in run_cli("show", tmp_path / "snap").out
    assert run_cli("show", tmp_path / "snap", "--json").json["intact"] is False


def test_nothing_in_a_snapshot_steers_the_terminal(elsewhere: str) -> None:
    state = {"\x1b[31mred\x1b]0;title\x07": 1, "[bold]x[nope]": "\x1b[2J", "line\nbreak": 2}
    hf.save(elsewhere, state, note={"\x1b[1m": "\x1b[5m"})
    answer = run_cli("show", elsewhere)
    assert "\x1b" not in answer.out
    assert "[bold]x[nope]" in answer.out


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_wraps_no_row(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    name = "layers.0.attention.a_very_long_name_of_a_projection.weight"
    hf.save(elsewhere, {"model": {name: torch.zeros(3, 4)}, "text": "long " * 50})
    terminal = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr("holdfast.cli.verbs.show.make_console", lambda: terminal)
    assert run_cli("show", elsewhere).code == 0
    lines = terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    assert sum("float32" in line for line in lines) == 1
    assert any("float32 [3, 4]" in line and line.rstrip().endswith("48 B") for line in lines)


def test_containers_tell_their_leaves(elsewhere: str) -> None:
    one = {"deep": [{"x": np.zeros(3), "n": 1, "more": [np.zeros(1), 2]}], "none": {}}
    hf.save(elsewhere, {"one": one, "two": [np.zeros(2)]})
    lines = [line.split(maxsplit=1) for line in run_cli("show", elsewhere).out.splitlines()]
    told = {words[0]: words[1] for words in lines if len(words) > 1}
    assert told["one"].startswith("dict, 4 leaves ")
    assert told["deep"].startswith("list, 4 leaves ")
    assert told["more"].startswith("list, 2 leaves ")
    assert told["two"].startswith("list, 1 leaf ")
    assert told["none"] == "dict, empty"


@pytest.mark.parametrize("verb", ["show", "ls", "verify", "diff", "copy", "sweep"])
def test_in_a_pipe_no_line_ends_with_blanks(run: str, elsewhere: str, verb: str) -> None:
    hf.save(f"{run}/version_80", {"text": "long " * 50, "n": 1, "x": np.zeros(3)})
    words = {
        "show": [f"{run}/version_80"],
        "diff": [f"{run}/version_80", f"{run}/version_60"],
        "copy": [run, elsewhere],
    }
    answer = run_cli(verb, *words.get(verb, [run]))
    assert answer.out.endswith("\n")
    assert [line for line in answer.out.splitlines() if line != line.rstrip()] == []


def test_all_patterns_print_whole_keys(run: str) -> None:
    """Where errors of load send people to see what the keys are."""
    shown = run_cli("show", f"{run}/version_20", "--keys", "**").out.splitlines()
    first = [line.split()[0] for line in shown if line]
    assert {"weights", "small/bias", "progress/step"} <= set(first)
