"""Stores in the file systems of fsspec, which promise nothing, and which fail."""

import gc
import math
import os
import sys
import threading
import time
import traceback
import uuid
from datetime import UTC, datetime

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

import limpet
from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, Denied, LimpetError, NoSpace, StoreError, Unavailable
from limpet.snapshot import pins
from limpet.storage.open import open_store
from limpet.storage.store import within
from limpet.testing import StoreContract
from limpet.testing.contract import keys, partial_keys, put
from tests.cli.invoke import run_cli
from tests.waiting import wait_until, wait_until_no_thread


def memory_url():
    return f"fsspec+memory://test-{uuid.uuid4().hex}"


class TestMemory(StoreContract):
    def make_store(self, folder):
        return open_store(f"{memory_url()}/a/b", allow_weak=True)


class TestFile(StoreContract):
    def make_store(self, folder):
        return open_store(f"fsspec+file://{folder}/not/yet", allow_weak=True)


class TestDirOfMemory(StoreContract):
    def make_store(self, folder):
        options = {"path": str(folder), "target_protocol": "memory"}
        return open_store("fsspec+dir://", **options, allow_weak=True)


# without allow_weak, nothing is written

STATE = {"weights": np.arange(50_000.0), "note": "weak"}


@pytest.fixture
def url():
    """The URL of a run with versions 1 and 2, in which every file pins a version to read it."""
    url = f"{memory_url()}/run"
    store = open_store(url, allow_weak=True)
    for step in (1, 2):
        save_version(store, step)
    return url


def save_version(store, step):
    state = {**STATE, "step": step}
    with limpet.Checkpointer(store, state) as checkpointer:
        checkpointer.resume()
        state["step"] = step
        for _ in range(step - checkpointer.current_step):
            checkpointer.step()
        checkpointer.save()


def files_of(url):
    return {s.key: s for kind in ("list", "partials") for s in getattr(open_store(url), kind)("")}


@pytest.mark.parametrize("how", ["save", "save_async", "checkpointer", "copy", "methods"])
def test_writing_is_refused(how, tmp_path):
    url = memory_url()
    limpet.save(tmp_path / "version_1", STATE, step=1)
    with pytest.raises(LimpetError, match="allow_weak=True") as caught:
        if how == "save":
            limpet.save(f"{url}/version_1", STATE, step=1)
        elif how == "save_async":
            limpet.save_async(f"{url}/version_1", STATE, step=1).wait()
        elif how == "checkpointer":
            save_version(url, 1)
        elif how == "copy":
            result = run_cli("copy", tmp_path / "version_1", f"{url}/version_1")
            assert result.code != 0
            raise LimpetError(result.err)
        else:
            open_store(url).put("a", 1)
    assert "guarantees none of this" in str(caught.value)
    assert files_of(url) == {}


def test_reading_works_and_writes_nothing(url, tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "MIN_PINNED_BYTES", 0)
    before, seen = files_of(url), []
    monkeypatch.setattr(limpet.events, "emit", lambda name, **_: seen.append(name))
    loaded = limpet.load(f"{url}/version_2")
    assert loaded["step"] == 2
    assert np.array_equal(loaded["weights"], STATE["weights"])
    assert [s.step for s in limpet.Run(url).snapshots()] == [1, 2]
    state = {**STATE, "weights": np.zeros(50_000), "step": 0}
    with limpet.Checkpointer(url, state) as checkpointer:
        assert checkpointer.resume().step == 2
    assert np.array_equal(state["weights"], STATE["weights"])
    for command in (
        ("ls", url),
        ("show", f"{url}@2"),
        ("verify", url),
        ("verify", f"{url}/version_1"),
        ("diff", f"{url}/version_1", f"{url}/version_2"),
        ("copy", f"{url}@1", tmp_path / "version_1"),
    ):
        result = run_cli(*command)
        assert result.code == (7 if command[0] == "diff" else 0), (command, result)
        assert "allow_weak" not in result.out + result.err
    assert limpet.load(tmp_path / "version_1")["step"] == 1
    assert files_of(url) == before
    assert "pin_left" not in seen


# a file system that fails

CALLS = ("info", "ls", "makedirs", "_open", "cat_file", "cp_file", "rm_file")


@pytest.fixture
def faulty():
    """Return the class behind ``faulty://``, whose objects are in memory and which can fail."""

    class Faulty(MemoryFileSystem):
        protocol = "faulty"
        store, pseudo_dirs = {}, [""]
        calls, fail_at, error, connections = 0, 0, OSError("broken"), 0

        def __init__(self, **options):
            super().__init__(**options)
            Faulty.connections += 1

        @classmethod
        def _strip_protocol(cls, path):
            return MemoryFileSystem._strip_protocol(path.removeprefix("faulty://"))

    def counted(name):
        method = getattr(MemoryFileSystem, name)

        def call(self, *args, **options):
            Faulty.calls += 1
            if Faulty.calls == Faulty.fail_at:
                raise Faulty.error
            return method(self, *args, **options)

        return call

    for name in CALLS:
        setattr(Faulty, name, counted(name))
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    return Faulty


def open_faulty(**options):
    return open_store("fsspec+faulty://run", allow_weak=True, **{"timeout": 1, **options})


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError("broken"), ConnectionResetError("gone")])
def test_a_save_raises_or_commits_at_each_failed_call(faulty, error):
    faulty.error = error
    outcomes = {"saved": 0, "nothing": 0, "unknown": 0}
    for fail_at in range(1, 1000):
        faulty.store.clear()
        faulty.calls, faulty.fail_at = 0, fail_at
        store = open_faulty()
        failure = None
        try:
            limpet.save(store, STATE, step=1)
        except LimpetError as e:
            failure = e
        is_done, faulty.fail_at = faulty.calls < fail_at, 0
        exists = "manifest.json" in keys(store)
        if failure is None:
            assert np.array_equal(limpet.load(store)["weights"], STATE["weights"])
            outcomes["saved"] += 1
        elif failure.is_outcome_unknown:
            outcomes["unknown"] += 1
        else:
            assert not exists
            outcomes["nothing"] += 1
        if is_done:
            break
    is_repeated = isinstance(error, ConnectionResetError)  # unless bytes were being written
    assert outcomes["nothing"] > (0 if is_repeated else 10)
    assert outcomes["unknown"] <= 24  # up to 8 calls from the move of each of 3 files on
    assert outcomes["saved"] >= (10 if is_repeated else 1)  # a failure to delete, or none


@pytest.mark.parametrize("fault", ["truncated", "unmoved", "uncopied", "half copied"])
def test_a_silent_failure_is_found(faulty, fault, monkeypatch):
    store = open_faulty()
    if fault == "truncated":
        open_file = faulty._open

        class Shorter:
            def __init__(self, file):
                self.file, self.close = file, file.close

            def write(self, data):
                self.file.write(data[:-1])
                return len(data)

        monkeypatch.setattr(
            faulty, "open", lambda self, path, mode="rb", **_: Shorter(open_file(self, path, mode))
        )
    elif fault == "unmoved":
        monkeypatch.setattr(faulty, "mv", lambda *_: None)
    elif fault == "uncopied":
        monkeypatch.setattr(faulty, "cp_file", lambda *_: None)
    else:
        copy = MemoryFileSystem.pipe_file
        monkeypatch.setattr(faulty, "cp_file", lambda self, _, path: copy(self, path, b"1"))
    for write in (
        lambda: put(store, "v/a", b"123"),
        lambda: store.put_if_absent("v/m", b"123"),
        lambda: limpet.save(store, STATE, step=1),
    ):
        with pytest.raises(StoreError):
            write()
    assert "manifest.json" not in keys(store)
    if fault != "half copied":
        assert keys(store) == []
    monkeypatch.undo()


def test_a_move_that_leaves_an_existing_file_is_a_conflict(faulty, monkeypatch):
    store, other = open_faulty(), open_faulty()

    def overtaken(self, source, target):
        monkeypatch.undo()
        other.put_if_absent("m", b"other")

    for data, expected in ((b"mine", AlreadyExists), (b"other", None)):
        monkeypatch.setattr(faulty, "mv", overtaken)
        if expected:
            with pytest.raises(expected):
                store.put_if_absent("m", data)
        else:
            assert store.put_if_absent("m", data).length == 5
        assert store.get("m", 9) == b"other"
        assert partial_keys(store) == []
        store.delete("m")


class AuthenticationException(Exception):
    """Paramiko's error of this name."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(13, "no"), Denied),
        (AuthenticationException("who?"), Denied),
        (OSError(28, "full"), NoSpace),
        (OSError(113, "no route"), Unavailable),
        (TimeoutError("slow"), Unavailable),
        (BrokenPipeError("gone"), Unavailable),
        (EOFError(), Unavailable),
        (NotImplementedError("read-only"), StoreError),
    ],
)
def test_errors_are_translated(faulty, monkeypatch, error, expected):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(faulty, "ls", fail)
    with pytest.raises(StoreError) as caught:
        list(open_faulty(timeout=0.1).list(""))
    assert type(caught.value) is expected
    assert type(error).__name__ in str(caught.value)


SECRET = "S3CRET/+=x"


@pytest.mark.parametrize(
    "options",
    [
        {"token": SECRET},
        {"client_kwargs": {"headers": {"Authorization": f"Basic {SECRET}"}}, "a": [1, None]},
        {"auth": ("user", SECRET.encode())},
        {"target_options": {"password": SECRET}},
    ],
)
@pytest.mark.parametrize("text", ["bad %s", "http://u:%s@h/", "GET /a?delegation=%s&op=x failed"])
def test_an_error_shows_no_secret(faulty, monkeypatch, options, text):
    sent = [SECRET, "S3CRET/%2B%3Dx", "S3CRET%2F%2B%3Dx", f"Basic {SECRET}"]
    faulty.error = OSError(" ".join(text % form for form in sent))
    store, faulty.fail_at = open_faulty(**options), 1
    with pytest.raises(StoreError, match="Cannot list") as caught:
        list(store.list(""))
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.fields)
    assert "S3CRET" not in shown


@pytest.mark.parametrize(
    "info",
    [
        {"mtime": 1700000000.5},
        {"mtime": datetime.fromtimestamp(1700000000.5, UTC)},
        {"updated": "2023-11-14T22:13:20.5Z", "created": "no"},
        {"LastModified": datetime(2023, 11, 14, 22, 13, 20)},
        {"created": datetime.fromtimestamp(1700000000, UTC)},
        *({}, {"mtime": "yesterday"}, {"mtime": object()}),  # of unknown age: it is new
    ],
)
def test_the_time_of_a_file(faulty, monkeypatch, info):
    monkeypatch.setattr(faulty, "info", lambda *_: {"type": "file", "size": 1, **info})
    monkeypatch.setattr(time, "time", lambda: 1700000000.9)
    assert int(open_faulty().stat("a").modified) == 1700000000


def test_a_file_of_unknown_length_is_an_error(faulty, monkeypatch):
    monkeypatch.setattr(faulty, "info", lambda *_: {"type": "file", "size": None})
    with pytest.raises(StoreError, match="length"):
        open_faulty().get("a", 100)


def test_a_failed_listing_is_not_an_empty_run(faulty):
    store = open_faulty()
    store.put_if_absent("version_1/a", b"1")
    for fail_at in (1, 2):
        faulty.calls, faulty.fail_at = 0, fail_at
        with pytest.raises(StoreError, match=r"Cannot list .*OSError"):
            list(store.list(""))


def test_a_call_that_never_returns_ends_in_time(faulty, monkeypatch):
    store, released = open_faulty(timeout=0.2), threading.Event()
    store.put_if_absent("m", bytes(100))
    read = MemoryFileSystem.cat_file
    monkeypatch.setattr(faulty, "cat_file", lambda *a: (released.wait(60), read(*a))[1])
    into, start = bytearray(b"x" * 100), time.monotonic()
    with pytest.raises(Unavailable, match="TimeoutError"):
        store.get_range("m", 0, 100, memoryview(into))
    deadline = Deadline.after(0.1, "a test")
    with pytest.raises(Unavailable):
        within(open_faulty(), deadline).get("m", 100)
    with pytest.raises(Unavailable, match="TimeoutError"):
        within(open_faulty(), deadline).stat("m")
    assert time.monotonic() - start < 30
    released.set()
    assert into == b"x" * 100  # the late call changes nothing


class HangingFile(AbstractBufferedFile):
    """A file whose bytes are sent when it is closed, to a server that does not answer."""

    released, senders = threading.Event(), []

    def _upload_chunk(self, final=False):
        self.senders.append(threading.current_thread().name)
        self.released.wait(60)


@pytest.fixture
def hanging(faulty, monkeypatch):
    HangingFile.released, HangingFile.senders = threading.Event(), []
    monkeypatch.setattr(
        faulty, "_open", lambda self, path, mode, **_: HangingFile(self, path, mode)
    )
    yield HangingFile
    HangingFile.released.set()


@pytest.mark.parametrize("over", [0, 1, 20])
def test_no_finalizer_sends_the_rest_of_a_file(hanging, monkeypatch, over):
    """The deadline passes before the file is closed, so long that nothing is cleaned up, or while
    it is being closed."""
    now, begin = [0.0], time.monotonic()
    if not over:
        monkeypatch.setattr("limpet.deadline.CLEANUP_SECONDS", 0.3)
        deadline = Deadline.after(0.3, "a test")
    else:
        monkeypatch.setattr("limpet.deadline.CLEANUP_SECONDS", 1.3)
        deadline = Deadline("a test", 0.3, lambda: now[0])
    upload = open_faulty().within(deadline).put("m", 3)
    upload.write_at(0, memoryview(b"123"))
    now[0] = over
    with pytest.raises(Unavailable):
        upload.commit()
    del upload
    gc.collect()
    assert time.monotonic() - begin < 10
    assert hanging.senders == ([] if over else ["limpet-call"])


def test_a_file_that_is_opened_too_late_is_given_up(hanging, faulty, monkeypatch):
    opened, may_open, files = threading.Event(), threading.Event(), []

    def open_late(self, path, mode, **_):
        opened.set()
        may_open.wait(60)
        files.append(HangingFile(self, path, mode))
        return files[0]

    monkeypatch.setattr(faulty, "_open", open_late)
    with pytest.raises(Unavailable):
        open_faulty(timeout=0.2).put_if_absent("m", b"123")
    assert opened.wait(10)
    may_open.set()
    wait_until(lambda: files and files[0].closed)
    assert hanging.senders == []


def test_a_connection_that_comes_too_late_is_not_used(faulty, monkeypatch):
    """The late deletion removed what was written after it had been reported as failed."""
    store, may_connect = open_faulty(), threading.Event()
    store.put_if_absent("m", b"1")
    slow = open_faulty(timeout=0.2)
    connect, ended = slow.remote.connect, []
    slow.remote.connect = lambda: (may_connect.wait(60), connect(), ended.append(1))[1]
    with pytest.raises(Unavailable):
        slow.delete("m")
    store.delete("m")
    store.put_if_absent("m", b"2")
    may_connect.set()
    wait_until_no_thread("limpet-call")
    assert ended
    assert store.get("m", 9) == b"2"


def test_a_forked_process_connects_again(faulty, monkeypatch):
    store = open_faulty()
    store.put_if_absent("m", b"1")
    connections = faulty.connections
    store.stat("m")
    assert faulty.connections == connections
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    store.stat("m")
    assert faulty.connections == connections + 1


def test_a_listing_shows_what_others_did(tmp_path):
    one, two = (open_store(f"fsspec+file://{tmp_path}", allow_weak=True) for _ in range(2))
    assert keys(one) == []
    two.put_if_absent("v/a", b"1")
    assert keys(one) == ["v/a"]
    (tmp_path / "v" / "b").write_bytes(b"2")
    assert keys(one) == ["v/a", "v/b"]
    one.delete("v/a")
    assert keys(two) == ["v/b"]


# bad input


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("fsspec+://a", "does not name one file system"),
        ("fsspec+dir::memory://a", "does not name one file system"),
        ("fsspec+nonsense://a", "Protocol not known: nonsense"),
        ("fsspec+smb://a", "smbprotocol"),
        ("fsspec+ftp://me:secret@host/a", "password"),
        ("fsspec+ftp://me:sec/ret@host/a", "password"),
        ("fsspec+ftp://:secret@host/a", "password"),
        ("fsspec+ftp://me@corp.com:secret@host/a", "password"),
        ("fsspec+sftp://me@corp.com:secret@host:22/a", "password"),
        ("fsspec+sftp://me@corp.com:sec/ret@host/a", "password"),
        ("fsspec+sftp://me:sec@secret@host/a", "password"),
        ("fsspec+simplecache::ftp://me:secret@host/a", "does not name one file system"),
        ("fsspec+nonsense://host/a?sig=secret", "query"),
        ("fsspec+http://host/a?x=1&sig=secret", "query"),
    ],
)
def test_bad_urls(url, message):
    with pytest.raises(StoreError, match=message) as caught:
        limpet.Run(url)
    shown = "".join(traceback.format_exception(caught.value)) + run_cli("ls", url).err
    shown = shown.replace("hide_secrets", "")  # a line of the source
    assert "secret" not in shown
    assert "sec/ret" not in shown


@pytest.mark.parametrize(
    "rest", ["host:8020/run@120", "me@host:22/run@120", "a/b:c@d", "a/what?/b", "/a:b@c"]
)
def test_a_url_without_credentials_is_accepted(rest):
    assert open_store(f"fsspec+memory://{rest}").url == f"fsspec+memory://{rest}"


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StoreError, match=r"Install fsspec"):
        open_store("fsspec+memory://a")


def test_bad_options():
    for timeout in (0, -1, "5", None, True, math.inf):
        with pytest.raises(StoreError, match="timeout="):
            open_store("fsspec+memory://a", timeout=timeout)
    for value in ("False", 1, 0, None):
        with pytest.raises(StoreError, match=r"allow_weak=. Expected True or False"):
            open_store("fsspec+memory://a", allow_weak=value)
    store = open_store("fsspec+dir://a", path="/", target_protocol="nonsense")
    with pytest.raises(StoreError, match="ValueError"):
        store.stat("a")
    with pytest.raises(StoreError, match="Cannot register"):
        limpet.register_store("fsspec+memory", open_store)
    with pytest.raises(StoreError, match=r"fsspec\+PROTOCOL://"):
        open_store("unknown://a")
