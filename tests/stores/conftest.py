"""The servers that the tests in this folder share: one of each kind, started when first needed."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from tests.stores.hdfs_server import Hdfs
from tests.stores.install import Missing
from tests.stores.servers import Ceph, server_folder

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
def running(request, kind, *arguments, **options):
    """Start a server, or skip the test if it is not installed."""
    with server_folder(kind.__name__.lower()) as folder:
        try:
            server = kind(folder, *arguments, **options)
        except Missing as e:
            skip_unless_required(request, e)
        try:
            yield server
        finally:
            server.stop()


def running_ceph(request, objectstore="memstore"):
    return running(request, Ceph, objectstore)


def running_hdfs(request, datanodes=1, replication=None):
    return running(request, Hdfs, datanodes, replication)


@pytest.fixture(scope="session")
def ceph(request):
    with running_ceph(request) as server:
        yield server


@pytest.fixture(scope="session")
def hdfs(request):
    """One NameNode and one DataNode. To kill one, start your own with ``running_hdfs``."""
    with running_hdfs(request) as server:
        yield server


@pytest.fixture
def s3(ceph, monkeypatch):
    """Point the environment variables of the AWS tools to Ceph. The value is a new bucket's URL."""
    for name, value in ceph.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"b-{uuid.uuid4()}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}"
