"""``holdfast reshard``."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.numpy

import holdfast as hf
from holdfast.format.names import MANIFEST
from holdfast.run.policy import EverySteps
from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import flip_bit, initial_state, shard_of, state_after, states_equal


def keys(url: str) -> list[str]:
    return [s.key for s in open_store(url).list("")]


@pytest.mark.parametrize("split", ["even", "none"])
def test_a_snapshot_to_a_place_of_its_own(run: str, elsewhere: str, split: str) -> None:
    words = ("reshard", f"{run}/version_40", f"{elsewhere}/four", "--shards", 4, "--split", split)
    answer = run_cli(*words)
    assert answer.code == 0
    assert "1 shard before, 4 now" in answer.out
    assert run_cli("verify", f"{elsewhere}/four").code == 0
    assert run_cli("diff", f"{run}/version_40", f"{elsewhere}/four").code == 0
    assert len([k for k in keys(elsewhere) if k.endswith(".safetensors")]) == 4


def test_one_shard_in_a_folder_is_a_file_for_others(run: str, tmp_path: Path) -> None:
    assert run_cli("reshard", f"{run}@latest", tmp_path / "x", "--shards", 1).code == 0
    [file] = (tmp_path / "x").glob("*.safetensors")
    loaded = safetensors.numpy.load_file(file)
    assert loaded["weights"].tobytes() == state_after(60)["weights"].tobytes()


def test_json_keys_are_stable(run: str, elsewhere: str) -> None:
    to = f"{elsewhere}/version_40"
    told = run_cli("reshard", f"{run}@40", to, "--shards", 2, "--json").json
    assert list(told) == [
        "from", "to", "step", "split", "shards", "shards_before", "leaves", "bytes", "seconds",
    ]  # fmt: skip
    assert (told["from"], told["to"]) == (f"{run}/version_40", to)
    assert (told["step"], told["shards"], told["shards_before"]) == (40, 2, 1)


def test_into_a_run_it_becomes_its_version_and_training_goes_on_from_it(
    store: MemoryStore, elsewhere: str
) -> None:
    run_cli("reshard", f"{store.url}@20", f"{elsewhere}/version_20", "--shards", 2)
    answer = run_cli("reshard", f"{store.url}@60", elsewhere, "--shards", 3, "--json")
    assert answer.json["to"] == f"{elsewhere}/version_60"
    assert [v["step"] for v in run_cli("ls", elsewhere, "--json").json["versions"]] == [20, 60]
    state = initial_state()
    with hf.Checkpointer(elsewhere, state, save=EverySteps(100)) as ckpt:
        resumed = ckpt.resume()
    assert resumed is not None
    assert resumed.step == 60
    assert states_equal(state, state_after(60))


def test_a_version_of_a_branch_keeps_it(store: MemoryStore, elsewhere: str) -> None:
    train_branch(store, start=40, last_step=80)
    run_cli("reshard", f"{store.url}@20", f"{elsewhere}/version_20", "--shards", 2)
    assert run_cli("reshard", f"{store.url}@80.1", elsewhere, "--shards", 2).code == 0
    assert f"version_80.1/{MANIFEST}" in keys(elsewhere)


def test_nothing_is_overwritten(run: str, elsewhere: str) -> None:
    hf.save(f"{elsewhere}/lone", {"n": 1})
    before = keys(run), keys(elsewhere)
    for to in (f"{elsewhere}/lone", run, f"{run}/version_40", f"{elsewhere}/version_50"):
        answer = run_cli("reshard", f"{run}/version_40", to, "--shards", 2)
        assert answer.code == 8, to
    assert (keys(run), keys(elsewhere)) == before


def test_a_snapshot_without_a_step_becomes_no_version(run: str, elsewhere: str) -> None:
    hf.save(f"{elsewhere}/lone", {"n": 1})
    answer = run_cli("reshard", f"{elsewhere}/lone", run, "--shards", 2)
    assert answer.code == 8
    assert "is a run of 3 versions" in answer.err


def test_damage_is_told_and_no_folder_stays(store: MemoryStore, tmp_path: Path) -> None:
    flip_bit(store, shard_of(store, "version_40"))
    answer = run_cli("reshard", f"{store.url}@40", tmp_path / "new" / "version_40", "--shards", 2)
    assert answer.code == 3
    assert "weights" in answer.err or "bias" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shards", 0), "0 is not in the range"),
        (("--shards", "few"), "'few' is not a valid integer"),
        (("--shards", 2, "--split", "rows"), "'rows' is not one of"),
        ((), "Missing option '--shards'"),
    ],
)
def test_words_that_do_not_fit(
    run: str, elsewhere: str, words: tuple[object, ...], said: str
) -> None:
    answer = run_cli("reshard", f"{run}@40", f"{elsewhere}/x", *words)
    assert answer.code == 2
    assert said in answer.err
    assert keys(elsewhere) == []


def test_what_is_no_snapshot(run: str, elsewhere: str) -> None:
    assert run_cli("reshard", run, f"{elsewhere}/x", "--shards", 2).code == 4
    assert run_cli("reshard", f"{elsewhere}/none", f"{elsewhere}/x", "--shards", 2).code == 4
