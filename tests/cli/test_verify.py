"""``limpet verify``."""

import pytest

from limpet.errors import Denied
from limpet.format.names import MANIFEST, Version
from limpet.run.catalog import Catalog
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import flip_bit, shard_of


def test_an_intact_run(run):
    result = run_cli("verify", run)
    assert result.code == 0
    assert result.out.count("ok") == 3
    assert "3 versions intact" in result.out


def test_json_keys_are_stable(store):
    shard = shard_of(store, "version_40")
    flip_bit(store, shard)
    result = run_cli("verify", store.url, "--json")
    assert result.code == 3
    report = result.json
    assert list(report) == ["place", "ok", "bytes", "seconds", "versions"]
    assert [v["ok"] for v in report["versions"]] == [True, False, True]
    assert list(report["versions"][1]) == [
        "version", "url", "ok", "bytes", "problems",
    ]  # fmt: skip
    [problem] = report["versions"][1]["problems"]
    assert list(problem) == ["file", "offset", "leaves", "kind", "message", "fields"]
    assert problem["file"] == shard
    assert problem["kind"] == "DigestMismatch"
    assert problem["offset"] > 0
    assert problem["leaves"]


@pytest.mark.parametrize("place", ["", "/version_40"])
def test_damage_is_reported_with_file_offset_and_leaf(store, place):
    flip_bit(store, shard_of(store, "version_40"))
    result = run_cli("verify", store.url + place)
    assert result.code == 3
    for part in (shard_of(store, "version_40"), "byte ", "weights", "1 problem"):
        assert part in result.out


def test_a_damaged_record_is_no_version(store):
    """It is counted as a problem, not as one of the versions."""
    store.put_if_absent("version_40/eval-x.0123456789ab.best.json", b'{"limpet":1,"junk":true}')
    result = run_cli("verify", store.url)
    assert result.code == 3
    count = f"{len(Run(store).snapshots())} versions and 1 record"
    assert f"problems in 1 of {count}" in result.out
    flip_bit(store, shard_of(store, "version_20"))
    assert f"problems in 2 of {count}" in run_cli("verify", store.url).out


def test_a_damaged_manifest_is_reported(store):
    flip_bit(store, f"version_40/{MANIFEST}")
    result = run_cli("verify", store.url)
    assert result.code == 3
    assert f"version_40/{MANIFEST}" in result.out
    assert run_cli("verify", f"{store.url}/version_40").code == 3


def test_evaluations_and_lasting_pins_are_verified(store):
    """A damaged evaluation no longer counts, so another version could become the best."""
    run = Run(store)
    run.add_metrics(Version(20), {"loss": 0.1})
    run.pin(40)
    assert run_cli("verify", store.url).code == 0
    [evaluation] = [s.key for s in store.list("version_20") if "/eval-" in s.key]
    for key in (evaluation, "pin-version_40.json"):
        flip_bit(store, key)
    result = run_cli("verify", store.url, "--json")
    assert result.code == 3
    damaged = [v for v in result.json["versions"] if not v["ok"]]
    assert sorted(v["version"] for v in damaged) == ["pin-version_40.json", evaluation]
    assert all(p["file"] == v["version"] for v in damaged for p in v["problems"])
    assert evaluation in run_cli("verify", store.url).out


def test_abandoned_versions_and_branch_records_are_verified(store):
    train_branch(store, start=40, last_step=60)
    flip_bit(store, shard_of(store, "version_60"))
    flip_bit(store, "branch-1.json")
    report = run_cli("verify", store.url, "--json").json
    assert [v["version"] for v in report["versions"] if not v["ok"]] == [
        "version_60",
        "branch-1.json",
    ]


def test_a_concurrently_deleted_version_is_not_damaged(store, monkeypatch):
    real = SnapshotReader.verify

    def deleted(snapshot, *rest):
        for stat in list(store.list("version_20")):
            store.delete(stat.key)
        return real(snapshot, *rest)

    monkeypatch.setattr(SnapshotReader, "verify", deleted)
    result = run_cli("verify", store.url, "--json")
    assert result.code == 0
    assert [v["version"] for v in result.json["versions"]] == ["version_40", "version_60"]


def test_an_unreadable_version_is_not_called_damaged(store, monkeypatch):
    def fail(self, version):
        raise Denied("Cannot read it")

    monkeypatch.setattr(Catalog, "open", fail)
    result = run_cli("verify", store.url)
    assert result.code == 5
    assert "problems in 3 of 3 versions" in result.out
    assert "damaged" not in result.out


def test_a_location_without_versions_is_not_found(empty_url):
    assert run_cli("verify", empty_url).code == 4
