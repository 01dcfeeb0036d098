"""Failures of HDFS: calls that fail or whose replies are lost, stopped and killed daemons."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import hdfs_native
import numpy as np
import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, LimpetError, NotFound, StoreError, Unavailable
from limpet.storage import hdfs as hdfs_server
from limpet.storage import hdfs as hdfs_store
from limpet.storage.hdfs import HdfsFolder, HdfsServer
from limpet.testing.contract import partial_keys, put
from limpet.types import MIB
from tests.stores.checks import check_intact
from tests.stores.conftest import running_hdfs
from tests.waiting import run_threads

STATE = {"w": np.arange(MIB, dtype=np.int32), "n": 3}


class Faults:
    """Wraps the client of hdfs-native. Each of its calls is one in ``log``.

    ``fail(number, when, error, count)``: the calls from ``number`` on raise ``error`` "before" they
    do anything, or "after" (the reply is lost). "late": they return ``error`` seconds later.
    """

    def __init__(self):
        self.log, self.plan = [], None
        self.written_types = set()
        self.of_timeouts = {}  # other objects, for the clients with these timeouts

    def fail(self, number, when, error, count=1, name=None):
        self.log.clear()
        self.plan = (number, when, error, count, name)

    def heal(self):
        self.fail(0, "before", None, 0)

    def wrap(self, inner):
        return _Wrapped(inner, self)

    def _hits(self, name):
        self.log.append(name)
        if self.plan is None:
            return None
        first, when, error, count, only = self.plan
        number = self.log.count(name) - 1 if only else len(self.log) - 1
        is_hit = first <= number < first + count and only in (None, name)
        return (when, error) if is_hit else None


class _Wrapped:
    def __init__(self, inner, faults):
        self._inner, self._faults = inner, faults

    def __getattr__(self, name):
        inner, faults = getattr(self._inner, name), self._faults

        def call(*args, **options):
            if name == "write":
                faults.written_types.add(type(args[0]))
            hit = faults._hits(name)
            if hit is not None and hit[0] == "before":
                raise hit[1]
            result = inner(*args, **options)
            if hit is not None and hit[0] == "after":
                raise hit[1]
            if hit is not None:
                time.sleep(hit[1])
            return faults.wrap(result) if name == "create" else result

        return inner if name in ("list_status", "read_range") else call


@pytest.fixture
def faults(monkeypatch):
    result = Faults()
    create = HdfsServer._create_client

    def create_wrapped(owner):
        return result.of_timeouts.get(owner.options.timeout, result).wrap(create(owner))

    monkeypatch.setattr(HdfsServer, "_create_client", create_wrapped)
    monkeypatch.setattr(hdfs_server, "_servers", {})
    return result


@pytest.fixture
def run_url(hdfs):
    return f"{hdfs.url}/{uuid.uuid4().hex}"


def versions(store):
    return [s.step for s in limpet.Run(store).snapshots()]


def check_run(store, expected):
    check_intact(store, expected)
    limpet.Run(store).sweep(grace=0, now=time.time() + 8 * 24 * 3600)
    assert partial_keys(store) == []
    assert {stat.key.partition("/")[0] for stat in store.list("")} == {
        f"version_{step}" for step in expected
    }


def calls_of_a_save(faults, store):
    faults.heal()
    limpet.save(store.at("version_1"), STATE, step=1)
    return [*faults.log]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_survives_or_raises_whichever_call_fails_once(run_url, faults, monkeypatch, when):
    """Each save has a client of its own, so that they run at the same time: most of them wait."""
    monkeypatch.setattr(hdfs_server, "_CLOSE_PAUSES", ())  # the number of those looks varies
    calls = calls_of_a_save(faults, limpet.open_store(run_url, timeout=60))
    assert {"create", "write", "hsync", "close", "rename", "get_file_info"} <= {*calls}

    def save(number):
        """Return the error of the save whose call of this number fails, or None."""
        step, own = number + 2, Faults()
        store = limpet.open_store(run_url, timeout=60 + step)
        faults.of_timeouts[60 + step] = own
        own.fail(number, when, ConnectionResetError("lost"))
        try:
            limpet.save(store.at(f"version_{step}"), STATE, step=step)
        except StoreError as e:
            assert not e.is_outcome_unknown, (number, e)  # noqa: PT017
            return type(e)
        finally:
            assert own.log[number] == calls[number]
            own.heal()
        return None

    with ThreadPoolExecutor(16) as threads:
        errors = [*threads.map(save, range(len(calls)))]
    assert [(call, error) for call, error in zip(calls, errors, strict=True) if error] == []
    check_run(limpet.open_store(run_url, timeout=60), [1, *range(2, len(calls) + 2)])


@pytest.mark.parametrize("name", ["create", "write", "hsync", "rename", "get_file_info"])
def test_a_call_that_fails_for_ever_ends_the_save(run_url, faults, name):
    store = limpet.open_store(run_url, timeout=2)
    calls_of_a_save(faults, store)
    faults.fail(0, "before", ConnectionRefusedError("no server"), 1 << 30, name)
    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"no server|no answer"):  # on a loaded machine
        limpet.save(store.at("version_2"), STATE, step=2)
    assert time.monotonic() - begin < 30
    faults.heal()
    limpet.save(store.at("version_3"), STATE, step=3)
    check_run(store, [1, 3])


def test_the_client_gets_bytes(run_url, faults):
    """hdfs-native 0.14.7 copies a memoryview one element at a time: 15 s of CPU time per GiB."""
    limpet.save(f"{run_url}/version_1", {"w": np.arange(3 * MIB, dtype=np.int32)}, step=1)
    assert faults.written_types == {bytes}


def test_a_lost_reply_of_the_commit(run_url, faults):
    store = limpet.open_store(run_url, timeout=30)
    faults.fail(0, "after", ConnectionResetError("lost"), name="rename")
    assert store.put_if_absent("m", b"own").length == 3
    for foreign in (b"foreign", b"oth"):
        faults.fail(0, "before", ConnectionResetError("lost"), name="rename")
        with pytest.raises(AlreadyExists):
            store.put_if_absent("m", foreign)
    assert store.get("m", 9) == b"own"
    faults.fail(0, "late", 2.0, name="rename")
    with pytest.raises(Unavailable) as caught:
        limpet.open_store(run_url, timeout=1).put_if_absent("n", b"unknown")
    assert caught.value.is_outcome_unknown
    assert faults.log.count("rename") == 1
    assert store.stat("n").length == 7
    faults.heal()
    assert store.put_if_absent("n", b"unknown").length == 7
    assert partial_keys(store) == []


def test_a_lost_reply_of_the_commit_that_cannot_be_looked_up(run_url, faults, monkeypatch):
    look_up = HdfsFolder.look_up

    def away(folder, path, key):
        if path.endswith(".partial"):
            return look_up(folder, path, key)
        raise Unavailable("away")

    store = limpet.open_store(run_url, timeout=5)
    faults.fail(0, "after", ConnectionResetError("lost"), name="rename")
    with monkeypatch.context() as patch, pytest.raises(Unavailable, match="away") as caught:
        patch.setattr(HdfsFolder, "look_up", away)
        store.put_if_absent("m", b"own")
    assert caught.value.is_outcome_unknown
    assert store.get("m", 9) == b"own"


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 36 * MIB])
@pytest.mark.parametrize("name", ["write", "hsync", "close"])
def test_a_step_of_an_upload_that_hangs_or_fails(run_url, faults, monkeypatch, name, size):
    """A short file is written anew. A long one is opened again: its first bytes are not kept. If
    it has all bytes, it is copied: they could not be synced any more."""
    monkeypatch.setattr(hdfs_store, "FIRST_STEP", 1.0)
    store = limpet.open_store(run_url, timeout=60)
    data, number = np.random.default_rng(0).bytes(size), 8 if size > MIB and name == "write" else 0
    for when, error in (("late", 3.0), ("before", OSError("refused")), ("after", OSError("lost"))):
        faults.fail(number, when, error, name=name)
        with store.put(when, size) as file:
            for at in range(0, size, 4 * MIB):
                file.write_at(at, memoryview(data)[at : at + 4 * MIB])
            file.commit()
        assert store.get(when, size) == data
        is_copied = size > MIB and name == "hsync" and when != "before"
        assert faults.log.count("append") == (size > MIB and name != "close" and not is_copied)
        if is_copied:
            assert (faults.log.count("create"), faults.log.count("hsync")) == (2, 2)
        faults.heal()
    assert partial_keys(store) == []


def test_a_file_that_is_opened_again_too_late_is_closed(run_url):
    """The call was abandoned, so nobody else would end the lease."""
    store = limpet.open_store(run_url)
    store.put_if_absent("a", b"1")
    client, path = store.remote.server._client, store.remote.path("a")
    hdfs_store._append(client, path, Deadline("a test", 0.0))
    hdfs_store._append(client, path, Deadline("a test", 0.0))  # it is not open


def test_a_lost_reply_of_close_ends_the_lease(run_url, faults):
    store = limpet.open_store(run_url, timeout=60)
    data = np.random.default_rng(0).bytes(9 * MIB)
    for when in ("before", "after"):
        faults.fail(0, when, TimeoutError(), name="close")
        assert put(store, f"{when}/x", data).length == len(data)
        assert "recover_lease" in faults.log
        assert store.get(f"{when}/x", len(data)) == data


def test_a_file_that_was_shortened_by_the_server_is_not_committed(run_url, faults, monkeypatch):
    store = limpet.open_store(run_url)

    def lose(*_):
        return None

    with store.put("v/a", 3) as upload:
        upload.write_at(0, memoryview(b"abc"))
        writer = upload._target.upload._writer
        monkeypatch.setattr(writer, "hsync", lose, raising=False)
        monkeypatch.setattr(writer, "close", lose, raising=False)  # the file stays open
        with pytest.raises(StoreError, match="differs from the bytes written"):
            upload.commit()
    assert [*store.list("")] == []
    assert partial_keys(store) == []


def test_without_hsync_nothing_is_committed(run_url, faults):
    faults.fail(0, "before", NotImplementedError("erasure coding"), 1 << 30, "hsync")
    with pytest.raises(StoreError, match="allow_weak=True"):
        limpet.save(f"{run_url}/version_1", STATE, step=1)
    assert versions(limpet.open_store(run_url)) == []
    weak = limpet.open_store(run_url, allow_weak=True)
    assert not weak.traits.durable
    assert limpet.open_store(run_url).traits.durable
    limpet.save(weak.at("version_2"), STATE, step=2)
    check_run(weak, [2])


SAVER = """
import sys, time
import hdfs_native, numpy as np, limpet
from limpet.storage import hdfs as store
url, place, name, key = sys.argv[1:]
owners = [store.HdfsFile, store, hdfs_native.FileWriter]
owner = owners[["HdfsFile", "store", "writer"].index(place)]
step = getattr(owner, name)
def stop(*args):
    if key in str([getattr(arg, "_key", arg) for arg in args]):
        print("here", flush=True)
        time.sleep(60)
    return step(*args)
setattr(owner, name, stop)
limpet.save(url, {"w": np.arange(3 << 20, dtype=np.int32)}, step=2)
"""


@pytest.mark.parametrize(
    ("place", "name", "key"),
    [
        ("HdfsFile", "write", ""),
        ("store", "_sync", "safetensors"),
        ("writer", "close", ""),
        ("HdfsFile", "_rename", "safetensors"),
        ("HdfsFile", "_rename", "manifest.json"),
    ],
)
def test_a_killed_save_leaves_nothing_that_sweep_does_not_find(run_url, place, name, key):
    store = limpet.open_store(run_url)
    limpet.save(store.at("version_1"), STATE, step=1)
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, f"{run_url}/version_2", place, name, key],
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert versions(store) == [1]
    limpet.save(store.at("version_3"), STATE, step=3)
    check_run(store, [1, 3])


def test_an_unclosed_file_is_not_taken_for_a_whole_one(run_url, faults):
    """HDFS renames a file that is being written; its length is that of the last sync."""
    store = limpet.open_store(run_url)
    upload = store.put("version_1/x", 4 * MIB)
    upload.write_at(0, memoryview(bytes(MIB)))
    path = upload._target.upload.paths[0]
    target = store.remote.path("version_1/manifest.json")
    store.remote.call(
        "rename", "commit", "x", lambda client: client.rename(path, target, overwrite=False)
    )
    assert store.stat("version_1/manifest.json").length == 0
    with pytest.raises(StoreError, match="too short"):
        store.get_range("version_1/manifest.json", 0, 5, memoryview(bytearray(5)))
    with pytest.raises(limpet.errors.NoSnapshot, match=r"manifest\.json is damaged"):
        limpet.Run(store).latest()


def flip_in_transit(monkeypatch, content, count):
    """Invert a bit of the next ``count`` answers of hdfs-native that contain ``content``."""
    read, left = hdfs_native.FileReader.read_range, [count]

    def flipped(reader, offset, length):
        data = bytearray(read(reader, offset, length))
        at = data.find(content)
        if at >= 0 and left[0]:
            left[0] -= 1
            data[at] ^= 1
        return bytes(data)

    monkeypatch.setattr(hdfs_native.FileReader, "read_range", flipped)
    return left


def test_a_flipped_bit_is_never_loaded(run_url, monkeypatch):
    store = limpet.open_store(run_url)
    for step in (1, 2):
        state = {"w": np.frombuffer(b"shard %d " % step * 1000, np.uint8), "n": f"manifest {step}"}
        limpet.save(store.at(f"version_{step}"), state, step=step)
    left = flip_in_transit(monkeypatch, b"manifest 2", 1)
    with pytest.raises(limpet.errors.FormatError, match=r"manifest\.json"):
        limpet.load(store.at("version_2"))
    assert left == [0]
    left = flip_in_transit(monkeypatch, b"shard 2", 1)
    assert limpet.load(store.at("version_2"))["n"] == "manifest 2"  # it was read once more
    assert left == [0]
    flip_in_transit(monkeypatch, b"shard 2", 1 << 30)
    with pytest.raises(limpet.errors.DigestMismatch):
        limpet.load(store.at("version_2"))
    state = {"w": np.zeros(8000, np.uint8), "n": ""}
    with pytest.warns(match="version_2"):
        assert limpet.Checkpointer(store, state).resume().step == 1
    assert state["n"] == "manifest 1"


@pytest.fixture(scope="module")
def cluster(request):
    """An HDFS with three DataNodes, and two copies of each block."""
    with running_hdfs(request, 3, 2) as server:
        yield server


def writing_datanode(cluster):
    """Return the name of a DataNode that writes the newest block."""

    def files():
        found = (f for f in cluster.folder.glob("datanode*/**/rbw/blk_*") if f.suffix != ".meta")
        return sorted(found, key=lambda file: int(file.name.removeprefix("blk_")))

    cluster.wait_until(lambda: len(files()) > 0)
    return files()[-1].relative_to(cluster.folder).parts[0]


def test_a_datanode_is_killed_during_a_write(cluster):
    # of two copies of a block, one may be on the first victim and the other on the second
    options = {"block_size": 8 * MIB, "replication": 3}
    store = limpet.open_store(f"{cluster.url}/{uuid.uuid4().hex}", **options)
    data = memoryview(np.random.default_rng(1).bytes(40 * MIB))
    victims = []
    try:
        with store.put("v/a", len(data)) as upload:
            for at in range(0, len(data), MIB):
                upload.write_at(at, data[at : at + MIB])
                if at in (3 * MIB, 20 * MIB):
                    if victims:
                        cluster.resume(victims[0])
                    victims.append(writing_datanode(cluster))
                    cluster.kill(victims[-1])
            upload.commit()
        assert store.get("v/a", len(data)) == data
    finally:
        cluster.resume()


@pytest.mark.slow
def test_one_of_three_datanodes_is_gone(cluster):
    """A small shard is accepted before any DataNode gets it: only its sync fails, or never ends."""
    store = limpet.open_store(f"{cluster.url}/{uuid.uuid4().hex}", timeout=120)
    data = np.random.default_rng(2).bytes(MIB)
    limpet.save(store.at("version_1"), STATE, step=1)
    cluster.kill("datanode1")
    begin = time.monotonic()
    try:
        with ThreadPoolExecutor(25) as threads:
            puts = [threads.submit(put, store, f"shards/{i}", data) for i in range(12)]
            puts += [threads.submit(store.put_if_absent, f"small/{i}", b"1") for i in range(12)]
            saved = threads.submit(limpet.save, store.at("version_2"), STATE, step=2)
            for future in [*puts, saved]:
                future.result()
        # Two of three tries meet the dead DataNode, each for up to 10 s: 16 to 64 s in all.
        assert time.monotonic() - begin < 120
        assert all(store.get(f"shards/{i}", MIB) == data for i in range(12))
        assert [s.step for s in limpet.Run(store).snapshots() if s.verify().ok] == [1, 2]
        assert partial_keys(store) == []
    finally:
        cluster.resume()


def test_a_bit_that_flips_on_one_disk_and_on_all(cluster):
    store = limpet.open_store(f"{cluster.url}/{uuid.uuid4().hex}", timeout=20)
    content = uuid.uuid4().hex.encode()
    store.put_if_absent("a", content)
    blocks = [
        file
        for file in cluster.folder.glob("datanode*/**/blk_*")
        if file.suffix != ".meta" and file.read_bytes() == content
    ]
    assert len(blocks) == 2
    blocks[0].write_bytes(bytes([content[0] ^ 1]) + content[1:])
    for _ in range(6):  # from any of the two
        assert store.get("a", 99) == content
    blocks[1].write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(Unavailable, match="every copy of a block is damaged") as caught:
        limpet.open_store(store.url, timeout=1).get("a", 99)
    assert caught.value.found.count("127.0.0.1:") == 2, caught.value
    assert "{" not in str(caught.value)


def test_all_daemons_are_killed_during_a_save_and_come_back(cluster, monkeypatch):
    url = f"{cluster.url}/{uuid.uuid4().hex}"
    monkeypatch.setattr(hdfs_server, "_servers", {})
    store = limpet.open_store(url, timeout=4)
    limpet.save(store.at("version_1"), STATE, step=1)
    with store.put("version_2/x", 8 * MIB) as upload:
        upload.write_at(0, memoryview(bytes(4 * MIB)))
        cluster.kill()
        begin = time.monotonic()
        with pytest.raises(StoreError):
            upload.write_at(4 * MIB, memoryview(bytes(4 * MIB)))
            upload.commit()
    with pytest.raises(LimpetError):
        limpet.save(store.at("version_3"), STATE, step=3)
    assert time.monotonic() - begin < 60
    cluster.resume()
    patient = limpet.open_store(url, timeout=60)
    assert versions(patient) == [1]
    limpet.save(patient.at("version_4"), STATE, step=4)
    check_run(patient, [1, 4])


@pytest.mark.parametrize("stopped", ["namenode", "all"])
def test_every_call_ends_although_the_server_never_answers(cluster, stopped, monkeypatch):
    url = f"{cluster.url}/{uuid.uuid4().hex}"
    store = limpet.open_store(url, timeout=2)
    store.put_if_absent("v/a", b"1234")
    open_upload = store.put("v/open", 8 * MIB)
    open_upload.write_at(0, memoryview(bytes(MIB)))
    calls = {
        "put": lambda: store.put_if_absent("v/b", b"1"),
        "get": lambda: store.get("v/a", 9),
        "stat": lambda: store.stat("v/a"),
        "list": lambda: [*store.list("")],
        "delete": lambda: store.delete("v/a"),
        "upload": lambda: (
            open_upload.write_at(MIB, memoryview(bytes(7 * MIB))),
            open_upload.commit(),
        ),
    }
    names = ["namenode"] if stopped == "namenode" else []
    cluster.pause(*names)
    seconds, results = {}, {}

    def measure(name):
        begin = time.monotonic()
        try:
            results[name] = calls[name]()
        except StoreError as e:
            results[name] = type(e)
        seconds[name] = time.monotonic() - begin

    run_threads((threading.Thread(target=measure, args=(name,)) for name in calls), 60)
    cluster.send(signal.SIGCONT, *names)
    assert results == dict.fromkeys(calls, Unavailable), seconds
    assert max(seconds.values()) < 30
    assert limpet.open_store(url, timeout=60).get("v/a", 9) == b"1234"
    open_upload.abort()


def test_a_namenode_in_safe_mode_is_waited_for(cluster):
    store = limpet.open_store(f"{cluster.url}/{uuid.uuid4().hex}", timeout=60)
    store.put_if_absent("a", b"1")
    cluster.admin("-safemode", "enter")
    quick = limpet.open_store(store.url, timeout=1)
    with pytest.raises(Unavailable, match="SafeModeException"):
        quick.put_if_absent("b", b"1")
    leave = threading.Timer(1, cluster.admin, ("-safemode", "leave"))
    leave.start()
    store.put_if_absent("c", b"1")
    leave.join()
    assert [stat.key for stat in store.list("")] == ["a", "c"]


def test_a_full_quota(cluster):
    folder = uuid.uuid4().hex
    store = limpet.open_store(f"{cluster.url}/{folder}")
    store.put_if_absent("a", b"1")
    cluster.admin("-setQuota", "3", f"/{folder}")
    store.put_if_absent("b", b"1")
    with pytest.raises(StoreError, match="quota") as caught:
        store.put_if_absent("c", b"1")
    assert isinstance(caught.value, limpet.errors.NoSpace)


def test_what_people_get_wrong(hdfs, monkeypatch, tmp_path):
    for url in ("hdfs://user@host/x", "hdfs://host?a=b"):
        with pytest.raises(StoreError, match="does not name a folder"):
            limpet.open_store(url)
    with pytest.raises(StoreError, match="Unknown option 'user'"):
        limpet.open_store(hdfs.url, user="me")
    for options in ({"timeout": 0}, {"replication": 0}, {"concurrency": "8"}, {"config": 3}):
        with pytest.raises(StoreError, match=f"Invalid value for {next(iter(options))}="):
            limpet.open_store(hdfs.url, **options)
    for options in (
        *({"config": ("abc",)}, {"config": (["a", "S3CRET"],)}, {"config": {"a": ["S3CRET"]}}),
        *({"config": {3: "S3CRET"}}, {"config": "S3CRET"}, {"config": None}),
        *({"replication": 1 << 40}, {"replication": 1 << 15}, {"block_size": 1 << 63}),
    ):
        with pytest.raises(StoreError, match=f"Invalid value for {next(iter(options))}=") as caught:
            limpet.open_store(hdfs.url, **options)
        assert "S3CRET" not in str(caught.value)
    for url in ("hdfs://user:S3CRET@h/x", "hdfs://h?delegation=S3CRET"):
        with pytest.raises(StoreError, match="does not name a folder") as caught:
            limpet.open_store(url)
        assert "S3CRET" not in str(caught.value)
    with pytest.raises(StoreError, match="HADOOP_CONF_DIR"):
        limpet.open_store("hdfs:///runs").stat("x")
    with pytest.raises(StoreError, match="Add the port"):
        limpet.open_store("hdfs://127.0.0.1/runs/a").stat("x")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.configuration))
    monkeypatch.setattr(hdfs_server, "_servers", {})
    with pytest.raises(NotFound):
        limpet.open_store("hdfs:///runs").stat("x")
    wrong = limpet.open_store(f"hdfs://127.0.0.1:{hdfs.port + 1}/x", timeout=1)
    with pytest.raises(Unavailable, match="no answer"):
        wrong.stat("x")
    store = limpet.open_store(f"{hdfs.url}/{uuid.uuid4().hex}")
    with pytest.raises(StoreError, match="Invalid path name"):
        store.put_if_absent("a:b", b"1")
    store.put_if_absent("a/b", b"1")
    for key in ("a", "a/b/c"):
        with pytest.raises(StoreError) as caught:
            store.put_if_absent(key, b"1")
        assert not isinstance(caught.value, AlreadyExists | Unavailable)
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    with pytest.raises(StoreError, match=r'pip install "limpet\[hdfs\]"'):
        limpet.open_store("hdfs://other/x")


@pytest.mark.parametrize("error", [TypeError, ValueError, OverflowError])
def test_an_error_of_this_process_is_not_repeated(run_url, faults, error):
    store = limpet.open_store(run_url, timeout=60)
    faults.fail(0, "before", error("a value"), 1 << 30)
    for call in (lambda: store.stat("a"), lambda: store.put_if_absent("a", b"1")):
        faults.log.clear()
        with pytest.raises(StoreError, match="a value") as caught:
            call()
        assert not isinstance(caught.value, Unavailable)
        assert faults.log[0] in ("get_file_info", "create")
        assert len({*faults.log}) == len(faults.log)


def test_another_process_after_a_fork(run_url):
    store = limpet.open_store(run_url, timeout=30)
    store.put_if_absent("a", b"1")
    pid = os.fork()
    if not pid:
        ok = store.get("a", 1) == b"1" and store.put_if_absent("b", b"2").length == 1
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.get("b", 1) == b"2"


LATE_REPLIES = """
import os, signal, subprocess, sys, limpet
url, namenode, seconds = sys.argv[1:]
store = limpet.open_store(url, timeout=1)
store.put_if_absent("a", b"1")
os.kill(int(namenode), signal.SIGSTOP)
for i in range(6):
    try:
        store.put_if_absent(f"b{i}", b"1")
    except limpet.errors.Unavailable:
        pass
subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {namenode}"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 0.05, 0.15, 0.3])
def test_the_end_of_a_process_waits_for_the_replies_to_abandoned_calls(cluster, seconds):
    url, namenode = f"{cluster.url}/{uuid.uuid4().hex}", cluster.processes["namenode"].pid
    command = [sys.executable, "-c", LATE_REPLIES, url, str(namenode), str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        cluster.send(signal.SIGCONT, "namenode")
    assert (done.returncode, done.stderr) == (0, "")
