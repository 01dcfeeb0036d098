"""Faults of an S3 server that no real server shows on demand."""

import os
import signal
import socket
import threading
import time
import traceback
from contextlib import suppress

import numpy as np
import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import Denied, LimpetError, NotFound, StoreError, Unavailable
from limpet.types import MIB
from tests.storage.fake_s3 import open_run

pytestmark = pytest.mark.slow

HTML = b"<!DOCTYPE html><html><body>It works</body></html>"


def lose_first(method, part, then):
    """Return a hook that loses the reply to the first such request, and answers others so."""
    seen = []

    def hook(found, path, handler):
        if found != method or part not in path:
            return False
        seen.append(path)
        if len(seen) == 1:
            handler.lose_reply()
        else:
            then(handler)
        return True

    return hook


def test_a_commit_without_a_reply_and_then_without_permission_says_that_it_is_unknown(s3):
    store = open_run(s3)
    s3.hook = lose_first("PUT", "manifest", lambda handler: handler.fail(403, "ExpiredToken"))
    with pytest.raises(LimpetError) as caught:
        limpet.save(store.at("version_1"), {"n": 1}, step=1)
    assert caught.value.is_outcome_unknown
    s3.hook = None
    assert limpet.load(store.at("version_1")) == {"n": 1}


def test_a_pin_without_a_reply_and_then_without_permission_is_removed(s3):
    store = open_run(s3)
    s3.hook = lose_first("PUT", "/pin-", lambda handler: handler.fail(403, "ExpiredToken"))
    with pytest.raises(Denied, match="ExpiredToken"):
        limpet.save(store.at("version_1"), {"n": 1}, step=1)
    assert [name for name in s3.objects if "pin-" in name] == []


def test_an_upload_whose_completion_is_looked_up_needs_no_second_request_at_once(s3):
    """With one request at a time, the look-up waited until its deadline."""
    store = open_run(s3, concurrency=1, part_size=8 * MIB, timeout=20)
    s3.hook = lose_first("POST", "uploadId=", lambda handler: handler.serve())
    data, start = bytes(20 * MIB), time.monotonic()
    with store.put("version_1/x", len(data)) as upload:
        upload.write_at(0, memoryview(data))
        upload.commit()
    assert time.monotonic() - start < 10


def test_a_completion_without_a_reply_that_cannot_be_looked_up_says_that_it_is_unknown(s3):
    lost = lose_first("POST", "uploadId=", lambda handler: handler.serve())

    def refused(method, path, handler):
        if method == "GET" and "uploads" in path:
            handler.fail(403, "AccessDenied")
            return True
        return lost(method, path, handler)

    s3.hook, data = refused, bytes(20 * MIB)
    with open_run(s3, part_size=8 * MIB).put("version_1/x", len(data)) as upload:
        upload.write_at(0, memoryview(data))
        with pytest.raises(Denied) as caught:
            upload.commit()
    assert caught.value.is_outcome_unknown
    assert s3.objects["run/version_1/x"] == data


def test_a_proxy_that_passes_a_write_on_and_reports_that_it_is_busy(s3):
    """As Envoy does if the connection to the server breaks after the request."""
    seen = []

    def busy(method, path, handler):
        if method != "PUT" or seen:
            return False
        seen.append(path)
        answer, handler.answer = handler.answer, lambda *arguments, **headers: None
        handler.serve()
        handler.answer = answer
        answer(503, b"upstream connect error or disconnect/reset before headers")
        return True

    s3.hook = busy
    store = open_run(s3, timeout=20)
    with store.put("version_1/x", 3) as upload:
        upload.write_at(0, memoryview(b"123"))
        upload.commit()
    assert store.get("version_1/x", 9) == b"123"
    hasty, succeeded = open_run(s3, timeout=0.5), False
    for _ in range(20):  # the first request also looks for credentials, which may take long
        with suppress(Unavailable):
            succeeded = hasty.get("version_1/x", 9) == b"123"
            break
    assert succeeded
    seen.clear()
    with hasty.put("version_1/y", 3) as upload:
        upload.write_at(0, memoryview(b"123"))
        with pytest.raises(Unavailable) as caught:
            upload.commit()
    assert caught.value.is_outcome_unknown
    assert "run/version_1/y" in s3.objects


def test_a_missing_bucket_is_not_a_missing_object(s3):
    def missing(method, path, handler):
        handler.fail(404, "NoSuchBucket" if method == "GET" else "NoSuchKey")
        return True

    s3.hook = missing
    with pytest.raises(StoreError, match="NoSuchBucket") as caught:
        open_run(s3).stat("a")
    assert not isinstance(caught.value, NotFound)
    s3.hook = lambda method, path, handler: method == "GET" and missing_permission(handler)
    for _ in range(2):
        with pytest.raises(NotFound):  # it may be there
            open_run(s3).stat("a")
    assert len([1 for method, path in s3.log if method == "GET"]) == 2  # asked once for each


def missing_permission(handler):
    handler.fail(403, "AccessDenied")
    return True


def test_the_reason_of_a_denied_head_is_that_of_a_get(s3):
    def denied(method, path, handler):
        handler.fail(403, "SignatureDoesNotMatch" if method == "GET" else "403")
        return True

    s3.hook = denied
    with pytest.raises(Denied, match="SignatureDoesNotMatch"):
        open_run(s3, timeout=60).stat("a")


def test_an_upload_that_was_aborted_by_another_process_says_so(s3):
    data = bytes(20 * MIB)
    with open_run(s3, part_size=8 * MIB).put("version_1/x", len(data)) as upload:
        s3.uploads.clear()
        with pytest.raises(StoreError, match="was deleted by another process"):
            upload.write_at(0, memoryview(data))


def page_of(number, token):
    next_token = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    key = f"<Contents><Key>run/{number}</Key><Size>1</Size>"
    key += "<LastModified>2026-11-25T03:00:00.000Z</LastModified></Contents>"
    return f"<R><IsTruncated>true</IsTruncated>{next_token}{key}</R>".encode()


@pytest.mark.parametrize("token", ["same", ""])
def test_a_list_that_does_not_go_on_is_an_error(s3, token):
    s3.hook = lambda method, path, handler: handler.answer(200, page_of(1, token)) or True
    with pytest.raises(StoreError, match="does not answer as S3 does"):
        list(open_run(s3).list(""))


def test_a_reply_that_becomes_slow_ends_by_the_deadline(s3):
    """Blocks of 1 MiB, as for a fast reply, would take 25 s."""

    def slow(method, path, handler):
        where = f"bytes 0-{8 * MIB - 1}/{8 * MIB}"
        handler.answer(206, b"", Content_Length=str(8 * MIB), ETag='"x"', Content_Range=where)
        handler.wfile.write(bytes(4 * MIB))
        for _ in range(300):
            handler.wfile.write(bytes(4000))
            time.sleep(0.1)
        return True

    s3.hook = slow
    store = open_run(s3, timeout=60).within(Deadline.after(2, "the test"))
    start = time.monotonic()
    with pytest.raises(Unavailable):
        store.get_range("a", 0, 8 * MIB, memoryview(bytearray(8 * MIB)))
    assert time.monotonic() - start < 8


def test_a_second_try_of_a_read_ends_by_the_deadline_of_the_first(s3):
    """The first reply breaks off after 3 s of 4, and the second one would never end."""
    began = time.monotonic()

    def slow(method, path, handler):
        first = int(handler.headers.get("Range", "bytes=0").split("=")[1].split("-")[0])
        where = f"bytes {first}-{MIB - 1}/{MIB}"
        handler.answer(206, b"", Content_Length=str(MIB - first), ETag='"x"', Content_Range=where)
        is_first = time.monotonic() < began + 2.9
        while time.monotonic() < began + (3 if is_first else 20):
            handler.wfile.write(bytes(4096))
            time.sleep(0.05)
        handler.close_connection = True
        return True

    s3.hook = slow
    store = open_run(s3, timeout=4)
    for read in (
        lambda: store.get_range("a", 0, MIB, memoryview(bytearray(MIB))),
        lambda: store.get("a", MIB),
    ):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            read()
        assert time.monotonic() - began < 6


def test_a_server_with_many_addresses_that_drop_packets(s3, monkeypatch):
    """Each address may take the timeout of a connection."""
    sockets, port = [], 0
    for number in range(1, 9):  # whose queues of connections are full
        listener = socket.socket()
        listener.bind((f"127.0.0.{number}", port))
        port = listener.getsockname()[1]
        listener.listen(0)
        sockets.append(listener)
        for _ in range(3):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex((f"127.0.0.{number}", port))
            sockets.append(client)
    ask = socket.getaddrinfo

    def resolve(host, *arguments, **options):
        if host != "s3.test":
            return ask(host, *arguments, **options)
        stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*stream, (f"127.0.0.{number}", port)) for number in range(1, 9)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store = limpet.open_store("s3://bucket/run", endpoint=f"http://s3.test:{port}")
    start = time.monotonic()
    with pytest.raises(Unavailable):
        store.within(Deadline.after(5, "the test")).stat("a")
    assert time.monotonic() - start < 18
    for each in sockets:
        each.close()


def test_an_interrupted_save_does_not_wait_for_a_busy_server(s3):
    def busy(method, path, handler):
        if "partNumber" in path:
            handler.fail(503, "SlowDown")
            return True
        return False

    s3.hook = busy
    store = open_run(s3, timeout=120, part_size=8 * MIB)
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        limpet.save(store.at("version_1"), {"w": np.zeros(12 * MIB, np.int32)}, step=1)
    timer.cancel()
    assert time.monotonic() - start < 15
    assert not [name for name in s3.objects if "manifest" in name]


def test_a_web_server_is_an_error_at_once(s3):
    s3.hook = lambda method, path, handler: handler.answer(200, HTML) or True
    store, start = open_run(s3, timeout=60), time.monotonic()
    for act in (
        lambda: limpet.save(store.at("version_1"), {"n": 1}, step=1),
        lambda: limpet.load(store.at("version_1")),
        lambda: limpet.Run(store).snapshots(),
    ):
        with pytest.raises(StoreError, match=r"does not answer as S3 does.*Check the endpoint"):
            act()
    assert time.monotonic() - start < 10


def test_an_endpoint_with_the_name_of_the_bucket(s3):
    """Every name then begins with that of the bucket, and no list exists."""
    s3.hook = lambda method, path, handler: handler.fail(404, "NoSuchKey") or True
    with pytest.raises(StoreError, match="must not contain the name of the bucket") as caught:
        limpet.Run(open_run(s3)).snapshots()
    assert not isinstance(caught.value, NotFound)


def test_tls_with_a_server_that_has_none(s3):
    endpoint, start = s3.endpoint.replace("http:", "https:"), time.monotonic()
    with pytest.raises(StoreError, match=r"WRONG_VERSION_NUMBER.*Check the endpoint") as caught:
        limpet.open_store("s3://bucket/run", endpoint=endpoint, timeout=60).stat("a")
    assert not isinstance(caught.value, Unavailable)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "url", ["http://user:SECRET@127.0.0.1:9", "user:SECRET@127.0.0.1:9", "127.0.0.1:9"]
)
def test_an_invalid_endpoint_in_the_environment(s3, monkeypatch, url):
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with pytest.raises(StoreError, match="ndpoint") as caught:
        limpet.open_store("s3://bucket/run", timeout=5).stat("a")
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_a_save_and_a_load(s3):
    """The fake server is good enough for the rest of this file."""
    store, state = open_run(s3), {"w": np.arange(5 * MIB, dtype=np.int32), "n": 3}
    limpet.save(store.at("version_1"), state, step=1)
    assert np.array_equal(limpet.load(store.at("version_1"))["w"], state["w"])
    assert not s3.uploads


def test_a_server_whose_tags_look_like_an_md5_and_are_none(s3):
    """As in the directory buckets of S3 Express. The bytes are right, and arrive twice."""
    s3.objects["run/a"], tag = b"1", '"' + "0" * 32 + '"'

    def other_tag(method, path, handler):
        if method != "GET":
            return False
        handler.answer(200, b"1", ETag=tag)
        return True

    s3.hook = other_tag
    store = open_run(s3)
    assert store.get("a", 9) == b"1"
    assert store.statistics().requests["GetObject"] == 2
