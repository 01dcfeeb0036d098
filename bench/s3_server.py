"""The S3 servers of the benchmarks: how to connect to them, and how to empty a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.s3_transfer import Connection

BUCKET = "limpet-bench"


def connection_to(endpoint: str, key: str = "bench", secret: str = "benchbench") -> Connection:
    return {
        "endpoint": endpoint,
        "access_key_id": key,
        "secret_access_key": secret,
        "region": "us-east-1",
    }


def environment_of(connection: Connection) -> dict[str, str]:
    """Return the environment variables with which the tools of AWS use the server."""
    return {
        "AWS_ENDPOINT_URL": connection["endpoint"],
        "AWS_ACCESS_KEY_ID": connection["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": connection["secret_access_key"],
        "AWS_DEFAULT_REGION": connection["region"],
        "AWS_REGION": connection["region"],
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def client_of(connection: Connection) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=connection["endpoint"],
        aws_access_key_id=connection["access_key_id"],
        aws_secret_access_key=connection["secret_access_key"],
        region_name=connection["region"],
    )


@contextmanager
def real_server(name: str) -> Iterator[Connection]:
    """Start "ceph" or "localstack" with an empty bucket ``BUCKET``, and yield how to connect.

    Raises ``Missing`` if the server is not installed.
    """
    from tests.stores.emulators import LocalStack
    from tests.stores.servers import Ceph, S3Server, running

    kinds: dict[str, type[S3Server]] = {"ceph": Ceph, "localstack": LocalStack}
    with running(kinds[name]) as server:
        connection = connection_to(server.endpoint, server.key, server.secret)
        client_of(connection).create_bucket(Bucket=BUCKET)
        yield connection


def empty_bucket(connection: Connection, bucket: str) -> None:
    """Delete all objects, and abort all uploads. Servers with data in memory would fill up."""
    client = client_of(connection)
    for found in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        client.delete_object(Bucket=bucket, Key=found["Key"])
    for found in client.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
        client.abort_multipart_upload(Bucket=bucket, Key=found["Key"], UploadId=found["UploadId"])
