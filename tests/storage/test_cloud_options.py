"""What is refused before any request is sent, and what messages show."""

import os
import traceback

import pytest

import limpet
from limpet.errors import Denied, NotFound, StoreError, Unavailable
from limpet.snapshot.location import locate
from limpet.storage import cloud
from limpet.storage.cloud import translate
from tests.cli.invoke import run_cli

KEY = "c2VjcmV0LWtleQ=="
SECRETS = (KEY, "SECRETSIG", "TOKENTOKEN", "hunter2")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in os.environ:
        if name.startswith(("AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("scheme", ["az", "gs", "s3"])
@pytest.mark.parametrize(
    ("path", "store", "folder"),
    [
        ("bucket", "bucket", ""),
        ("bucket/version_1", "bucket", "version_1"),
        ("bucket/a/b/version_1/", "bucket/a/b", "version_1"),
        ("bucket/100%/a b+c/v", "bucket/100%/a b+c", "v"),
    ],
)
def test_a_url_names_a_container_and_a_folder(scheme, path, store, folder):
    location = locate(f"{scheme}://{path}")
    assert (location.store.url, location.folder) == (f"{scheme}://{store}", folder)
    assert limpet.open_store(f"{scheme}://{path}").url == f"{scheme}://{path}".rstrip("/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("az://", "does not name a container.*Expected az://CONTAINER/folder"),
        ("az:///run", "does not name a container"),
        ("gs://", "Expected gs://CONTAINER/folder"),
        ("az://Upper/run", "does not name a container .*, found 'az://Upper/run'"),
        ("az://account:hunter2@bucket/run", "Credentials and other options are not part"),
        ("az://bucket?sig=SECRETSIG/run", "a password, or a query"),
        ("az://bucket/run?sv=1&sig=SECRETSIG", "a password, or a query.*see docs"),
        ("az://bucket/a/b?sig=SECRETSIG/run", "Credentials and other options are not part"),
        ("gs://bucket/run?X-Goog-Signature=SECRETSIG", "a password, or a query"),
        ("az://bucket//run", "has no name"),
        ("az://bucket/a/../b", "Invalid key"),
    ],
)
def test_a_mistyped_url_is_refused(url, message):
    with pytest.raises(StoreError, match=message) as caught:
        limpet.open_store(url)
    shown = str(caught.value) + run_cli("ls", url).err
    assert not any(secret in shown for secret in SECRETS)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        (
            "az://b1b/r",
            {"acount": "x"},
            "Unknown option 'acount' of an az:// store. .* or endpoint",
        ),
        ("gs://b1b/r", {"account": "x"}, "Unknown option 'account'.* or service_account"),
        ("az://b1b/r", {"part_size": 1 << 20}, "part_size=. Expected at least 5242880 bytes"),
        ("az://b1b/r", {"part_size": "16M"}, "found '16M'"),
        ("az://b1b/r", {"endpoint": "localhost"}, "endpoint=. Expected http://HOST"),
        ("az://b1b/r", {"endpoint": "https://a:hunter2@host"}, "endpoint=.*without a password"),
        ("az://b1b/r", {"anonymous": "no"}, "anonymous=. Expected True or False, found 'no'"),
        ("gs://b1b/r", {"anonymous": 1}, "anonymous=. Expected True or False"),
        ("az://b1b/r", {"account": 3}, "account=. Expected the name of an account, found 3"),
        ("az://b1b/r", {"account": ""}, "account=. Expected the name of an account"),
        ("az://b1b/r", {"account_key": KEY.encode()}, "Expected the base64.*of type bytes"),
        ("az://b1b/r", {"account_key": [KEY]}, "Expected the base64.*of type list"),
        ("az://b1b/r", {"account_key": ""}, "account_key=. Expected the base64 text"),
        ("az://b1b/r", {"sas_token": 5}, "a text with sig=, .* of type int"),
        ("az://b1b/r", {"sas_token": "TOKENTOKEN"}, "sas_token=. Expected a text with sig="),
        ("gs://b1b/r", {"service_account": {"k": KEY}}, "Expected the path.*of type dict"),
        ("gs://b1b/r", {"service_account": '{"k": "hunter2"}'}, "Expected the path of a key file"),
        ("gs://b1b/r", {"service_account": "-----BEGIN\nhunter2"}, "Expected the path of a key"),
    ],
)
def test_an_invalid_option_is_refused(url, options, message):
    with pytest.raises(StoreError, match=message) as caught:
        limpet.open_store(url, **options)
    assert not any(secret in str(caught.value) for secret in SECRETS)


@pytest.mark.parametrize("url", ["az://b1b/r", "gs://b1b/r"])
def test_without_credentials_nothing_is_written(url):
    """No request is sent, not even one for credentials."""
    store = limpet.open_store(url, anonymous=True, **({"account": "a"} if "az" in url else {}))
    for call in (
        lambda: store.put_if_absent("k", b""),
        lambda: store.put("k", 1),
        lambda: store.put("k", 1 << 30),
        lambda: store.delete("k"),
    ):
        with pytest.raises(Denied, match=r"opened with anonymous=True.*Open it without"):
            call()
    assert store.statistics().requests == {}


def test_no_message_shows_credentials():
    shown = []
    for secret in ({"account_key": KEY}, {"sas_token": "sv=1&sig=SECRETSIG"}):
        store = limpet.open_store("az://bucket/run", account="a", **secret)
        shown += [repr(store), repr(store.remote.options), store.url]
        for options in ({"part_size": 1}, {"endpoint": "ftp://a:hunter2@host"}):
            with pytest.raises(StoreError) as caught:
                limpet.open_store("az://bucket/run", **secret, **options)
            shown += [str(caught.value), repr(caught.value.fields)]
    assert not any(secret in text for text in shown for secret in SECRETS)


def test_a_client_that_cannot_be_created_says_what_to_do(monkeypatch):
    message = r"Account must be specified.*AZURE_STORAGE_ACCOUNT_NAME"
    with pytest.raises(StoreError, match=message):
        limpet.open_store("az://bucket/run").stat("a")
    with pytest.raises(Denied, match=r"Check account_key=") as caught:
        limpet.open_store("az://bucket/run", account="a", account_key="TOKENTOKEN-").stat("a")
    assert "TOKENTOKEN" not in str(caught.value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "-")
    with pytest.raises(StoreError, match="Invalid Access Key"):
        limpet.open_store("az://bucket/run", account="a").stat("a")


@pytest.mark.parametrize("is_option", [True, False])
@pytest.mark.parametrize(
    "value", ["/no/such.json", '{"private_key": "SECRETSIG"}', "SECRETSIG", "file"]
)
def test_a_service_account_that_is_not_a_key_file(value, is_option, monkeypatch, tmp_path):
    if value == "file":  # a path, of a file that is not a key
        value = str(tmp_path / "key.json")
        (tmp_path / "key.json").write_text('"SECRETSIG"')
    options = {"service_account": value} if is_option else {}
    if not is_option:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", value)
    with pytest.raises(StoreError, match=r"service_account=.* the path of a key file") as caught:
        limpet.open_store("gs://bucket/run", **options).stat("a")
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.fields)
    assert not any(secret in shown for secret in SECRETS)


def test_a_forked_process_is_refused(monkeypatch):
    """The threads of obstore are those of the parent: each call of the child would hang."""
    store = limpet.open_store("az://bucket/run")
    process = os.getpid()
    monkeypatch.setattr(cloud.os, "getpid", lambda: process + 1)
    for call in (lambda: store.stat("a"), lambda: limpet.open_store("gs://other")):
        with pytest.raises(StoreError, match=r"forked.*'spawn' or 'forkserver'"):
            call()


def test_views_share_the_requests():
    store = limpet.open_store("az://bucket/run")
    assert store.at("a/b").url == "az://bucket/run/a/b"
    assert store.at("a").remote.server is store.remote.server
    assert limpet.open_store("az://other").remote.server is store.remote.server
    assert limpet.open_store("az://other", concurrency=3).remote.server is not store.remote.server
    assert limpet.open_store("gs://bucket").remote.server is not store.remote.server


def test_other_variables_are_another_endpoint(monkeypatch):
    store = limpet.open_store("az://bucket/run")
    before = store.remote.server
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    assert store.remote.server is not before


@pytest.mark.parametrize(
    "key", ["é" * 600, "a\ud800", "a\\b", "a.", "a./b", "a\nb", "a\x01", "a\x7f"]
)
def test_a_name_that_the_cloud_changes_or_refuses_is_an_error(key):
    store = limpet.open_store("az://bucket/run")
    with pytest.raises(StoreError, match="Invalid key"):
        store.put_if_absent(key, b"")


def test_the_folder_that_makes_a_name_invalid_is_shown():
    with pytest.raises(StoreError, match=r"names that end with a dot, found 'a\./b/manifest.json'"):
        limpet.open_store("az://bucket/a./b").stat("manifest.json")


def test_a_thread_that_cannot_be_started_is_an_error(monkeypatch):
    options = {"account": "a", "account_key": KEY}
    store = limpet.open_store("az://bucket/run", part_size=5 << 20, **options)
    monkeypatch.setattr("limpet.deadline.start_thread", lambda _: False)
    upload = store.put("a", 12 << 20)
    with pytest.raises(StoreError, match=r"Cannot write a in az://bucket/run: .*thread.*ulimit"):
        upload.write_at(0, memoryview(bytes(12 << 20)))
    upload.abort()


REPLY = """Generic MicrosoftAzure error: Error performing GET https://a.net/c/k?sig=SECRETSIG in 2ms
 - Server returned non-2xx status code: {status}: <?xml version="1.0"?>
<Error><Code>{code}</Code><Message>{message}
RequestId:1</Message><AuthenticationErrorDetail>TOKENTOKEN</AuthenticationErrorDetail></Error>

Debug source: uri: https://a.net/c/k?sig=SECRETSIG"""


@pytest.mark.parametrize(
    ("status", "code", "kind", "fields"),
    [
        ("404 Not Found", "BlobNotFound", NotFound, {}),
        ("404 Not Found", "ContainerNotFound", StoreError, {}),
        ("404 Not Found", "NoSuchBucket", StoreError, {}),
        ("401 Unauthorized", "NoAuth", Denied, {}),
        ("403 Forbidden", "AuthorizationFailure", Denied, {}),
        ("429 Too Many", "TooManyRequests", Unavailable, {"throttled": True}),
        ("503 Service Unavailable", "ServerBusy", Unavailable, {"throttled": True}),
        ("500 Internal", "InternalError", Unavailable, {"outcome": "unknown"}),
        ("408 Timeout", "RequestTimeout", Unavailable, {"outcome": "unknown"}),
        ("501 Not Implemented", "NotImplemented", StoreError, {}),
        ("400 Bad Request", "InvalidBlockList", StoreError, {}),
    ],
)
@pytest.mark.parametrize("message", ["Sorry.", "Signed sig=SECRETSIG", "see https://a:hunter2@b"])
def test_a_reply_with_an_error(status, code, kind, fields, message):
    text = REPLY.format(status=status, code=code, message=message)
    found = translate(OSError(text), "read", "v/k", "az://c/run")
    assert type(found) is kind
    assert {name: found.fields.get(name) for name in ("throttled", "outcome")} == {
        "throttled": None,
        "outcome": None,
        **fields,
    }
    assert not any(secret in str(found) for secret in (*SECRETS, "RequestId"))
    assert "az://c" in str(found)


@pytest.mark.parametrize(
    ("text", "kind", "outcome"),
    [
        ("HTTP error: error sending request\n kind: Connect,\n ConnectError(", Unavailable, None),
        ("HTTP error: error sending request\n kind: ConnectionReset", Unavailable, "unknown"),
        ("HTTP error: request or response body error", Unavailable, "unknown"),
        ("Last-Modified Header missing from response", Unavailable, "unknown"),
        ("Error performing token request: GET http://1.2.3.4", Denied, None),
        ("Something else at https://a:hunter2@host", StoreError, None),
    ],
)
def test_an_error_without_a_reply(text, kind, outcome):
    found = translate(OSError(text), "write", "v/k", "gs://c/run")
    assert type(found) is kind
    assert found.fields.get("outcome") == outcome
    assert not any(secret in str(found) for secret in SECRETS)
    assert "http" not in str(found)
