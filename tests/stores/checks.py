"""Checks that the tests of several servers share."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import limpet
from limpet.errors import LimpetError, NotFound, StoreError, Unavailable
from limpet.storage.retry import Reply
from limpet.testing.contract import read
from limpet.types import MIB
from tests.stores.emulators import Azurite
from tests.stores.fault_proxy import Fault
from tests.waiting import run_threads

SECRETS = ("testtest", "wrong-secret-key", "unknown-key-id", Azurite.key)


def check_intact(store, steps=(1,)):
    run = limpet.Run(store)
    assert [s.step for s in run.snapshots()] == [*steps]
    assert [s.verify().problems for s in run.snapshots()] == [() for _ in steps]


def check_a_replaced_object_is_an_error(store, proxy, monkeypatch):
    data = bytes(4 * MIB)
    store.put_if_absent("a", data)
    proxy.inject(Fault("cut", "GET", after=2 * MIB + 5))
    read_into = Reply.read_into

    def replace(*arguments):
        try:
            yield from read_into(*arguments)
        finally:
            store.delete("a")
            store.put_if_absent("a", data[1:] + b"1")

    monkeypatch.setattr(Reply, "read_into", replace)
    with pytest.raises(StoreError, match="was replaced while it was read"):
        read(store, "a", 0, len(data))


def check_two_writers_of_one_version(store, proxy):
    """Both replies of the first try are lost, and one of the two commits."""
    proxy.inject(Fault("lose_reply", "PUT", "manifest.json$", count=2))
    outcomes = []

    def commit(number):
        try:
            store.put_if_absent("version_1/manifest.json", b"%d" % number * 100)
            outcomes.append(number)
        except LimpetError as e:
            outcomes.append(e)

    run_threads(threading.Thread(target=commit, args=(n,)) for n in (1, 2))
    winners = [o for o in outcomes if isinstance(o, int)]
    assert len(winners) == 1
    assert store.get("version_1/manifest.json", 1000) == b"%d" % winners[0] * 100


def check_no_call_is_held_up(server, calls):
    """Make all calls while the server is stopped. The last one has a deadline of 1 s."""

    def time_call(call):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="Gave up after"):
            call()
        return time.monotonic() - began

    server.send(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(calls)) as threads:
            seconds = [*threads.map(time_call, calls)]
    finally:
        server.send(signal.SIGCONT)
    assert max(seconds) < 4.5
    assert seconds[-1] < 2.5


def check_message(result, *words):
    """The output of a command has one line, with all these words, and no secret."""
    assert result.code in (4, 5, 6), result
    assert result.err.startswith("limpet: ")
    assert result.err.count("\n") == 1
    for word in words:
        assert word in result.err
    assert not any(secret in result.err for secret in SECRETS)


def check_a_missing_bucket_is_not_an_empty_run(url, message, *more):
    """``more`` are other calls that must fail alike."""
    for call in (
        lambda: limpet.save(f"{url}/version_1", {"n": 1}),
        lambda: limpet.load(f"{url}/version_1"),
        lambda: limpet.Run(url).latest(),
        lambda: limpet.Checkpointer(url, {"n": 1}).resume(),
        *more,
    ):
        with pytest.raises(StoreError, match=message) as caught:
            call()
        assert not isinstance(caught.value, NotFound)
