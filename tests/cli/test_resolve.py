"""``RUN@STEP`` wherever a snapshot is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as library
from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store
from tests.cli.invoke import run_cli, train_branch


@pytest.mark.parametrize(
    ("address", "version"),
    [
        ("20", "version_20"), ("60", "version_60.1"), ("60.0", "version_60"),
        ("latest", "version_60.1"),
    ],
)  # fmt: skip
def test_every_verb_takes_an_address(store: MemoryStore, address: str, version: str) -> None:
    train_branch(store, start=40, last_step=60)
    place, whole = f"{store.url}@{address}", f"{store.url}/{version}"
    assert run_cli("show", place, "--json").json == run_cli("show", whole, "--json").json
    assert run_cli("verify", place, "--json").json["place"] == whole
    assert run_cli("diff", place, whole).code == 0
    assert run_cli("copy", place, f"{store.url}-copies/{version}").code == 0
    assert run_cli("verify", f"{store.url}-copies/{version}").code == 0


def test_what_is_not_there_is_told(store: MemoryStore, elsewhere: str) -> None:
    for verb in ("show", "verify"):
        answer = run_cli(verb, f"{store.url}@30")
        assert answer.code == 4
        assert "no version of step 30" in answer.err
        assert "version_20, version_40" in answer.err
        answer = run_cli(verb, f"{elsewhere}@30")
        assert answer.code == 4
        assert f"There is no run at {elsewhere}" in answer.err
        assert run_cli(verb, f"{store.url}@20.7").code == 4
        assert run_cli(verb, f"{store.url}@last").code == 4
        answer = run_cli(verb, f"{store.url}/version_20@20")
        assert answer.code == 4
        assert "one snapshot, not a run" in answer.err


def test_a_path_that_exists_goes_first(tmp_path: Path) -> None:
    library.save(tmp_path / "a" / "version_5", {"n": 1})
    assert "version_5" in run_cli("show", tmp_path / "a@5").out
    library.save(tmp_path / "a@5", {"n": 2})
    assert run_cli("show", tmp_path / "a@5", "--json").json["snapshot"] == str(tmp_path / "a@5")
    library.save(tmp_path / "b" / "version_5", {"n": 1})
    library.save(tmp_path / "b@5" / "version_7", {"n": 1})  # a run of that name
    assert run_cli("show", tmp_path / "b@5").code == 4
    assert run_cli("verify", tmp_path / "b@5", "--json").json["place"] == str(tmp_path / "b@5")


def test_a_run_is_no_place_for_a_copy(run: str) -> None:
    before = keys(run)
    for to in (run, f"{run}/"):
        answer = run_cli("copy", f"{run}@40", to)
        assert answer.code == 8
        assert "is a run of 3 versions; nothing was changed. Name a version in it" in answer.err
    assert keys(run) == before


def test_what_is_a_run_and_a_snapshot_is_taken_as_a_run_and_said(
    store: MemoryStore, elsewhere: str
) -> None:
    url = store.url
    for verb in ("ls", "verify"):
        assert "its folder also contains a snapshot" not in run_cli(verb, url).out
        assert run_cli(verb, url, "--json").json["stray"] is False
    library.save(elsewhere, {"n": 1})  # the snapshot was there first
    for stat in list(store.list("")):
        open_store(elsewhere).put_if_absent(stat.key, store.get(stat.key, 1 << 20))
    for verb, said in (("ls", "3 versions"), ("verify", "3 versions intact")):
        answer = run_cli(verb, elsewhere)
        assert answer.code == 0
        assert said in answer.out
        assert f"{elsewhere} is a run, but its folder also contains a snapshot" in answer.out
        assert run_cli(verb, elsewhere, "--json").json["stray"] is True
    answer = run_cli("copy", elsewhere, f"{elsewhere}-copy")
    assert "3 snapshots copied" in answer.out
    assert "its folder also contains a snapshot" in answer.out
    assert keys(f"{elsewhere}-copy") == keys(url)
    assert run_cli("show", elsewhere, "--json").json["snapshot"] == elsewhere


def keys(url: str) -> list[str]:
    return [s.key for s in open_store(url).list("")]
