"""``fsspec+sftp://`` on OpenSSH: the Store contract, and a server that fails."""

import os
import signal
import threading
import time
import uuid

import numpy as np
import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, Denied, LimpetError, StoreError, Unavailable
from limpet.storage.fsspec import _FsspecFile
from limpet.storage.open import open_store
from limpet.testing import StoreContract, contract
from limpet.testing.contract import keys, partial_keys
from tests.stores.conftest import running_sftp
from tests.waiting import wait_until

STATE = {"w": np.arange(600_000, dtype=np.int32), "note": "weak"}  # 2.4 MB


@pytest.fixture
def url(sftp):
    """The URL of a folder that does not exist."""
    return f"{sftp.url}/{uuid.uuid4().hex}/a"


class TestSftp(StoreContract):
    @pytest.fixture
    def store(self, sftp, url):
        return open_run(sftp, url)


def open_run(sftp, url, **options):
    options = {"timeout": 60, **sftp.options, **options}
    return open_store(url, allow_weak=True, **options)


def save(store, step=1):
    return limpet.save(store.at(f"version_{step}"), STATE, step=step)


def check_intact(store, steps):
    run = limpet.Run(store)
    assert [s.step for s in run.snapshots()] == [*steps]
    for snapshot in run.snapshots():
        assert snapshot.verify().ok
        assert np.array_equal(limpet.load(store.at(f"version_{snapshot.step}"))["w"], STATE["w"])


def test_versions_are_saved_loaded_verified_and_deleted(sftp, url):
    store = open_run(sftp, url)
    save(store)
    save(store, 2)
    check_intact(open_run(sftp, url), [1, 2])
    with pytest.raises(Denied, match="allow_weak=True"):
        save(open_store(url, **sftp.options), 3)
    run = limpet.Run(store)
    run.delete(run.snapshots()[0].version)
    check_intact(store, [2])
    assert all(key.startswith("version_2/") for key in keys(store))
    assert partial_keys(store) == []
    assert os.listdir(sftp.folder / "data" / url.split("/")[-2] / "a") == ["version_2"]


def used():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_refused_creations_leave_no_connection(sftp, url):
    store = open_run(sftp, url)
    store.put_if_absent("m", b"first")
    before = used()
    for number in range(60):
        with pytest.raises(AlreadyExists):
            if number % 2:
                contract.put(store, "m", b"second")
            else:
                store.put_if_absent("m", b"second")
    assert used() == before
    assert partial_keys(store) == []


def test_failed_uploads_leave_no_connection(sftp, url):
    """A folder where a file should be: the server refuses the move."""
    store = open_run(sftp, url)
    store.put_if_absent("m/x", b"1")
    before = used()
    for _ in range(20):
        with pytest.raises(StoreError):
            contract.put(store, "m", b"second")
    wait_until(lambda: used()[1] <= before[1] and used()[0] <= before[0])
    assert keys(store) == ["m/x"]


def test_a_wrong_key_is_denied_and_not_shown(sftp, url, tmp_path):
    options = {**sftp.options, "key_filename": None, "password": "S3CRET"}
    with pytest.raises(Denied) as caught:
        open_store(url, **options).stat("a")
    assert "S3CRET" not in str(caught.value)


@pytest.mark.usefixtures("no_time_for_bodies")
def test_a_stopped_server_holds_no_call_up(request):
    with running_sftp(request) as server:
        url = f"{server.url}/run"
        save(open_run(server, url))
        store = open_run(server, url, timeout=2)
        connected = open_run(server, url, timeout=2)
        connected.stat("version_1/manifest.json")
        upload = connected.put("x", 3 << 20)
        upload.write_at(0, memoryview(bytes(1 << 20)))
        calls = [
            lambda: connected.stat("version_1/manifest.json"),
            lambda: store.stat("version_1/manifest.json"),
            lambda: store.get("version_1/manifest.json", 1 << 20),
            lambda: contract.read(store, "version_1/manifest.json", 0, 9),
            lambda: store.delete("z"),
            lambda: keys(store),
            lambda: [*store.list_level("")],
            lambda: upload.write_at(1 << 20, memoryview(bytes(2 << 20))),
            lambda: store.within(Deadline.after(1, "the test")).put_if_absent("x", b"1"),
        ]
        server.pause()
        try:
            for call in calls:
                began = time.monotonic()
                with pytest.raises(Unavailable, match="TimeoutError"):
                    call()
                assert time.monotonic() - began < 4
            began = time.monotonic()
            with pytest.raises(LimpetError):
                limpet.save(store.at("version_2"), STATE, step=2, timeout=2)
            assert time.monotonic() - began < 2 + 12  # and the cleanup
            upload.abort()
        finally:
            server.send(signal.SIGCONT)
        run = open_run(server, url)
        check_intact(run, [1])
        save(run, 2)
        check_intact(run, [1, 2])


def test_a_server_that_is_killed_during_an_upload(request, monkeypatch):
    with running_sftp(request) as server:
        store = open_run(server, f"{server.url}/run", timeout=10)
        save(store)
        killed = []
        write = _FsspecFile.write

        def kill_first(*arguments):
            write(*arguments)
            if not killed:
                killed.append(server.pids())
                server.kill()

        monkeypatch.setattr(_FsspecFile, "write", kill_first)
        with pytest.raises(LimpetError):
            save(store, 2)
        assert len(killed[0]) > 1  # also the processes of the connections
        server.resume()
        check_intact(store, [1])
        save(store, 2)
        check_intact(store, [1, 2])
