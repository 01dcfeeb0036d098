"""The servers that the tests in this folder share: one of each kind, started when first needed."""

import uuid
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from tests.stores.emulators import Azurite, LocalStack
from tests.stores.fault_proxy import FaultProxy
from tests.stores.hdfs_server import Hdfs
from tests.stores.install import Missing
from tests.stores.servers import Ceph, running
from tests.stores.sftp_server import Sftp

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:  # those of all folders
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.stores)


def skip_unless_required(request, error):
    """Skip the test, with the reason, unless ``--require-servers`` asks for a failure."""
    if request.config.getoption("--require-servers"):
        pytest.fail(f"a server is missing: {error}")
    pytest.skip(str(error))


@contextmanager
def running_or_skip(request, kind, *arguments):
    try:
        with running(kind, *arguments) as server:
            yield server
    except Missing as e:
        skip_unless_required(request, e)


def running_ceph(request, objectstore="memstore"):
    return running_or_skip(request, Ceph, objectstore)


def running_hdfs(request, datanodes=1, replication=None):
    return running_or_skip(request, Hdfs, datanodes, replication)


def running_azurite(request):
    return running_or_skip(request, Azurite)


def running_localstack(request):
    return running_or_skip(request, LocalStack)


def running_sftp(request):
    return running_or_skip(request, Sftp)


@pytest.fixture(scope="session")
def ceph(request):
    with running_ceph(request) as server:
        with pytest.MonkeyPatch.context() as patch, new_bucket(server, patch) as url:
            # the first upload takes seconds to begin: a short timeout would repeat the request
            boto3.client("s3").create_multipart_upload(Bucket=url[5:], Key="first")
        yield server


@pytest.fixture
def proxy(ceph):
    proxy = FaultProxy(ceph.port)
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def hdfs(request):
    """One NameNode and one DataNode. To kill one, start your own with ``running_hdfs``."""
    with running_hdfs(request) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(request):
    with running_azurite(request) as server:
        yield server


@pytest.fixture(scope="session")
def localstack(request):
    with running_localstack(request) as server:
        yield server


@pytest.fixture(scope="session")
def sftp(request):
    with running_sftp(request) as server:
        yield server


@contextmanager
def new_bucket(server, monkeypatch):
    """Point the environment variables of the AWS tools to a server. Yield a new bucket's URL."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"b-{uuid.uuid4()}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    yield f"s3://{bucket}"
    # Ceph's memstore blocks for ever when it is full
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for found in page.get("Contents", ()):
            client.delete_object(Bucket=bucket, Key=found["Key"])
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket):
        for found in page.get("Uploads", ()):
            client.abort_multipart_upload(
                Bucket=bucket, Key=found["Key"], UploadId=found["UploadId"]
            )


@pytest.fixture
def s3(ceph, monkeypatch):
    """The URL of a new bucket of Ceph."""
    with new_bucket(ceph, monkeypatch) as url:
        yield url


@pytest.fixture
def localstack_s3(localstack, monkeypatch):
    """The URL of a new bucket of LocalStack."""
    with new_bucket(localstack, monkeypatch) as url:
        yield url


@pytest.fixture
def az(azurite, monkeypatch):
    """The URL of a new container of Azurite, which the environment variables point to."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    container = f"c-{uuid.uuid4()}"
    azurite.create_container(container)
    return f"az://{container}"


@pytest.fixture
def no_time_for_bodies(monkeypatch):
    """A call gets its timeout only, however long its body is."""
    for module in ("retry", "s3"):
        monkeypatch.setattr(f"limpet.storage.{module}.LEAST_RATE", 1 << 40)
