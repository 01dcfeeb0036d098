"""Every command that takes a snapshot accepts ``RUN@STEP``."""

import pytest

import limpet as hf
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli


@pytest.mark.parametrize("is_local", [True, False])
def test_an_existing_path_takes_precedence(is_local, tmp_path, store):
    root = str(tmp_path) if is_local else store.url
    hf.save(f"{root}/a/version_5", {"n": 1})
    assert "version_5" in run_cli("show", f"{root}/a@5").out
    hf.save(f"{root}/a@5", {"n": 2})
    assert run_cli("show", f"{root}/a@5", "--json").json["snapshot"] == f"{root}/a@5"
    hf.save(f"{root}/b/version_5", {"n": 1})
    hf.save(f"{root}/b@5/version_7", {"n": 1})  # a run with that name
    assert run_cli("show", f"{root}/b@5", "--json").json["snapshot"] == f"{root}/b@5/version_7"
    assert run_cli("verify", f"{root}/b@5", "--json").json["place"] == f"{root}/b@5"


def test_a_snapshot_cannot_be_copied_to_a_run(run):
    before = keys(run)
    for to in (run, f"{run}/"):
        result = run_cli("copy", f"{run}@40", to)
        assert result.code == 8
        assert "is a run of 3 versions; nothing was changed. Name a version in it" in result.err
    assert keys(run) == before


def test_a_folder_that_is_both_a_run_and_a_snapshot(store, empty_url):
    """Commands for a run or a snapshot take it as a run."""
    hf.save(empty_url, {"n": 1})  # the snapshot existed first
    for stat in list(store.list("")):
        open_store(empty_url).put_if_absent(stat.key, store.get(stat.key, 1 << 20))
    for verb, message in (("ls", "3 versions"), ("verify", "3 versions intact")):
        result = run_cli(verb, empty_url)
        assert result.code == 0
        assert message in result.out
    assert "3 snapshots copied" in run_cli("copy", empty_url, f"{empty_url}-copy").out
    assert keys(f"{empty_url}-copy") == keys(store.url)
    assert run_cli("show", empty_url, "--json").json["snapshot"] == empty_url


def keys(url):
    return [s.key for s in open_store(url).list("")]


@pytest.mark.parametrize("arguments", [("show", "@latest"), ("show", "@3"), ("pin", "", "3")])
def test_the_requests_for_one_version_do_not_grow_with_the_run(arguments, empty_url, monkeypatch):
    counts: list[int] = []
    original = MemoryStore.stat

    def stat(self, key):
        counts[-1] += 1
        return original(self, key)

    monkeypatch.setattr(MemoryStore, "stat", stat)
    verb, address, *rest = arguments
    for versions in (5, 20):
        counts.append(0)
        for step in range(1, versions + 1):
            hf.save(f"{empty_url}/{versions}/version_{step}", {"n": step}, step=step)
        counts[-1] = 0
        assert run_cli(verb, f"{empty_url}/{versions}{address}", *rest).code == 0
    assert counts[0] == counts[1]
