"""``holdfast copy``."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.cli.verbs.copy import _copy_run
from holdfast.cli.verbs.ls import list_versions
from holdfast.cli.verbs.verify import _verify_run
from holdfast.errors import AlreadyExists, FormatError, NotFound
from holdfast.format.names import MANIFEST, Version
from holdfast.run.policy import EverySteps, KeepEvery, KeepLast
from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store
from holdfast.storage.store import Store
from tests.cli.invoke import make_run, run_cli, train_branch
from tests.engine.unreliable_stores import HookedStore
from tests.trainings import flip_bit, shard_of, train, training


def keys(url: str) -> list[str]:
    return [s.key for s in open_store(url).list("")]


def test_a_snapshot(run: str, elsewhere: str) -> None:
    answer = run_cli("copy", f"{run}/version_40", f"{elsewhere}/version_40")
    assert answer.code == 0
    assert "1 snapshot copied" in answer.out
    assert run_cli("diff", f"{run}/version_40", f"{elsewhere}/version_40").code == 0
    assert run_cli("verify", elsewhere).code == 0


def test_json_keys_are_stable(run: str, elsewhere: str) -> None:
    told = run_cli("copy", run, elsewhere, "--json").json
    assert list(told) == [
        "from", "to", "copied", "present", "damaged", "branches", "evaluations", "pins", "stray",
        "bytes", "seconds",
    ]  # fmt: skip
    assert [list(c) for c in told["copied"]] == [["snapshot", "step", "bytes"]] * 3
    assert [c["step"] for c in told["copied"]] == [20, 40, 60]


def test_a_whole_run_with_its_branches(store: MemoryStore, tmp_path: Path) -> None:
    train_branch(store, start=40, last_step=80)
    to = tmp_path / "runs" / "copy"
    answer = run_cli("copy", store.url, to)
    assert answer.code == 0
    assert keys(str(to)) == keys(store.url)
    ours, theirs = run_cli("ls", store.url, "--json").json, run_cli("ls", to, "--json").json
    assert theirs["latest"] == ours["latest"] == "version_80.1"
    assert [v["on_line"] for v in theirs["versions"]] == [v["on_line"] for v in ours["versions"]]
    assert run_cli("verify", to).code == 0


def test_a_run_is_copied_again_only_where_it_grew(store: MemoryStore, elsewhere: str) -> None:
    run_cli("copy", store.url, elsewhere)
    train_branch(store, start=40, last_step=80)
    told = run_cli("copy", store.url, elsewhere, "--json").json
    assert [c["step"] for c in told["present"]] == [20, 40, 60]
    assert [c["step"] for c in told["copied"]] == [60, 80]
    assert told["branches"] == 1
    assert "already present" in run_cli("copy", store.url, elsewhere).out


def test_evaluations_and_lasting_pins_come_with_a_run(store: MemoryStore, elsewhere: str) -> None:
    """So that the best of a copy is the best of its original, and what was to stay stays."""
    run = hf.Run(store)
    run.add_metrics(20, {"val": 0.25, "odd": float("nan")})
    run.add_metrics(40, {"val": 0.5})
    run.pin(40)
    for added in (0, 1):
        told = run_cli("copy", store.url, elsewhere, "--json").json
        assert (told["evaluations"], told["pins"]) == (2 + added, 1)
        copied = hf.Run(elsewhere)
        assert keys(elsewhere) == keys(store.url)
        assert [repr(r) for r in copied.records()] == [repr(r) for r in run.records()]
        assert copied.pins() == run.pins()
        run.add_metrics(60, {"val": 0.125})
    assert run_cli("verify", elsewhere).code == 0


def copied_to(one: Store, two: Store) -> int:
    run = hf.Run(one)
    return len(_copy_run(run, run.listing(), hf.Run(two), True).copied)


def test_a_backup_goes_on_where_the_source_has_kept_nothing_of_it() -> None:
    """As an hourly one of a training that saves often and keeps the last."""
    source, backup, other = MemoryStore(), MemoryStore(), MemoryStore()
    with training(source, EverySteps(1), KeepLast(2)) as (state, ckpt):
        for steps in (3, 6, 9):
            train(state, ckpt, steps)
            ckpt.wait()
            assert copied_to(source, backup) == 2
    assert [v.step for v in hf.Run(backup).line()] == [2, 3, 5, 6, 8, 9]
    with training(other, EverySteps(1), KeepLast(2)) as (state, ckpt):
        train(state, ckpt, 12)
    with pytest.raises(AlreadyExists, match="another training"):  # newer, but it began elsewhere
        copied_to(other, backup)
    with training(source, EverySteps(1), KeepLast(2)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 12)
    with training(backup, EverySteps(1), KeepLast(2)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 20)
    with pytest.raises(AlreadyExists, match="another training"):  # both went on
        copied_to(source, backup)


def test_two_that_saved_another_version_of_one_step_are_not_mixed(elsewhere: str) -> None:
    """Retention has left nothing between a version and its parent, only the parent's name."""
    one, two = MemoryStore(), open_store(elsewhere)
    with training(one, EverySteps(3), KeepLast(1) | KeepEvery(3)) as (state, ckpt):
        train(state, ckpt, 3)
    assert copied_to(one, two) == 1
    for store, steps in ((one, (12,)), (two, (12, 13))):
        with training(store, EverySteps(100), KeepLast(1) | KeepEvery(3)) as (state, ckpt):
            ckpt.resume()
            for step in steps:
                train(state, ckpt, step)
                state["history"] = [float(id(store))]
                ckpt.save()
    hf.Run(two).delete(Version(12))
    before = keys(elsewhere)
    for a, b in ((one, two), (two, one)):
        with pytest.raises(AlreadyExists, match="both continued training"):
            copied_to(a, b)
    assert keys(elsewhere) == before


def test_nothing_is_overwritten(run: str, elsewhere: str) -> None:
    hf.save(f"{elsewhere}/version_40", {"n": 1})
    before = keys(elsewhere)
    for words in ((f"{run}/version_40", f"{elsewhere}/version_40"), (run, elsewhere)):
        answer = run_cli("copy", *words)
        assert answer.code == 8
        assert "nothing was changed" in answer.err
    assert keys(elsewhere) == before


def test_two_trainings_are_not_mixed(run: str, elsewhere: str) -> None:
    hf.save(f"{elsewhere}/version_7", {"n": 1})
    answer = run_cli("copy", run, elsewhere)
    assert answer.code == 8
    assert "another training" in answer.err
    other = open_store(elsewhere + "-other")
    assert isinstance(other, MemoryStore)
    make_run(other)
    assert run_cli("copy", run, other.url).code == 8


def test_a_version_keeps_its_step(run: str, elsewhere: str) -> None:
    answer = run_cli("copy", f"{run}/version_40", f"{elsewhere}/version_50")
    assert answer.code == 8
    assert keys(elsewhere) == []
    assert run_cli("copy", f"{run}/version_40", f"{elsewhere}/best").code == 0


def test_a_damaged_snapshot_is_not_copied(store: MemoryStore, elsewhere: str) -> None:
    flip_bit(store, shard_of(store, "version_40"))
    answer = run_cli("copy", f"{store.url}/version_40", f"{elsewhere}/version_40")
    assert answer.code == 3
    assert answer.out == ""
    assert f"version_40/{MANIFEST}" not in keys(elsewhere)


def test_of_a_run_what_is_damaged_is_named_and_left_out(store: MemoryStore, elsewhere: str) -> None:
    flip_bit(store, shard_of(store, "version_40"))
    flip_bit(store, f"version_20/{MANIFEST}")
    answer = run_cli("copy", store.url, elsewhere, "--json")
    assert answer.code == 3
    assert [d["version"] for d in answer.json["damaged"]] == ["version_20", "version_40"]
    assert [c["step"] for c in answer.json["copied"]] == [60]
    assert run_cli("verify", elsewhere).code == 0
    out = run_cli("copy", store.url, elsewhere).out
    assert "NOT copied       version_20" in out
    assert out.endswith("Nothing copied; 1 already present; 2 NOT copied\n")


def test_the_sum_says_what_was_done(store: MemoryStore, tmp_path: Path) -> None:
    assert ", all checked\n" in run_cli("copy", store.url, tmp_path / "b").out
    out = run_cli("copy", store.url, tmp_path / "b").out
    assert out.endswith("\nNothing copied; 3 already present\n")
    flip_bit(store, f"version_20/{MANIFEST}")
    out = run_cli("copy", store.url, tmp_path / "c").out
    assert out.startswith("copied           ")
    assert out.endswith(", all checked; 1 NOT copied\n")


def test_no_empty_folder_is_left_where_nothing_was_copied(
    store: MemoryStore, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    for step in (20, 40, 60):
        flip_bit(store, shard_of(store, f"version_{step}"))
    for to in ("b", "mine"):
        answer = run_cli("copy", store.url, tmp_path / to)
        assert answer.code == 3
        assert answer.out.endswith("\nNothing copied; 3 NOT copied\n")
        assert run_cli("copy", f"{store.url}@20", tmp_path / to / "version_20").code == 3
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert list((tmp_path / "mine").iterdir()) == []


# -- a copy that is copied to again --------------------------------------------------------------


def go_on(store: Store, steps: int, every: int = 20, at: int | None = None) -> None:
    """Train on from the newest version, or from that of step ``at``."""
    with training(store, EverySteps(every)) as (state, ckpt):
        ckpt.resume(at=at)
        train(state, ckpt, state["progress"].step + steps)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"steps": 40}, {"steps": 25, "every": 25}, "version_75"),
        ({"steps": 25, "every": 25}, {"steps": 40}, "version_80"),
        ({"steps": 40, "at": 20}, {"steps": 40, "every": 15}, "version_90"),
        ({"steps": 40}, {"steps": 40, "at": 20}, "branch 1"),
        ({}, {"steps": 20}, "version_80"),
        ({"steps": 20, "at": 20}, {"steps": 20, "at": 40}, "branch-1.json"),
    ],
    ids=["between", "behind", "source back", "copy back", "record alone", "both back"],
)
def test_two_that_went_on_from_one_are_not_mixed(
    store: MemoryStore, elsewhere: str, ours: dict[str, int], theirs: dict[str, int], said: str
) -> None:
    run_cli("copy", store.url, elsewhere)
    for each, how in ((store, ours), (open_store(elsewhere), theirs)):
        if how:
            go_on(each, **how)
        else:  # as a training does that dies before its first save
            snapshot = hf.Run(each).open(Version(20))
            hf.Run(each).leave_from(snapshot, Version(20), "on request")
    for a, b in ((store.url, elsewhere), (elsewhere, store.url)):
        before = keys(b)
        answer = run_cli("copy", a, b)
        assert answer.code == 8
        assert "nothing was changed" in answer.err
        assert keys(b) == before
        if b == elsewhere:
            assert said in answer.err


def test_two_that_went_on_on_one_branch_are_not_mixed(store: MemoryStore, elsewhere: str) -> None:
    snapshot = hf.Run(store).open(Version(20))
    hf.Run(store).leave_from(snapshot, Version(20), "on request")
    run_cli("copy", store.url, elsewhere)
    go_on(store, 10, 30)
    go_on(open_store(elsewhere), 20)
    assert [str(hf.Run(r).line()[-1]) for r in (store, elsewhere)] == [
        "version_30.1", "version_40.1",
    ]  # fmt: skip
    for a, b in ((store.url, elsewhere), (elsewhere, store.url)):
        assert run_cli("copy", a, b).code == 8


def test_what_a_copy_has_gone_on_to_comes_home(store: MemoryStore, elsewhere: str) -> None:
    run_cli("copy", store.url, elsewhere)
    go_on(open_store(elsewhere), 40)
    go_on(open_store(elsewhere), 40, at=80)
    assert [c["step"] for c in run_cli("copy", elsewhere, store.url, "--json").json["copied"]] == [
        80, 100, 100, 120,
    ]  # fmt: skip
    assert keys(store.url) == keys(elsewhere)
    go_on(store, 20)
    assert run_cli("copy", store.url, elsewhere).code == 0


def test_a_copy_that_is_ahead_is_left_as_it_is(store: MemoryStore, elsewhere: str) -> None:
    run_cli("copy", store.url, elsewhere)
    go_on(open_store(elsewhere), 40, at=40)
    before = keys(elsewhere)
    assert run_cli("copy", store.url, elsewhere).code == 0
    assert keys(elsewhere) == before


@pytest.mark.parametrize("seed", range(12))
def test_a_backup_keeps_what_its_source_deletes_and_is_never_refused(
    store: MemoryStore, elsewhere: str, seed: int
) -> None:
    choose = random.Random(seed)
    run = hf.Run(store)
    had: set[Version] = set()
    run.pin(20)  # so that they have something in common
    for _ in range(12):
        what = choose.randrange(5)
        if what == 0:
            go_on(store, 40, choose.choice([7, 10, 20]))
        elif what == 1:
            go_on(store, 20, 10, at=choose.choice(run.line()).step)
        elif what == 2:
            run.retain(hf.KeepLast(choose.choice([1, 2, 3])))
        elif what == 3:
            run.retain(hf.KeepLast(1) | hf.KeepEvery(50))
        else:
            answer = run_cli("copy", store.url, elsewhere)
            assert answer.code == 0, answer.err
            had |= set(run.listing().versions)
            assert set(hf.Run(elsewhere).listing().versions) == had
            assert hf.Run(elsewhere).line()[-1] == run.line()[-1]
            if choose.random() < 0.5:
                run.sweep(abandoned=True, grace=0)
    assert len(had) > 3


@pytest.mark.parametrize("seed", range(12))
def test_after_a_sweep_of_what_was_abandoned_the_message_says_what_to_do(
    store: MemoryStore, elsewhere: str, seed: int
) -> None:
    """It cannot be told from a copy that went on by itself; but it can be said."""
    choose, refused = random.Random(seed), 0
    run, to = hf.Run(store), open_store(elsewhere)
    had = set(run.listing().versions)
    run_cli("copy", store.url, elsewhere)
    for _ in range(8):
        at = choose.choice([None, *(v.step for v in run.line())])
        go_on(store, 20, 10, at=at)
        if choose.random() < 0.7:
            run.sweep(abandoned=True, grace=0)
        had |= set(run.listing().versions)
        answer = run_cli("copy", store.url, elsewhere)
        if answer.code == 8:
            refused += 1
            assert "seem to have both continued training" in answer.err
            records = [k for k in keys(store.url) if k.startswith("branch-") and k in answer.err]
            assert records
            assert f"copy {' and '.join(records)} into {elsewhere} by hand" in answer.err
            for key in records:
                to.put_if_absent(key, store.get(key, 1 << 20))
            answer = run_cli("copy", store.url, elsewhere)
        assert answer.code == 0, answer.err
        assert hf.Run(to).line() == run.line()
        assert set(hf.Run(to).listing().versions) == had
    assert refused > 0


def test_a_copy_that_went_on_is_not_told_of_sweeps(store: MemoryStore, elsewhere: str) -> None:
    run_cli("copy", store.url, elsewhere)
    go_on(store, 40)
    go_on(open_store(elsewhere), 25, 25)
    assert "sweep" not in run_cli("copy", store.url, elsewhere).err


@pytest.mark.parametrize("seed", range(12))
def test_two_that_both_went_on_are_always_told_apart(
    store: MemoryStore, elsewhere: str, seed: int
) -> None:
    choose = random.Random(seed)
    run_cli("copy", store.url, elsewhere)
    for each in (store, open_store(elsewhere)):
        every = choose.choice([1, 2, 3, 7])
        for _ in range(choose.choice([1, 2])):
            at = choose.choice([None, None, *(v.step for v in hf.Run(each).line())])
            go_on(each, every * choose.choice([1, 2]), every, at)
    for a, b in ((store.url, elsewhere), (elsewhere, store.url)):
        before = keys(b)
        assert run_cli("copy", a, b).code == 8
        assert keys(b) == before


def test_a_run_is_not_copied_into_a_snapshot(run: str, store: MemoryStore, tmp_path: Path) -> None:
    hf.save(tmp_path / "b" / "version_4", {"n": 1})
    hf.save(tmp_path / "lone", {"n": 1})
    before = keys(str(tmp_path))
    for to in ("b/version_4", "b/version_4/", "b/version_4/.", "b/version_9", "lone"):
        answer = run_cli("copy", run, f"{tmp_path}/{to}")
        assert answer.code == 8, to
        assert "nothing was changed" in answer.err
    assert run_cli("copy", run, f"{run}-more/version_4").code == 8
    assert keys(str(tmp_path)) == before


def test_what_is_called_like_a_version_is_that_version_whatever_lies_in_it(
    store: MemoryStore,
) -> None:
    for stat in list(store.list("version_20")):
        inner = stat.key.replace("version_20", "version_40/version_20")
        store.put_if_absent(inner, store.get(stat.key, 1 << 20))
    answer = run_cli("ls", f"{store.url}/version_40")
    assert answer.code == 4
    assert "is one snapshot, not a run" in answer.err
    for verb in ("verify", "show"):
        answer = run_cli(verb, f"{store.url}/version_40")
        assert answer.code == 0
        assert "Delete" not in answer.out + answer.err


def test_a_damaged_manifest_is_moved_away_and_copied_back(run: str, store: MemoryStore) -> None:
    to = f"{run}-copied"
    run_cli("copy", run, to)
    flip_bit(store, f"version_40/{MANIFEST}")
    answer = run_cli("copy", to, run)
    assert answer.code == 8
    assert f"Move its {MANIFEST} away, and nothing else" in answer.err
    store.delete(f"version_40/{MANIFEST}")
    assert run_cli("copy", to, run).code == 0
    assert keys(run) == keys(to)
    assert run_cli("verify", run).code == 0


# -- beside retention ----------------------------------------------------------------------------


def copied(run: hf.Run) -> list[object]:
    made = _copy_run(run, run.listing(), hf.Run(MemoryStore()), quiet=True)
    assert made.damaged == []
    return list(made.copied)


@pytest.mark.parametrize("damage", ["loses", "refuses"])
def test_what_the_other_store_loses_is_no_deletion(store: MemoryStore, damage: str) -> None:
    to = HookedStore(MemoryStore())

    def lose(method: str, key: str) -> None:
        if key.endswith(".index.json") and method == "put_if_absent":
            to.inner.delete(key.replace(".index.json", ".safetensors"))

    def refuse(method: str, key: str) -> None:
        if method == "commit":
            raise NotFound("the share is gone", key=key, store="elsewhere")

    run = hf.Run(store)
    if damage == "loses":
        to.after = lose
        told = _copy_run(run, run.listing(), hf.Run(to), quiet=True)
        assert [type(e) for _, e in told.damaged] == [FormatError] * 3
    else:
        to.before = refuse
        with pytest.raises(NotFound, match="the share is gone"):
            _copy_run(run, run.listing(), hf.Run(to), quiet=True)
    assert hf.Run(to.inner).listing().versions == []


def checked(run: hf.Run) -> list[object]:
    found, _ = _verify_run(run, run.listing(), quiet=True)
    assert [c.problems for c in found] == [()] * len(found)
    return list(found)


def looked_at(run: hf.Run) -> list[object]:
    entries = list_versions(run, run.listing()).entries
    assert [e.problem for e in entries] == [None] * len(entries)
    return list(entries)


@pytest.mark.parametrize("use", [copied, checked, looked_at])
def test_what_is_deleted_meanwhile_is_no_damage(use: Callable[[hf.Run], list[object]]) -> None:
    """Retention is let in before every call in turn."""
    outcomes = Counter[int]()
    for at in itertools.count(1):
        store, calls = HookedStore(make_run(MemoryStore())), itertools.count(1)

        def retain(
            method: str,
            key: str,
            store: HookedStore = store,
            n: Iterator[int] = calls,
            at: int = at,
        ) -> None:
            if next(n) == at:
                hf.Run(store.inner).retain(hf.KeepLast(1))

        store.before = retain
        outcomes[len(use(hf.Run(store)))] += 1
        if next(calls) <= at:
            break
    assert outcomes.keys() == {1, 2, 3}
