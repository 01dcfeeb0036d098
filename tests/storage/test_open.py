"""``open_store``: from the user's argument to a store."""

import re
import uuid
from pathlib import Path

import pytest
import torch

import limpet
import limpet.storage.open
from limpet.cli import VERBS
from limpet.errors import StoreError
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from limpet.testing.contract import keys
from tests.cli.invoke import run_cli


@pytest.mark.parametrize(
    "make", [str, Path, lambda p: f"file://{p}", lambda p: f"file://localhost{p}"]
)
def test_a_path_is_a_local_folder(tmp_path, make):
    store = open_store(make(tmp_path / "a"))
    store.put_if_absent("m", b"1")
    assert (tmp_path / "a" / "m").read_bytes() == b"1"


def test_a_file_url_is_decoded_and_a_path_is_not(tmp_path):
    open_store(f"file://{tmp_path}/a%20b%3F").put_if_absent("m", b"1")
    open_store(f"{tmp_path}/c%20d?x#y").put_if_absent("m", b"1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a b?", "c%20d?x#y"]


@pytest.mark.parametrize("make", [str, Path])
def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch, make):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = open_store(make("~/runs"))
    assert store.url == str(tmp_path / "home" / "runs")
    store.put_if_absent("m", b"1")
    open_store("./~/runs").put_if_absent("m", b"1")  # names a folder "~"
    open_store("a~/b").put_if_absent("m", b"1")
    limpet.save(make("~/snap"), {"n": 1})
    (tmp_path / "home" / "snap").rename(tmp_path / "home" / "moved")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "moved"))
    assert limpet.load(make("~"))["n"] == 1  # the home directory itself is a snapshot
    with pytest.raises(StoreError, match="The home directory in ~no-such-user/x is unknown"):
        open_store(make("~no-such-user/x"))
    with pytest.raises(StoreError, match=r"Write the full path, or \./~no-such-user for"):
        limpet.save(make("~no-such-user"), {"n": 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a~", "home", "~"]


def test_a_memory_url_names_one_store():
    one, two = open_store("memory://test-open-1"), open_store("memory://test-open-2")
    one.put_if_absent("v/m", b"1")
    assert open_store("memory://test-open-1") is one
    assert keys(two) == []
    inner = open_store("memory://test-open-1/v")
    assert (keys(inner), inner.url) == (["m"], "memory://test-open-1/v")


def test_a_store_is_returned_unchanged():
    store = MemoryStore()
    assert open_store(store) is store


def test_the_settings_choose_direct_io(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMPET_DIRECT", "0")
    assert not open_store(tmp_path)._direct
    monkeypatch.setenv("LIMPET_DIRECT", "1")
    assert open_store(tmp_path)._direct


@pytest.mark.parametrize("url", ["ftp://x/y", "S4://bucket/run"])
def test_the_error_for_an_unknown_scheme_lists_the_known_schemes(url):
    with pytest.raises(StoreError, match="memory://") as caught:
        open_store(url)
    assert url in str(caught.value)


@pytest.mark.parametrize("url", ["", "file://", "file://host/x", "memory://", None, 3, b"x"])
def test_an_argument_that_names_no_location_is_an_error(url):
    with pytest.raises(StoreError):
        open_store(url)


UNNAMED = "not name|no name|is not the URL of a snapshot"


@pytest.mark.parametrize(
    "url", ["s3://", "az://", "gs:///", "memory://", "memory:///", "file://", "file:///"]
)
def test_a_url_without_a_name_is_not_a_local_folder(tmp_path, monkeypatch, url):
    """As from ``"s3://$BUCKET"`` with an empty variable."""
    monkeypatch.chdir(tmp_path)
    for use in (lambda: limpet.save(url, {"n": 1}), lambda: limpet.load(url)):
        with pytest.raises(StoreError, match=UNNAMED):
            use()
    version = f"memory://test-open-{uuid.uuid4().hex}/version_1"
    limpet.save(version, {"x": torch.ones(1)}, step=1)
    (tmp_path / "file:").mkdir()  # a folder with such a name is not what the URL means
    for arguments in (
        ("copy", version, url),
        ("reshard", version, url, "--shards", "2"),
        ("export", version, "--to", "safetensors", url),
        ("show", url),
    ):
        result = run_cli(*arguments)
        assert result.code == 5
        assert re.search(UNNAMED, result.err)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["file:"]


def test_the_last_level_of_a_file_url_is_decoded(tmp_path):
    url = f"file://{tmp_path}/a%20b%3F"
    limpet.save(f"{url}/version_1", {"x": torch.ones(1)}, step=1)
    assert run_cli("copy", f"{url}@1", f"file://{tmp_path}/c%20d").code == 0
    assert run_cli("show", f"file://{tmp_path}/c%20d").code == 0
    assert run_cli("export", f"{url}@1", "--to", "torch", f"file://{tmp_path}/e%20f").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a b?", "c d", "e f"]


LOST_SLASHES = [
    "s3:/demo/px", "gs:/demo", "az:/c/px", "hdfs:/nn:8020/px", "memory:/a/b", "file:/a/b",
    "fsspec+sftp:/h/px", "s3:", "shelf:/a/b",
]  # fmt: skip


@pytest.mark.parametrize("make", [str, Path])
@pytest.mark.parametrize("text", LOST_SLASHES)
def test_a_url_that_lost_a_slash_is_not_a_local_folder(shelf, tmp_path, monkeypatch, text, make):
    """As in ``pathlib.Path("s3://demo/px")``, which ``argparse`` makes with ``type=Path``."""
    monkeypatch.chdir(tmp_path)
    path = make(text)
    message = rf"{re.escape(text)} looks like a URL that lost a slash.*\./{re.escape(text)} for"
    for use in (
        open_store,
        lambda path: limpet.save(path, {"n": 1}),
        limpet.load,
        limpet.Run,
        lambda path: limpet.Checkpointer(path, {"n": 1}).resume(),
    ):
        with pytest.raises(StoreError, match=message):
            use(path)
    for command in ("ls", "show", "verify", "sweep", "request-save"):
        result = run_cli(command, text)
        assert result.code == 5
        assert "looks like a URL that lost a slash" in result.err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("text", ["c:/x", "word:", "./s3:/demo/px", "a/s3:/x", "s3:x", "s3/x"])
def test_other_folders_may_have_a_colon(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with limpet.Checkpointer(text, {"n": 1}, save=limpet.EverySteps(1)) as checkpointer:
        checkpointer.resume()
        checkpointer.step()
    assert (tmp_path / text / "version_1" / "manifest.json").exists()
    assert run_cli("verify", text).code == run_cli("show", f"{text}@1").code == 0


@pytest.mark.parametrize(
    "url",
    ["s3://b//r", "s3://b/r//v/", "gs://b//r", "az://c/r///v", "hdfs://n:1//r", "memory://a//b"],
)
def test_a_folder_without_a_name_in_a_url(url):
    single = re.sub("(?<!:)//+", "/", url)
    message = f"A folder in {url} has no name.* Perhaps you meant {single}[.]$"
    for use in (open_store, lambda url: limpet.save(url, {"n": 1}), limpet.load, limpet.Run):
        with pytest.raises(StoreError, match=message):
            use(url)


# stores of others


@pytest.fixture
def shelf(monkeypatch):
    """Register the scheme ``shelf``, whose stores are in memory and have an option."""
    monkeypatch.setattr(limpet.storage.open, "_functions", {**limpet.storage.open._functions})
    stores = {}

    class Shelf(MemoryStore):
        @property
        def url(self):
            return super().url.replace("memory://", "shelf://")

    def open_shelf(url, *, label="none"):
        name, _, folder = url.removeprefix("shelf://").partition("/")
        store = stores.setdefault((name, label), Shelf(name))
        return store.at(folder) if folder else store

    limpet.register_store("shelf", open_shelf)
    return stores


ABSENT = "Run.best() and Run.latest() return None if there is no such version."


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: limpet.load(limpet.Run("memory://none").best("loss", mode="min"), {}), ABSENT),
        (lambda: limpet.open(limpet.Run("memory://none").latest()), ABSENT),
        (lambda: limpet.export(None, "x"), ABSENT),
        (lambda: limpet.save({"n": 1}, "x"), "The place is first: save(url, state)."),
        (lambda: limpet.save_async(torch.nn.Linear(1, 1), "x"), "The place is first: save(url, "),
        (lambda: limpet.open_store(limpet.Run("memory://none")), "Pass its url."),
    ],
)
def test_the_error_about_another_object_says_what_to_pass(call, advice):
    with pytest.raises(StoreError, match="The argument is not a store") as caught:
        call()
    assert advice in str(caught.value)


def test_a_registered_scheme_works_everywhere(shelf, tmp_path):
    url = "shelf://one/run"
    limpet.save(f"{url}/version_1", {"n": 1}, step=1)
    limpet.save("shelf://one/version_7", {"n": 7})
    assert limpet.load(f"{url}/version_1") == {"n": 1}
    assert limpet.open(f"{url}/version_1").step == 1
    assert [s.step for s in limpet.Run(url).snapshots()] == [1]
    with limpet.Checkpointer(url, {"n": 2}) as checkpointer:
        checkpointer.resume()
    for number, start in enumerate((f"{url}@1", limpet.open_store(f"{url}/version_1"))):
        state = {"n": 2}
        with limpet.Checkpointer(f"shelf://one/tuned{number}", state) as checkpointer:
            assert checkpointer.resume(start=start).step == 1
        assert state == {"n": 1}


def test_every_command_accepts_a_registered_scheme(shelf, tmp_path):
    url = "shelf://one/run"
    with limpet.Run(url).writer() as writer:
        for step in (1, 2):
            writer.save({"w": torch.zeros(9), "n": 1}, step=step, metrics={"loss": 1 / step})
    commands = [
        ("ls", url),
        ("best", url, "--metric", "loss", "--mode", "min"),
        ("show", f"{url}@1"),
        ("verify", url),
        ("report", url),
        ("metrics", url),
        ("diff", f"{url}@1", f"{url}/version_2"),
        ("copy", f"{url}@1", f"{tmp_path}/out/version_1"),
        ("copy", url, "shelf://two/run"),
        ("reshard", f"{url}@2", "shelf://two/one", "--shards", 1),
        ("export", f"{url}@2", "--to", "safetensors", "--root", "/", "shelf://two/out"),
        ("import", "shelf://two/out/model.safetensors", "shelf://two/imported", "--step", 5),
        (
            "evaluate", url, "--with", "tests.evaluation.trivial", "--workers", "0", "--data",
            "tests.evaluation.trivial:data",
        ),
        ("pin", url, 1),
        ("rm", "shelf://two/run", 1),
        ("sweep", url, "--grace", "0"),
        ("request-save", url, "--no-wait"),
    ]  # fmt: skip
    for command in commands:
        result = run_cli(*command)
        assert result.code == 0, (command, result)
    assert {command[0] for command in commands} == {*VERBS} - {"run", "ui"}
    assert limpet.load(tmp_path / "out/version_1")["n"] == 1
    assert [s.step for s in limpet.Run("shelf://two/run").snapshots()] == [2]
    assert limpet.Run("shelf://two/imported").latest().step == 5


def test_options_reach_the_function(shelf):
    limpet.open_store("shelf://a", label="x").put_if_absent("m", b"1")
    assert ("a", "x") in shelf
    with pytest.raises(TypeError, match="colour"):
        limpet.open_store("shelf://a", colour="x")


@pytest.mark.parametrize("scheme", ["s3", "file", "memory", "", "a b", "1x"])
def test_a_scheme_of_limpet_cannot_be_replaced(scheme):
    with pytest.raises(StoreError, match="Cannot register the kind of store"):
        limpet.register_store(scheme, MemoryStore)


class FakeEntryPoint:
    def __init__(self, name, value, function):
        self.name, self.value, self.load = name, value, lambda: function


def test_a_package_adds_a_scheme_by_an_entry_point(monkeypatch):
    store = MemoryStore()
    points = [FakeEntryPoint("depot", "depot:open", lambda url: store)]

    def entry_points(group, name=None):
        return [p for p in points if group == "limpet.stores" and name in (None, p.name)]

    monkeypatch.setattr(limpet.storage.open, "_functions", {})
    monkeypatch.setattr(limpet.storage.open, "entry_points", entry_points)
    with pytest.raises(StoreError, match=r"Unsupported kind of store: x://y\..* or depot:// or"):
        open_store("x://y")
    assert open_store("depot://a") is store
    points.append(FakeEntryPoint("twice", "one:open", None))
    points.append(FakeEntryPoint("twice", "two:open", None))
    with pytest.raises(StoreError, match=r"Several packages support twice://.*one:open, two:open"):
        open_store("twice://a")


@pytest.mark.parametrize("url", ["a/b", "file:///a/b", "memory://a", MemoryStore()])
def test_a_store_without_options_refuses_them(url):
    with pytest.raises(StoreError, match="options"):
        open_store(url, region="x")
