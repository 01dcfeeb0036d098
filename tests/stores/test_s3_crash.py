"""Kill -9 of Ceph and of the training, in the middle of a save."""

import os
import signal
import subprocess
import sys
import threading
import time

import boto3
import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError
from limpet.testing.contract import partial_keys
from limpet.types import MIB
from tests.stores.conftest import running_ceph
from tests.stores.fault_proxy import Fault, FaultProxy
from tests.waiting import wait_until

STATE = {"w": np.arange(5 * MIB, dtype=np.int32), "n": 3}


@pytest.fixture(scope="module")
def durable_ceph(request):
    """A Ceph whose data is in files, so that it survives the end of its processes."""
    with running_ceph(request, "bluestore") as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "partNumber=2"), ("POST", "uploadId="), ("PUT", "manifest.json$")]
)
def test_all_daemons_of_ceph_are_killed_during_a_save(durable_ceph, method, path):
    ceph, proxy = durable_ceph, FaultProxy(durable_ceph.port)
    bucket = f"b-{path[:4].lower()}-{time.time_ns()}"
    credentials = {"access_key_id": ceph.key, "secret_access_key": ceph.secret}
    boto3.client(
        "s3",
        endpoint_url=ceph.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ceph.key,
        aws_secret_access_key=ceph.secret,
    ).create_bucket(Bucket=bucket)

    def open_run(timeout):
        options = {**credentials, "endpoint": proxy.endpoint, "region": "us-east-1"}
        return limpet.open_store(
            f"s3://{bucket}/run", timeout=timeout, part_size=8 * MIB, **options
        )

    store = open_run(5)
    limpet.save(store.at("version_1"), STATE, step=1)
    proxy.inject(Fault("stall", method, path, seconds=1))  # killed while this request waits
    killer = threading.Thread(target=kill_at_stall, args=(proxy, ceph))
    killer.start()
    with pytest.raises(LimpetError, match="Gave up after"):
        limpet.save(store.at("version_2"), STATE, step=2)
    killer.join()
    proxy.inject()
    ceph.resume()
    run = limpet.Run(open_run(60))
    assert [s.step for s in run.snapshots()] == [1]
    assert run.latest().verify().ok
    limpet.save(run.store.at("version_2"), STATE, step=2)
    assert [s.step for s in run.snapshots()] == [1, 2]
    assert all(s.verify().ok for s in run.snapshots())
    run.sweep(grace=0, now=time.time() + 8 * 24 * 3600)
    assert partial_keys(run.store) == []
    proxy.stop()


def kill_at_stall(proxy, ceph):
    end = time.monotonic() + 30
    while time.monotonic() < end and not any(r.action for r in proxy.log):
        time.sleep(0.01)
    ceph.kill()


SAVER = """
import sys, numpy as np, limpet
limpet.save(sys.argv[1], {"w": np.arange(10 << 20, dtype=np.int32)}, step=2)
"""


@pytest.mark.parametrize("path", ["uploads", "partNumber=2", "uploadId=", "index.json$"])
def test_a_killed_save_leaves_nothing_that_sweep_does_not_find(s3, ceph, path):
    proxy = FaultProxy(ceph.port)
    url = f"{s3}/run"
    limpet.save(f"{url}/version_1", {"n": 1}, step=1)
    proxy.inject(Fault("stall", "PUT|POST", path, count=-1, seconds=30))
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, f"{url}/version_2"],
        env={**os.environ, "AWS_ENDPOINT_URL": proxy.endpoint},
    )
    wait_until(lambda: any(r.action for r in proxy.log), 60)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    proxy.stop()
    run = limpet.Run(url)
    assert [s.step for s in run.snapshots()] == [1]
    # the process is dead, so its pin protects nothing; only the age of the files counts
    result = run.sweep(grace=0, now=time.time() + 120)
    assert any("pin-" in key for key in result.removed)
    assert partial_keys(run.store) == []
    assert {stat.key.partition("/")[0] for stat in run.store.list("")} == {"version_1"}
