"""A place that is a run is no place for a snapshot, and no snapshot to load."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.engine.snapshot.location import Location, describe_run, locate, versions_in
from holdfast.errors import AlreadyExists, Denied, NotFound
from holdfast.format.names import Version
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store
from holdfast.storage.os_calls import Fs

STATE = {"x": np.arange(3)}
_numbers = count()


@pytest.fixture(params=["memory", "local"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of versions 2, 10 and 10.1, a folder of a save that was never committed, and others."""
    monkeypatch.chdir(tmp_path)
    url = "runs" if request.param == "local" else f"memory://location-{next(_numbers)}/runs"
    for version in ("version_10", "version_2"):
        holdfast.save(f"{url}/{version}", STATE)
    store = open_store(url)
    for key in ("version_10.1/manifest.json", "version_7/shard", "version_x/manifest.json",
                "version_010/manifest.json", "other/version_5/manifest.json", "branch-1.json",
                "version_8"):  # fmt: skip
        store.put_if_absent(key, b"x")
    return url


def keys(url: str) -> list[str]:
    return [s.key for s in open_store(url).list("")]


def test_versions_are_folders_with_a_manifest_right_in_a_place(run: str) -> None:
    expected = [Version(2), Version(10), Version(10, 1)]
    assert versions_in(locate(run)) == expected
    assert versions_in(Location(open_store(run), "")) == expected
    assert versions_in(locate(f"{run}/other")) == [Version(5)]
    for none in (f"{run}/nothing", f"{run}/version_10", f"{run}/version_8", f"{run}/branch-1.json"):
        assert versions_in(locate(none)) == []


def test_a_version_s_own_folder_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "list", lambda self, prefix: 1 / 0)
    assert versions_in(Location(MemoryStore(), "a/version_3")) == []
    with pytest.raises(NotFound, match="There is no snapshot"):
        holdfast.open("memory://location/none/version_3")


def test_a_run_is_no_place_for_a_snapshot(run: str) -> None:
    before = keys(run)
    for save in (holdfast.save, holdfast.save_async):
        for place in (run, f"{run}/", open_store(run)):
            with pytest.raises(AlreadyExists, match="is a run of 3 versions; nothing was") as e:
                save(place, STATE)
            assert str(e.value).endswith("version_N, or another folder.")
    assert keys(run) == before


def test_beside_and_below_a_run_there_is_room(run: str) -> None:
    for place in (f"{run}-best", f"{run}/version_11", f"{run}/best", f"{run}/version_7"):
        assert holdfast.save(place, STATE).verify().ok


def test_a_run_is_no_snapshot(run: str) -> None:
    for read in (holdfast.load, holdfast.open):
        with pytest.raises(NotFound) as e:
            read(run)
        told = str(e.value)
        assert f"{run} is a run of 3 versions, not a snapshot. Name one of them, such as" in told
        assert told.endswith(f"{run}/version_10.1.")
        assert "never committed" not in told


def test_a_run_that_is_a_snapshot_as_well_is_loaded(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", STATE)
    holdfast.save(tmp_path / "a/version_1", {"y": 1})
    assert list(holdfast.load(tmp_path / "a")) == ["x"]
    with pytest.raises(AlreadyExists, match="A snapshot already exists"):
        holdfast.save(tmp_path / "a", STATE)


def test_only_the_folder_itself_is_listed(tmp_path: Path) -> None:
    listed: list[str] = []

    class Watched(Fs):
        def scandir(self, path: str) -> Any:
            listed.append(path)
            return super().scandir(path)

    for step in (1, 2):
        holdfast.save(tmp_path / f"a/version_{step}", STATE)
    (tmp_path / "a/deep/deeper").mkdir(parents=True)
    store = LocalStore(tmp_path, fs=Watched())
    assert len(versions_in(Location(store, "a"))) == 2
    assert listed == [str(tmp_path / "a")]


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    class Closed(Fs):
        def scandir(self, path: str) -> Any:
            raise PermissionError(13, os.strerror(13), path)

    with pytest.raises(Denied, match="Cannot list a in"):
        versions_in(Location(LocalStore(tmp_path, fs=Closed()), "a"))


def test_words() -> None:
    assert describe_run([Version(1)]) == "a run of 1 version"
    assert describe_run([Version(n) for n in range(1234)]) == "a run of 1,234 versions"
