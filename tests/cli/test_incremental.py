"""Commands on incremental versions: what they refer to is told, checked once, and copied whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.buffers import shared_pool
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location
from holdfast.format.names import MANIFEST, Version
from holdfast.format.records import Branch, encode_branch
from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store
from tests.cli.invoke import run_cli
from tests.forging import seal, sealed_content
from tests.trainings import flip_bit, shard_of


@pytest.fixture
def store(elsewhere: str) -> MemoryStore:
    """Version 1 in full; 2 and 3 refer to it."""
    made = open_store(elsewhere)
    assert isinstance(made, MemoryStore)
    for step in (1, 2, 3):
        save(made, step)
    return made


def save(store: MemoryStore, step: int, **more: Any) -> None:
    """An increment on the version before."""
    state = {"frozen": np.arange(20_000.0), "adapter": np.full(10, float(step)), **more}
    place = Location(store, f"version_{step}")
    base = hf.Run(store).open(Version(step - 1)) if step > 1 else None
    finish_save(
        begin_save(
            place, state, VersionMetadata(step=step), shared_pool(), stage_now=False, base=base
        )
    )


def test_ls_tells_own_and_referred_bytes(store: MemoryStore) -> None:
    versions = run_cli("ls", store.url, "--json").json["versions"]
    assert [v["referred_bytes"] for v in versions] == [0, 160_000, 160_000]
    assert [v["bytes"] for v in versions][1:] == [4096 + 80] * 2
    out = run_cli("ls", store.url).out
    assert "own" in out
    assert "referred" in out
    assert out.count("156.2 KiB") == 2
    alone = "memory://cli-ls-of-full-versions"
    hf.save(f"{alone}/version_1", {"n": 1})
    assert "referred" not in run_cli("ls", alone).out


def test_show_tells_own_and_referred_bytes_and_bases(store: MemoryStore) -> None:
    told = run_cli("show", f"{store.url}/version_3", "--json").json
    assert told["bytes"] == 4096 + 80
    assert told["referred_bytes"] == 160_000
    assert told["bases"] == ["version_1"]
    assert told["chain"] == 2
    answer = run_cli("show", f"{store.url}/version_3")
    assert "156.2 KiB in version_1" in answer.out
    full = run_cli("show", f"{store.url}/version_1", "--json").json
    assert (full["referred_bytes"], full["bases"], full["chain"]) == (0, [], 0)
    assert "refers to" not in run_cli("show", f"{store.url}/version_1").out


def test_verify_names_every_version_that_a_damaged_base_takes_along(store: MemoryStore) -> None:
    flip_bit(store, shard_of(store, "version_1"), byte=5000)
    answer = run_cli("verify", store.url, "--json")
    assert answer.code == 3
    versions = answer.json["versions"]
    assert [v["ok"] for v in versions] == [False, False, False]
    problems = [p for v in versions for p in v["problems"]]
    assert {p["file"] for p in problems} == {shard_of(store, "version_1")}
    assert [tuple(p["leaves"]) for p in problems] == [("frozen",)] * 3
    assert [p["fields"].get("base") for p in problems] == [None, "version_1", "version_1"]
    people = run_cli("verify", store.url)
    assert "3 of 3 damaged" in people.out
    assert people.out.count(f"{shard_of(store, 'version_1')}, byte ") == 1
    assert "also affects version_2, version_3\n" in people.out
    assert people.out.count("is damaged between bytes") == 1


@pytest.mark.parametrize("gone", [False, True])
def test_verify_tells_two_places_of_one_file_apart(store: MemoryStore, gone: bool) -> None:
    save(store, 4, more=np.arange(9000.0))
    save(store, 5, more=np.arange(9000.0))
    if gone:
        store.delete(shard_of(store, "version_1"))
    else:
        flip_bit(store, shard_of(store, "version_1"), byte=5000)
        flip_bit(store, shard_of(store, "version_1"), byte=4)
    flip_bit(store, shard_of(store, "version_4"), byte=5000)
    people = run_cli("verify", store.url)
    assert people.out.count("also affects version_2, version_3, version_4, version_5\n") == 1
    assert people.out.count("also affects version_5\n") == 1
    if not gone:  # what is damaged in the header alone takes nothing along
        assert people.out.count(f"{shard_of(store, 'version_1')}, byte ") == 2
    assert "5 of 5 damaged" in people.out


def left_empty(store: MemoryStore) -> None:
    """The line ends in a branch without versions, at a version that is gone."""
    hf.Run(store).leave_from(hf.Run(store).open(Version(1)), Version(1), "on request")
    flip_bit(store, f"version_1/{MANIFEST}")


def of_later_format(store: MemoryStore) -> None:
    hf.Run(store).leave_from(hf.Run(store).open(Version(2)), Version(2), "on request")
    raw = store.get("branch-1.json", 1 << 20)
    store.delete("branch-1.json")
    store.put_if_absent("branch-1.json", seal(sealed_content(raw), 99))


def without_first(store: MemoryStore) -> None:
    hf.Run(store).leave_from(hf.Run(store).open(Version(1)), Version(1), "on request")
    store.delete(f"version_1/{MANIFEST}")


def from_itself(store: MemoryStore) -> None:
    record = Branch(1, "version_2.1", "0" * 32, "2026-01-01T00:00:00+00:00", "")
    store.put_if_absent("branch-1.json", encode_branch(record))


@pytest.mark.parametrize("spoil", [left_empty, of_later_format, without_first, from_itself])
def test_a_line_that_cannot_be_told_costs_no_report(
    store: MemoryStore, spoil: Callable[[MemoryStore], None]
) -> None:
    spoil(store)
    flip_bit(store, shard_of(store, "version_3"), byte=-1)
    told = run_cli("verify", store.url, "--json")
    assert told.code == 3
    assert shard_of(store, "version_3") in [
        p["file"] for v in told.json["versions"] for p in v["problems"]
    ]
    assert told.json["danger"] is None


def save_after(store: MemoryStore, steps: int) -> hf.Snapshot:
    """One more version by a training that goes on."""
    state = {"frozen": np.arange(20_000.0), "adapter": np.zeros(10), "p": hf.Progress()}
    state["p"].step = steps - 1
    with hf.Checkpointer(store, state, incremental=True) as ckpt:
        ckpt._saver.resume_from(hf.Run(store).open(Version(steps - 1)))
        ckpt._lifecycle.is_resumed = True  # it has been going on since before the damage
        ckpt.step()
        return ckpt.save()


def test_verify_tells_what_to_do_while_training_saves_onto_a_damaged_base(
    store: MemoryStore,
) -> None:
    assert run_cli("verify", store.url, "--json").json["danger"] is None
    shard = shard_of(store, "version_1")
    flip_bit(store, shard, byte=5000)
    assert save_after(store, 4).bases == {Version(1)}  # lengths are as they were
    told = run_cli("verify", store.url, "--json").json["danger"]
    assert f"Move {shard} out of the run now" in told
    assert told in run_cli("verify", store.url).out
    store.delete(shard)
    saved = save_after(store, 5)
    assert saved.bases == frozenset()
    assert saved.verify().ok
    assert run_cli("verify", store.url, "--json").json["danger"] is None


def test_verify_of_a_run_reads_a_shared_chunk_once(store: MemoryStore) -> None:
    told = run_cli("verify", store.url, "--json").json
    assert told["ok"]
    first, *others = [v["bytes"] for v in told["versions"]]
    assert first > 160_000
    assert max(others) < 10_000
    alone = run_cli("verify", f"{store.url}/version_3", "--json").json
    assert alone["bytes"] > 160_000


def test_a_copy_is_self_contained_and_known_again(store: MemoryStore) -> None:
    to = "memory://cli-copies-of-increments"
    answer = run_cli("copy", store.url, to, "--json")
    assert answer.code == 0
    assert [s["snapshot"] for s in answer.json["copied"]] == [
        f"{to}/version_{n}" for n in (1, 2, 3)
    ]
    store.delete(shard_of(store, "version_1"))
    for step in (1, 2, 3):
        found = hf.load(f"{to}/version_{step}")
        assert found["adapter"].tolist() == [float(step)] * 10
        assert hf.open(f"{to}/version_{step}").bases == frozenset()
    assert run_cli("verify", to).code == 0


def test_evaluations_of_increments_are_as_true_of_their_copies(store: MemoryStore) -> None:
    to = "memory://cli-evaluated-increments"
    hf.Run(store).add_metrics(2, {"val": 0.5})
    for _ in range(2):
        assert run_cli("copy", store.url, to, "--json").json["evaluations"] == 1
        best = hf.Run(to).best("val")
        assert best is not None
        assert best.step == 2
    assert run_cli("verify", to).code == 0


def test_a_copy_is_not_made_twice(store: MemoryStore) -> None:
    to = "memory://cli-copies-made-twice"
    assert run_cli("copy", store.url, to).code == 0
    again = run_cli("copy", store.url, to, "--json")
    assert again.code == 0
    assert again.json["copied"] == []
    assert len(again.json["present"]) == 3


def test_what_was_copied_as_it_is_by_other_means_is_not_copied_again(store: MemoryStore) -> None:
    other = open_store("memory://cli-increments-by-rsync")
    for stat in store.list(""):
        other.put_if_absent(stat.key, store.get(stat.key, 1 << 30))
    answer = run_cli("copy", store.url, other.url, "--json")
    assert answer.code == 0
    assert answer.json["copied"] == []
    assert len(answer.json["present"]) == 3


def test_one_version_alone_can_be_copied(store: MemoryStore) -> None:
    to = "memory://cli-one-increment/version_3"
    assert run_cli("copy", f"{store.url}/version_3", to).code == 0
    assert hf.load(to)["frozen"][5] == 5.0


def test_a_copy_that_was_trained_on_comes_home(store: MemoryStore) -> None:
    to = "memory://cli-increments-that-come-home"
    run_cli("copy", store.url, to)
    other = open_store(to)
    assert isinstance(other, MemoryStore)
    save_after(other, 4)
    answer = run_cli("copy", to, store.url, "--json")
    assert answer.code == 0
    assert [c["step"] for c in answer.json["copied"]] == [4]
    assert hf.Run(store).open(Version(3)).bases == {Version(1)}
    assert run_cli("verify", store.url).code == 0
    assert run_cli("copy", store.url, to).code == 0


@pytest.mark.parametrize("step", [1, 3])
def test_a_damaged_manifest_costs_no_version_that_refers_to_its_files(
    store: MemoryStore, step: int
) -> None:
    """Also of an increment, whose shard has another name in the copy, which is full."""
    to = f"memory://cli-healed-from-copies-{step}"
    hf.Run(store).delete(Version(3))
    for each in (3, 4):
        save(store, each, more=np.arange(30_000.0))
    assert hf.Run(store).open(Version(4)).bases == {Version(1), Version(3)}
    run_cli("copy", store.url, to)
    flip_bit(store, f"version_{step}/{MANIFEST}")
    answer = run_cli("copy", to, store.url)
    assert answer.code == 8
    assert f"Move its {MANIFEST} away, and nothing else" in answer.err
    store.delete(f"version_{step}/{MANIFEST}")
    assert run_cli("copy", to, store.url).code == 0
    assert run_cli("verify", store.url).code == 0
    assert run_cli("copy", to, store.url, "--json").json["copied"] == []
    hf.Run(store).sweep(grace=0)
    assert run_cli("verify", store.url).code == 0
