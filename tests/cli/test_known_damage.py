"""What ``limpet verify`` has found is recorded: a version with wrong bytes does not count."""

import numpy as np
import pytest

import limpet
from limpet.errors import DigestMismatch, NoSnapshot, SkippedVersion
from limpet.format.records import Verified, decode_about_version, encode_record
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import delete_version, flip_bit, shard_of, train, training


def records_of(store, folder="version_60"):
    """Return the results of verifications, oldest first."""
    keys = [s.key for s in store.list(folder) if s.key.endswith(".verified.json")]
    records = [decode_about_version(store.get(k, 1 << 20), k, "verified") for k in keys]
    return sorted(records, key=lambda record: record.created)


def listed(store, step=60):
    [version] = [
        v for v in run_cli("ls", store.url, "--json").json["versions"] if v["step"] == step
    ]
    return version


def damage(store, folder="version_60"):
    flip_bit(store, shard_of(store, folder))


def test_a_version_with_wrong_bytes_does_not_count_after_a_verify(store):
    damage(store)
    assert listed(store)["intact"]
    assert run_cli("verify", store.url).code == 3
    assert not listed(store)["intact"]
    assert listed(store)["problem"]["kind"] == "DigestMismatch"
    assert "limpet verify" in listed(store)["problem"]["message"]
    text = run_cli("ls", store.url).out
    assert "damaged" in text
    assert "version_60: `limpet verify` found wrong bytes in version_60.\n" in text
    assert "`limpet verify` found wrong bytes" in run_cli("show", f"{store.url}@60").out
    shown = run_cli("show", f"{store.url}/version_60", "--json").json
    assert (shown["intact"], shown["problem"]["kind"]) == (False, "DigestMismatch")
    run = Run(store)
    assert run.latest().step == 40
    assert [r.version.step for r in run.records()] == [20, 40]
    assert limpet.open(f"{store.url}@latest").step == 40
    run.add_metrics(60, {"val": 1.0})
    assert run.best("val", "min") is None
    [record] = records_of(store)
    assert shard_of(store, "version_60") in record.damage


def test_a_policy_keeps_no_damaged_version_instead_of_an_intact_one(store):
    for step, value in ((20, 2.0), (40, 1.0), (60, 3.0)):
        Run(store).add_metrics(step, {"val": value})
    damage(store, "version_40")
    run_cli("verify", store.url)
    run = Run(store)
    assert run.retain(limpet.KeepBest(1, "val")) == []
    assert run.best("val", "min").step == 20
    assert {v["step"] for v in run_cli("ls", store.url, "--json").json["versions"]} == {20, 40, 60}


@pytest.mark.parametrize(
    "keep",
    [
        limpet.KeepLast(1),
        limpet.KeepSteps([20]),
        limpet.KeepLast(1) | limpet.KeepSteps([99]),
        limpet.KeepLast(1) | limpet.KeepBest(1, "val"),
    ],
    ids=str,
)
def test_no_policy_deletes_the_newest_version_without_known_damage(store, keep):
    damage(store)
    run_cli("verify", store.url)
    run = Run(store)
    run.retain(keep)
    assert run.latest().step == 40
    assert run.latest().verify().ok
    assert 60 in [v["step"] for v in run_cli("ls", store.url, "--json").json["versions"]]


def test_a_result_that_cannot_be_recorded_is_still_shown(store):
    damage(store)
    about = "version_60", reader_of(limpet.open(f"{store.url}@60")).digest
    last = Verified("verify", "0" * 12, *about, "9999-12-31T23:59:59.999999+00:00", "")
    store.put_if_absent(f"version_60/{last.file_name}", encode_record(last))
    result = run_cli("verify", store.url)
    assert (result.code, "damaged" in result.out) == (3, True)
    assert "not recorded in the run: No record can be newer" in result.err


def test_the_newest_version_without_known_damage_cannot_be_deleted(store):
    damage(store)
    run_cli("verify", store.url)
    with pytest.raises(limpet.errors.LimpetError, match="the newest intact version"):
        Run(store).delete(40)


def test_a_folder_of_runs_counts_it():
    store = open_store("memory://known/runs/a")
    with training(store, EverySteps(20)) as (state, ckpt):
        train(state, ckpt, 40)
    damage(store, "version_40")
    run_cli("verify", f"{store.url}@40")
    [run] = run_cli("ls", "memory://known/runs", "--json").json["runs"]
    assert (run["latest"], run["damaged"]) == ("version_20", 1)
    assert run["problem"]["kind"] == "DigestMismatch"


@pytest.mark.parametrize("address", ["", "@60", "/version_60"])
def test_every_change_is_recorded_once(store, address):
    for is_damaged in (False, True, True, False, False, True):
        damaged_before = bool(len(records_of(store)) % 2)
        if is_damaged != damaged_before:
            damage(store)
        assert run_cli("verify", store.url + address).code == 3 * is_damaged
        assert listed(store)["intact"] is not is_damaged
    assert [bool(r.damage) for r in records_of(store)] == [True, False, True]


def test_a_verify_of_intact_versions_writes_nothing(store):
    before = [s.key for s in store.list("")]
    assert run_cli("verify", store.url).code == 0
    assert [s.key for s in store.list("")] == before


def test_missing_bytes_are_not_recorded_since_they_are_always_seen(store):
    store.delete(shard_of(store, "version_60"))
    assert run_cli("verify", store.url).code == 3
    assert records_of(store) == []


def test_wrong_bytes_are_recorded_until_all_are_right(store):
    damage(store)
    run_cli("verify", store.url)
    shard = shard_of(store, "version_60")
    raw = store.get(shard, 1 << 20)
    store.delete(shard)
    assert run_cli("verify", store.url).code == 3
    assert len(records_of(store)) == 1
    store.put_if_absent(shard, raw)
    assert not listed(store)["intact"]


def test_a_store_that_is_read_only(store, monkeypatch):
    damage(store)

    def deny(self, key, data):
        raise limpet.errors.Denied("The store is read-only", key=key)

    monkeypatch.setattr(MemoryStore, "put_if_absent", deny)
    for address in ("", "@60"):
        result = run_cli("verify", store.url + address, "--json")
        assert result.code == 3
        assert not result.json["ok"]
        assert "not recorded" in result.err
        assert "read-only" in result.err


def test_a_resume_reads_the_bytes_and_not_the_record(store):
    damage(store)
    run_cli("verify", store.url)
    with training(store, EverySteps(20)) as (state, ckpt):
        with pytest.warns(limpet.errors.SkippedVersion):
            ckpt.resume()
        assert state["progress"].step == 40
    damage(store)  # repaired
    assert Run(store).latest().step == 40
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at="60")
        assert state["progress"].step == 60


def test_what_a_resume_skipped_is_damaged_until_a_verify_finds_it_intact(store):
    """The branch record says so, before and without any verify."""
    damage(store, "version_40")
    damage(store)
    with pytest.warns(SkippedVersion), training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 40)
    found = {v["version"]: v for v in run_cli("ls", store.url, "--json").json["versions"]}
    assert [v for v in found if not found[v]["intact"]] == ["version_40", "version_60"]
    assert "A resume skipped version_60 as damaged" in found["version_60"]["problem"]["message"]
    assert found["version_40.1"]["latest"]
    assert run_cli("verify", store.url).code == 3
    damage(store)  # a second flip of the bit repairs it
    assert run_cli("verify", f"{store.url}/version_60").code == 0
    assert listed(store, 60)["intact"]
    assert "abandoned" in run_cli("ls", store.url).out


def test_a_version_that_a_user_left_behind_is_not_damaged(store):
    train_branch(store, start=20, last_step=40)
    assert all(v["intact"] for v in run_cli("ls", store.url, "--json").json["versions"])


def test_a_version_saved_again_is_another_one(store):
    damage(store)
    run_cli("verify", store.url)
    records = {s.key: store.get(s.key, 1 << 20) for s in store.list("version_60")}
    delete_version(store, 60)
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 60)
    for key, raw in records.items():
        if key.endswith(".verified.json"):
            store.put_if_absent(key, raw)
    assert Run(store).latest().step == 60
    assert listed(store)["intact"]


def test_a_copy_does_not_inherit_the_record(store, empty_url):
    run_cli("copy", store.url, empty_url)
    damage(store)
    run_cli("verify", store.url)
    assert run_cli("copy", store.url, empty_url).code in (0, 3)
    assert records_of(open_store(empty_url)) == []
    assert Run(empty_url).latest().step == 60


def test_damage_of_a_base_is_recorded_for_each_version_that_refers_to_it():
    store = open_store("memory://known-bases")
    with Run(store).writer(incremental=True) as writer:
        rows = {"x": make_rows()}
        writer.save(rows, step=1)
        writer.save(rows, step=2)
    damage(store, "version_1")
    assert run_cli("verify", store.url).code == 3
    assert [len(records_of(store, f"version_{n}")) for n in (1, 2)] == [1, 1]
    with pytest.raises(NoSnapshot):
        Run(store).latest()


def make_rows():
    return np.arange(100_000.0)


def test_the_public_method(store):
    run = Run(store)
    snapshot = run.latest()
    damage(store)
    report = snapshot.verify()
    assert isinstance(report.problems[0].error, DigestMismatch)
    run.record_verification(snapshot, report)
    assert run.latest().step == 40
    record = run.catalog.evaluations.read(snapshot.version, reader_of(snapshot).digest)
    assert len(record.of(Verified)) == 1
    assert run.evaluations(60) == {}


def test_a_snapshot_outside_of_a_run(tmp_path):
    limpet.save(tmp_path / "alone", {"x": make_rows()})
    [shard] = (tmp_path / "alone").glob("*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    before = sorted(tmp_path.rglob("*"))
    assert run_cli("verify", tmp_path / "alone").code == 3
    assert sorted(tmp_path.rglob("*")) == before
