"""The checksums and conditions that S3 has and Ceph ignores, on LocalStack, which honors them.

LocalStack accepts any credentials and any signature, so tests of those run on Ceph.
"""

import base64
from itertools import pairwise

import boto3
import numpy as np
import pytest

import limpet
from limpet.errors import AlreadyExists, StoreError
from limpet.storage.s3 import S3Parts, crc32c
from limpet.testing.contract import partial_keys, put, random_bytes
from limpet.threads import no_op
from limpet.types import MIB
from tests.stores import checks
from tests.stores.fault_proxy import Fault, FaultProxy

STATE = {"w": np.arange(5 * MIB, dtype=np.int32), "n": 3}  # 20 MiB: three parts
PART = 8 * MIB


@pytest.fixture
def proxy(localstack):
    proxy = FaultProxy(localstack.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def open_run(localstack_s3, proxy):
    def open_run(**options):
        options = {"timeout": 20, "part_size": PART, **options}
        return limpet.open_store(f"{localstack_s3}/run", endpoint=proxy.endpoint, **options)

    return open_run


def save(store, step=1):
    return limpet.save(store.at(f"version_{step}"), STATE, step=step)


def statuses(proxy, path):
    return [r.status for r in proxy.log if r.method == "PUT" and path in r.target]


def check_intact(store):
    checks.check_intact(store)
    assert partial_keys(store) == []


def stored_checksums(store, key):
    """Return the CRC-32C that the server has of an object, and those of its parts."""
    bucket, _, name = f"{store.url}/{key}".removeprefix("s3://").partition("/")
    reply = boto3.client("s3").get_object_attributes(
        Bucket=bucket, Key=name, ObjectAttributes=["Checksum", "ObjectParts"]
    )
    parts = reply["ObjectParts"]["Parts"]
    return reply["Checksum"].get("ChecksumCRC32C"), [p.get("ChecksumCRC32C") for p in parts]


# bits that change on their way


@pytest.mark.parametrize("checksum", ["crc32c", "md5"])
def test_a_flipped_bit_of_an_upload_is_refused_and_sent_again(
    open_run, proxy, monkeypatch, checksum
):
    if checksum == "md5":  # as if the server did not know CRC-32C
        monkeypatch.setattr(S3Parts, "has_crc", property(lambda _: False, no_op), raising=False)
    store = open_run()
    proxy.inject(
        Fault("flip", "PUT", "partNumber=2", after=1000),
        Fault("flip", "PUT", "index.json$", after=10),
        Fault("flip", "PUT", "manifest.json$", after=10),
    )
    save(store)
    for path in ("partNumber=2", "index.json", "manifest.json"):
        assert statuses(proxy, path)[:2] == [400, 200], path
    check_intact(store)


@pytest.mark.parametrize("path", ["partNumber=2", "index.json$", "manifest.json$"])
def test_a_save_whose_bytes_always_change_fails(open_run, proxy, path):
    store = open_run(timeout=2)
    proxy.inject(Fault("flip", "PUT", path, count=-1, after=10))
    with pytest.raises(StoreError, match="Gave up after"):
        save(store)
    found = {*statuses(proxy, path.rstrip("$"))}
    assert 400 in found
    assert found <= {400, 0}  # 0: the time was over before the reply
    proxy.inject()
    assert limpet.Run(store).snapshots() == []
    save(store)
    check_intact(store)


@pytest.mark.parametrize("path", [r"manifest\.json$", r"index\.json$", r"safetensors$"])
def test_a_flipped_bit_of_a_download_is_read_again(open_run, proxy, path):
    store = open_run()
    save(store)
    proxy.inject(Fault("flip_reply", "GET", path, after=100))
    assert np.array_equal(limpet.load(store.at("version_1"))["w"], STATE["w"])
    assert proxy.faults[0].hits == 1


# what the server keeps


def test_the_server_keeps_the_crc32c_of_each_part(open_run):
    store = open_run()
    data = random_bytes(2 * PART + 1000)
    put(store, "v/a", data)
    cuts = [0, PART, 2 * PART, len(data)]
    expected = [crc32c([memoryview(data)[a:b]]) for a, b in pairwise(cuts)]
    digests = b"".join(map(base64.b64decode, expected))
    whole = crc32c([memoryview(digests)])
    assert stored_checksums(store, "v/a") == (whole, expected)


# CompleteMultipartUpload with If-None-Match


def begin(store, data):
    upload = store.put("v/a", len(data))
    upload.write_at(0, memoryview(data))
    return upload


def test_the_first_of_several_uploads_of_a_key_wins(open_run):
    """One after another: LocalStack lets several win that end at the same moment."""
    store = open_run()
    contents = [random_bytes(PART + 1000, seed) for seed in range(3)]
    uploads = [begin(store, data) for data in contents]
    uploads[1].commit()
    for loser in (uploads[0], uploads[2]):
        with pytest.raises(AlreadyExists):
            loser.commit()
    assert store.get("v/a", 2 * PART) == contents[1]
    assert partial_keys(store) == []


@pytest.mark.parametrize("action", ["lose_reply", "ok_error", "reset", "status", "truncate"])
def test_an_upload_whose_completion_is_repeated_succeeds(open_run, proxy, action):
    store = open_run()
    data = random_bytes(PART + 1000)
    upload = begin(store, data)
    proxy.inject(Fault(action, "POST", "uploadId=", count=2))
    upload.commit()
    assert proxy.faults[0].hits >= 1
    assert store.get("v/a", len(data)) == data
    assert partial_keys(store) == []


def test_an_object_of_another_writer_is_not_taken_for_the_repeated_upload(open_run, proxy):
    """Same key, same length: only the upload that is still open shows that it was not completed."""
    store = open_run()
    own, foreign = random_bytes(PART + 1000, 1), random_bytes(PART + 1000, 2)
    upload, other = begin(store, own), begin(store, foreign)
    other.commit()
    proxy.inject(Fault("status", "POST", "uploadId=", code=500, reason="InternalError"))
    with pytest.raises(AlreadyExists):
        upload.commit()
    assert proxy.faults[0].hits == 1
    assert store.get("v/a", len(foreign)) == foreign
    assert partial_keys(store) == []
