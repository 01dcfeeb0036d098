"""``holdfast copy``."""

from __future__ import annotations

from pathlib import Path

import holdfast as hf
from holdfast.format.names import MANIFEST
from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store

from ..trainings import flip, shard_of
from .running import holdfast, leave, make_run


def keys(url: str) -> list[str]:
    return [s.key for s in open_store(url).list("")]


def test_a_snapshot(run: str, elsewhere: str) -> None:
    answer = holdfast("copy", f"{run}/version_40", f"{elsewhere}/version_40")
    assert answer.code == 0
    assert "1 snapshot copied" in answer.out
    assert holdfast("diff", f"{run}/version_40", f"{elsewhere}/version_40").code == 0
    assert holdfast("verify", elsewhere).code == 0


def test_json_keys_are_stable(run: str, elsewhere: str) -> None:
    told = holdfast("copy", run, elsewhere, "--json").json
    assert list(told) == [
        "from", "to", "copied", "present", "damaged", "branches", "evaluations", "pins", "stray",
        "bytes", "seconds",
    ]  # fmt: skip
    assert [list(c) for c in told["copied"]] == [["snapshot", "step", "bytes"]] * 3
    assert [c["step"] for c in told["copied"]] == [20, 40, 60]


def test_a_whole_run_with_its_branches(store: MemoryStore, tmp_path: Path) -> None:
    leave(store, at=40, to=80)
    to = tmp_path / "runs" / "copy"
    answer = holdfast("copy", store.url, to)
    assert answer.code == 0
    assert keys(str(to)) == keys(store.url)
    ours, theirs = holdfast("ls", store.url, "--json").json, holdfast("ls", to, "--json").json
    assert theirs["latest"] == ours["latest"] == "version_80.1"
    assert [v["on_line"] for v in theirs["versions"]] == [v["on_line"] for v in ours["versions"]]
    assert holdfast("verify", to).code == 0


def test_a_run_is_copied_again_only_where_it_grew(store: MemoryStore, elsewhere: str) -> None:
    holdfast("copy", store.url, elsewhere)
    leave(store, at=40, to=80)
    told = holdfast("copy", store.url, elsewhere, "--json").json
    assert [c["step"] for c in told["present"]] == [20, 40, 60]
    assert [c["step"] for c in told["copied"]] == [60, 80]
    assert told["branches"] == 1
    assert "already there" in holdfast("copy", store.url, elsewhere).out


def test_evaluations_and_lasting_pins_come_with_a_run(store: MemoryStore, elsewhere: str) -> None:
    """So that the best of a copy is the best of its original, and what was to stay stays."""
    run = hf.Run(store)
    run.add_metrics(20, {"val": 0.25, "odd": float("nan")})
    run.add_metrics(40, {"val": 0.5})
    run.pin(40)
    for added in (0, 1):
        told = holdfast("copy", store.url, elsewhere, "--json").json
        assert (told["evaluations"], told["pins"]) == (2 + added, 1)
        copied = hf.Run(elsewhere)
        assert keys(elsewhere) == keys(store.url)
        assert [repr(r) for r in copied.records()] == [repr(r) for r in run.records()]
        assert copied.pins() == run.pins()
        run.add_metrics(60, {"val": 0.125})
    assert holdfast("verify", elsewhere).code == 0


def test_nothing_is_overwritten(run: str, elsewhere: str) -> None:
    hf.save(f"{elsewhere}/version_40", {"n": 1})
    before = keys(elsewhere)
    for words in ((f"{run}/version_40", f"{elsewhere}/version_40"), (run, elsewhere)):
        answer = holdfast("copy", *words)
        assert answer.code == 8
        assert "nothing was changed" in answer.err
    assert keys(elsewhere) == before


def test_two_trainings_are_not_mixed(run: str, elsewhere: str) -> None:
    hf.save(f"{elsewhere}/version_7", {"n": 1})
    answer = holdfast("copy", run, elsewhere)
    assert answer.code == 8
    assert "another training" in answer.err
    other = open_store(elsewhere + "-other")
    assert isinstance(other, MemoryStore)
    make_run(other)
    assert holdfast("copy", run, other.url).code == 8


def test_a_version_keeps_its_step(run: str, elsewhere: str) -> None:
    answer = holdfast("copy", f"{run}/version_40", f"{elsewhere}/version_50")
    assert answer.code == 8
    assert keys(elsewhere) == []
    assert holdfast("copy", f"{run}/version_40", f"{elsewhere}/best").code == 0


def test_a_damaged_snapshot_is_not_copied(store: MemoryStore, elsewhere: str) -> None:
    flip(store, shard_of(store, "version_40"))
    answer = holdfast("copy", f"{store.url}/version_40", f"{elsewhere}/version_40")
    assert answer.code == 3
    assert answer.out == ""
    assert f"version_40/{MANIFEST}" not in keys(elsewhere)


def test_of_a_run_what_is_damaged_is_named_and_left_out(store: MemoryStore, elsewhere: str) -> None:
    flip(store, shard_of(store, "version_40"))
    flip(store, f"version_20/{MANIFEST}")
    answer = holdfast("copy", store.url, elsewhere, "--json")
    assert answer.code == 3
    assert [d["version"] for d in answer.json["damaged"]] == ["version_20", "version_40"]
    assert [c["step"] for c in answer.json["copied"]] == [60]
    assert holdfast("verify", elsewhere).code == 0
    assert "NOT copied" in holdfast("copy", store.url, elsewhere).out
