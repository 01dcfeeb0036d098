"""The life of a run that spreads its shards: saves, retention, pins, branches, and sweeps."""

import os
import shutil
from collections import Counter

import numpy as np
import pytest

import limpet
from limpet.errors import FormatError, LimpetError, ManifestInvalid, StoreError
from limpet.format import names
from limpet.format.manifest import decode_manifest
from limpet.format.names import Version, index_name, shard_name
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps, KeepBest, KeepLast
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.testing.contract import keys, put
from tests.crash.promises import check_promises
from tests.forging import manifest_key, save_to_files, seal, sealed_content
from tests.spread_stores import shards_in, spread_over
from tests.trainings import initial_state, state_after, states_equal, train
from tests.unreliable_stores import HookedStore

ATTEMPT = "0c9d1e2f3a4b"
LATER = 2e12


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "run")


def save_steps(store, last_step, spread=0, **options):
    state, store = initial_state(), spread_over(store, spread)
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(1), **options)
    with ckpt:
        ckpt.resume()
        while state["progress"].step < last_step:
            train(state, ckpt, state["progress"].step + 1)
            ckpt.wait()
    return Run(store)


def test_the_life_of_a_run(store):
    run = save_steps(store, 6, spread=16, keep=KeepLast(3))
    *manifests, end, newest = (k for k in keys(store) if not k.startswith("spread"))
    assert [*manifests, newest] == [f"version_{n}/manifest.json" for n in (4, 5, 6)]
    assert end.startswith("version_6/eval-training.")
    assert len(shards_in(store)) == 6
    assert all(key.startswith("spread-") for key in shards_in(store))
    run = save_steps(store, 8, keep=KeepLast(3))  # without the option
    assert [v.step for v in run.line()] == [6, 7, 8]
    assert sum(key.startswith("spread-") for key in shards_in(store)) == 2
    assert len(run.spread_folders()) >= 1
    state, store = initial_state(), spread_over(store, 16)
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        ckpt.resume(at=7)
        train(state, ckpt, 9)
    assert [str(v) for v in run.line()] == ["version_6", "version_7", "version_8.1", "version_9.1"]
    assert states_equal(state, state_after(9))
    run.add_metrics(9, {"val": 1.0})
    run.add_metrics(7, {"val": 0.5})
    run.pin(6)
    assert run.retain(KeepBest(1, "val")) == [Version(8, 1)]
    assert run.metrics(7)["val"] == 0.5
    run.sweep(abandoned=True, grace=0, now=LATER)
    assert [str(v) for v in run.listing().versions] == ["version_6", "version_7", "version_9.1"]
    assert len(shards_in(store)) == 6
    run.delete(Version(7))
    assert len(shards_in(store)) == 4
    run.unpin(6)
    assert check_promises(store, [6, 9]) == [6, 9]


def test_incremental_versions(store):
    state = {"frozen": np.arange(40_000.0), "x": np.zeros(3), "progress": limpet.Progress()}
    with limpet.Checkpointer(
        spread_over(store, 16), state, save=EverySteps(1), keep=KeepLast(2), incremental=True
    ) as ckpt:
        for step in range(5):
            state["x"] += step
            ckpt.step()
            ckpt.wait()
    run = Run(store)
    latest = run.latest()
    assert latest.bases == {Version(1)}
    assert [v.step for v in run.listing().versions] == [1, 4, 5]
    assert len(shards_in(store)) == 6
    assert latest.verify().ok
    assert latest["x"][:].tolist() == [10.0] * 3
    with pytest.raises(LimpetError, match="refers to it"):
        run.delete(Version(1))


def test_a_copy_by_another_tool_is_read(tmp_path):
    """As from S3 with "aws s3 sync"."""
    source = MemoryStore()
    save_steps(source, 2, spread=16)
    for key in keys(source):
        path = tmp_path / "copy" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.get(key, 1 << 20))
    state = initial_state()
    limpet.load(tmp_path / "copy" / "version_2", into=state)
    assert states_equal(state, state_after(2))
    run = Run(tmp_path / "copy")
    assert [s.verify().ok for s in run.snapshots()] == [True] * 2
    # one version of a run that is not spread, copied into one that is, and the other way round
    plain = save_steps(LocalStore(tmp_path / "plain"), 3)
    shutil.copytree(tmp_path / "plain" / "version_3", tmp_path / "copy" / "version_3")
    latest = Run(tmp_path / "copy").latest()
    assert latest.step == 3
    assert latest.verify().ok
    run.delete(Version(2))
    assert not (tmp_path / "copy" / "version_2").exists()
    assert [s.verify().ok for s in plain.snapshots()] == [True] * 3


def place(folder, name):
    return names.spread_path(folder, name, 4).removeprefix("../")


def test_sweep_removes_what_a_killed_save_left(store):
    run = save_steps(store, 1, spread=4)
    for rank in range(8):  # a killed save of version 2, which has no folder of its own
        put(store, place("version_2", shard_name(rank, 8, ATTEMPT)), b"123")
        put(store, place("version_1", index_name(rank, 8, ATTEMPT)), b"12")
    upload = store.put(place("version_2", shard_name(0, 1, "000000000000")), 9)
    others = [
        "spread-00/notes.txt",
        "spread-00/version_2/notes.txt",
        "spread-07/a",
        "a/spread-01/b",
    ]
    for key in others:
        put(store, key, b"somebody else's")
    before = keys(store)
    run = Run(store)
    kept = run.sweep()
    assert kept.removed == []
    assert len([k for k, _ in kept.kept if ATTEMPT in k]) == 16
    with pins.hold_pin(run.location(Version(2)), ATTEMPT):
        kept = run.sweep(grace=0, now=LATER)
    assert {reason for key, reason in kept.kept if ATTEMPT in key} == {"a save is in progress"}
    assert len(kept.removed) == 1  # the upload
    planned = run.sweep(grace=0, now=LATER, dry_run=True)
    assert keys(store) == before
    swept = Run(store).sweep(grace=0, now=LATER)
    assert swept.removed == planned.removed
    assert (len(swept.removed), swept.nbytes) == (16, 8 * 3 + 8 * 2)
    assert {*keys(store)} == {key for key in before if ATTEMPT not in key}
    assert {*others} <= {*keys(store)}
    assert list(store.partials("")) == []
    upload.abort()
    assert [s.verify().ok for s in run.snapshots()] == [True]


def test_a_folder_with_an_unreadable_manifest_is_kept(store):
    run = save_steps(store, 2, spread=4)
    store.delete("version_2/manifest.json")
    put(store, "version_2/manifest.json", b"{")
    run = Run(store)
    kept = run.sweep(grace=0, now=LATER)
    assert kept.removed == []
    assert len(kept.kept) == 4  # also the end of the training
    assert len(shards_in(store)) == 4


def shard_path(tmp_path, step):
    """Make a run with three versions. Return the path of the shard of one of them."""
    run = save_steps(LocalStore(tmp_path / "run"), 3, spread=4)
    [name] = [s.name for s in reader_of(run.open(Version(step))).manifest.shards]
    [path] = (tmp_path / "run").glob(f"spread-*/version_{step}/{name}")
    return path


@pytest.mark.parametrize("level", ["spread", "version", "shard"])
def test_nothing_is_deleted_in_a_linked_folder(level, tmp_path):
    path = shard_path(tmp_path, 1)
    linked = {"spread": path.parents[1], "version": path.parent, "shard": path}[level]
    shutil.move(linked, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", linked)
    before = keys(LocalStore(tmp_path / "run"))
    run = Run(tmp_path / "run")
    assert [s.verify().ok for s in run.snapshots()] == [True] * 3
    with pytest.raises(LimpetError, match="symbolic link"):
        run.delete(Version(1))
    assert run.retain(KeepLast(1)) == [Version(2)]
    assert set(before) - set(keys(run.store)) <= {k for k in before if "version_2/" in k}
    assert linked.is_symlink()


@pytest.mark.parametrize("level", ["version", "shard"])
def test_a_version_to_which_a_link_leads_is_not_deleted(level, tmp_path):
    path = shard_path(tmp_path, 3)
    target = path.parents[1] / "version_1"
    target.mkdir(exist_ok=True)
    for file in [path] if level == "shard" else [*path.parent.iterdir()]:
        file.rename(target / file.name)
    if level == "version":
        path.parent.rmdir()
        os.symlink(target, path.parent)
    else:
        os.symlink(target / path.name, path)
    assert Run(tmp_path / "run").retain(KeepLast(1)) == [Version(2)]


def test_files_of_others_are_not_those_of_the_run(store):
    run = save_steps(store, 2, spread=4)
    others = [
        "spread-00/version_1/note",
        "spread-00/version_1/manifest.json",
        "spread-01/spread.json",
        "spread-02/writer.json",
    ]
    for key in others:
        put(store, key, b"somebody else's")
    run.sweep(grace=0, now=LATER)
    run.delete(Version(1))
    assert {*others} <= {*keys(store)}
    assert len(shards_in(store)) == 2


def counting_store():
    """Return a store, and the number of its requests of each kind."""
    store, counts = HookedStore(MemoryStore()), Counter[str]()
    store.before = lambda method, key: counts.update([method])
    return store, counts


def test_a_training_makes_no_more_requests():
    """Saves, retention by metrics, resuming."""
    counts = []
    for count in (0, 16):
        store, found = counting_store()
        save_steps(store, 6, count, keep=KeepLast(2) | KeepBest(1, "loss"))
        save_steps(store, 8, count, keep=KeepLast(2) | KeepBest(1, "loss"))
        counts.append(found)
    plain, spread = counts
    assert spread <= plain


def test_a_store_that_is_slow_lists_the_folders_only_to_sweep():
    store, counts = counting_store()
    run = save_steps(store, 3, spread=16)
    counts.clear()
    run.retain(KeepLast(1))
    assert counts["list"] < 16
    assert len(shards_in(store)) == 2
    counts.clear()
    run.sweep()
    assert counts["list"] < 10


def test_the_versions_of_one_rank_and_the_ranks_of_one_version_are_spread_evenly():
    def folders(paths):
        return Counter(path.split("/")[1] for path in paths)

    versions = folders(
        names.spread_path(f"version_{100 * n}", shard_name(0, 1, ATTEMPT), 16) for n in range(1600)
    )
    assert len(versions) == 16
    assert max(versions.values()) < 2 * 100
    for name in (shard_name, index_name):
        ranks = folders(names.spread_path("version_1", name(r, 64, ATTEMPT), 16) for r in range(64))
        assert {*ranks.values()} == {4}


def test_a_snapshot_that_is_not_in_a_run_is_not_spread():
    store = MemoryStore()
    limpet.save(spread_over(store, 16).at("version_7"), {"x": 1}, step=7)
    assert {key.partition("/")[0] for key in keys(store)} == {"version_7"}


def test_a_snapshot_that_is_opened_without_its_run_says_so():
    store = MemoryStore()
    save_steps(store, 1, spread=2)
    with pytest.raises(FormatError, match="RUN/version_N"):
        limpet.load(store.at("version_1"))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.replace("version_7", "version_6"),
        lambda path: path.replace("spread-", "spread-x"),
        lambda path: path.replace("../spread-", "../../spread-"),
        lambda path: path.removeprefix("../"),
        lambda path: "../version_7/" + path.rpartition("/")[2],
        lambda path: path + "\n",
        lambda path: path.rpartition("/")[0] + "/manifest.json",
    ],
    ids=range(7),
)
def test_a_path_that_is_not_that_of_a_shard_of_the_version_is_refused(change):
    files = save_to_files({"x": np.arange(3)})
    key = manifest_key(files)
    content = sealed_content(files[key])
    [shard] = content["shards"]
    path = f"../spread-0e/version_7/{shard['path']}"
    shard["path"] = path
    assert decode_manifest(seal(content), "f")[0].shards[0].path == path
    shard["path"] = change(path)
    with pytest.raises(ManifestInvalid):
        decode_manifest(seal(content), "f")


def test_a_local_tier_keeps_shards_in_the_folder_and_promotes_them_to_the_spread_ones(tmp_path):
    store = MemoryStore()
    tiers = [limpet.LocalTier(tmp_path / "disk")]
    run = save_steps(store, 2, spread=4, tiers=tiers)
    assert all(key.startswith("spread-") for key in shards_in(store))
    assert not [*(tmp_path / "disk").rglob("spread-*")]
    assert [s.verify().ok for s in run.snapshots()] == [True] * 2


@pytest.mark.parametrize("count", [1, -1, 257, 16.0, "16", True])
@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_an_invalid_number_of_folders_is_refused(url, count):
    with pytest.raises(StoreError, match=r"Invalid value for spread=.*2 to 256"):
        limpet.open_store(url, spread=count)


def test_the_folders_are_known_before_the_first_version():
    """For those who ask AWS to prepare the prefixes."""
    folders = Run(spread_over(MemoryStore("s"), 16)).spread_folders()
    assert (len(folders), folders[0], folders[15]) == (
        16, "memory://s/spread-00", "memory://s/spread-0f"
    )  # fmt: skip
    assert Run(MemoryStore()).spread_folders() == []
