"""Servers whose replies trickle in and whose listings never end: no packet renews a deadline."""

import itertools
import time
from contextlib import suppress

import numpy as np
import pytest

import limpet
from limpet.errors import StoreError, Unavailable
from limpet.storage.retry import LEAST_RATE, RetryStore
from tests.storage.fake_s3 import WHEN
from tests.storage.test_cloud_requests import KEY, WebServer, listing
from tests.storage.test_retry import Bucket
from tests.stores.fault_proxy import Fault, FaultProxy
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SECONDS, SPARE = 1.0, 9.0
DATA = bytes(300_000)


@pytest.fixture
def proxy(s3):
    proxy = FaultProxy(s3.server.server_port)
    store = limpet.open_store("s3://bucket/run", endpoint=s3.endpoint)
    store.put_if_absent("version_1/a", DATA)
    limpet.save(store.at("version_1"), {"x": np.ones(100_000)}, step=1)
    yield proxy
    proxy.stop()


def open_s3(server, **options):
    options = {"timeout": SECONDS, "part_size": 5 << 20, **options}
    return limpet.open_store("s3://bucket/run", endpoint=server.endpoint, **options)


def bounded(act, store, error=Unavailable, spare=SPARE):
    began = time.monotonic()
    with pytest.raises(error):
        act(store)
    assert time.monotonic() - began < SECONDS + spare


def put_parts(store):
    with store.put("version_2/b", 12 << 20) as upload:
        upload.write_at(0, memoryview(bytes(12 << 20)))
        upload.commit()


CALLS = {
    "list": ("GET", "list-type", lambda s: list(s.list(""))),
    "list_level": ("GET", "list-type", lambda s: list(s.list_level(""))),
    "partials": ("GET", "uploads", lambda s: list(s.partials(""))),
    "run": ("GET", "list-type", lambda s: limpet.Run(s).latest()),
    "get": ("GET", "/a$", lambda s: s.get("version_1/a", 1 << 20)),
    "get_range": ("GET", "/a$", lambda s: s.get_range("version_1/a", 0, 99, bytearray(99))),
    "open": ("GET", "manifest", lambda s: limpet.open(s.at("version_1"))),
    "load": ("GET", "safetensors", lambda s: limpet.load(s.at("version_1"))),
    "put_if_absent": ("PUT", "/b$", lambda s: s.put_if_absent("version_2/b", b"1")),
    "put": ("PUT", "partNumber", put_parts),
    "delete": ("DELETE", "/a$", lambda s: s.delete("version_1/a")),
}


@pytest.mark.parametrize("part", ["head", "body"])
@pytest.mark.parametrize("name", CALLS)
def test_a_reply_that_trickles_ends_by_the_deadline(s3, proxy, name, part, monkeypatch):
    """Each packet arrives long before the timeout of boto3, which begins anew with it."""
    for module in ("retry", "s3"):  # a part of 8 MiB gets no more than a second
        monkeypatch.setattr(f"limpet.storage.{module}.LEAST_RATE", 10 << 20)
    method, path, act = CALLS[name]
    if part == "body" and method != "GET":
        pytest.skip("the reply has no body")

    def trickle(found, target, handler):
        if found != method or path.rstrip("$") not in target:
            return False
        for _ in range(3000):
            handler.wfile.write(b"H")
            time.sleep(0.05)
        return True

    if part == "head":
        s3.hook = trickle
    else:
        proxy.inject(Fault("slow", method, path, count=-1, rate=10))
    bounded(act, open_s3(s3 if part == "head" else proxy))


def test_a_body_that_is_slow_and_steady_arrives(s3, proxy):
    """Its time grows with its length."""
    proxy.inject(Fault("slow", "GET", "/a$", count=-1, rate=2 * LEAST_RATE))
    store, into = open_s3(proxy, timeout=1), bytearray(len(DATA))
    store.get_range("version_1/a", 0, len(DATA), memoryview(into))
    assert into == store.get("version_1/a", len(DATA)) == DATA
    proxy.inject(Fault("slow", "GET", "/a$", count=-1, rate=LEAST_RATE // 4))
    for act in (CALLS["get"][2], lambda s: s.get_range("version_1/a", 0, len(DATA), into)):
        bounded(act, store)


# listings that never end

TOKENS = {"new": itertools.count(), "repeated": itertools.cycle("ab")}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ["list", "list_level", "partials", "run"])
def test_the_pages_of_a_listing_end_together(s3, name, tokens):
    def page(method, path, handler):
        if "list-type" not in path and "uploads" not in path:
            return False
        token = next(TOKENS[tokens])
        names = "NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker"
        marks = "".join(f"<{n}>{token}</{n}>" for n in names)
        key = f"<Contents><Key>run/x{token}</Key><Size>1</Size>"
        key += f"<LastModified>{WHEN}</LastModified></Contents>"
        body = f"<R><IsTruncated>true</IsTruncated>{marks}{key}</R>"
        handler.answer(200, body.encode())
        return True

    store = open_s3(s3)
    with suppress(Unavailable):  # the first request also looks for credentials: a busy machine
        list(store.list(""))
    s3.hook = page
    bounded(CALLS[name][2], store)
    before = len(s3.log)
    time.sleep(0.3)
    assert len(s3.log) <= before + 1  # nothing goes on in a thread


@pytest.fixture
def azure():
    with WebServer.running() as server:
        yield server


@pytest.mark.parametrize("name", ["list", "list_level", "run"])
def test_a_listing_of_azure_ends_and_leaves_nothing(azure, name):
    numbers = itertools.count()
    azure.reply = lambda path: listing([f"run/{n:09}" for n in range(3)], str(next(numbers)))
    store = limpet.open_store(
        "az://bucket/run", endpoint=azure.url, account="a", account_key=KEY, timeout=SECONDS
    )
    bounded(CALLS[name][2], store)

    def has_stopped():  # the library completes the chunk that it has begun
        before = len(azure.requests)
        time.sleep(0.5)
        return len(azure.requests) <= before + 1

    wait_until(has_stopped, 10)


class Endless(Bucket):
    """A remote of one's own, whose folders have folders and pages without an end."""

    has_conditional_put = False

    def page(self, folder, prefix, marker, *, deep, partial):
        self.log.append(folder)
        time.sleep(0.01)
        kind = "object" if self.is_flat else "folder"
        return [limpet.storage.Entry(f"n{marker or 0}", kind)], None if not self.is_flat else 1

    def stat(self, key):
        time.sleep(0.01)
        return limpet.storage.Stat(key, 1, 1.0)


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_listing_of_any_remote_ends(is_flat):
    remote = Endless()
    remote.is_flat = is_flat
    error = Unavailable if is_flat else StoreError
    bounded(lambda s: list(s.list("")), RetryStore(remote, SECONDS), error)


def test_the_work_on_entries_takes_no_time_of_the_listing():
    bucket = Bucket()
    bucket.objects = {f"run/{n}": b"1" for n in range(9)}
    found = []
    for stat in RetryStore(bucket, 0.3).list(""):
        found.append(stat.key)
        time.sleep(0.1)
    assert len(found) == 9
