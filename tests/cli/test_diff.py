"""``limpet diff``."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import limpet as hf
from tests.cli.invoke import run_cli
from tests.trainings import flip_bit, shard_of


def compare(folder, a, b, *arguments):
    hf.save(f"{folder}/a", a)
    hf.save(f"{folder}/b", b)
    return run_cli("diff", f"{folder}/a", f"{folder}/b", *arguments)


def test_equal_states_are_identical_without_reading_them(empty_url):
    state = {"x": torch.arange(70000.0), "y": np.ones(3), "n": 1, "l": [1, 2]}
    result = compare(empty_url, state, state, "--json")
    assert result.code == 0
    assert result.json["same"] is True
    assert result.json["bytes_read"] == 0
    assert result.json["equal"] == 4
    assert "Identical" in run_cli("diff", f"{empty_url}/a", f"{empty_url}/b").out


def test_unchanged_leaves_that_share_a_chunk_with_a_change_are_equal(empty_url):
    a = {"x": np.arange(5.0), "y": np.arange(3.0)}
    b = {"x": np.arange(5.0), "y": np.array([0.0, 1.0, 2.5])}
    report = compare(empty_url, a, b, "--json").json
    assert [c["key"] for c in report["changed"]] == ["y"]
    assert report["equal"] == 1
    assert report["bytes_read"] == 64


def test_json_keys_are_stable(run):
    result = run_cli("diff", f"{run}/version_20", f"{run}/version_40", "--json")
    assert result.code == 7
    report = result.json
    assert list(report) == [
        "a", "b", "same", "only_a", "only_b", "changed", "equal", "bytes_read", "config",
    ]  # fmt: skip
    assert report["a"]["step"] == 20
    weights = next(c for c in report["changed"] if c["key"] == "weights")
    names = ["key", "what", "a", "b", "elements", "differing", "largest", "differing_slots"]
    assert list(weights) == names
    assert (weights["what"], weights["elements"], weights["differing"]) == ("bytes", 1000, 1000)
    assert weights["largest"] > 0
    step = next(c for c in report["changed"] if c["key"] == "progress/step")
    assert (step["what"], step["a"], step["b"]) == ("value", 20, 40)


SPARSE = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], check_invariants=False)

CASES: list[tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = [
    ({"x": torch.zeros(2)}, {"x": torch.zeros(3)}, [("x", "shape")]),
    ({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.float64)}, [("x", "dtype")]),
    ({"x": torch.zeros(2)}, {"x": 1}, [("x", "kind")]),
    ({"x": torch.zeros(2)}, {"x": np.zeros(2, np.float32)}, [("x", "kind")]),
    ({"x": np.zeros(2, ">u2")}, {"x": np.zeros(2, ">i2")}, [("x", "kind")]),
    ({"x": b"a" * 5000}, {"x": bytearray(b"a" * 5000)}, [("x", "kind")]),
    ({"x": 1}, {"x": 1.0}, [("x", "value")]),
    ({"x": 1}, {"x": True}, [("x", "value")]),
    ({"x": [1]}, {"x": (1,)}, [("x", "value")]),
    ({"x": {}}, {"x": OrderedDict()}, [("x", "kind")]),
    ({"x": {1: 2}}, {"x": {"1": 2}}, [("x/1", "name")]),
    ({"x": 0.0}, {"x": -0.0}, [("x", "value")]),
    ({"x": SPARSE}, {"x": SPARSE.coalesce()}, [("x", "kind")]),
    ({"x": torch.zeros(0, 2)}, {"x": torch.zeros(0, 2)}, []),
]


@pytest.mark.parametrize(("a", "b", "expected"), CASES)
def test_differences_other_than_bytes(empty_url, a, b, expected):
    result = compare(empty_url, a, b, "--json")
    changes = [(c["key"], c["what"]) for c in result.json["changed"]]
    assert changes == expected
    assert result.code == (7 if changes else 0)
    assert run_cli("diff", f"{empty_url}/a", f"{empty_url}/b").code == result.code


def test_members_on_one_side_only_are_reported_once(empty_url):
    a = {"both": 1, "gone": {"x": torch.zeros(2), "y": 1}}
    b = {"both": 1, "new": {"z": torch.zeros(2)}}
    report = compare(empty_url, a, b, "--json").json
    assert report["only_a"] == ["gone"]
    assert report["only_b"] == ["new"]
    out = run_cli("diff", f"{empty_url}/a", f"{empty_url}/b").out
    assert "only in A  gone" in out
    assert "only in B  new" in out


def test_tied_tensors_are_compared_with_untied_ones(empty_url):
    one = torch.zeros(3)
    a = {"x": one, "y": one}
    b = {"x": torch.zeros(3), "y": torch.ones(3)}
    report = compare(empty_url, a, b, "--json").json
    assert len(report["changed"]) == 1
    assert report["changed"][0]["differing"] == 3
    assert report["equal"] == 1


def test_keys_limit_the_comparison(run):
    arguments = ("diff", f"{run}/version_20", f"{run}/version_40", "--json", "--keys")
    assert [c["key"] for c in run_cli(*arguments, "small/**").json["changed"]] == ["small/bias"]


def test_damage_is_not_a_difference(store):
    flip_bit(store, shard_of(store, "version_40"))
    result = run_cli("diff", f"{store.url}/version_20", f"{store.url}/version_40")
    assert result.code == 3
    assert "damaged" in result.err


@pytest.mark.parametrize("damage", ["missing", "known"])
@pytest.mark.parametrize("damaged", ["a", "b"])
def test_equal_digests_do_not_hide_damage(damaged, damage, tmp_path):
    for run in ("a", "b"):
        hf.save(tmp_path / run / "version_1", {"x": np.arange(9.0)}, step=1)
    store = hf.open_store(tmp_path / damaged)
    if damage == "missing":
        store.delete(shard_of(store, "version_1"))
    else:
        flip_bit(store, shard_of(store, "version_1"))
        assert run_cli("verify", tmp_path / damaged).code == 3
    result = run_cli("diff", tmp_path / "a/version_1", f"{tmp_path}/b@1")
    assert (result.code, result.out) == (3, "")
    assert f"{damaged}/version_1" in result.err


def save_with(url, config, x=1):
    with hf.Checkpointer(url, {"x": x}, config=config) as ckpt:
        ckpt.step()
    return f"{url}@1"


def test_configs_are_compared_and_are_no_part_of_the_state(empty_url):
    a = save_with(f"{empty_url}/a", {"lr": 0.1, "o": {"b": (1, 2), "same": 1}, "old": None})
    b = save_with(f"{empty_url}/b", {"lr": 0.2, "o": {"b": (1, 3), "same": 1}, "new": "n"})
    report = run_cli("diff", a, b, "--json")
    assert (report.code, report.json["same"]) == (0, True)
    assert report.json["config"] == [
        {"name": "lr", "a": 0.1, "b": 0.2},
        {"name": "o.b", "a": [1, 2], "b": [1, 3]},
        {"name": "old", "a": None},
        {"name": "new", "b": "n"},
    ]
    result = run_cli("diff", a, b)
    assert result.code == 0
    assert [line for line in result.out.splitlines() if line.startswith("config")] == [
        "config  lr 0.1 -> 0.2",
        "config  o.b (1, 2) -> (1, 3)",
        "config  old None (removed)",
        "config  new 'n' (new)",
    ]
    assert "Identical" in result.out
    c = save_with(f"{empty_url}/c", None, x=2)
    assert run_cli("diff", a, c).code == 7
    found = run_cli("diff", c, a, "--json").json
    assert [change["name"] for change in found["config"]] == ["lr", "o.b", "o.same", "old"]
    assert run_cli("diff", a, a, "--json").json["config"] == []
