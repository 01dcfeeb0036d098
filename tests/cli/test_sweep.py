"""``limpet sweep``."""

import pytest

from limpet.format.names import random_id, shard_name
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from limpet.storage.store import Traits
from tests.cli.invoke import run_cli, train_branch
from tests.forging import seal, sealed_content
from tests.trainings import flip_bit


def orphan(store, attempt=None):
    key = f"version_80/{shard_name(0, 1, attempt or random_id())}"
    store.put_if_absent(key, b"x" * 10)
    return key


def keys(store):
    return [s.key for s in store.list("")]


def test_only_files_that_no_manifest_names_are_removed(store):
    before = keys(store)
    key = orphan(store)
    result = run_cli("sweep", store.url, "--grace", "0")
    assert result.code == 0
    assert f"removed  {key}" in result.out
    assert "Removed 1 file, 10 B" in result.out
    assert keys(store) == before
    assert "Nothing to remove" in run_cli("sweep", store.url, "--grace", "0").out


def test_json_keys_are_stable(store):
    key = orphan(store)
    report = run_cli("sweep", store.url, "--json", "--grace", "1h30m").json
    assert report == {
        "run": store.url,
        "dry_run": False,
        "grace_seconds": 5400.0,
        "abandoned": False,
        "removed": [],
        "bytes": 0,
        "kept": [{"key": key, "why": "younger than 5400 s"}],
        "hidden_uploads": "",
    }


def test_what_removes_uploads_that_cannot_be_listed_is_said(store, monkeypatch):
    rule = "add the rule R"
    monkeypatch.setattr(
        MemoryStore, "traits", Traits("memory", 1, durable=False, hidden_uploads=rule)
    )
    result = run_cli("sweep", store.url)
    assert f"Unfinished uploads cannot be listed here: {rule}" in result.out
    assert run_cli("sweep", store.url, "--json").json["hidden_uploads"] == rule


def test_a_dry_run_removes_nothing(store):
    key = orphan(store)
    assert "would remove" in run_cli("sweep", store.url, "--grace", "0", "--dry-run").out
    assert key in keys(store)


def test_the_files_of_an_active_save_are_kept(store):
    attempt = random_id()
    key = orphan(store, attempt)
    pins.create_pin(Location(store, "version_80"), attempt)
    result = run_cli("sweep", store.url, "--grace", "0")
    assert "a save is in progress" in result.out
    assert key in keys(store)


def test_abandoned_versions_are_removed_on_request(store):
    train_branch(store, start=40, last_step=60)
    assert not run_cli("sweep", store.url, "--grace", "0", "--json").json["removed"]
    out = run_cli("sweep", store.url, "--abandoned", "--dry-run").out
    assert "would remove  version_60/manifest.json\n" in out
    assert "\nWould remove 4 files, " in out
    key = orphan(store)
    out = run_cli("sweep", store.url, "--abandoned").out
    assert "\nkept     version_80/shard-" in out
    assert "\nRemoved 4 files, " in out
    assert out.endswith("; 1 kept\n")
    store.delete(key)
    report = run_cli("ls", store.url, "--json").json
    assert [v["version"] for v in report["versions"]] == [
        "version_20",
        "version_40",
        "version_60.1",
    ]


def test_pinned_abandoned_versions_are_kept(store):
    train_branch(store, start=40, last_step=60)
    run_cli("pin", store.url, "60.0")
    result = run_cli("sweep", store.url, "--abandoned")
    assert result.code == 0
    assert "kept     version_60 (it is pinned)" in result.out
    assert result.out.endswith("\nRemoved nothing; 1 kept\n")
    orphan(store)
    out = run_cli("sweep", store.url, "--abandoned", "--grace", "0").out
    assert out.endswith("\nRemoved 1 file, 10 B; 1 kept\n")
    key = orphan(store)
    out = run_cli("sweep", store.url, "--abandoned").out
    assert out.endswith("\nRemoved nothing; 2 kept\n")
    store.delete(key)
    report = run_cli("sweep", store.url, "--abandoned", "--json").json
    assert report["kept"] == [{"key": "version_60", "why": "it is pinned"}]
    run_cli("pin", store.url, "60.0", "--remove")
    orphan(store)
    out = run_cli("sweep", store.url, "--abandoned", "--grace", "0").out
    assert "\nRemoved 5 files, " in out


def test_unclassified_versions_are_kept(store):
    train_branch(store, start=40, last_step=60)
    flip_bit(store, "branch-1.json")
    raw = sealed_content(store.get("version_60.1/manifest.json", 1 << 20))
    store.delete("version_60.1/manifest.json")
    raw["parent"] = None
    store.put_if_absent("version_60.1/manifest.json", seal(raw, 1))
    out = run_cli("sweep", store.url, "--abandoned").out
    assert "kept     all abandoned versions (branch-1.json is unreadable" in out
    assert out.endswith("\nRemoved nothing; 1 kept\n")


def test_a_run_without_any_version_can_be_swept(empty_url):
    store = open_store(empty_url)
    orphan(store)
    assert run_cli("ls", empty_url).code == 4
    assert "1 folder without a manifest" in run_cli("ls", empty_url).err
    assert run_cli("sweep", empty_url, "--grace", "0").code == 0
    assert keys(store) == []


def test_a_location_without_a_run_is_an_error(empty_url):
    assert run_cli("sweep", empty_url).code == 4


@pytest.mark.parametrize(
    "grace",
    ["", "-5", "-5s", "5 ", "1e3", ".", "5.", "inf", "9" * 10, "1w", "h", "1h 2m", "nan", "24 h"],
)
def test_an_invalid_grace_is_a_usage_error(run, grace):
    result = run_cli("sweep", run, "--grace", grace)
    assert result.code == 2
    assert "24h" in result.err


@pytest.mark.parametrize(
    ("grace", "seconds"),
    [
        ("0", 0), ("5", 5), ("1.5", 1.5), ("90s", 90), ("15m", 900), ("24h", 86400),
        ("7d", 604800), ("0.5h", 1800),
    ],
)  # fmt: skip
def test_durations(run, grace, seconds):
    assert run_cli("sweep", run, "--grace", grace, "--json").json["grace_seconds"] == seconds
