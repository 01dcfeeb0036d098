"""``limpet copy``."""

import itertools
import random
from collections import Counter
from weakref import WeakSet

import numpy as np
import pytest

import limpet as hf
from limpet.cli.verbs.copy import _copy_run
from limpet.cli.verbs.verify import verify_run
from limpet.errors import AlreadyExists, CommitError, FormatTooNew, NotFound
from limpet.format.names import MANIFEST, Version
from limpet.format.records import BecameBest
from limpet.run.overview import list_versions
from limpet.run.policy import EverySteps, KeepEvery, KeepLast
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import make_run, run_cli, train_branch
from tests.trainings import flip_bit, leave_from, shard_of, train, training
from tests.unreliable_stores import HookedStore


def keys(url):
    return [s.key for s in open_store(url).list("")]


def test_json_keys_are_stable(run, empty_url):
    report = run_cli("copy", run, empty_url, "--json").json
    assert list(report) == [
        "from", "to", "copied", "present", "damaged", "branches", "evaluations", "pins",
        "bytes", "seconds",
    ]  # fmt: skip
    assert [list(c) for c in report["copied"]] == [["snapshot", "step", "bytes"]] * 3
    assert [c["step"] for c in report["copied"]] == [20, 40, 60]


def test_a_run_with_branches(store, tmp_path):
    train_branch(store, start=40, last_step=80)
    to = tmp_path / "runs" / "copy"
    assert run_cli("copy", store.url, to).code == 0
    assert keys(str(to)) == keys(store.url)
    source, copied = run_cli("ls", store.url, "--json").json, run_cli("ls", to, "--json").json
    assert copied["latest"] == source["latest"] == "version_80.1"
    assert [v["on_line"] for v in copied["versions"]] == [v["on_line"] for v in source["versions"]]
    assert run_cli("verify", to).code == 0


def test_a_repeated_copy_copies_only_new_versions(store, empty_url):
    run_cli("copy", store.url, empty_url)
    train_branch(store, start=40, last_step=80)
    report = run_cli("copy", store.url, empty_url, "--json").json
    assert [c["step"] for c in report["present"]] == [20, 40, 60]
    assert [c["step"] for c in report["copied"]] == [60, 80]
    assert report["branches"] == 1
    assert "already present" in run_cli("copy", store.url, empty_url).out


def test_evaluations_and_lasting_pins_are_copied_with_a_run(store, empty_url):
    """A copy has the same best version as its original, and the same pinned versions."""
    run = hf.Run(store)
    run.add_metrics(20, {"val": 0.25, "odd": float("nan")})
    run.add_metrics(40, {"val": 0.5})
    run.put_record(BecameBest, "training", 40, metric="val", mode="min")  # is no evaluation
    run.pin(40)
    for added in (0, 1):
        report = run_cli("copy", store.url, empty_url, "--json").json
        assert (report["evaluations"], report["pins"]) == (2 + added, 1)
        copied = hf.Run(empty_url)
        assert keys(empty_url) == keys(store.url)
        assert [repr(r) for r in copied.records()] == [repr(r) for r in run.records()]
        assert copied.pins() == run.pins()
        run.add_metrics(60, {"val": 0.125})
    assert run_cli("verify", empty_url).code == 0


def count_copied(one, two):
    run = hf.Run(one)
    return len(_copy_run(run, run.listing(), hf.Run(two), True).copied)


def test_a_backup_continues_if_the_source_has_deleted_all_its_versions():
    """For example, an hourly backup of a training that saves often and keeps few versions."""
    source, backup, other = MemoryStore(), MemoryStore(), MemoryStore()
    with training(source, EverySteps(1), KeepLast(2)) as (state, ckpt):
        for steps in (3, 6, 9):
            train(state, ckpt, steps)
            ckpt.wait()
            assert count_copied(source, backup) == 2
    assert [v.step for v in hf.Run(backup).line()] == [2, 3, 5, 6, 8, 9]
    with training(other, EverySteps(1), KeepLast(2)) as (state, ckpt):
        train(state, ckpt, 12)
    with pytest.raises(
        AlreadyExists, match="not an earlier copy"
    ):  # newer, but from a different start
        count_copied(other, backup)
    with training(source, EverySteps(1), KeepLast(2)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 12)
    with training(backup, EverySteps(1), KeepLast(2)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 20)
    with pytest.raises(AlreadyExists, match="not an earlier copy"):
        count_copied(source, backup)


def test_different_versions_of_one_step_are_not_mixed(empty_url):
    """Retention deleted the versions between a version and its parent. Only a name is left."""
    one, two = MemoryStore(), open_store(empty_url)
    with training(one, EverySteps(3), KeepLast(1) | KeepEvery(3)) as (state, ckpt):
        train(state, ckpt, 3)
    assert count_copied(one, two) == 1
    for store, steps in ((one, (12,)), (two, (12, 13))):
        with training(store, EverySteps(100), KeepLast(1) | KeepEvery(3)) as (state, ckpt):
            ckpt.resume()
            for step in steps:
                train(state, ckpt, step)
                state["history"] = [float(id(store))]
                ckpt.save()
    hf.Run(two).delete(Version(12))
    before = keys(empty_url)
    for a, b in ((one, two), (two, one)):
        with pytest.raises(AlreadyExists, match="not an earlier copy"):
            count_copied(a, b)
    assert keys(empty_url) == before


def test_nothing_is_overwritten(run, empty_url):
    hf.save(f"{empty_url}/version_40", {"n": 1})
    before = keys(empty_url)
    for arguments in ((f"{run}/version_40", f"{empty_url}/version_40"), (run, empty_url)):
        result = run_cli("copy", *arguments)
        assert result.code == 8
        assert "nothing was changed" in result.err
    assert keys(empty_url) == before


def test_two_trainings_are_not_mixed(run, empty_url):
    hf.save(f"{empty_url}/version_7", {"n": 1})
    result = run_cli("copy", run, empty_url)
    assert result.code == 8
    assert "another training" in result.err
    other = open_store(empty_url + "-other")
    make_run(other)
    assert run_cli("copy", run, other.url).code == 8


def test_a_version_keeps_its_step(run, empty_url):
    assert run_cli("copy", f"{run}/version_40", f"{empty_url}/version_50").code == 8
    assert keys(empty_url) == []
    assert run_cli("copy", f"{run}/version_40", f"{empty_url}/best").code == 0


def test_a_damaged_snapshot_is_not_copied(store, empty_url):
    flip_bit(store, shard_of(store, "version_40"))
    result = run_cli("copy", f"{store.url}/version_40", f"{empty_url}/version_40")
    assert result.code == 3
    assert result.out == ""
    assert f"version_40/{MANIFEST}" not in keys(empty_url)


def test_damaged_versions_of_a_run_are_reported_and_not_copied(store, empty_url):
    flip_bit(store, shard_of(store, "version_40"))
    flip_bit(store, f"version_20/{MANIFEST}")
    result = run_cli("copy", store.url, empty_url, "--json")
    assert result.code == 3
    assert [d["version"] for d in result.json["damaged"]] == ["version_20", "version_40"]
    assert [c["step"] for c in result.json["copied"]] == [60]
    assert run_cli("verify", empty_url).code == 0
    out = run_cli("copy", store.url, empty_url).out
    assert "NOT copied       version_20" in out
    assert out.endswith("Nothing copied; 1 already present; 2 NOT copied\n")


def test_a_run_of_damaged_versions_is_not_copied(store, tmp_path):
    for step in (20, 40, 60):
        flip_bit(store, shard_of(store, f"version_{step}"))
    result = run_cli("copy", store.url, tmp_path)
    assert result.code == 3
    assert result.out.endswith("\nNothing copied; 3 NOT copied\n")
    assert run_cli("copy", f"{store.url}@20", tmp_path / "version_20").code == 3
    assert list(tmp_path.iterdir()) == []


def continue_training(store, steps, every=20, at=None):
    """Continue training from the newest version, or from that of step ``at``."""
    with training(store, EverySteps(every), at_end=False) as (state, ckpt):
        ckpt.resume(at=at)
        train(state, ckpt, state["progress"].step + steps)


@pytest.mark.parametrize(
    ("source_change", "copy_change", "message"),
    [
        ({"steps": 40}, {"steps": 25, "every": 25}, "version_75"),
        ({"steps": 25, "every": 25}, {"steps": 40}, "version_100"),
        ({"steps": 40, "at": 20}, {"steps": 40, "every": 15}, "version_90"),
        ({"steps": 40}, {"steps": 40, "at": 20}, "branch-1.json"),
        ({}, {"steps": 20}, "version_80"),
        ({"steps": 20, "at": 20}, {"steps": 20, "at": 40}, "branch-1.json"),
    ],
    ids=["between", "behind", "source back", "copy back", "record alone", "both back"],
)
def test_two_runs_that_diverged_are_not_mixed(
    store, empty_url, source_change, copy_change, message
):
    run_cli("copy", store.url, empty_url)
    for each, change in ((store, source_change), (open_store(empty_url), copy_change)):
        if change:
            continue_training(each, **change)
        else:  # like a training that stops before its first save
            snapshot = hf.Run(each).open(Version(20))
            leave_from(hf.Run(each), snapshot, Version(20), "on request")
    for a, b in ((store.url, empty_url), (empty_url, store.url)):
        before = keys(b)
        result = run_cli("copy", a, b)
        assert result.code == 8
        assert "nothing was changed" in result.err
        assert keys(b) == before
        if b == empty_url:
            assert message in result.err


def test_a_damaged_version_of_the_source_proves_nothing(store, empty_url):
    """Both continued to step 80, and that of the source is damaged: nobody knows whose it is."""
    run_cli("copy", store.url, empty_url)
    continue_training(open_store(empty_url), 20)
    continue_training(store, 40)
    flip_bit(store, f"version_80/{MANIFEST}")
    before = keys(empty_url)
    assert run_cli("copy", store.url, empty_url).code == 8
    assert keys(empty_url) == before


def test_versions_added_to_a_copy_can_be_copied_back(store, empty_url):
    run_cli("copy", store.url, empty_url)
    continue_training(open_store(empty_url), 40)
    continue_training(open_store(empty_url), 40, at=80)
    assert [c["step"] for c in run_cli("copy", empty_url, store.url, "--json").json["copied"]] == [
        80, 100, 100, 120,
    ]  # fmt: skip
    assert keys(store.url) == keys(empty_url)
    continue_training(store, 20)
    assert run_cli("copy", store.url, empty_url).code == 0


def test_a_copy_that_is_ahead_is_not_changed(store, empty_url):
    run_cli("copy", store.url, empty_url)
    continue_training(open_store(empty_url), 40, at=40)
    before = keys(empty_url)
    assert run_cli("copy", store.url, empty_url).code == 0
    assert keys(empty_url) == before


@pytest.mark.parametrize("seed", range(8))
def test_a_backup_continues_and_keeps_what_its_source_deletes(store, empty_url, seed):
    """Retention has deleted what the last copy had, and a sweep what the training left."""
    rng, run, to = random.Random(seed), hf.Run(store), open_store(empty_url)
    backup, saved = hf.Run(to), set(run.listing().versions)
    run_cli("copy", store.url, empty_url)
    for _ in range(8):
        at = rng.choice([None, *(v.step for v in run.line())])
        continue_training(store, rng.choice([20, 40, 60]), 10, at=at)
        run.retain(hf.KeepLast(rng.choice([1, 2, 3])))
        if rng.random() < 0.7:
            run.sweep(abandoned=True, grace=0)
        saved |= set(run.listing().versions)
        result = run_cli("copy", store.url, empty_url)
        assert result.code == 0, result.err
        assert backup.line()[-len(run.line()) :] == run.line()
        assert set(backup.listing().versions) == saved


def test_a_run_is_not_copied_into_a_snapshot(run, store, tmp_path):
    hf.save(tmp_path / "b" / "version_4", {"n": 1})
    hf.save(tmp_path / "lone", {"n": 1})
    before = keys(str(tmp_path))
    for to in ("b/version_4", "b/version_4/", "b/version_4/.", "b/version_9", "lone"):
        result = run_cli("copy", run, f"{tmp_path}/{to}")
        assert result.code == 8, to
        assert "nothing was changed" in result.err
    assert run_cli("copy", run, f"{run}-more/version_4").code == 8
    assert keys(str(tmp_path)) == before


def test_a_folder_named_like_a_version_is_that_version(store):
    for stat in list(store.list("version_20")):
        inner = stat.key.replace("version_20", "version_40/version_20")
        store.put_if_absent(inner, store.get(stat.key, 1 << 20))
    result = run_cli("ls", f"{store.url}/version_40")
    assert result.code == 4
    assert "is one snapshot, not a run" in result.err
    for verb in ("verify", "show"):
        result = run_cli(verb, f"{store.url}/version_40")
        assert result.code == 0
        assert "Delete" not in result.out + result.err


def test_a_damaged_manifest_can_be_replaced_from_a_copy(run, store):
    to = f"{run}-copied"
    run_cli("copy", run, to)
    flip_bit(store, f"version_40/{MANIFEST}")
    result = run_cli("copy", to, run)
    assert result.code == 8
    assert f"Move its {MANIFEST} away, and nothing else" in result.err
    store.delete(f"version_40/{MANIFEST}")
    assert run_cli("copy", to, run).code == 0
    assert keys(run) == keys(to)
    assert run_cli("verify", run).code == 0


def copy_and_check(run):
    copy_result = _copy_run(run, run.listing(), hf.Run(MemoryStore()), quiet=True)
    assert copy_result.damaged == []
    return list(copy_result.copied)


@pytest.mark.parametrize("damage", ["loses", "fails"])
def test_files_lost_by_the_destination_are_errors(store, damage):
    to = HookedStore(MemoryStore())

    def lose(method, key):
        if key.endswith(".index.json") and method == "put_if_absent":
            to.inner.delete(key.replace(".index.json", ".safetensors"))

    def fail(method, key):
        if method == "commit":
            raise NotFound("the file share is unavailable", key=key, store="elsewhere")

    run = hf.Run(store)
    if damage == "loses":
        to.after = lose
        with pytest.raises(CommitError, match=r"files of the copy .* are not what was written"):
            _copy_run(run, run.listing(), hf.Run(to), quiet=True)
    else:
        to.before = fail
        with pytest.raises(NotFound, match="the file share is unavailable"):
            _copy_run(run, run.listing(), hf.Run(to), quiet=True)
    assert hf.Run(to.inner).listing().versions == []


def verify_and_check(run):
    found = verify_run(run, run.listing(), quiet=True)
    assert [c.problems for c in found] == [()] * len(found)
    return list(found)


def list_and_check(run):
    entries = list_versions(run, run.listing()).entries
    assert [e.problem for e in entries] == [None] * len(entries)
    return list(entries)


@pytest.mark.parametrize("use", [copy_and_check, verify_and_check, list_and_check])
def test_concurrently_deleted_versions_are_not_damaged(use):
    """Run retention before each call in turn."""
    results_by_count = Counter[int]()
    for at in itertools.count(1):
        store, calls = HookedStore(make_run(MemoryStore())), itertools.count(1)

        def retain(method, key, store=store, n=calls, at=at):
            if next(n) == at:
                hf.Run(store.inner).retain(hf.KeepLast(1))

        store.before = retain
        results_by_count[len(use(hf.Run(store)))] += 1
        if next(calls) <= at:
            break
    assert results_by_count.keys() == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, True])
def test_two_concurrent_copies_of_a_run_both_succeed(incremental):
    """Copy the run a second time before each call on the destination in turn."""
    run, copied_counts = hf.Run(MemoryStore()), set[int]()
    state = {"frozen": np.arange(100_000), "progress": hf.Progress()}
    with hf.Checkpointer(run.store, state, save=EverySteps(20), incremental=incremental) as ckpt:
        for _ in range(60):
            ckpt.step()
    assert bool(run.open(Version(60)).bases) == incremental
    run.add_metrics(20, {"extra": 1.0})
    run.pin(40)
    versions = run.listing().versions
    for at in itertools.count(1):
        to, calls = HookedStore(MemoryStore()), itertools.count(1)

        def copy_too(method, key, to=to, n=calls, at=at):
            if next(n) == at:
                _copy_run(run, run.listing(), hf.Run(to.inner), quiet=True)

        to.before = copy_too
        result = _copy_run(run, run.listing(), hf.Run(to), quiet=True)
        assert result.damaged == []
        assert len(result.copied) + len(result.present) == len(versions)
        copied_counts.add(len(result.copied))
        copy = hf.Run(to.inner)
        assert copy.listing().versions == versions
        assert all(copy.open(v).verify().ok for v in versions)
        assert copy.metrics(20)["extra"] == 1.0
        assert copy.pins() == [Version(40)]
        if next(calls) <= at:
            break
    assert copied_counts == {*range(len(versions) + 1)}


def test_the_versions_of_a_run_are_not_all_in_memory(empty_url, monkeypatch):
    """A snapshot has its tree and its indexes in memory: megabytes for a large model."""
    for step in range(1, 21):
        hf.save(f"{empty_url}/a/version_{step}", {"x": np.full(4, step)}, step=step)
    alive, most = WeakSet[SnapshotReader](), 0
    original = SnapshotReader.__init__

    def init(self, *arguments):
        nonlocal most
        original(self, *arguments)
        alive.add(self)
        most = max(most, len(alive))

    monkeypatch.setattr(SnapshotReader, "__init__", init)
    copy = ("copy", f"{empty_url}/a", f"{empty_url}/b")
    for arguments in (copy, copy, ("ls", copy[2]), ("verify", copy[2])):
        most = 0
        assert run_cli(*arguments).code == 0
        assert 1 <= most <= 4, arguments


def test_an_evaluation_that_differs_does_not_stop_a_copy(store, empty_url):
    run = hf.Run(store)
    run.add_metrics(20, {"x": 1.0})
    assert run_cli("copy", store.url, empty_url).code == 0
    run.add_metrics(20, {"x": 2.0})
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 80)
    [key] = [k for k in keys(empty_url) if "/eval-metrics" in k]
    copy = open_store(empty_url)
    copy.delete(key)
    copy.put_if_absent(key, b"damaged")
    result = run_cli("copy", store.url, empty_url)
    assert result.code == 8
    assert "NOT copied       version_20/eval-" in result.out
    assert "version_80" in result.out
    copy.delete(key)
    assert run_cli("copy", store.url, empty_url).code == 0
    assert hf.Run(empty_url).metrics(20)["x"] == 2.0
    assert run_cli("verify", empty_url).code == 0


def test_a_copy_of_a_later_format_is_not_called_damaged(run, empty_url, monkeypatch):
    assert run_cli("copy", run, empty_url).code == 0
    original = SnapshotReader.check_files

    def check_files(self):
        if self.url.startswith(empty_url):
            raise FormatTooNew("its format is 9")
        original(self)

    monkeypatch.setattr(SnapshotReader, "check_files", check_files)
    result = run_cli("copy", run, empty_url)
    assert result.code == 8
    assert "a snapshot of a later format" in result.err
    assert "damaged" not in result.err
    assert "Use a newer Limpet" in result.err


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_nothing_is_written_to_an_address(kind, run, empty_url, tmp_path):
    url = empty_url if kind == "memory" else str(tmp_path)
    assert run_cli("copy", run, f"{url}/b").code == 0
    for arguments in (
        ("copy", f"{run}@20", f"{url}/b@20"),
        ("copy", run, f"{url}/b@20"),
        ("reshard", f"{run}@20", f"{url}/b@20", "--shards", "2"),
    ):
        result = run_cli(*arguments)
        assert result.code == 8
        assert "is the address of a version" in result.err
    assert run_cli("copy", f"{run}@20", f"{url}/other@20").code == 0  # no such run
    assert run_cli("show", f"{url}/b@20").code == 0
