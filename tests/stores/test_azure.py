"""``az://`` on Azurite: the Store contract, and faults between a training and the server."""

import time

import numpy as np
import obstore
import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, LimpetError, StoreError, Unavailable
from limpet.testing import StoreContract, contract
from limpet.testing.contract import keys
from limpet.types import MIB
from tests.stores.checks import (
    check_a_replaced_object_is_an_error,
    check_intact,
    check_no_call_is_held_up,
    check_two_writers_of_one_version,
)
from tests.stores.emulators import Azurite
from tests.stores.fault_proxy import Fault, FaultProxy


class TestAzurite(StoreContract):
    partials_are_listed = False

    @pytest.fixture
    def store(self, az):
        return limpet.open_store(f"{az}/a/folder", part_size=5 * MIB)


STATE = {"w": np.arange(11 * MIB // 4, dtype=np.int32), "n": 3}  # 11 MiB: three parts

SHARD = r"\.safetensors"
REQUESTS = {
    "pin": ("PUT", r"/pin-[^?]*$"),
    "part": ("PUT", r"comp=block&"),
    "complete": ("PUT", r"comp=blocklist"),
    "index": ("PUT", r"index\.json$"),
    "manifest": ("PUT", r"manifest\.json$"),
    "stat": ("HEAD", SHARD),
    "unpin": ("POST", r"comp=batch"),
}
"""The requests of a save."""

READS = {
    "list": ("GET", r"comp=list"),
    "manifest": ("GET", r"manifest\.json$"),
    "index": ("GET", r"index\.json$"),
    "shard": ("GET", SHARD),
    "stat": ("HEAD", SHARD),
}


@pytest.fixture
def proxy(azurite):
    proxy = FaultProxy(azurite.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def store(az, proxy):
    """A run behind the proxy. No call takes longer than 20 s."""
    return open_run(az, proxy)


@pytest.fixture(scope="module")
def saved_container(azurite):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in azurite.environment().items():
            patch.setenv(name, value)
        azurite.create_container("saved")
        save(limpet.open_store("az://saved/run", part_size=5 * MIB))
    return "az://saved"


@pytest.fixture
def saved(az, proxy, saved_container):
    """A run with one version, which nobody changes."""
    return open_run(saved_container, proxy)


def open_run(az, proxy, **options):
    endpoint = f"{proxy.endpoint}/{Azurite.account}"
    return limpet.open_store(
        f"{az}/run", **{"timeout": 20, "part_size": 5 * MIB, "endpoint": endpoint, **options}
    )


def save(store, step=1):
    return limpet.save(store.at(f"version_{step}"), STATE, step=step)


def check_nothing(store):
    """Nothing was committed, and the next save works."""
    assert limpet.Run(store).snapshots() == []
    save(store, 2)
    check_intact(store, [2])


# faults that pass


@pytest.mark.parametrize(
    ("request_name", "action"),
    [
        *((name, "lose_reply") for name in REQUESTS),
        *((name, "reset") for name in ("part", "complete", "manifest")),
        *((name, "ok_error") for name in REQUESTS if name not in ("part", "complete")),
        *((name, "status") for name in ("part", "manifest")),
    ],
)
def test_a_save_survives_a_fault(store, proxy, request_name, action):
    method, path = REQUESTS[request_name]
    proxy.inject(Fault(action, method, path))
    save(store)
    assert proxy.faults[0].hits == 1
    proxy.inject()
    check_intact(store)
    assert [key for key in keys(store) if key.startswith("pin-")] == []


@pytest.mark.parametrize(
    ("request_name", "action"),
    [
        *((name, action) for name in READS for action in ("reset", "ok_error")),
        *((name, "truncate") for name in READS if name != "stat"),
        ("shard", "cut"),
        ("shard", "flip_reply"),  # without TLS, one in a manifest is damage: Azure sends no MD5
        ("shard", "status"),
    ],
)
def test_a_load_survives_a_fault(saved, proxy, request_name, action):
    method, path = READS[request_name]
    proxy.inject(Fault(action, method, path, after=100))
    assert limpet.Run(saved).latest() is not None
    assert np.array_equal(limpet.load(saved.at("version_1"))["w"], STATE["w"])
    assert proxy.faults[0].hits == 1


def test_a_read_goes_on_behind_what_has_arrived(store, proxy, monkeypatch):
    ranges, get = [], obstore.get

    def record(client, name, options):
        ranges.append(options["range"])
        return get(client, name, options=options)

    monkeypatch.setattr(obstore, "get", record)
    data = np.arange(MIB, dtype=np.int32).tobytes()
    store.put_if_absent("a", data)
    proxy.inject(Fault("truncate", "GET", after=2 * MIB + 5))
    assert contract.read(store, "a", 3, len(data) - 3) == data[3:]
    assert ranges[0] == (3, len(data))
    assert 3 + MIB <= ranges[1][0] <= 3 + 2 * MIB + 5


def test_a_replaced_object_is_an_error(store, proxy, monkeypatch):
    check_a_replaced_object_is_an_error(store, proxy, monkeypatch)


def test_a_stalled_reply_is_abandoned(saved, saved_container, proxy):
    store = open_run(saved_container, proxy, timeout=15)
    proxy.inject(Fault("stall_reply", "GET", SHARD, after=MIB, seconds=60))
    began = time.monotonic()
    assert np.array_equal(limpet.load(store.at("version_1"))["w"], STATE["w"])
    assert time.monotonic() - began < 12


# faults that stay


@pytest.mark.parametrize(
    ("request_name", "action"),
    [
        *((name, "status") for name in ("pin", "part", "complete", "manifest")),
        *((name, "reset") for name in ("part", "complete", "index")),
        *((name, "ok_error") for name in ("complete", "manifest")),
    ],
)
def test_a_save_fails_in_time(az, proxy, request_name, action):
    store = open_run(az, proxy, timeout=1.5)
    method, path = REQUESTS[request_name]
    proxy.inject(Fault(action, method, path, count=-1))
    began = time.monotonic()
    with pytest.raises(LimpetError) as caught:
        save(store)
    assert time.monotonic() - began < 8
    assert store.url in str(caught.value)
    assert "Gave up after" in str(caught.value)
    proxy.inject()
    check_nothing(open_run(az, proxy))  # with more time: the machine may be busy


def test_a_part_that_the_server_did_not_keep(store, proxy):
    """A reply of 200 hides an error. The list of the parts then has one that is missing."""
    proxy.inject(Fault("ok_error", "PUT", "comp=block&"))
    with pytest.raises(StoreError, match="400: InvalidBlockList"):
        save(store)
    proxy.inject()
    check_nothing(store)


def test_a_server_that_goes_away_during_a_save_is_waited_for_once(az, proxy):
    """The failed save also looks for its shard and removes its pin, each of which tries once."""
    store = open_run(az, proxy, timeout=4)
    save(store)
    stalled = (("PUT", "comp=block"), ("POST", "comp=batch"))
    late = Fault("stall", "HEAD", SHARD, skip=1, count=-1)  # the first look-up is before the upload
    proxy.inject(late, *(Fault("stall", *which, count=-1) for which in stalled))
    began = time.monotonic()
    with pytest.raises(Unavailable, match="Gave up after"):
        save(store, 2)
    assert time.monotonic() - began < 4 + 3.5  # timeout, and two tries that get no byte for 1 s
    proxy.inject()
    check_intact(open_run(az, proxy))


@pytest.mark.usefixtures("no_time_for_bodies")
def test_a_stopped_server_holds_no_call_up(az, proxy, azurite):
    store = open_run(az, proxy, timeout=3)
    save(store)

    def upload(length):
        with store.put("y", length) as upload:
            upload.write_at(0, memoryview(bytes(length)))
            upload.commit()

    calls = [
        lambda: store.stat("version_1/manifest.json"),
        lambda: store.get("version_1/manifest.json", MIB),
        lambda: contract.read(store, "version_1/manifest.json", 0, 9),
        lambda: store.put_if_absent("x", b"1"),
        lambda: upload(6 * MIB),
        lambda: upload(90 * MIB),
        lambda: store.delete("z"),
        lambda: keys(store),
        lambda: [*store.list_level("")],
        lambda: store.within(Deadline.after(1, "the test")).stat("x"),
    ]
    check_no_call_is_held_up(azurite, calls)
    assert limpet.Run(open_run(az, proxy)).latest().verify().ok


def test_an_upload_obeys_the_deadline_of_its_view(az, proxy):
    """The writer of obstore would wait for 100 s."""
    store = open_run(az, proxy, timeout=300)
    proxy.inject(Fault("stall", "PUT", "comp=block", count=-1, seconds=30))
    began = time.monotonic()
    view = store.within(Deadline.after(1, "the save"))
    upload = view.put("a", 90 * MIB)
    with pytest.raises(Unavailable, match=r"Gave up after .*\(the save\)"):
        upload.write_at(0, memoryview(bytes(90 * MIB)))
    upload.abort()
    assert time.monotonic() - began < 2.5


# the commit, and large objects


def test_a_lost_commit_whose_outcome_is_unknown_says_so(az, proxy):
    store = open_run(az, proxy, timeout=2)
    proxy.inject(
        Fault("lose_reply", "PUT", "manifest.json$", count=1),
        Fault("reset", ".*", "manifest.json$", count=-1, skip=1),
    )
    with pytest.raises(StoreError) as caught:
        save(store)
    assert caught.value.is_outcome_unknown
    proxy.inject()
    check_intact(open_run(az, proxy))


@pytest.mark.parametrize("size", [1000, 12 * MIB])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_lost_reply_of_a_shard(store, proxy, size, is_own):
    """Its own object is found. Another one with the key is refused, and stays."""
    data = memoryview(np.arange(size // 4, dtype=np.int32)).cast("B")
    proxy.inject(Fault("lose_reply", "PUT", "a($|.comp=blocklist)"))
    if is_own:
        assert contract.put(store, "a", data).length == size
    else:
        store.put_if_absent("a", b"foreign")
        with pytest.raises(AlreadyExists):
            contract.put(store, "a", data)
        data = b"foreign"
    assert store.get("a", 20 * MIB) == data


def test_two_writers_of_one_version(store, proxy):
    check_two_writers_of_one_version(store, proxy)


def test_the_memory_of_a_large_object_may_change_after_each_write(store):
    """obstore's writer refers to what it got until it is sent."""
    piece = np.zeros(MIB, np.uint8)
    with store.put("a", 40 * MIB) as upload:
        for number in range(40):
            piece[:] = number
            upload.write_at(number * MIB, memoryview(piece))
        piece[:] = 255
        upload.commit()
    found = np.frombuffer(store.get("a", 40 * MIB), np.uint8).reshape(40, MIB)
    assert np.array_equal(found, np.repeat(np.arange(40, dtype=np.uint8)[:, None], MIB, 1))


def test_a_large_upload_to_a_slow_server_takes_bounded_memory(store, proxy):
    proxy.inject(Fault("stall", "PUT", "comp=block&", count=-1, seconds=60))
    began, piece = resident(), memoryview(bytes(MIB))
    upload = store.within(Deadline.after(2, "the test")).put("a", 400 * MIB)
    with pytest.raises(Unavailable):
        for number in range(400):
            upload.write_at(number * MIB, piece)
    # the parts are also in the proxy, which runs in this process
    assert resident() - began < 2 * 6 * 5 * MIB + 20 * MIB
    upload.abort()


def resident():
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("size", [10, 12 * MIB])
def test_a_large_object_does_not_replace_another(store, size):
    store.put_if_absent("a", b"first")
    with pytest.raises(AlreadyExists):
        contract.put(store, "a", bytes(size))
    assert store.get("a", 5) == b"first"
