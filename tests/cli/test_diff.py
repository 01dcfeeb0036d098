"""``holdfast diff``."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.storage.memory import MemoryStore
from tests.cli.invoke import CommandResult, run_cli
from tests.trainings import flip_bit, shard_of


def compare(place: str, a: dict[str, Any], b: dict[str, Any], *words: str) -> CommandResult:
    hf.save(f"{place}/a", a)
    hf.save(f"{place}/b", b)
    return run_cli("diff", f"{place}/a", f"{place}/b", *words)


def test_equal_states_are_the_same_and_not_read(elsewhere: str) -> None:
    state = {"x": torch.arange(70000.0), "y": np.ones(3), "n": 1, "l": [1, 2]}
    answer = compare(elsewhere, state, state, "--json")
    assert answer.code == 0
    assert answer.json["same"] is True
    assert answer.json["bytes_read"] == 0
    assert answer.json["equal"] == 4
    assert "Identical" in run_cli("diff", f"{elsewhere}/a", f"{elsewhere}/b").out


def test_small_leaves_that_share_a_chunk_with_a_change_are_read_and_equal(elsewhere: str) -> None:
    a = {"x": np.arange(5.0), "y": np.arange(3.0)}
    b = {"x": np.arange(5.0), "y": np.array([0.0, 1.0, 2.5])}
    told = compare(elsewhere, a, b, "--json").json
    assert [c["key"] for c in told["changed"]] == ["y"]
    assert told["equal"] == 1
    assert told["bytes_read"] == 64


def test_json_keys_are_stable(run: str) -> None:
    answer = run_cli("diff", f"{run}/version_20", f"{run}/version_40", "--json")
    assert answer.code == 7
    told = answer.json
    assert list(told) == ["a", "b", "same", "only_a", "only_b", "changed", "equal", "bytes_read"]
    assert told["a"]["step"] == 20
    weights = next(c for c in told["changed"] if c["key"] == "weights")
    assert list(weights) == ["key", "what", "a", "b", "elements", "differing", "largest"]
    assert (weights["what"], weights["elements"], weights["differing"]) == ("bytes", 1000, 1000)
    assert weights["largest"] > 0
    step = next(c for c in told["changed"] if c["key"] == "progress/step")
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
def test_what_differs_beside_the_bytes(elsewhere: str, a: Any, b: Any, expected: Any) -> None:
    answer = compare(elsewhere, a, b, "--json")
    changes = [(c["key"], c["what"]) for c in answer.json["changed"]]
    assert changes == expected
    assert answer.code == (7 if changes else 0)
    assert run_cli("diff", f"{elsewhere}/a", f"{elsewhere}/b").code == answer.code


def test_members_of_one_side_only_are_named_once(elsewhere: str) -> None:
    a = {"both": 1, "gone": {"x": torch.zeros(2), "y": 1}}
    b = {"both": 1, "new": {"z": torch.zeros(2)}}
    told = compare(elsewhere, a, b, "--json").json
    assert told["only_a"] == ["gone"]
    assert told["only_b"] == ["new"]
    out = run_cli("diff", f"{elsewhere}/a", f"{elsewhere}/b").out
    assert "only in A  gone" in out
    assert "only in B  new" in out


def test_tied_tensors_are_compared_with_what_stands_there(elsewhere: str) -> None:
    one = torch.zeros(3)
    a = {"x": one, "y": one}
    b = {"x": torch.zeros(3), "y": torch.ones(3)}
    told = compare(elsewhere, a, b, "--json").json
    assert len(told["changed"]) == 1
    assert told["changed"][0]["differing"] == 3
    assert told["equal"] == 1


def test_keys_limit_the_comparison(run: str) -> None:
    words = ("diff", f"{run}/version_20", f"{run}/version_40", "--json", "--keys")
    assert [c["key"] for c in run_cli(*words, "small/**").json["changed"]] == ["small/bias"]


def test_damage_is_not_a_difference(store: MemoryStore) -> None:
    flip_bit(store, shard_of(store, "version_40"))
    answer = run_cli("diff", f"{store.url}/version_20", f"{store.url}/version_40")
    assert answer.code == 3
    assert "damaged" in answer.err


def test_counts_have_their_plural(elsewhere: str, run: str) -> None:
    compare(elsewhere, {"x": 1}, {"x": 1})
    assert "Identical: 1 leaf or value\n" in run_cli("diff", f"{elsewhere}/a", f"{elsewhere}/b").out
    out = run_cli("diff", f"{run}/version_20", f"{run}/version_20").out
    assert re.search(r"Identical: [0-9]+ leaves and values\n", out)
