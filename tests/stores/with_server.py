"""Run a script with a real storage server: ``python -m tests.stores.with_server KIND SCRIPT ...``.

``KIND``: "s3" (Ceph) or "hdfs".
The script gets ``--root URL``, and environment variables with which the URL works. The server is
stopped when the script ends.
"""

import os
import subprocess
import sys

import boto3

from tests.stores.hdfs_server import Hdfs
from tests.stores.install import Missing
from tests.stores.servers import Ceph, running

BUCKET = "demo"


def run_with_ceph(command):
    with running(Ceph) as ceph:
        os.environ |= ceph.environment()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        print(f"Ceph's S3 gateway is running at {ceph.endpoint}", flush=True)
        return subprocess.call([*command, "--root", f"s3://{BUCKET}/runs"])


def run_with_hdfs(command):
    with running(Hdfs) as hdfs:
        print(f"HDFS is running at {hdfs.url}", flush=True)
        return subprocess.call([*command, "--root", f"{hdfs.url}/runs"])


KINDS = {"s3": run_with_ceph, "hdfs": run_with_hdfs}


def main():
    kind, *arguments = sys.argv[1:] or [""]
    if kind not in KINDS:
        expected = " or ".join(f"STORE={name}" for name in KINDS)
        print(f"Unknown kind of store {kind!r}. Expected {expected}.", file=sys.stderr)
        return 2
    try:
        return KINDS[kind]([sys.executable, *arguments])
    except Missing as e:
        print(f"The server cannot be started: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
