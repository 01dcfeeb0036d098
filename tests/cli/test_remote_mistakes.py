"""A wrong URL of any store is explained as a wrong path is: by what is there instead."""

import uuid

import numpy as np
import pytest

import limpet
from limpet.cli import resolve
from limpet.format.names import SAVE_REQUEST
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from limpet.storage.store import Entry
from tests.cli.invoke import run_cli


@pytest.fixture(params=["memory", "local", "file"])
def root(request, tmp_path):
    """Return the URL of a folder with the run ``runs/a``, and a file."""
    name = uuid.uuid4().hex
    root = {
        "memory": f"memory://{name}",
        "local": str(tmp_path / name),
        "file": f"file://{tmp_path}/{name}",
    }[request.param]
    for step in (1, 2, 10):
        limpet.save(f"{root}/runs/a/version_{step}", {"x": np.arange(3)}, step=step)
    open_store(root).put_if_absent("notes.txt", b"hello")
    return root


def check(result, *parts):
    assert result.code == 4
    assert result.err.startswith("limpet: There is no ")
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


ON_RUN = ["ls", "verify", "sweep", "request-save"]


@pytest.mark.parametrize("verb", [*ON_RUN, "show"])
def test_a_wrong_location_is_explained(root, verb):
    for place in (f"{root}/runs", f"{root}/runs/"):
        if verb == "ls":
            assert run_cli(verb, place, "--json").json["runs"][0]["name"] == "a"
        else:
            check(run_cli(verb, place), "found a folder with a.")
    check(run_cli(verb, root), "found a folder with notes.txt, runs.")
    check(run_cli(verb, f"{root}/elsewhere/b"), "found nothing", "Check the path")
    check(run_cli(verb, f"{root}/runs/zzz"), "found nothing. Check the path")
    if not root.startswith("memory"):
        check(run_cli(verb, f"{root}/notes.txt"), "found a file")


def test_a_missing_version_is_explained(root):
    for name in ("a/version_3", "a@best:"):
        check(
            run_cli("show", f"{root}/runs/{name}"), "found nothing. ", "The address of a version is"
        )
    open_store(f"{root}/runs/a").delete("version_2/manifest.json")
    check(run_cli("show", f"{root}/runs/a/version_2"), "files of a save that was never committed")


@pytest.mark.parametrize("verb", ON_RUN)
def test_a_snapshot_is_not_a_run(root, verb):
    assert run_cli("copy", f"{root}/runs/a@latest", f"{root}/cc").code == 0
    if verb != "verify":
        found = run_cli(verb, f"{root}/cc").err
        assert (
            "is one snapshot, not a run. Its name is not that of a version. To show it: " in found
        )
        assert f"limpet show {root}/cc" in found
        found = run_cli(verb, f"{root}/runs/a/version_2").err
        assert f"one snapshot, not a run. Use the run that contains it: {root}/runs/a." in found
    check(run_cli(verb, root), "a folder with cc, notes.txt, runs")


@pytest.fixture
def folders(monkeypatch):
    """Return a store with 5,000 folders that no call lists completely, or recursively."""
    store = open_store(f"memory://{uuid.uuid4().hex}")

    def list_level(self, folder, prefix=""):
        counts.append(0)
        if self.url == store.url and not folder:
            for number in range(5000):
                if (name := f"data-{number:04}").startswith(prefix):
                    counts[-1] += 1
                    yield Entry(name, "folder")
        yield from original(self, folder, prefix)

    counts: list[int] = []
    original = MemoryStore.list_level
    monkeypatch.setattr(MemoryStore, "list_level", list_level)
    monkeypatch.delattr(MemoryStore, "list")
    yield store
    assert max(counts) <= 1001
    assert len(counts) <= 20


def test_only_the_first_of_many_folders_are_looked_at(folders):
    check(run_cli("sweep", folders.url), "found a folder with data-0000, data-0001, data-0002 ...")


@pytest.mark.parametrize(
    "key", ["writer.json", "spread-01/version_1/shard", "deleting/0123456789ab.json"]
)
def test_a_training_without_a_version_is_found_behind_many_folders(folders, key):
    folders.put_if_absent(key, b"{}")
    assert resolve._has_run_files(folders.url)


@pytest.mark.parametrize("verb", ["ls", "verify", "show", "pin"])
def test_a_run_without_a_version(root, verb):
    open_store(f"{root}/new").put_if_absent("writer.json", b"{}")
    result = run_cli(verb, f"{root}/new", *([3] if verb == "pin" else []))
    assert result.code == 4
    assert "has no version" in result.err or "There is no snapshot" in result.err


@pytest.mark.parametrize("file", ["writer.json", "branch-1.json"])
def test_the_first_save_of_a_training_can_be_requested(root, file):
    """The training runs, but has no version yet."""
    url = f"{root}/new"
    open_store(url).put_if_absent(file, b"{}")
    assert run_cli("request-save", url, "--no-wait").code == 0
    assert open_store(url).stat(SAVE_REQUEST)
    assert run_cli("sweep", url).code == 0
