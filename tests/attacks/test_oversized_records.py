"""A record that is longer than its format allows is a damaged record, not an error of the store."""

import warnings

import pytest

from limpet.errors import ManifestInvalid, SkippedVersion
from limpet.format.names import Version
from limpet.format.records import MAX_RECORD
from limpet.run import catalog
from limpet.run.catalog import Catalog
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.run.save_request import RequestWatcher, put_request, read_request
from limpet.run.writer_lock import WriterLock
from tests.cli.invoke import run_cli
from tests.trainings import train, trained_run, training

TOO_LONG = b" " * (MAX_RECORD + 1)


@pytest.fixture
def store():
    """A run with the versions 1, 2, and 3."""
    return trained_run(3, 1)


def resume(store, at=None):
    """Resume, take one step, and return the version that it saved."""
    with training(store, EverySteps(1)) as (state, ckpt):
        ckpt.resume(at=at)
        train(state, ckpt, state["progress"].step + 1)
    return Run(store).line()[-1]


def test_a_branch_is_skipped_but_its_number_stays_taken(store):
    store.put_if_absent("branch-1.json", TOO_LONG)
    assert resume(store) == Version(4)
    assert resume(store, at=2) == Version(3, 2)
    with pytest.raises(ManifestInvalid, match="longer than the format allows"):
        Run(store).read_branch(1)


def test_an_evaluation_is_skipped(store):
    run = Run(store)
    run.add_metrics(2, {"accuracy": 0.5})
    store.put_if_absent("version_2/eval-val.0c9d1e2f3a4b.json", TOO_LONG)
    run.add_metrics(2, {"accuracy": 0.75})
    assert run.metrics(2)["accuracy"] == 0.75
    assert run.retain(KeepLast(1)) == [Version(1), Version(2)]


def test_a_writer_lock_is_replaced(store):
    store.put_if_absent("writer.json", TOO_LONG)
    lock = WriterLock(store)
    lock.acquire()
    lock.check(store)
    assert store.stat("writer.json").length <= MAX_RECORD


def test_a_request_is_answered_and_removed(store):
    store.put_if_absent("request-save.json", TOO_LONG)
    request = read_request(store)
    assert request is not None
    assert put_request(store, "0c9d1e2f3a4b") == request
    watcher = RequestWatcher(store)
    watcher.poll()
    assert watcher.pending_request == request
    watcher.mark(watcher.accept(), True)
    assert read_request(store) is None


def test_a_manifest_is_skipped_and_protects_what_it_names(store, monkeypatch):
    monkeypatch.setattr("limpet.snapshot.reader.MAX_MANIFEST", MAX_RECORD)
    monkeypatch.setattr(catalog, "_PART", 1000)
    for offset in range(990, 1011):  # a name in and around the end of the first part
        store.delete("version_3/manifest.json")
        raw = b"x" * offset + b'"version_2.17"' + TOO_LONG
        store.put_if_absent("version_3/manifest.json", raw)
        listing = Run(store).listing()
        record = Catalog(store).read_version(Version(3), listing)
        assert record is not None
        assert not record.digest
        assert Version(2, 17) in record.bases
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resume(store) == Version(3, 1)
    assert SkippedVersion in [w.category for w in caught]


def test_a_copy_reports_a_branch(store, tmp_path):
    resume(store, at=2)
    store.delete("branch-1.json")
    store.put_if_absent("branch-1.json", TOO_LONG)
    local = f"{tmp_path}/run"
    with training(local, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 1)
    with open(f"{local}/branch-1.json", "wb") as f:
        f.write(TOO_LONG)
    result = run_cli("copy", local, f"{tmp_path}/copy", "--json")
    assert result.code == 3
    assert [d["version"] for d in result.json["damaged"]] == ["branch-1.json"]
    assert len(result.json["copied"]) == 1
    assert run_cli("verify", local).code == 3
    assert run_cli("ls", local).code == 0
