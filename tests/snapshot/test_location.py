"""A run can neither be overwritten by a snapshot nor be loaded as a snapshot."""

import os
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import limpet
from limpet.errors import AlreadyExists, Denied, NotFound
from limpet.format.names import Version
from limpet.snapshot.location import Location, locate, versions_in
from limpet.snapshot.reader import open_snapshot
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.storage.open import open_store

STATE = {"x": np.arange(3)}
_numbers = count()


@pytest.fixture(params=["memory", "local"])
def run(request, tmp_path, monkeypatch):
    """Return a run with the versions 2, 10, and 10.1, an uncommitted save, and unrelated files."""
    monkeypatch.chdir(tmp_path)
    url = "runs" if request.param == "local" else f"memory://location-{next(_numbers)}/runs"
    for version in ("version_10", "version_2"):
        limpet.save(f"{url}/{version}", STATE)
    store = open_store(url)
    for key in ("version_10.1/manifest.json", "version_7/shard", "version_x/manifest.json",
                "version_010/manifest.json", "other/version_5/manifest.json", "branch-1.json",
                "version_8"):  # fmt: skip
        store.put_if_absent(key, b"x")
    return url


def keys(url):
    return [s.key for s in open_store(url).list("")]


def test_versions_in_finds_folders_with_a_manifest_directly_in_a_location(run):
    expected = [Version(2), Version(10), Version(10, 1)]
    assert versions_in(locate(run)) == expected
    assert versions_in(Location(open_store(run), "")) == expected
    assert versions_in(locate(f"{run}/other")) == [Version(5)]
    for none in (f"{run}/nothing", f"{run}/version_10", f"{run}/version_8", f"{run}/branch-1.json"):
        assert versions_in(locate(none)) == []


def test_a_save_to_the_folder_of_a_run_is_refused(run):
    before = keys(run)
    for save in (limpet.save, limpet.save_async):
        for location in (run, f"{run}/", open_store(run)):
            with pytest.raises(AlreadyExists, match="is a run of 3 versions; nothing was") as e:
                save(location, STATE)
            assert str(e.value).endswith("version_N, or another folder.")
    assert keys(run) == before


def test_a_snapshot_can_be_saved_next_to_a_run_and_below_it(run):
    for location in (f"{run}-best", f"{run}/version_11", f"{run}/best", f"{run}/version_7"):
        assert limpet.save(location, STATE).verify().ok


def test_reading_a_run_as_a_snapshot_raises_an_error_that_names_a_version(run):
    for read in (limpet.load, limpet.open):
        with pytest.raises(NotFound) as e:
            read(run)
        message = str(e.value)
        assert f"{run} is a run of 3 versions, not a snapshot. Name one of them, such as" in message
        assert f"{run}@latest or " in message
        assert message.endswith(f"{run}/version_10.1.")
        assert "never committed" not in message


@pytest.mark.parametrize("read", [limpet.load, limpet.open])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope.pt", "no such file or folder. Check the path"),
        ("a/nope", "no such file or folder. Check the path"),
        ("empty", "found none.*never committed"),
    ],
)
def test_the_error_for_a_missing_path_says_what_is_there(
    tmp_path, monkeypatch, read, name, message
):
    monkeypatch.chdir(tmp_path)
    limpet.save("weights", STATE)
    Path("empty").mkdir()
    with pytest.raises(NotFound, match=message):
        read(name)


def test_a_file_is_no_snapshot(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NotFound, match=r"found a file\. .*import_checkpoint"):
        open_snapshot(tmp_path / "notes.txt")


def test_a_folder_that_is_both_a_run_and_a_snapshot_is_loaded(tmp_path):
    limpet.save(tmp_path / "a", STATE)
    limpet.save(tmp_path / "a/version_1", {"y": 1})
    assert list(limpet.load(tmp_path / "a")) == ["x"]
    with pytest.raises(AlreadyExists, match="A snapshot already exists"):
        limpet.save(tmp_path / "a", STATE)


def test_versions_in_does_not_list_subfolders(tmp_path):
    listed: list[str] = []

    class RecordingFs(Fs):
        def scandir(self, path):
            listed.append(path)
            return super().scandir(path)

    for step in (1, 2):
        limpet.save(tmp_path / f"a/version_{step}", STATE)
    (tmp_path / "a/deep/deeper").mkdir(parents=True)
    store = LocalStore(tmp_path, fs=RecordingFs())
    assert len(versions_in(Location(store, "a"))) == 2
    assert listed == [str(tmp_path / "a")]


def test_a_folder_that_cannot_be_listed_raises_an_error(tmp_path):
    class DeniedFs(Fs):
        def scandir(self, path):
            raise PermissionError(13, os.strerror(13), path)

    with pytest.raises(Denied, match="Cannot list a in"):
        versions_in(Location(LocalStore(tmp_path, fs=DeniedFs()), "a"))
