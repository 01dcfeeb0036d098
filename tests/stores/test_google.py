"""``gs://`` on Ceph's gateway, which understands a translation of Google's XML API.

This is no evidence for Google: it runs the code, and shows what obstore sends. Not simulated:
tokens, generations, and the rates of Google.
"""

import json
import re
import uuid

import boto3
import numpy as np
import pytest

import limpet
from limpet.errors import Denied, StoreError
from limpet.testing import StoreContract
from limpet.types import MIB
from tests.stores.checks import check_intact
from tests.stores.fault_proxy import Fault, FaultProxy

STATE = {"w": np.arange(11 * MIB // 4, dtype=np.int32), "n": 3}  # 11 MiB: three parts


class GoogleProxy(FaultProxy):
    """Translates the two headers in which Google and S3 differ for obstore's requests."""

    def translate(self, head):
        head = re.sub(rb"(?i)\r\nauthorization: Bearer[^\r]*", b"", head)
        return re.sub(rb"(?i)x-goog-if-generation-match: 0", b"If-None-Match: *", head)


@pytest.fixture
def google(ceph, monkeypatch, tmp_path):
    """A proxy. ``gs://BUCKET`` works with the key file that the environment variables name."""
    proxy = GoogleProxy(ceph.port)
    names = ("client_email", "private_key", "private_key_id")
    key = {"gcs_base_url": proxy.endpoint, "disable_oauth": True, **dict.fromkeys(names, "")}
    file = tmp_path / "key.json"
    file.write_text(json.dumps(key))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(file))
    monkeypatch.setenv("GOOGLE_BASE_URL", proxy.endpoint)
    yield proxy
    proxy.stop()


@pytest.fixture
def gs(s3, google):
    """The URL of a new bucket, in which everyone may do everything."""
    bucket = s3.removeprefix("s3://")
    everyone = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [everyone]})
    boto3.client("s3").put_bucket_policy(Bucket=bucket, Policy=policy)
    return f"gs://{bucket}"


@pytest.fixture
def store(gs):
    """A run. No call takes longer than 20 s."""
    return limpet.open_store(f"{gs}/run", timeout=20, part_size=5 * MIB)


class TestGoogle(StoreContract):
    partials_are_listed = False

    @pytest.fixture
    def store(self, gs):
        return limpet.open_store(f"{gs}/a/folder", part_size=5 * MIB)


def save(store, step=1):
    return limpet.save(store.at(f"version_{step}"), STATE, step=step)


MANIFEST = r"manifest(\.|%2E)json"
REQUESTS = {
    "create": ("POST", r"\?uploads"),
    "part": ("PUT", "partNumber=2"),
    "complete": ("POST", "uploadId="),
    "manifest": ("PUT", MANIFEST),
}


@pytest.mark.parametrize("action", ["status", "reset", "lose_reply"])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_save_survives_a_fault(store, google, request_name, action):
    google.inject(Fault(action, *REQUESTS[request_name]))
    save(store)
    assert google.faults[0].hits == 1
    google.inject()
    check_intact(store, [1])


@pytest.mark.parametrize("action", ["status", "reset", "cut", "truncate", "flip_reply"])
def test_a_load_survives_a_fault(store, google, action):
    save(store)
    google.inject(Fault(action, "GET", r"safetensors$", after=100))
    loaded = limpet.load(store.at("version_1"))
    assert google.faults[0].hits == 1
    assert np.array_equal(loaded["w"], STATE["w"])


def test_a_public_bucket_is_read_without_credentials(gs, store, monkeypatch):
    save(store)
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT")
    public = limpet.open_store(f"{gs}/run", anonymous=True)
    assert limpet.load(public.at("version_1"), keys="n") == {"n": 3}
    assert limpet.Run(public).latest().verify().ok
    with pytest.raises(Denied, match="anonymous=True"):
        save(public, 2)


def test_a_missing_bucket(google):
    for act in (limpet.load, lambda url: limpet.save(url, {"n": 1})):
        with pytest.raises(StoreError, match=r"There is no gs://\S+\. Create it") as caught:
            act(f"gs://missing-{uuid.uuid4()}/run/version_1")
        assert type(caught.value) is StoreError
