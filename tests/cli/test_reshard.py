"""``limpet reshard``."""

from pathlib import Path

import pytest

import limpet as hf
from limpet.format.names import MANIFEST
from limpet.run.policy import EverySteps
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import flip_bit, initial_state, shard_of, state_after, states_equal


def keys(url):
    return [s.key for s in open_store(url).list("")]


@pytest.mark.parametrize("split", ["even", "none"])
def test_a_snapshot_is_resharded_to_a_new_location(run, empty_url, split):
    arguments = (
        "reshard", f"{run}/version_40", f"{empty_url}/four", "--shards", 4, "--split", split,
    )  # fmt: skip
    result = run_cli(*arguments)
    assert result.code == 0
    assert "1 shard before, 4 now" in result.out
    assert run_cli("verify", f"{empty_url}/four").code == 0
    assert run_cli("diff", f"{run}/version_40", f"{empty_url}/four").code == 0
    assert len([k for k in keys(empty_url) if k.endswith(".safetensors")]) == 4


def test_json_keys_are_stable(run, empty_url):
    to = f"{empty_url}/version_40"
    report = run_cli("reshard", f"{run}@40", to, "--shards", 2, "--json").json
    assert list(report) == [
        "from", "to", "step", "split", "shards", "shards_before", "leaves", "bytes", "seconds",
    ]  # fmt: skip
    assert (report["from"], report["to"]) == (f"{run}/version_40", to)
    assert (report["step"], report["shards"], report["shards_before"]) == (40, 2, 1)


def test_the_result_in_a_run_is_a_version_that_can_be_resumed(store, empty_url):
    run_cli("reshard", f"{store.url}@20", f"{empty_url}/version_20", "--shards", 2)
    result = run_cli("reshard", f"{store.url}@60", empty_url, "--shards", 3, "--json")
    assert result.json["to"] == f"{empty_url}/version_60"
    assert [v["step"] for v in run_cli("ls", empty_url, "--json").json["versions"]] == [20, 60]
    state = initial_state()
    with hf.Checkpointer(empty_url, state, save=EverySteps(100)) as ckpt:
        resumed = ckpt.resume()
    assert resumed.step == 60
    assert states_equal(state, state_after(60))


def test_the_branch_is_kept(store, empty_url):
    train_branch(store, start=40, last_step=80)
    run_cli("reshard", f"{store.url}@20", f"{empty_url}/version_20", "--shards", 2)
    assert run_cli("reshard", f"{store.url}@80.1", empty_url, "--shards", 2).code == 0
    assert f"version_80.1/{MANIFEST}" in keys(empty_url)


def test_nothing_is_overwritten(run, empty_url):
    hf.save(f"{empty_url}/lone", {"n": 1})
    before = keys(run), keys(empty_url)
    for to in (f"{empty_url}/lone", run, f"{run}/version_40", f"{empty_url}/version_50"):
        assert run_cli("reshard", f"{run}/version_40", to, "--shards", 2).code == 8, to
    assert (keys(run), keys(empty_url)) == before


def test_a_snapshot_without_a_step_cannot_become_a_version(run, empty_url):
    hf.save(f"{empty_url}/lone", {"n": 1})
    result = run_cli("reshard", f"{empty_url}/lone", run, "--shards", 2)
    assert result.code == 8
    assert "is a run of 3 versions" in result.err


def test_damage_is_reported_and_leaves_no_files(store, tmp_path):
    flip_bit(store, shard_of(store, "version_40"))
    result = run_cli("reshard", f"{store.url}@40", tmp_path / "new" / "version_40", "--shards", 2)
    assert result.code == 3
    assert "weights" in result.err or "bias" in result.err
    assert [*filter(Path.is_file, tmp_path.rglob("*"))] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shards", 0), "0 is not in the range"),
        (("--shards", "few"), "'few' is not a valid integer"),
        (("--shards", 2, "--split", "rows"), "'rows' is not one of"),
        ((), "Missing option '--shards'"),
    ],
)
def test_invalid_arguments(run, empty_url, arguments, message):
    result = run_cli("reshard", f"{run}@40", f"{empty_url}/x", *arguments)
    assert result.code == 2
    assert message in result.err
    assert keys(empty_url) == []


def test_a_location_without_a_snapshot(run, empty_url):
    assert run_cli("reshard", run, f"{empty_url}/x", "--shards", 2).code == 4
    assert run_cli("reshard", f"{empty_url}/none", f"{empty_url}/x", "--shards", 2).code == 4
