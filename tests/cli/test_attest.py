"""``limpet attest``, and what other commands show of verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.errors import NoSnapshot
from limpet.format.names import Version
from limpet.format.records import InexactEvaluation
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import flip_bit, shard_of


def attest(store: MemoryStore, *arguments: object, code: int = 0) -> Any:
    result = run_cli("attest", store.url, *arguments)
    assert result.code == code, result
    return result


def row(store: MemoryStore, step: int) -> str:
    lines = run_cli("ls", store.url).out.splitlines()
    return next(line for line in lines if line.split()[:1] == [str(step)])


def test_several_steps_get_a_verdict_at_once(store: MemoryStore) -> None:
    result = attest(store, 40, "60", "--not-ok", "--by", "sdc-replay", "--note", "bit 3")
    assert result.out == (
        "sdc-replay does not trust version_40\nsdc-replay does not trust version_60\n"
    )
    latest = Run(store).latest()
    assert latest is not None
    assert latest.step == 20
    assert run_cli("show", f"{store.url}@latest", "--json").json["step"] == 20
    result = attest(store, 60, "--ok", "--by", "sdc-replay")
    assert result.out == "sdc-replay trusts version_60\n"
    assert run_cli("show", f"{store.url}@latest", "--json").json["step"] == 60


def test_json_keys_are_stable(store: MemoryStore) -> None:
    report = attest(store, 20, 40, "--ok", "--by", "ann", "--note", "é", "--json").json
    assert report == {
        "run": store.url,
        "versions": ["version_20", "version_40"],
        "ok": True,
        "by": "ann",
        "note": "é",
    }


def test_steps_of_branches(store: MemoryStore) -> None:
    train_branch(store, start=40, last_step=60)
    attest(store, "60.0", "60", "--not-ok", "--by", "ann")
    entries = run_cli("ls", store.url, "--json").json["versions"]
    distrusted = [e["version"] for e in entries if e["trust"] == "distrusted"]
    assert distrusted == ["version_60", "version_60.1"]


def test_nothing_is_recorded_if_one_version_does_not_exist(store: MemoryStore) -> None:
    before = [s.key for s in store.list("")]
    result = attest(store, 20, 50, "--ok", "--by", "ann", code=4)
    assert "no version of step 50" in result.err
    flip_bit(store, "version_40/manifest.json")
    before_damage = [s.key for s in store.list("")]
    attest(store, 20, 40, "--ok", "--by", "ann", code=3)
    assert [s.key for s in store.list("")] == before_damage == before
    assert attest(store, 50, "--ok", "--by", "x", "--json", code=4).json["exit"] == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("20", "--by", "ann"),
        ("20", "--ok"),
        ("--ok", "--by", "ann"),
        ("x", "--ok", "--by", "ann"),
        ("20", "x", "--ok", "--by", "ann"),
        ("20", "--ok", "--by", ""),
        ("20", "--ok", "--by", "a b"),
        ("20", "--ok", "--by", "../a"),
        ("20", "--ok", "--by", "x" * 65),
    ],
)
def test_an_invalid_command_line_is_a_usage_error(store: MemoryStore, arguments: Any) -> None:
    before = [s.key for s in store.list("")]
    attest(store, *arguments, code=2)
    assert [s.key for s in store.list("")] == before


def test_a_note_that_is_too_long_and_a_location_without_a_run(
    store: MemoryStore, empty_url: str
) -> None:
    result = attest(store, 20, "--ok", "--by", "ann", "--note", "x" * 16_385, code=1)
    assert "16,385 characters" in result.err
    assert run_cli("attest", empty_url, 20, "--ok", "--by", "ann").code == 4
    assert run_cli("attest", f"{store.url}/version_20", 20, "--ok", "--by", "ann").code == 4


# -- other commands ------------------------------------------------------------------------------


def test_ls_shows_trust_and_is_not_fooled_about_the_latest(store: MemoryStore) -> None:
    attest(store, 60, "--not-ok", "--by", "sdc", "--note", "step 58\ndiffers\x1b[31m")
    attest(store, 40, 20, "--ok", "--by", "sdc")
    Run(store).pin(40)
    assert " distrusted " in row(store, 60)
    assert " latest, attested, pinned " in row(store, 40)
    assert " ok, attested " in row(store, 20)
    out = run_cli("ls", store.url).out
    assert "version_60: sdc does not trust it: step 58 differs?[31m\n" in out
    assert "version_40:" not in out, "only what is wrong is explained"
    report = run_cli("ls", store.url, "--json").json
    assert report["latest"] == "version_40"
    assert [v["latest"] for v in report["versions"]] == [False, True, False]
    assert [v["trust"] for v in report["versions"]] == ["attested", "attested", "distrusted"]
    assert [v["intact"] for v in report["versions"]] == [True] * 3
    [verdict] = report["versions"][2]["verdicts"]
    assert (verdict["by"], verdict["ok"]) == ("sdc", False)
    assert verdict["note"] == "step 58\ndiffers\x1b[31m"


def test_ls_of_a_run_without_a_trusted_version(store: MemoryStore) -> None:
    attest(store, 20, 40, 60, "--not-ok", "--by", "sdc")
    result = run_cli("ls", store.url)
    assert result.code == 0
    assert "No version on the current lineage is intact and trusted." in result.out
    assert run_cli("ls", store.url, "--json").json["latest"] is None
    result = run_cli("show", f"{store.url}@latest")
    assert result.code == 4
    assert "sdc does not trust it" in result.err
    with pytest.raises(NoSnapshot):
        Run(store).latest()


def test_ls_of_a_damaged_and_distrusted_version_shows_both(store: MemoryStore) -> None:
    attest(store, 60, "--not-ok", "--by", "sdc", "--note", "bit 3")
    store.delete(shard_of(store, "version_60"))
    assert " damaged, distrusted " in row(store, 60)
    assert "sdc does not trust it: bit 3" in run_cli("ls", store.url).out


def test_an_unreadable_verdict_is_shown(store: MemoryStore) -> None:
    key = "version_60/eval-sdc.0123456789ab.verdict.json"
    store.put_if_absent(key, b"{}")
    out = run_cli("ls", store.url).out
    assert f"version_60: A verdict of sdc on it cannot be read ({key}). It may be a negative" in out
    assert run_cli("ls", store.url, "--json").json["versions"][2]["trust"] == "distrusted"
    assert run_cli("verify", store.url).code == 3


def test_show_and_verify_mention_verdicts(store: MemoryStore) -> None:
    attest(store, 60, "--not-ok", "--by", "sdc", "--note", "bit 3")
    attest(store, 60, "--ok", "--by", "ann")
    attest(store, 40, "--ok", "--by", "ann")
    out = run_cli("show", f"{store.url}/version_60").out
    assert "sdc does not trust it: bit 3" in out
    assert "ann trusts it" in out
    report = run_cli("show", f"{store.url}@60", "--json").json
    assert report["trust"] == "distrusted"
    assert [v["by"] for v in report["verdicts"]] == ["sdc", "ann"]
    result = run_cli("verify", store.url)
    assert result.code == 0, "a distrusted version is not damaged"
    assert [line.split()[-1] for line in result.out.splitlines()[1:4]] == [
        "ok", "attested", "distrusted",
    ]  # fmt: skip
    report = run_cli("verify", store.url, "--json").json
    assert [v["trust"] for v in report["versions"]] == [None, "attested", "distrusted"]
    assert run_cli("verify", f"{store.url}@60", "--json").json["versions"][0]["trust"] == (
        "distrusted"
    )


def test_show_mentions_inexact_evaluations(store: MemoryStore) -> None:
    content = {"metrics": {"loss": 0.5}, "first_step": 60, "last_step": 67}
    Run(store).put_record(InexactEvaluation, "val", 60, **content)
    assert "loss 0.5 (val, steps 60 to 67)" in run_cli("show", f"{store.url}@60").out
    report = run_cli("show", f"{store.url}@60", "--json").json
    assert report["inexact"] == [{"by": "val", **content}]
    assert report["metrics"] == {"loss": 42.25}, "that of the save"


def test_a_snapshot_outside_of_a_run_has_no_verdicts(tmp_path: Path) -> None:
    limpet.save(str(tmp_path / "model"), {"x": 1})
    assert run_cli("show", tmp_path / "model", "--json").json["verdicts"] == []
    assert run_cli("verify", tmp_path / "model").code == 0


def test_a_copy_of_a_run_has_its_verdicts(store: MemoryStore, empty_url: str) -> None:
    attest(store, 60, "--not-ok", "--by", "sdc", "--note", "bit 3")
    attest(store, 40, "--ok", "--by", "sdc")
    assert run_cli("copy", store.url, empty_url, "--json").json["evaluations"] == 2
    entries = run_cli("ls", empty_url, "--json").json["versions"]
    assert [e["trust"] for e in entries] == [None, "attested", "distrusted"]
    attest(store, 60, "--ok", "--by", "sdc")  # later, and copied later
    assert run_cli("copy", store.url, empty_url).code == 0
    assert run_cli("ls", empty_url, "--json").json["latest"] == "version_60"


def test_a_copy_is_not_trusted_more_than_its_original(store: MemoryStore, empty_url: str) -> None:
    """The verdict cannot be copied, but the version is, which must not become trusted by that."""
    attest(store, 60, "--not-ok", "--by", "sdc")
    [key] = [s.key for s in store.list("version_60") if "verdict" in s.key]
    flip_bit(store, key, 60)
    result = run_cli("copy", store.url, empty_url)
    assert result.code == 3
    assert f"NOT copied       {key}" in result.out
    assert Run(empty_url).open(Version(60)).verify().ok
    assert run_cli("ls", empty_url, "--json").json["latest"] == "version_40"
    assert run_cli("copy", store.url, empty_url).code == 3, "it can be repeated"


def test_an_export_and_a_diff_of_the_latest_version_use_a_trusted_one(
    store: MemoryStore, tmp_path: Path
) -> None:
    attest(store, 60, "--not-ok", "--by", "sdc")
    result = run_cli("diff", f"{store.url}@latest", f"{store.url}@40")
    assert result.code == 0
    result = run_cli("diff", f"{store.url}@latest", f"{store.url}@60")
    assert result.code == 7
