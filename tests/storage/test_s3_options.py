"""What is refused before any request is sent, and what messages show."""

import socket
import sys
import time

import pytest
from botocore.exceptions import ClientError

import limpet
from limpet.errors import StoreError, Unavailable
from limpet.snapshot.location import locate
from limpet.storage.s3 import endpoint
from limpet.storage.s3.endpoint import S3Options
from limpet.storage.s3.pace import MEASURED, STEPS
from limpet.storage.s3.store import S3Store
from limpet.storage.s3.upload import S3Upload
from limpet.storage.store import part_length
from limpet.types import MIB
from tests.cli.invoke import run_cli


@pytest.mark.parametrize(
    ("url", "store", "folder"),
    [
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/", "s3://bucket", ""),
        ("s3://bucket/version_1", "s3://bucket", "version_1"),
        ("s3://bucket/a/b/version_1/", "s3://bucket/a/b", "version_1"),
        ("s3://bucket/100%/a b+c/v", "s3://bucket/100%/a b+c", "v"),
    ],
)
def test_a_url_names_a_bucket_and_a_folder(url, store, folder):
    location = locate(url)
    assert (location.store.url, location.folder) == (store, folder)
    assert limpet.open_store(url).url == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "does not name a bucket"),
        ("s3:///run", "does not name a bucket"),
        ("s3://key:secret@bucket/run", "Credentials and other options are not part of the URL"),
        ("s3://bucket?region=x/run", "does not name a bucket"),
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
        ({"acces_key_id": "x"}, "Unknown option 'acces_key_id' of an S3 store. Expected endpoint"),
        ({"part_size": 1 << 20}, "part_size=. Expected at least 5242880 bytes, found 1048576"),
        ({"part_size": "16M"}, "part_size=. Expected at least 5242880 bytes, found '16M'"),
        ({"concurrency": 0}, "concurrency=. Expected 1 to 1024"),
        ({"timeout": 0}, "timeout="),
        ({"checksum": "crc"}, "Expected auto or crc32c or md5 or none, found 'crc'"),
        ({"addressing": "dns"}, "Expected 'path' or 'virtual'"),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    with pytest.raises(StoreError, match=message):
        limpet.open_store("s3://bucket/run", **options)


def test_no_message_shows_credentials():
    options = {"access_key_id": "AKIAKEY", "secret_access_key": "SECRET", "session_token": "TOKEN"}
    store = limpet.open_store("s3://bucket/run", **options)
    shown = [repr(store), repr(store.options), store.url]
    with pytest.raises(StoreError) as caught:
        limpet.open_store("s3://bucket/run", part_size=1, **options)
    shown += [str(caught.value), repr(caught.value.fields)]
    assert not any(secret in text for text in shown for secret in options.values())


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StoreError, match=r"needs the package boto3\. .*'limpet\[cloud\]'"):
        limpet.open_store("s3://bucket/run")


def test_views_share_the_requests():
    store = limpet.open_store("s3://bucket/run")
    assert store.at("a/b").url == "s3://bucket/run/a/b"
    assert store.at("a").endpoint is store.endpoint
    assert limpet.open_store("s3://other").endpoint is store.endpoint
    assert limpet.open_store("s3://other", concurrency=3).endpoint is not store.endpoint
    assert store.options == S3Options()


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
        with pytest.raises(StoreError) as caught, store.translated(action, "v/a"):
            raise ClientError(reply, operation)
        error = caught.value
        assert ("was replaced while it was read" in str(error)) == (action == "read")
        assert (error.key, error.store) == ("v/a", store.url)
    assert error.status == 412  # of which the commit takes care


def test_a_reply_that_is_not_that_of_s3_names_the_key():
    with pytest.raises(StoreError, match="does not answer as S3 does") as caught:
        limpet.open_store("s3://bucket/run").require_field({}, "ETag", "v/a")
    assert (caught.value.key, caught.value.store) == ("v/a", "s3://bucket/run")


def test_a_server_may_answer_404_to_the_deletion_of_what_is_gone():
    class Client:
        def delete_object(self, **arguments):
            metadata = {"HTTPStatusCode": 404}
            reply = {"Error": {"Code": self.code}, "ResponseMetadata": metadata}
            raise ClientError(reply, "DeleteObject")

    client = Client()
    store = limpet.open_store("s3://bucket/run", endpoint="https://example.org", region="x")
    store._send = lambda action, key, request, deadline, longest: call(store, request, client)
    client.code = "NoSuchKey"
    store.delete("a")
    client.code = "NoSuchBucket"
    with pytest.raises(StoreError, match="NoSuchBucket"):
        store.delete("a")


def call(store, request, client):
    with store.translated("delete", "a"):
        return request(client)


def endpoint_at(step, name):
    """Return a store whose endpoint has found that ``STEPS[step]`` is best."""
    store = S3Store("bucket", "", S3Options(region=f"{name}-{step}"))
    for size in [size for _, size in STEPS][:step]:
        store.endpoint.pace.note(size, MEASURED, 1)
    return store


@pytest.mark.parametrize(
    ("mib", "step", "part", "parts"),
    [
        (6, 2, 8, 1),
        (20, 2, 12, 2),
        (20, 0, 8, 3),
        (30, 2, 16, 2),
        (1000, 2, 28, 36),
        (1000, 1, 16, 63),
        (1000, 0, 8, 125),
        (10**6, 2, 104, 9616),
    ],
)
def test_parts_adapt_to_the_length_of_the_object(mib, step, part, parts):
    store = endpoint_at(step, f"length-{mib}")
    found = part_length(store.traits, mib * MIB)
    assert (found, -(-mib * MIB // found)) == (part * MIB, parts)
    shown = store.statistics()
    assert (shown.connections, shown.part_size) == STEPS[step]
    assert (store.traits.connections, store.traits.max_part) == STEPS[step]


def test_a_setting_fixes_parts_and_concurrency():
    store = S3Store("bucket", "", S3Options(part_size=40 * MIB, concurrency=5))
    for seconds in (0.1, 100):
        store.endpoint.pace.note(8 * MIB, MEASURED, seconds)
        assert {part_length(store.traits, n) for n in (1, 10**9, 10**11)} == {40 * MIB}
        assert store.traits.connections == 5
    assert S3Store("bucket", "", S3Options(part_size=40 * MIB)).traits.connections == 2
    assert S3Store("bucket", "", S3Options(part_size=8 * MIB)).traits.connections == 7


@pytest.mark.parametrize(("options", "part"), [({}, 16 * MIB), ({"part_size": 9 * MIB}, 12 * MIB)])
def test_parts_that_are_collected_do_not_grow(monkeypatch, options, part):
    """A copy or an export has them in memory once per thread, whatever ``connections`` says."""
    store = S3Store("bucket", "", S3Options(region="test-collected", **options))
    monkeypatch.setattr(S3Upload, "_create", lambda self: "id")
    monkeypatch.setattr(S3Upload, "abort", lambda self: None)
    for size in (8 * MIB, 16 * MIB, 28 * MIB):
        store.endpoint.pace.note(size, MEASURED, 1)
        assert store.put("a", 10**9)._part == part
        assert store.put("a", 10**9, 100)._part == part_length(store.traits, 10**9)


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
    monkeypatch.setattr(endpoint, "CREDENTIALS_TIMEOUT", 1)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
def test_an_option_of_a_wrong_type_or_a_half_of_two_is_refused(options, message):
    with pytest.raises(StoreError, match=message) as caught:
        limpet.open_store("s3://bucket/run", **options)
    assert "SECRET" not in str(caught.value)


def test_a_version_of_a_run_that_is_a_whole_bucket(s3, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    limpet.save("s3://bucket/version_1", {"n": 1}, step=1)
    for address in ("s3://bucket@latest", "s3://bucket@1", "s3://bucket/@1"):
        assert "s3://bucket/version_1" in run_cli("show", address).out
        assert run_cli("copy", address, tmp_path / address[-4:].strip("/")).code == 0
    assert "s3://bucket has no version of step 2" in run_cli("show", "s3://bucket@2").err
    assert "one version, not a run" in run_cli("ls", "s3://bucket@1").err
    assert "...@bucket does not name a bucket" in run_cli("show", "s3://key:secret@bucket").err
