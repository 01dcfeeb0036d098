"""A path names the same folder for Limpet, for its commands, and for the system."""

import os

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError, StoreError
from tests.cli.invoke import check_error_line, run_cli

STATE = {"w": np.arange(2000.0), "n": 1}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A run in ``disk/a/run``; ``work/link`` leads to ``disk/a/inner``, where ``..`` is another
    folder than ``work``."""
    (tmp_path / "disk/a/inner").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/link").symlink_to(tmp_path / "disk/a/inner")
    (tmp_path / "work/runlink").symlink_to(tmp_path / "disk/a/run")
    (tmp_path / "work/sub").mkdir()
    (tmp_path / "~").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "disk/a"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def save_versions(run):
    """Save two versions; the second one refers to files of the first."""
    state = dict(STATE)
    with limpet.Checkpointer(run, state, incremental=True, save=limpet.EverySteps(1)) as ckpt:
        ckpt.step()
        state["n"] = 2
        ckpt.step()


def check_url(url, folder):
    assert os.path.isabs(url)
    assert os.path.samefile(url, folder)


SPELLINGS = {
    "link": "link/../run",
    "deep": "link/.././inner//../run",
    "dot": "runlink/.",
    "slash": "runlink//",
    "up": "runlink/version_1/..",
    "runlink": "runlink",
    "home": "~/run",
    "sub": "sub/../runlink",
    "file": "file://{place}/work/link/../run",
    "absolute": "{place}/work/link/../run",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_api_and_the_commands_name_the_folder_of_the_system(place, name):
    run, real = SPELLINGS[name].format(place=place), place / "disk/a/run"
    real.mkdir()
    if name != "up":
        save_versions(run)
    else:
        save_versions(real)
    assert sorted(os.listdir(real))[-2:] == ["version_1", "version_2"]
    assert sorted(os.listdir(place / "work")) == ["link", "runlink", "sub"]
    opened = limpet.Run(run)
    assert [s.step for s in opened.snapshots()] == [1, 2]
    for url in (f"{run}/version_2", f"{run}@2", f"{run}@latest", f"{run}/version_2/."):
        assert limpet.load(url)["n"] == 2
        shown = run_cli("show", url, "--json")
        assert shown.code == 0, shown
        snapshot = limpet.open(url)
        check_url(snapshot.url, real / "version_2")
    check_url(opened.url, real)
    assert run_cli("ls", run).code == run_cli("verify", run).code == 0
    assert run_cli("pin", run, "1").code == 0
    assert [path.name for path in real.iterdir() if path.name.startswith("pin")]
    check_error_line(run_cli("rm", f"{run}@2"), 1, "version_2 of ")
    assert run_cli("sweep", run).code == run_cli("pin", f"{run}/version_1/").code == 0
    check_error_line(run_cli("ls", f"{run}/version_1"), 4, "is one snapshot, not a run")


def test_what_was_opened_by_a_relative_path_stays_after_chdir(place, monkeypatch):
    save_versions("sub/run")
    run, snapshot = limpet.Run("sub/run"), limpet.open("sub/run@2")
    store, saved = limpet.open_store("sub/run"), limpet.open("sub/run/version_1/")
    monkeypatch.chdir("/")
    assert run.latest().step == limpet.open(snapshot.url).step == 2
    assert limpet.Run(run.url).latest().step == 2
    assert limpet.load(snapshot.url)["n"] == snapshot["n"] == 2
    assert limpet.open(saved.url).step == 1
    assert {os.path.commonpath([u, place]) for u in (store.url, saved.url)} == {str(place)}
    assert repr(run) == f"<Run {place}/work/sub/run>"
    monkeypatch.chdir(place)
    assert repr(run) == "<Run work/sub/run>"  # for people
    assert run_cli("ls", "work/sub/run").out.startswith("work/sub/run ")
    assert run_cli("ls", "work/sub/run", "--json").json["run"] == run.url


@pytest.mark.parametrize("target", ["disk/a/run/version_2", "disk/a/run/version_1"])
def test_a_link_to_a_version_has_the_files_next_to_its_target(place, target):
    save_versions(place / "disk/a/run")
    (place / "work/best").symlink_to(place / target)
    assert limpet.load("best")["n"] == int(target[-1])
    assert (limpet.load("best/")["w"] == STATE["w"]).all()
    assert limpet.open("best").verify().ok
    assert run_cli("verify", "best").code == run_cli("show", "best").code == 0
    assert run_cli("copy", "best", "copied").code == 0
    assert limpet.open("copied").step == int(target[-1])


def test_an_export_and_an_import_go_where_the_system_says(place):
    limpet.save("sub/s", STATE)
    limpet.export("sub/s", "link/../out", to="safetensors")
    assert (place / "disk/a/out").is_dir()
    assert not (place / "work/out").exists()
    limpet.import_checkpoint("link/../out", "link/../imported")
    assert (place / "disk/a/imported/manifest.json").is_file()
    assert (limpet.load("link/../imported")["model"]["w"] == STATE["w"]).all()


def test_without_a_current_folder(place, monkeypatch):
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    save_versions(place / "disk/a/run")
    calls = (limpet.open, limpet.load, limpet.Run, limpet.open_store, lambda u: limpet.save(u, {}))
    for call in calls:
        with pytest.raises(StoreError, match=r"current folder.*does not exist"):
            call("run/version_1")
    monkeypatch.chdir(place)


@pytest.mark.parametrize(
    "url", ["s3://bucket/a/../run", "memory://m/a/../run", "hdfs://h:1/a/../b"]
)
def test_a_relative_level_in_a_url_is_refused(url):
    with pytest.raises(LimpetError):
        limpet.open_store(url).stat("x")
    with pytest.raises(LimpetError):
        limpet.open(f"{url}/version_1")


def test_fsspec_would_edit_a_path(place):
    with pytest.raises(StoreError, match=r"'\.\.'"):
        limpet.open_store(f"fsspec+file://{place}/work/link/../run")
