"""Versions that are symbolic links, in whole or in part: they count everywhere, are never changed,
and protect what they refer to."""

import os
import shutil
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import limpet
from limpet import events
from limpet.errors import (
    AlreadyExists,
    BrokenLink,
    FormatError,
    LimpetError,
    NoSnapshot,
    SkippedVersion,
    StoreError,
)
from limpet.format.names import MANIFEST, Version
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps, KeepBest, KeepLast
from limpet.run.run import Run
from tests.cli.invoke import run_cli
from tests.trainings import leave_from, train, training

LINKS = ["folder", "manifest", "shards", "index", "every file", "folder of links"]


def make_run(path, steps=3):
    """Return a run with the versions 1 to ``steps``."""
    with training(str(path), EverySteps(1)) as (state, ckpt):
        train(state, ckpt, steps)
    return path


def make_incremental_run(path, steps):
    """Return a run in which each version but the first refers to the first one."""
    state = {"frozen": np.arange(9000.0), "live": np.zeros(9)}
    with limpet.Checkpointer(path, state, save=EverySteps(1), incremental=True) as ckpt:
        for _ in range(steps):
            state["live"] += 1
            ckpt.step()
    assert Run(path).open(Version(steps)).bases == {Version(1)}
    return path


def move_behind_links(run, version, how):
    """Move a version, or some of its files, to another folder, and link to them from the run."""
    folder, elsewhere = run / version, run.parent / "elsewhere" / version
    elsewhere.mkdir(parents=True)
    suffixes = {
        "manifest": (MANIFEST,),
        "shards": (".safetensors",),
        "index": (".index.json",),
    }.get(how, ("",))
    if how == "folder":
        shutil.rmtree(elsewhere)
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
        return elsewhere
    for file in sorted(folder.iterdir()):
        if file.name.endswith(suffixes):
            file.rename(elsewhere / file.name)
            file.symlink_to(os.path.relpath(elsewhere / file.name, folder))
    if how == "folder of links":  # a folder as ``cp -rs`` makes it, on another disk
        outer = run.parent / "outer"
        outer.mkdir(exist_ok=True)
        links = outer / version
        links.mkdir()
        for file in elsewhere.iterdir():
            (links / file.name).symlink_to(file)
        shutil.rmtree(folder)
        folder.symlink_to(links)
    return elsewhere


def contents(*folders):
    """Return every file and link below folders."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("how", LINKS)
def test_a_linked_version_counts_everywhere(tmp_path, how):
    path = make_run(tmp_path / "run")
    Run(path).add_metrics(2, {"loss": 0.1})
    for step in (1, 2, 3):
        move_behind_links(path, f"version_{step}", how)
    run = Run(path)
    versions = [Version(step) for step in (1, 2, 3)]
    assert [s.version for s in run.snapshots()] == run.line() == run.listing().versions == versions
    latest, best = run.latest(), run.best("loss")
    assert (latest.step, best.step) == (3, 2)
    assert [r.version for r in run.records()] == versions
    assert all(s.verify().ok for s in run.snapshots())
    assert run.pin(3) == Version(3)
    assert run.unpin(3) == Version(3)
    with training(str(path), EverySteps(1)) as (state, ckpt), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckpt.resume() is not None
        assert ckpt.current_step == 3
        train(state, ckpt, 5)
    assert Run(path).line() == [*versions, Version(4), Version(5)]
    result = run_cli("ls", str(path))
    assert result.code == 0
    assert "damaged" not in result.out
    assert run_cli("verify", str(path)).code == 0


@pytest.mark.parametrize("how", LINKS)
def test_nothing_is_deleted_through_a_link(tmp_path, how):
    path = make_run(tmp_path / "run", 5)
    for step in (1, 2):
        move_behind_links(path, f"version_{step}", how)
    outside = [p for p in tmp_path.iterdir() if p.name != "run"]
    linked = [path / "version_1", path / "version_2"]
    before, emitted = contents(*outside, *linked), []
    run = Run(path)
    with events.attach(lambda name, fields: emitted.append((name, str(fields.get("version"))))):
        assert run.retain(KeepLast(2)) == [Version(3)]
        assert run.retain(KeepLast(2)) == []
        assert run.retain(KeepLast(1)) == [Version(4)]
    # said once, not after each save
    assert emitted.count(("skipped", "version_1, version_2")) == 1
    assert [name for name, _ in emitted] == ["skipped", "deleted", "deleted"] or [
        name for name, _ in emitted
    ] == ["deleted", "skipped", "deleted"]
    for _ in range(2):
        with pytest.raises(LimpetError, match="symbolic link") as caught:
            run.delete(Version(1))
        assert "only by hand" in str(caught.value)
    assert run.line() == [Version(1), Version(2), Version(5)]
    assert run.sweep(grace=0, abandoned=True, now=2e9).removed == []
    assert contents(*outside, *linked) == before


@pytest.mark.parametrize("how", LINKS)
def test_sweep_keeps_abandoned_versions_and_orphans_that_are_links(tmp_path, how):
    path = make_run(tmp_path / "run", 4)
    with training(str(path), EverySteps(1)) as (state, ckpt):
        ckpt.resume(at=1)
        train(state, ckpt, 2)
    for step in (2, 3):
        move_behind_links(path, f"version_{step}", how)
    outside = [p for p in tmp_path.iterdir() if p.name != "run"]
    before = contents(*outside)
    for dry_run in (True, False):
        result = Run(path).sweep(grace=0, abandoned=True, now=2e9, dry_run=dry_run)
        kept = dict(result.kept)
        assert "symbolic link" in kept["version_2"]
        assert "symbolic link" in kept["version_3"]
        assert {key.partition("/")[0] for key in result.removed} == {"version_4"}
    assert contents(*outside) == before
    # without its manifest, the version is a folder of orphans, which may belong to someone else
    for step in (2, 3):
        (path / f"version_{step}" / MANIFEST).unlink()
    remaining = contents(*outside, path)
    Run(path).sweep(grace=0, now=2e9)
    after = contents(*outside, path)
    links = {k for k, v in remaining.items() if isinstance(v, str) or "elsewhere" in k}
    assert links <= after.keys()


@pytest.mark.parametrize("how", LINKS)
def test_the_base_of_a_linked_version_is_kept(tmp_path, how):
    path = make_incremental_run(tmp_path / "run", 3)
    move_behind_links(path, "version_3", how)
    for policy in (KeepLast(1), KeepBest(1, "none") | KeepLast(1)):
        run = Run(path)
        run.retain(policy)
        run.sweep(grace=0, abandoned=True, now=2e9)
        newest = Run(path).latest()
        assert newest.step == 3
        assert newest.verify().ok


BROKEN = ["folder", "manifest", "shards", "index", "every file", "cycle"]


def break_link(run, version, how):
    if how == "cycle":
        shutil.rmtree(run / version)
        (run / version).symlink_to(version)
    else:
        shutil.rmtree(move_behind_links(run, version, how))


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_link_is_a_damaged_version(tmp_path, how):
    path = make_run(tmp_path / "run")
    break_link(path, "version_3", how)
    run = Run(path)
    assert Version(3) in run.listing().versions
    assert run.latest().step == 2
    with pytest.raises(FormatError):
        reader_of(run.open(Version(3))).check_files()
    listed = run_cli("ls", str(path))
    assert "damaged" in listed.out
    assert run_cli("verify", str(path)).code == 3
    with training(str(path), EverySteps(1)) as (state, ckpt):
        with pytest.warns(SkippedVersion, match="version_3"):
            ckpt.resume()
        assert ckpt.current_step == 2
        train(state, ckpt, 4)
    # the training continues on a branch, because a newer version may come back
    assert Run(path).line() == [Version(1), Version(2), Version(3, 1), Version(4, 1)]


@pytest.mark.parametrize("how", BROKEN)
def test_a_run_of_broken_links_is_not_an_empty_run(tmp_path, how):
    path = make_run(tmp_path / "run")
    for step in (1, 2, 3):
        break_link(path, f"version_{step}", how)
    before = contents(path)
    with pytest.raises(NoSnapshot):
        Run(path).latest()
    with training(str(path), EverySteps(1)) as (_, ckpt), pytest.raises(NoSnapshot):
        ckpt.resume()
    with (
        training(str(path), EverySteps(1)) as (state, ckpt),
        pytest.raises(LimpetError, match="holds versions of an earlier training"),
    ):
        train(state, ckpt, 1)
    assert contents(path) == before


def test_a_run_on_an_unmounted_disk_is_not_an_empty_run(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "unmounted" / "run")
    with (
        training(str(tmp_path / "run"), EverySteps(1)) as (_, ckpt),
        pytest.raises(BrokenLink, match="mounted"),
    ):
        ckpt.resume()
    with (
        training(str(tmp_path / "run"), EverySteps(1)) as (state, ckpt),
        pytest.raises(StoreError, match="mounted"),
    ):
        train(state, ckpt, 1)
    with pytest.raises(BrokenLink):
        Run(tmp_path / "run").latest()
    assert not (tmp_path / "unmounted").exists()


@pytest.mark.parametrize("how", ["folder", "manifest", "every file", "cycle"])
def test_a_broken_link_blocks_the_deletion_of_older_versions(tmp_path, how):
    path = make_run(tmp_path / "run", 6)
    break_link(path, "version_4", how)
    before = contents(*(path / f"version_{step}" for step in (1, 2, 3, 4, 6)))
    run, emitted = Run(path), []
    with events.attach(lambda name, fields: emitted.append((name, fields.get("version")))):
        assert run.retain(KeepLast(1)) == [Version(5)]  # version 4 cannot refer to it
        for _ in range(3):
            assert run.retain(KeepLast(1)) == []
    assert emitted.count(("skipped", "version_4")) == 1
    for step in (1, 2, 3):
        with pytest.raises(LimpetError, match="version_4"):
            run.delete(Version(step))
    result = run.sweep(grace=0, abandoned=True, now=2e9)
    assert not [key for key in result.removed if key.startswith("version_")]
    assert {k: v for k, v in contents(path).items() if k in before} == before


def test_a_version_comes_back_with_the_target_of_its_link(tmp_path):
    path = make_run(tmp_path / "run")
    elsewhere = move_behind_links(path, "version_3", "folder")
    run = Run(path)
    elsewhere.rename(elsewhere.with_name("unmounted"))
    assert run.retain(KeepLast(1)) == []
    elsewhere.with_name("unmounted").rename(elsewhere)
    assert run.latest().step == 3
    assert run.retain(KeepLast(1)) == [Version(1), Version(2)]


@pytest.mark.parametrize("how", ["folder", "shards", "every file"])
def test_a_version_that_others_are_links_to_is_kept(tmp_path, how):
    """Two names for one file, such as after a deduplication."""
    path = make_run(tmp_path / "run")
    if how == "folder":
        shutil.rmtree(path / "version_3")
        (path / "version_3").symlink_to("version_1")  # another step: a damaged version
    else:
        source = path / "version_1"
        for file in list((path / "version_3").iterdir()):
            if how == "every file" or file.suffix == ".safetensors":
                copied = source / f"copy-{file.name}"
                file.rename(copied)
                file.symlink_to(f"../version_1/{copied.name}")
    before = contents(path / "version_1")
    run = Run(path)
    run.retain(KeepLast(1))
    assert contents(path / "version_1") == before
    with pytest.raises(LimpetError, match="version_3 refers to it"):
        run.delete(Version(1))
    if how != "folder":
        latest = Run(path).latest()
        assert latest.step == 3
        assert latest.verify().ok


def test_a_link_to_a_version_of_another_run_is_read(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", 2)
    (two / "version_3").symlink_to(one / "version_3")
    latest = Run(two).latest()
    assert latest is not None
    assert reader_of(latest).digest == reader_of(Run(one).open(Version(3))).digest
    before = contents(one)
    assert Run(two).retain(KeepLast(1)) == [Version(1), Version(2)]
    assert contents(one) == before


@pytest.mark.parametrize("target", ["empty", "missing", "version"])
def test_a_step_whose_folder_is_a_link_is_not_saved_again(tmp_path, target):
    path = make_run(tmp_path / "run", 2)
    outside = tmp_path / "outside"
    if target == "empty":
        outside.mkdir()
    elif target == "version":
        make_run(tmp_path / "other", 3)
        outside = tmp_path / "other" / "version_3"
    (path / "version_3").symlink_to(outside)
    before = contents(tmp_path)
    saves: list[Callable[[], object]] = [
        lambda: limpet.save(path / "version_3", {"x": 1}),
        lambda: limpet.save_async(path / "version_3", {"x": 1}).wait(),
    ]
    for save in saves:
        with pytest.raises(LimpetError, match="version_3") as caught:
            save()
        if target != "version":
            assert "link" in str(caught.value)
        assert isinstance(caught.value, AlreadyExists) == (target == "version")
    assert contents(tmp_path) == before
    assert target != "missing" or not outside.exists()


def test_records_are_not_added_through_a_link(tmp_path):
    path = make_run(tmp_path / "run")
    elsewhere = move_behind_links(path, "version_3", "folder")
    before = contents(elsewhere)
    with pytest.raises(StoreError, match="through a link") as caught:
        Run(path).add_metrics(3, {"loss": 1})
    assert str(elsewhere) in str(caught.value)
    assert contents(elsewhere) == before
    move_behind_links(path, "version_2", "manifest")  # its folder is real
    Run(path).add_metrics(2, {"loss": 1})
    assert Run(path).metrics(2)["loss"] == 1


def test_linked_versions_are_copied_and_copies_are_not_written_through_links(tmp_path):
    path, copy = make_run(tmp_path / "run"), tmp_path / "copy"
    Run(path).add_metrics(3, {"loss": 1})
    move_behind_links(path, "version_3", "folder")
    assert run_cli("copy", str(path), str(copy)).code == 0
    assert not (copy / "version_3").is_symlink()
    assert [s.verify().ok for s in Run(copy).snapshots()] == [True] * 3
    shutil.move(copy / "version_3", tmp_path / "moved")
    (copy / "version_3").symlink_to(tmp_path / "moved")
    assert run_cli("copy", str(path), str(copy)).code == 0  # all is there already
    (tmp_path / "empty").mkdir()
    shutil.rmtree(copy / "version_2")
    (copy / "version_2").symlink_to(tmp_path / "empty")
    result = run_cli("copy", str(path), str(copy))
    assert result.code == 5
    assert "through a link" in " ".join((result.out + result.err).split())
    assert list((tmp_path / "empty").iterdir()) == []


def test_records_of_a_run_can_be_links(tmp_path):
    """As in a run that ``cp -rs`` made: its training removes only links."""
    path, copy = make_run(tmp_path / "run", 4), tmp_path / "copy"
    with training(str(path), EverySteps(1)) as (state, ckpt):
        ckpt.resume(at=3)
        train(state, ckpt, 4)
    Run(path).pin(3)
    for file in sorted(path.rglob("*")):
        target = copy / file.relative_to(path)
        if file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    before = contents(path)
    run = Run(copy)
    assert run.line() == Run(path).line()
    assert run.pins() == [Version(3)]
    with training(str(copy), EverySteps(1), keep=KeepLast(1)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 6)
    run.unpin(3)
    run.sweep(grace=0, abandoned=True, now=2e9)
    assert Run(copy).line()[-1] == Version(6, 1)
    assert all(s.verify().ok for s in Run(copy).snapshots())
    assert contents(path) == before


@pytest.mark.parametrize("name", ["pin-0123456789ab.json", "pin-version_1.json", "branch-1.json"])
def test_a_record_that_is_a_broken_link_is_a_damaged_record(tmp_path, name):
    path = make_run(tmp_path / "run")
    (path / name).symlink_to(tmp_path / "missing")
    run = Run(path)
    latest = run.latest()
    assert latest.step == 3
    deleted = run.retain(KeepLast(1))
    if name.startswith("pin-0"):
        assert deleted == []  # it may protect any version
    elif name.startswith("pin-version"):
        assert deleted == [Version(2)]
    else:
        assert deleted == [Version(1), Version(2)]
        assert leave_from(run, latest, Version(3), "test") == 2
    run.sweep(grace=0, now=2e9)
