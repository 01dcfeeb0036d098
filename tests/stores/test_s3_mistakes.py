"""What people get wrong: each message says what was expected, what was found, and what to do."""

import http.server
import os
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager

import boto3
import pytest

import limpet
from limpet.errors import Denied, StoreError
from tests.cli.invoke import run_cli
from tests.stores.checks import check_a_missing_bucket_is_not_an_empty_run, check_message


@pytest.fixture
def saved(s3):
    """A run on Ceph with one version."""
    limpet.save(f"{s3}/run/version_1", {"n": 1}, step=1)
    return f"{s3}/run"


COMMANDS = ["ls", "verify", "show", "sweep"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_bucket(s3, ceph, command):
    url = f"s3://no-such-bucket-{uuid.uuid4()}"
    check_message(
        run_cli(command, f"{url}/run"), "NoSuchBucket", "Create the bucket", ceph.endpoint
    )


def test_a_missing_bucket_is_not_an_empty_run(s3):
    url = f"s3://no-such-bucket-{uuid.uuid4()}/run"
    check_a_missing_bucket_is_not_an_empty_run(url, "NoSuchBucket")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_folder(saved, command):
    check_message(run_cli(command, f"{saved}x"), "There is no", f"{saved}x")


def test_a_mistyped_url_lists_no_other_folder(s3, monkeypatch):
    """Nothing below other folders is listed."""
    store = limpet.open_store(s3)
    client = boto3.client("s3")
    for number in range(20):
        client.put_object(Bucket=store.remote.bucket, Key=f"data/{number % 5}/{number}", Body=b"")
    before = store.statistics().requests
    check_message(run_cli("ls", s3), "There is no run")
    check_message(run_cli("ls", f"{s3}/nothing"), "There is no run")
    after = store.statistics().requests
    listed = after["ListObjectsV2"] - before.get("ListObjectsV2", 0)
    assert listed <= 7
    keys = [entry.name for entry in store.list_level("")]
    assert keys == ["data"]


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_credentials(saved, monkeypatch, command):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    check_message(run_cli(command, saved), "SignatureDoesNotMatch", "Check the secret key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown-key-id")
    check_message(run_cli(command, saved), "InvalidAccessKeyId", "check the credentials")


def test_no_permission(saved, monkeypatch, ceph):
    """Another user of the server may not read the bucket."""
    command = ["radosgw-admin", "-c", ceph.configuration, "-n", "client.rgw", "user", "create"]
    user = ["--uid=other", "--display-name=o", "--access-key=other", "--secret=wrong-secret-key"]
    subprocess.run([*command, *user], capture_output=True, check=False, timeout=60)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    check_message(run_cli("ls", saved), "AccessDenied", "Allow s3:GetObject")
    with pytest.raises(Denied, match="AccessDenied"):
        limpet.load(f"{saved}/version_1")
    with pytest.raises(Denied, match="AccessDenied"):
        limpet.save(f"{saved}/version_2", {"n": 1})


CREDENTIALS = "[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"


def remove_credentials(monkeypatch):
    """Remove the credentials from the environment, and return them."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    values = [os.environ[name] for name in names]
    for name in names:
        monkeypatch.delenv(name)
    return values


def test_missing_credentials(saved, monkeypatch, tmp_path):
    remove_credentials(monkeypatch)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    tried = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "~/.aws/credentials", "metadata services")
    check_message(run_cli("ls", saved), "there are no credentials", *tried)


def test_credentials_that_are_set_later_are_found(saved, monkeypatch, tmp_path):
    """A notebook: the first cell fails, the second writes the file, the first is run again."""
    key, secret = remove_credentials(monkeypatch)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with pytest.raises(Denied, match="no credentials"):
        limpet.load(f"{saved}/version_1")
    file.write_text(CREDENTIALS.format(key=key, secret=secret))
    assert limpet.load(f"{saved}/version_1") == {"n": 1}


def test_a_profile_and_a_missing_profile(saved, monkeypatch, tmp_path):
    key, secret = remove_credentials(monkeypatch)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text(f"[team]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    assert limpet.load(limpet.open_store(f"{saved}/version_1", profile="team")) == {"n": 1}
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert limpet.load(f"{saved}/version_1") == {"n": 1}
    monkeypatch.setenv("AWS_PROFILE", "tema")
    check_message(run_cli("ls", saved), "tema", "Tried:")


def test_a_clock_that_is_off_by_20_minutes(saved, ceph):
    """The process runs with a wrong clock, as boto3 sees it."""
    script = f"""
import datetime, limpet, botocore.auth, botocore.crt.auth
def later(*args, **kwargs):
    now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=20)
    return now.replace(tzinfo=None)
botocore.auth.get_current_datetime = botocore.crt.auth.get_current_datetime = later
try:
    limpet.load({f"{saved}/version_1"!r})
except limpet.errors.Denied as e:
    print(e)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "RequestTimeTooSkewed" in done.stdout, done
    assert "The clock of this machine is wrong" in done.stdout


@contextmanager
def serving(answer):
    """Serve every request with ``answer(request)``: a status, headers, and a body. Yield the URL.

    It is not S3.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


REDIRECTS = {  # what AWS answers to a request that was signed for another region
    "PermanentRedirect": (301, {"x-amz-bucket-region": "eu-west-1"}, ""),
    "AuthorizationHeaderMalformed": (400, {}, "<Region>eu-west-1</Region>"),
}


@pytest.mark.parametrize("code", REDIRECTS)
def test_a_wrong_region(monkeypatch, code):
    """boto3 asks the region that the reply names. The message names it if that fails as well."""
    status, headers, extra = REDIRECTS[code]
    body = f"<Error><Code>{code}</Code><Message>Wrong region</Message>{extra}</Error>".encode()
    regions = []

    def answer(request):
        regions.append(request.headers["Authorization"].split("/")[2])
        return status, {**headers, "Content-Type": "application/xml"}, body

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with serving(answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        result = run_cli("ls", "s3://bucket-in-europe/run")
        check_message(result, code, "The bucket is in the region eu-west-1", "region=")
        assert {*regions} == {"us-east-1", "eu-west-1"}
        regions.clear()
        with pytest.raises(StoreError, match="The bucket is in the region eu-west-1"):
            limpet.save("s3://bucket-in-europe/run/version_1", {"n": 1})
        assert len(regions) < 6  # it is not repeated until the deadline


def test_nobody_listens_at_the_endpoint(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = limpet.open_store(f"{s3}/run", timeout=1)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9.*Gave up after .* Check the network"):
        limpet.Run(store).latest()


def test_a_versioned_bucket_in_which_ceph_replaces_objects(s3):
    """AWS keeps the condition in such a bucket. Ceph does not, so two writers could commit."""
    client, bucket = boto3.client("s3"), s3.removeprefix("s3://")
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    with pytest.raises(StoreError, match=r"cannot hold a run.*a bucket with versioning"):
        limpet.save(f"{s3}/run/version_1", {"n": 1}, step=1)
    assert limpet.Run(f"{s3}/run").latest() is None
    assert run_cli("ls", f"{s3}/run").code == 4


def test_the_console_shows_folders_as_empty_objects(saved):
    bucket, _, folder = saved.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for key in (f"{folder}/", f"{folder}/version_1/", f"{folder}/version_9/"):
        client.put_object(Bucket=bucket, Key=key)
    assert [s.step for s in limpet.Run(saved).snapshots()] == [1]
    assert run_cli("ls", saved, "--json").json["versions"][0]["step"] == 1
    assert run_cli("sweep", saved).code == 0
    assert limpet.load(f"{saved}/version_1") == {"n": 1}
