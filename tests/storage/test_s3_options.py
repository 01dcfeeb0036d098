"""What is refused before any request is sent, and what messages show."""

import socket
import threading
import time

import numpy as np
import pytest
from botocore.exceptions import ClientError

import limpet
from limpet.errors import StoreError, Unavailable
from limpet.storage import s3 as s3_store
from limpet.storage.store import part_length
from limpet.types import MIB
from tests.cli.invoke import run_cli
from tests.storage.fake_s3 import open_run


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "does not name a bucket"),
        ("s3:///run", "does not name a bucket"),
        ("s3://key:secret@bucket/run", "Credentials and other options are not part of the URL"),
        ("s3://bucket?region=x/run", "a password, or a query"),
        ("s3://b/run", "does not name a bucket"),
        ("s3://bucket//run", "has no name"),
        ("s3://bucket/a/../b", "Invalid key"),
    ],
)
def test_a_mistyped_url_is_refused(url, message):
    with pytest.raises(StoreError, match=message):
        limpet.open_store(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acces_key_id": "x"}, "Unknown option 'acces_key_id' of an S3 store. .* or endpoint"),
        ({"part_size": 1 << 20}, "part_size=. Expected at least 5242880 bytes, found 1048576"),
        ({"part_size": "16M"}, "part_size=. Expected at least 5242880 bytes, found '16M'"),
        ({"addressing": "dns"}, "Expected 'path' or 'virtual'"),
        ({"access_key_id": "a"}, "one of access_key_id= and secret_access_key="),
        ({"secret_access_key": "SECRET"}, "one of access_key_id= and secret_access_key="),
        ({"access_key_id": "a", "secret_access_key": 5}, "secret_access_key=.*text.*type int"),
        ({"access_key_id": "a", "secret_access_key": ["SECRET"]}, "secret_access_key="),
        ({"endpoint": 3}, "endpoint=. Expected http://HOST"),
        ({"endpoint": "127.0.0.1:9"}, "endpoint=. Expected http://HOST"),
        ({"endpoint": "http://user:SECRET@host"}, "without a password"),
        ({"region": 3}, "region=. Expected text"),
        ({"anonymous": "no"}, "anonymous=. Expected True or False"),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    with pytest.raises(StoreError, match=message) as caught:
        limpet.open_store("s3://bucket/run", **options)
    assert "SECRET" not in str(caught.value)


def test_no_message_shows_credentials():
    options = {"access_key_id": "AKIAKEY", "secret_access_key": "SECRET", "session_token": "TOKEN"}
    store = limpet.open_store("s3://bucket/run", **options)
    shown = [repr(store), repr(store.remote.options), store.url]
    with pytest.raises(StoreError) as caught:
        limpet.open_store("s3://bucket/run", part_size=1, **options)
    shown += [str(caught.value), repr(caught.value.fields)]
    assert not any(secret in text for text in shown for secret in options.values())


def test_views_share_the_requests():
    store = limpet.open_store("s3://bucket/run")
    assert store.at("a/b").url == "s3://bucket/run/a/b"
    assert store.at("a").remote.server is store.remote.server
    assert limpet.open_store("s3://other").remote.server is store.remote.server
    assert limpet.open_store("s3://other", concurrency=3).remote.server is not store.remote.server


def test_a_name_that_s3_does_not_allow_is_refused():
    store = limpet.open_store("s3://bucket/run")
    for key, message in (("é" * 600, "at most 1024 bytes"), ("a\ud800", "Invalid key")):
        with pytest.raises(StoreError, match=message):
            store.put_if_absent(key, b"")
    with pytest.raises(StoreError, match="reserved for unfinished uploads"):
        store.put("v/.a.partial", 1)


def test_an_object_that_was_replaced_while_it_was_read_is_named():
    """The second request for a range has the tag of the first reply as its condition."""
    reply = {"Error": {"Code": "PreconditionFailed"}, "ResponseMetadata": {"HTTPStatusCode": 412}}
    store = limpet.open_store("s3://bucket/run")
    for operation, action in (("GetObject", "read"), ("PutObject", "write")):
        with pytest.raises(StoreError) as caught, store.remote.translated(action, "v/a"):
            raise ClientError(reply, operation)
        error = caught.value
        assert ("was replaced while it was read" in str(error)) == (action == "read")
        assert (error.key, error.store) == ("v/a", store.url)
    assert error.status == 412  # of which the commit takes care


def test_a_server_may_answer_404_to_the_deletion_of_what_is_gone(s3):
    store = open_run(s3)
    s3.hook = lambda method, path, handler: handler.fail(404, "NoSuchKey") or True
    store.delete("a")
    s3.hook = lambda method, path, handler: handler.fail(404, "NoSuchBucket") or True
    with pytest.raises(StoreError, match="NoSuchBucket"):
        store.delete("a")


@pytest.mark.parametrize(
    ("options", "part", "connections"),
    [
        ({}, 28, 2),
        ({"part_size": 8 * MIB}, 8, 7),
        ({"part_size": 40 * MIB}, 40, 2),
        ({"part_size": 9 * MIB, "concurrency": 5}, 12, 5),
    ],
)
def test_parts_are_as_long_as_configured(options, part, connections):
    """Rounded up to blocks, and longer only if 10,000 of them do not suffice."""
    traits = limpet.open_store("s3://bucket", **options).traits
    assert {part_length(traits, length) for length in (1, 10**9)} == {part * MIB}
    assert -(-(10**12) // part_length(traits, 10**12)) <= 10_000
    assert traits.connections == connections


@pytest.mark.slow
@pytest.mark.parametrize(("staged", "most"), [(True, 6), (False, 2)])
def test_parts_that_are_in_memory_anyway_are_sent_by_all_threads(s3, monkeypatch, staged, most):
    monkeypatch.setenv("LIMPET_THREADS", "6")
    active, peak, arrived = set(), [0], threading.Semaphore(0)

    def wait_for_others(method, path, handler):
        if "partNumber" in path:
            active.add(path)
            peak[0] = max(peak[0], len(active))
            if len(active) == most:
                arrived.release(most)
            arrived.acquire(timeout=2)
            active.discard(path)

    store = open_run(s3, part_size=28 * MIB, timeout=60)
    state = {"w": np.zeros(6 * 28 * MIB, np.uint8)}
    s3.hook = wait_for_others
    if staged:
        with limpet.Checkpointer(store, state, save=limpet.Never()) as ckpt:
            ckpt.save()
    else:
        limpet.save(store.at("version_1"), state, step=1)
    assert peak[0] == most


ROLE = """
[profile role]
role_arn = arn:aws:iam::123456789012:role/training
source_profile = base
[profile base]
aws_access_key_id = key
aws_secret_access_key = wrong-secret-key
"""


@pytest.mark.slow
def test_a_service_for_credentials_that_never_answers(monkeypatch, tmp_path):
    monkeypatch.setattr(s3_store, "CREDENTIALS_TIMEOUT", 1)
    (tmp_path / "config").write_text(ROLE)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{silent.getsockname()[1]}")
        options = {"endpoint": "http://127.0.0.1:1", "region": "us-east-1", "profile": "role"}
        store = limpet.open_store("s3://bucket/run", timeout=1, **options)
        start = time.monotonic()
        with pytest.raises(Unavailable, match="credentials did not arrive in time"):
            store.stat("a")
    assert time.monotonic() - start < 20


@pytest.mark.slow
def test_a_version_of_a_run_that_is_a_whole_bucket(s3, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    limpet.save("s3://bucket/version_1", {"n": 1}, step=1)
    for address in ("s3://bucket@latest", "s3://bucket@1", "s3://bucket/@1"):
        assert "s3://bucket/version_1" in run_cli("show", address).out
        assert run_cli("copy", address, tmp_path / address[-4:].strip("/")).code == 0
    assert "s3://bucket has no version of step 2" in run_cli("show", "s3://bucket@2").err
    assert "one version, not a run" in run_cli("ls", "s3://bucket@1").err
    assert "s3://...@bucket does not name" in run_cli("show", "s3://key:secret@bucket").err
