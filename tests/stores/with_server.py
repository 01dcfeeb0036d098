"""Run a script with a real storage server: ``python -m tests.stores.with_server s3 SCRIPT ...``.

The script gets ``--root URL``, and environment variables with which the URL works. The server is
stopped when the script ends.
"""

from __future__ import annotations

import os
import subprocess
import sys

import boto3

from tests.stores.install import Missing
from tests.stores.servers import Ceph, running

BUCKET = "demo"


def run_with_ceph(command: list[str]) -> int:
    with running(Ceph) as ceph:
        os.environ |= ceph.environment()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        print(f"Ceph's S3 gateway is running at {ceph.endpoint}", flush=True)
        return subprocess.call([*command, "--root", f"s3://{BUCKET}/runs"])


def main() -> int:
    kind, *arguments = sys.argv[1:] or [""]
    if kind != "s3":
        print(f"Unknown kind of store {kind!r}. Expected STORE=s3.", file=sys.stderr)
        return 2
    try:
        return run_with_ceph([sys.executable, *arguments])
    except Missing as e:
        print(f"The server cannot be started: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
