"""Symbolic links in a local store: reading follows them, and nothing is changed through them."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from limpet.errors import AlreadyExists, BrokenLink, FormatError, NotFound, StoreError
from limpet.storage.local.store import LocalStore
from limpet.storage.store import list_level
from limpet.testing.contract import keys, partial_keys, put, read


@pytest.fixture
def root(tmp_path):
    """A store with ``v/a``, and next to it a folder that links may lead to."""
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "secret").write_bytes(b"123")
    (tmp_path / "outside" / "deep" / "x").write_bytes(b"1")
    put(LocalStore(tmp_path / "run"), "v/a", b"1")
    return tmp_path / "run"


def link(path, target):
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


def tree(folder):
    """Return every file below a folder with its content, and every link with its target."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("relative", [False, True])
def test_reading_follows_links(root, relative):
    outside = root.parent / "outside"
    link(root / "folder", "../outside" if relative else outside)
    link(root / "v" / "file", "../../outside/secret" if relative else outside / "secret")
    link(root / "v" / "twice", "file")
    link(root / "up", "folder")
    store = LocalStore(root)
    assert keys(store) == [
        "folder/deep/x", "folder/secret", "up/deep/x", "up/secret", "v/a", "v/file", "v/twice"
    ]  # fmt: skip
    assert keys(store, "folder/deep") == ["folder/deep/x"]
    for key in ("folder/secret", "up/secret", "v/file", "v/twice"):
        assert (store.get(key, 3), store.stat(key).length) == (b"123", 3)
        assert read(store, key, 1, 2) == b"23"
    assert {(e.name, e.kind) for e in list_level(store, "")} == {
        ("folder", "link"), ("up", "link"), ("v", "folder")
    }  # fmt: skip
    assert {(e.name, e.kind) for e in list_level(store, "folder")} == {
        ("deep", "folder"), ("secret", "object")
    }  # fmt: skip


def test_the_root_can_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    store = LocalStore(tmp_path / "run")
    put(store, "v/a", b"1")
    assert keys(store) == ["v/a"]
    assert (tmp_path / "real" / "v" / "a").exists()
    store.delete("v/a")
    assert list((tmp_path / "real").iterdir()) == []


def test_a_cycle_ends(root):
    link(root / "loop", root)
    link(root / "v" / "up", "..")
    link(root / "above", root.parent)
    link(root / "self", "self")
    link(root / "one", "two")
    link(root / "two", "one")
    store = LocalStore(root)
    found = keys(store)
    assert "v/a" in found
    assert "above/outside/secret" in found
    assert len(found) < 10
    for key in ("self", "one", "one/manifest.json"):
        for call in (store.stat, lambda k: store.get(k, 9)):
            with pytest.raises(BrokenLink, match="broken symbolic link"):
                call(key)


@pytest.mark.parametrize("where", ["file", "folder", "chain", "inner", "cycle"])
def test_a_link_to_nothing_is_an_error_and_not_a_missing_object(root, where):
    target, key = root.parent / "gone", "w/m"
    if where == "file":
        link(root / "w" / "m", target)
    elif where == "folder":
        link(root / "w", target)
    elif where == "chain":
        link(root / "w", "next")
        link(root / "next", target)
    elif where == "inner":
        link(root / "w", root.parent / "outside")
        link(root.parent / "outside" / "m", target)
    else:
        link(root / "w", "w")
    store = LocalStore(root)
    calls: list[Callable[[], Any]] = [
        lambda: store.stat(key),
        lambda: store.get(key, 9),
        lambda: store.get_range(key, 0, 1, memoryview(bytearray(1))),
        lambda: store.get_range(key, 0, 0, memoryview(bytearray(1))),
    ]
    if where not in {"inner", "file"}:
        calls.append(lambda: list_level(store, "w"))
    for call in calls:
        with pytest.raises(BrokenLink) as caught:
            call()
        assert isinstance(caught.value, StoreError)
        assert isinstance(caught.value, FormatError)
        assert not isinstance(caught.value, NotFound)
        assert caught.value.link in str(caught.value)
        assert "mounted" in str(caught.value)
    assert "v/a" in keys(store)  # it does not hide the others
    with pytest.raises(NotFound):
        store.stat("nothing/m")


def test_a_root_that_is_a_link_to_nothing_is_not_an_empty_store(tmp_path):
    link(tmp_path / "run", tmp_path / "unmounted")
    link(tmp_path / "disk", tmp_path / "unmounted")
    for root in (tmp_path / "run", tmp_path / "disk" / "run"):
        store = LocalStore(root)
        for call in (
            lambda s: list_level(s, ""), lambda s: list(s.list("")), lambda s: s.stat("writer.json")
        ):  # fmt: skip
            with pytest.raises(BrokenLink):
                call(store)
        with pytest.raises(StoreError):
            store.put_if_absent("a", b"1")
    assert not (tmp_path / "unmounted").exists()


def test_nothing_is_written_or_deleted_through_a_link(root):
    outside = root.parent / "outside"
    link(root / "folder", outside)
    link(root / "twice", "folder")
    (root / "real").mkdir()
    link(root / "real" / "inner", outside)
    link(root / "gone", root.parent / "missing")
    before, store = (tree(root), tree(outside)), LocalStore(root)
    assert store.put_if_absent("folder/secret", b"123").length == 3  # nothing has to be written
    for folder in ("folder", "twice", "folder/deep", "real/inner", "gone"):
        for name in ("new", "secret", "x"):
            key = f"{folder}/{name}"
            for call in (
                lambda k: store.put(k, 1),
                lambda k: store.put_if_absent(k, b"other"),
                store.delete,
            ):
                with pytest.raises(StoreError, match="through a link") as caught:
                    call(key)
                assert not isinstance(caught.value, NotFound | AlreadyExists)
                assert "real folder" in str(caught.value)
    assert (tree(root), tree(outside)) == before
    assert partial_keys(store) == []


def test_a_link_is_never_overwritten_and_only_the_link_is_deleted(root):
    secret = root.parent / "outside" / "secret"
    link(root / "v" / "file", secret)
    link(root / "v" / "gone", root.parent / "missing")
    store = LocalStore(root)
    for name, error_type in (("file", AlreadyExists), ("gone", StoreError)):
        for write in (store.put_if_absent, lambda key, data: put(store, key, data)):
            with pytest.raises(StoreError) as caught:
                write(f"v/{name}", b"other")
            assert type(caught.value) is error_type  # a broken link is no object: do not try again
    assert store.put_if_absent("v/file", b"123").length == 3  # the bytes are there already
    for name in ("file", "gone"):
        store.delete(f"v/{name}")
        assert not os.path.lexists(root / "v" / name)
    assert secret.read_bytes() == b"123"
    assert not (root.parent / "missing").exists()


def test_unfinished_uploads_behind_a_link_are_not_listed(root):
    (root.parent / "outside" / ".a.partial").write_bytes(b"1")
    (root / "v" / ".b.partial").write_bytes(b"1")
    link(root / "folder", root.parent / "outside")
    link(root / "v" / ".c.partial", root.parent / "outside" / "secret")
    store = LocalStore(root)
    assert {"v/.b.partial"} <= set(partial_keys(store)) <= {"v/.b.partial", "v/.c.partial"}
    assert list(store.partials("folder")) == []


def test_the_target_of_a_link_is_a_key_if_it_is_in_the_store(root):
    link(root / "w", "v")
    link(root / "x", root.parent / "run" / "v" / "a")
    link(root / "out", root.parent / "outside")
    link(root.parent / "alias", root)
    for store in (LocalStore(root), LocalStore(root.parent / "alias")):
        assert store.link_target("w") == "v"
        assert store.link_target("x") == "v/a"
        assert store.link_target("out") is None
