"""The versions of a run: listing, the newest intact version, branches, sweep."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import limpet
from limpet import events
from limpet.buffers import shared_pool
from limpet.convert.copy import copy_snapshot
from limpet.errors import FormatTooNew, ManifestInvalid, NoSnapshot, NotFound
from limpet.format.digest import digest
from limpet.format.names import MANIFEST, Version, index_name, random_id, shard_name
from limpet.format.records import Branch, encode_record
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.run.address import open_version
from limpet.run.policy import EverySteps, KeepEvery, KeepLast
from limpet.run.run import Run
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from tests.trainings import flip_bit, leave_from, shard_of, train, trained_run, training
from tests.unreliable_stores import HookedStore

DAY = 24 * 3600.0


@pytest.fixture
def store():
    """Return a run with versions 20, 40, and 60."""
    return trained_run()


def steps(run):
    return [s.step for s in run.snapshots() if s.step is not None]


def branch_off(store, at, to):
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=at)
        train(state, ckpt, to)


def test_a_missing_run_has_no_versions():
    run = Run("memory://never-made")
    assert run.snapshots() == []
    assert run.latest() is None
    assert run.line() == run.line(branch=0) == []
    assert run.sweep().removed == []
    assert run.newest(lambda s: None, branch=0) == (None, [])
    with pytest.raises(NotFound):
        run.find(1)
    for at in (5, -5, 0):
        with pytest.raises(NoSnapshot, match=f"has no version of step {at} on .* found none"):
            run.newest(lambda s: None, at=at)


def test_a_folder_without_manifest_is_not_a_version(store):
    store.delete(f"version_60/{MANIFEST}")
    assert steps(Run(store)) == [20, 40]


def test_other_folders_and_files_are_not_versions(store):
    for key in ("version_007/manifest.json", "version_-1/manifest.json", "notes/manifest.json"):
        store.put_if_absent(key, b"{}")
    store.put_if_absent("branch-x.json", b"{}")
    store.put_if_absent("version_80", b"a file, not a folder")
    assert steps(Run(store)) == [20, 40, 60]


def test_latest_skips_damaged_and_truncated_versions(store):
    run = Run(store)
    flip_bit(store, f"version_60/{MANIFEST}")
    assert run.latest().step == 40
    key = shard_of(store, "version_40")
    raw = store.get(key, 1 << 30)
    store.delete(key)
    store.put_if_absent(key, raw[:-1])
    assert run.latest().step == 20


def test_a_run_without_intact_versions_raises_and_names_them(store):
    for step in (20, 40, 60):
        flip_bit(store, f"version_{step}/{MANIFEST}")
    with pytest.raises(NoSnapshot) as e:
        Run(store).latest()
    assert e.value.skipped == ("version_60", "version_40", "version_20")
    assert "version_20" in str(e.value)


def test_a_version_in_a_newer_format_is_never_skipped(store):
    key = f"version_60/{MANIFEST}"
    raw = store.get(key, 1 << 20).replace(b'{"limpet":1,', b'{"limpet":99,', 1)
    start = raw.index(b'"digest":"') + len('"digest":"')
    new_digest = digest(raw[:start] + b"0" * 32 + raw[start + 32 :])
    store.delete(key)
    store.put_if_absent(key, raw[:start] + new_digest.encode() + raw[start + 32 :])
    with pytest.raises(FormatTooNew, match="newer version of Limpet"):
        Run(store).latest()


def test_a_version_in_a_folder_of_another_name_is_damaged(store):
    for stat in list(store.list("version_60")):
        store.put_if_absent(stat.key.replace("_60", "_80"), store.get(stat.key, 1 << 30))
    with pytest.raises(ManifestInvalid, match=r"folder name of .* does not match its manifest"):
        Run(store).open(Version(80))
    assert Run(store).latest().step == 60


def test_versions_after_the_branch_point_are_abandoned(store):
    branch_off(store, at=20, to=40)
    run = Run(store)
    assert run.line() == [Version(20), Version(40, 1)]
    assert run.branch() == 1
    assert run.read_branch(1).from_version == "version_20"
    assert Version(60) in run.listing().versions  # kept until a sweep of abandoned versions


def test_a_branch_of_a_branch(store):
    branch_off(store, at=40, to=100)  # 40, then 60.1, 80.1, 100.1
    branch_off(store, at=80, to=100)  # branches off at 80.1
    assert [str(v) for v in Run(store).line()] == [
        "version_20",
        "version_40",
        "version_60.1",
        "version_80.1",
        "version_100.2",
    ]


def test_a_new_branch_is_current_before_its_first_version(store):
    branch_off(store, at=20, to=20)
    assert Run(store).line() == [Version(20)]


def test_a_damaged_branch_record_is_replaced_by_its_first_version(store):
    branch_off(store, at=20, to=60)
    line = Run(store).line()
    flip_bit(store, "branch-1.json")
    assert Run(store).line() == line
    store.delete("branch-1.json")
    assert Run(store).line() == line


def test_a_damaged_record_of_an_empty_branch_is_ignored(store):
    branch_off(store, at=20, to=20)
    flip_bit(store, "branch-1.json")
    assert [v.step for v in Run(store).line()] == [20, 40, 60]
    assert Run(store).branch() == 0
    snapshot = Run(store).open(Version(20))
    assert (
        leave_from(Run(store), snapshot, Version(20), "again") == 2
    )  # its number is not used again


def test_a_branch_from_itself_is_rejected(store):
    record = Branch(1, "version_20.1", "0" * 32, "2026-01-01T00:00:00+00:00", "")
    store.put_if_absent("branch-1.json", encode_record(record))
    with pytest.raises(ManifestInvalid, match="before 1"):
        Run(store).line()


def test_each_branch_gets_its_own_number(store):
    snapshot = Run(store).open(Version(20))
    numbers = {leave_from(Run(store), snapshot, Version(20), "x") for _ in range(3)}
    assert numbers == {1, 2, 3}


def make_branches(store):
    """Make the lineages 20 40 60, 20 40.1 60.1, and 20 40.1 60.2 (branches 0 to 2)."""
    branch_off(store, at=20, to=60)
    branch_off(store, at=40, to=60)
    return store


def test_the_lineage_of_each_branch(store):
    run = Run(make_branches(store))
    lines = [[str(v)[8:] for v in run.line(branch=b)] for b in (0, 1, 2, None)]
    assert lines[:3] == [["20", "40", "60"], ["20", "40.1", "60.1"], ["20", "40.1", "60.2"]]
    assert lines[3] == lines[2]
    for branch in (3, -1, 10**12):
        with pytest.raises(NotFound, match=f"no branch {branch}.*0, 1, 2"):
            run.line(branch=branch)


def test_find(store):
    run = Run(make_branches(store))
    for step, branch, found in (
        (20, None, "20"), (40, None, "40.1"), (60, None, "60.2"), (40, 0, "40"), (60, 1, "60.1"),
        (20, 2, "20"),
    ):  # fmt: skip
        assert str(run.find(step, branch)) == f"version_{found}"
    for step, branch in ((30, None), (0, 0), (80, 1)):
        with pytest.raises(NotFound, match=f"no version of step {step} on .*found version_"):
            run.find(step, branch)


def test_the_newest_version_of_another_branch(store):
    run = Run(make_branches(store))
    flip_bit(store, f"version_60/{MANIFEST}")
    for branch, at, found in (
        (0, None, "40"),
        (1, None, "60.1"),
        (None, 40, "40.1"),
        (0, 20, "20"),
    ):
        snapshot, _ = run.newest(lambda s: None, at=at, branch=branch)
        assert str(snapshot.version) == f"version_{found}"
    with pytest.raises(NoSnapshot):
        run.newest(lambda s: None, at=60, branch=0)
    with pytest.raises(NotFound, match="no branch 7"):
        run.newest(lambda s: None, branch=7)


ADDRESSES = {
    "@20": "20", "@40": "40.1", "@latest": "60.2", "@40.0": "40", "@60.1": "60.1",
    "/version_60.1": "60.1",
}  # fmt: skip
NO_ADDRESSES = [
    "/version_60@20", "@30", "@40.7", "@latest.1", "@", "@-1", "@020", "@20@40",
    "@9999999999999999999", "@ 20", "@20\n",
]  # fmt: skip


def test_addresses(tmp_path):
    folder = tmp_path / "a@7"  # the path may contain an @
    for at in (None, 20, 40):
        with training(str(folder), EverySteps(20)) as (state, ckpt):
            ckpt.resume(at=at)
            train(state, ckpt, 60)
    for address, found in ADDRESSES.items():
        assert str(open_version(f"{folder}{address}").version) == f"version_{found}"
        assert str(open_version(Path(f"{folder}{address}")).version) == f"version_{found}"
    for address in NO_ADDRESSES:
        with pytest.raises(NotFound):
            open_version(f"{folder}{address}")


@pytest.mark.parametrize(
    ("at", "branch", "message"),
    [
        (60, None, r"of step 60 on .*lineage.*found version_20, version_40\.1 \(and 2 on other"),
        (60, 1, r"\(and 2 on other branches\)\. `limpet ls RUN` .*resume\(at=\"120\.1\"\)"),
        (-5, None, r"no version of step -5 .*found version_20, version_40\.1 \(and 2 on"),
    ],
)  # fmt: skip
def test_the_error_for_a_missing_step_names_other_versions(store, at, branch, message):
    branch_off(store, at=20, to=40)
    with pytest.raises(NoSnapshot, match=message):
        Run(store).newest(lambda s: None, at=at, branch=branch)
    with pytest.raises(NotFound, match=message):
        Run(store).find(at, branch)


def test_a_lineage_whose_versions_are_all_deleted(store):
    branch_off(store, at=20, to=40)
    for version in (Version(40, 1), Version(20)):  # by hand: Run.delete keeps the newest
        store.delete(f"{version}/{MANIFEST}")
    with pytest.raises(NoSnapshot, match=r"no version on the .*found none \(and 2 on other"):
        Run(store).latest()


def test_the_error_for_an_address_without_run(tmp_path):
    for address in ("@80", "@80.1", "@latest", "@best", "@best:val/loss"):
        with pytest.raises(NotFound, match=r"zzz is not a run with versions\. Check the path"):
            open_version(f"{tmp_path}/runs/zzz{address}")
        (tmp_path / "runs" / "empty").mkdir(parents=True, exist_ok=True)
        with pytest.raises(NotFound, match="Check the path"):
            open_version(f"{tmp_path}/runs/empty{address}")
        with pytest.raises(NotFound, match="Check the path"):
            open_version(f"memory://never-made{address}")
    for address in ("@best:", "@version_80", "/80"):
        with pytest.raises(NotFound, match=r"RUN@120 \(on branch 1: RUN@120\.1\), RUN@latest,"):
            open_version(f"{tmp_path}/runs/big{address}")


@pytest.mark.parametrize(("count", "last"), [(9, "version_9."), (12, "version_12, and 3 more.")])
def test_the_error_for_a_missing_step_lists_few_versions_all(tmp_path, count, last):
    for step in range(1, count + 1):
        limpet.save(tmp_path / f"version_{step}", {"n": step})
    with pytest.raises(NotFound) as e:
        open_version(f"{tmp_path}@99")
    assert "version_8, version_9" in str(e.value)
    assert f", {last} `limpet ls RUN` lists" in str(e.value)


def test_delete_takes_the_step_of_a_version_of_the_current_lineage(store):
    branch_off(store, at=20, to=40)
    assert Run(store).delete(20) > 0
    with pytest.raises(NotFound, match="no version of step 60 on the current lineage"):
        Run(store).delete(60)
    assert Run(store).listing().versions == [Version(40), Version(40, 1), Version(60)]


def leave_orphans(store, step):
    attempt = random_id()
    keys = [f"version_{step}/{name(0, 1, attempt)}" for name in (shard_name, index_name)]
    for key in keys:
        store.put_if_absent(key, b"left over")
    return keys


def test_sweep_removes_only_old_orphans(store):
    before = {s.key for s in store.list("")}
    orphans = leave_orphans(store, 60) + leave_orphans(store, 80)
    run = Run(store)
    assert run.sweep().removed == []
    assert len(run.sweep().kept) == 4
    planned = run.sweep(now=time.time() + 2 * DAY, dry_run=True)
    assert sorted(planned.removed) == sorted(orphans)
    assert {s.key for s in store.list("")} == before | set(orphans)
    swept = run.sweep(now=time.time() + 2 * DAY)
    assert sorted(swept.removed) == sorted(orphans)
    assert swept.nbytes == 4 * len(b"left over")
    assert {s.key for s in store.list("")} == before


def test_sweep_keeps_files_of_a_running_process_at_any_age(store):
    attempt = random_id()
    key = pins.create_pin(Location(store, "version_80"), attempt)
    shard = f"version_80/{shard_name(0, 1, attempt)}"
    store.put_if_absent(shard, b"half a save")
    upload = store.put(f"version_80/{index_name(0, 1, attempt)}", 5)
    swept = Run(store).sweep(now=time.time() + 365 * DAY)
    assert swept.removed == []
    assert {why for _, why in swept.kept} == {"a save is in progress"}
    upload.abort()
    pins.remove_pin(Location(store, "version_80"), key)
    assert Run(store).sweep(now=time.time() + 365 * DAY).removed == [shard]


def test_sweep_removes_nothing_in_the_folder_of_an_unreadable_manifest(store):
    flip_bit(store, f"version_60/{MANIFEST}")
    before = {s.key for s in store.list("")}
    assert Run(store).sweep(now=time.time() + 365 * DAY).removed == []
    assert {s.key for s in store.list("")} == before


def test_sweep_keeps_foreign_files(store):
    for key in ("README.txt", "version_60/notes.txt", "version_60/eval-x.000000000000.json"):
        store.put_if_absent(key, b"foreign")
    assert Run(store).sweep(now=time.time() + 365 * DAY).removed == []


def test_sweep_keeps_what_is_no_longer_abandoned_after_its_removal_of_orphans(store):
    """The orphans may be so many that their removal takes hours."""
    branch_off(store, at=20, to=40)  # abandons versions 40 and 60
    orphan = f"version_80/{shard_name(0, 1, random_id())}"
    store.put_if_absent(orphan, b"orphan")
    hooked = HookedStore(store)

    def go_back(method, key):
        if (method, key) == ("delete", orphan):
            run = Run(store)
            leave_from(run, run.open(Version(40)), Version(40), "resume(at=40)")
            run.pin(60, branch=0)

    hooked.before = go_back
    swept = Run(hooked).sweep(grace=0, abandoned=True)
    assert swept.removed == [orphan]
    assert swept.kept == [("version_60", "it is pinned")]
    assert Run(store).line() == [Version(20), Version(40)]


def test_sweep_keeps_the_files_of_a_save_in_a_run_within_the_run(tmp_path):
    limpet.save(tmp_path / "version_1", {"x": 1}, step=1)
    inner, attempt = LocalStore(tmp_path / "inner"), random_id()
    with (
        pins.hold_pin(Location(inner, "version_1"), attempt),
        inner.put(f"version_1/{shard_name(0, 1, attempt)}", 4) as upload,
    ):
        (tmp_path / "inner" / ".writer.json.0123456789abcdef.partial").touch()
        assert Run(tmp_path).sweep(grace=0, now=time.time() + DAY).removed == []
        upload.write_at(0, memoryview(b"data"))
        upload.commit()


def test_opening_a_missing_version(store):
    with pytest.raises(NotFound, match="no snapshot"):
        Run(store).open(Version(99))
    with pytest.raises(NotFound):
        limpet.open("memory://never-made/version_1")


class ChangingStore(HookedStore):
    """At some calls, another process saves a version, and keeps only that one (and the first)."""

    def __init__(self, at, *, first):
        super().__init__(MemoryStore())
        self.calls = itertools.count()
        self.keep = KeepLast(1) | KeepEvery(100) if first else KeepLast(1)
        self.step, self.at = 99, at
        for _ in range(2):
            self.change()
        self.before = lambda method, key: self.change() if next(self.calls) in at else None

    def change(self):
        run = Run(self.inner)
        self.step += 1
        metadata = VersionMetadata(step=self.step, metrics={"loss": 1 / self.step})
        location = run.location(Version(self.step))
        finish_save(
            begin_save(location, {"n": np.zeros(2)}, metadata, shared_pool(), stage_now=False)
        )
        run.retain(self.keep)


@pytest.mark.parametrize("first", [False, True], ids=["the last", "and the first"])
@pytest.mark.parametrize("at", [*({n} for n in range(12)), {1, 3}, {1, 2, 4, 5}, range(1, 12)])
def test_a_version_is_found_although_versions_change_meanwhile(at, first):
    """The found version is at least as new as the newest (best) one at the beginning."""
    finds: list[Callable[[Run], Any]] = [Run.latest, lambda run: run.best("loss")]
    for find in finds:
        store = ChangingStore(at, first=first)
        newest_before = store.step
        found = find(Run(store))
        assert found.step >= newest_before
        assert found.metadata["metrics"]["loss"] == 1 / found.step
    store = ChangingStore(at, first=first)
    assert Run(store).best("never") is None
    assert next(store.calls) < 60


class InconsistentListStore(ChangingStore):
    """The first listing shows neither versions saved meanwhile nor versions deleted meanwhile."""

    def __init__(self):
        super().__init__((), first=True)
        self.lists = itertools.count()

    def list(self, prefix):
        found = list(super().list(prefix))
        if next(self.lists) == 0:
            found = [s for s in found if not s.key.startswith(f"version_{self.step}/")]
            self.change()
        return iter(found)


def test_an_inconsistent_listing_is_repeated():
    finds: list[Callable[[Run], Any]] = [
        Run.latest,
        lambda run: run.best("loss"),
        lambda run: run.newest(lambda snapshot: reader_of(snapshot).check_files())[0],
    ]
    for find in finds:
        assert find(Run(inconsistent := InconsistentListStore())).step == inconsistent.step == 102


@pytest.mark.parametrize("at", range(8))
def test_a_version_deleted_meanwhile_causes_no_skipped_event(at):
    emitted: list[str] = []
    with events.attach(lambda name, fields: emitted.append(name)):
        snapshot, skipped = Run(ChangingStore({at}, first=True)).newest(
            lambda s: reader_of(s).check_files()
        )
    assert snapshot is not None
    assert skipped == []
    assert "skipped" not in emitted


def test_a_run_deleted_during_a_load_raises(store):
    """The live state may already be overwritten."""

    def use(snapshot):
        for stat in list(store.list("")):
            store.delete(stat.key)
        raise NotFound("the version was deleted", live_state="not valid")

    with pytest.raises(NoSnapshot, match="version_60: the version was deleted") as caught:
        Run(store).newest(use)
    assert caught.value.live_state == "not valid"


def test_a_version_that_is_listed_but_missing_is_skipped(store):
    """For example, a network file system lists a deleted version. The search must end."""

    def use(snapshot):
        if snapshot.step == 60:
            raise NotFound("no such file")

    snapshot, skipped = Run(store).newest(use)
    assert snapshot.step == 40
    assert [v for v, _ in skipped] == [Version(60)]


def test_reading_a_deleted_version_raises_not_found(store):
    location = Run(store).location(Version(20))
    uses: list[Callable[[limpet.Snapshot], object]] = [
        lambda s: reader_of(s).check_files(),
        lambda s: reader_of(s).indexes(),
        lambda s: s.verify(),
        lambda s: s["weights"][:],
        lambda s: load_snapshot(reader_of(s)),
        lambda s: copy_snapshot(reader_of(s), Location(MemoryStore(), "version_20")),
    ]
    snapshots = [Run(store).open(Version(20)) for _ in uses]
    opened_before = Run(store).open(Version(20))
    reader_of(opened_before).indexes()
    for key in [s.key for s in store.list("version_20")]:
        store.delete(key)
    for use, snapshot in zip(
        [*uses, uses[3], uses[5]], [*snapshots, opened_before, opened_before], strict=True
    ):
        with pytest.raises(NotFound, match="was deleted") as caught:
            use(snapshot)
        assert location.url in str(caught.value)
