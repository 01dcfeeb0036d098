"""Copies from, to, and within S3: killed and repeated, damaged on the way, and at the source."""

import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

import limpet
from limpet.convert.copy import copy_snapshot
from limpet.loading.snapshot import reader_of
from limpet.snapshot.location import Location, locate
from limpet.testing.contract import partial_keys
from limpet.types import MIB
from tests.cli.invoke import run_cli
from tests.convert.checkpoints import write_dcp_as_ranks
from tests.memory_peak import numbers_of
from tests.snapshot.manual_shards import split_rows, write_resharded
from tests.stores.fault_proxy import Fault

STATE = {"w": np.arange(20 * MIB, dtype=np.int32).reshape(20, -1), "b": np.ones(5)}  # 80 MiB


@pytest.fixture
def source(tmp_path):
    """A local run whose version has two shards of 40 MiB, each of which is two parts."""
    whole = limpet.save(tmp_path / "whole" / "version_1", STATE, step=1)
    return write_resharded(
        reader_of(whole), locate(tmp_path / "run" / "version_1"), split_rows(2), 2
    )


def check_copy(run, steps=(1,)):
    assert [s.step for s in run.snapshots()] == [*steps]
    for snapshot in run.snapshots():
        assert snapshot.verify().ok
        loaded = limpet.load(snapshot.url)
        assert np.array_equal(loaded["w"], STATE["w"])


KILLS = {  # the request that is in progress, and the files that the repeated copy writes again
    "first shard": ("partNumber=2", "shard-00000", {"shard-00000", "shard-00001"}),
    "second shard": ("partNumber=2", "shard-00001", {"shard-00001"}),
    "completion": ("uploadId=", "shard-00001", {"shard-00001"}),
    "index": ("index.json$", "shard-00000", set()),
    "manifest": ("manifest.json$", "", set()),
}


def run_and_kill(proxy, *command):
    """Run a command of Limpet, and kill it half a second after its first fault."""
    process = subprocess.Popen(
        [sys.executable, "-m", "limpet", *command],
        env={**os.environ, "AWS_ENDPOINT_URL": proxy.endpoint},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not any(r.action for r in proxy.log):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.5)  # the other requests end
    process.send_signal(signal.SIGKILL)
    process.wait(30)


@pytest.mark.parametrize("point", KILLS)
def test_a_copy_that_was_killed_is_repeated(s3, proxy, source, point):
    request, shard, written = KILLS[point]
    method = "POST" if point == "completion" else "PUT"
    proxy.inject(Fault("stall", method, f"{shard}.*{request}", count=-1, seconds=60))
    run_and_kill(proxy, "copy", source.url, f"{s3}/copy/version_1")
    run = limpet.Run(f"{s3}/copy")
    assert run.snapshots() == []
    proxy.inject()
    began = time.monotonic()
    store = limpet.open_store(f"{s3}/copy", endpoint=proxy.endpoint)
    copy_snapshot(source, Location(store, "version_1"))
    assert time.monotonic() - began < 20
    sent = [r.target for r in proxy.log if r.method == "PUT" and ".safetensors" in r.target]
    assert {re.search("shard-[0-9]{5}", target)[0] for target in sent} == written
    check_copy(run)
    run.sweep(grace=0, now=time.time() + 8 * 24 * 3600)  # what the killed copy has left
    assert partial_keys(run.store) == []
    check_copy(run)


@pytest.mark.parametrize("request_name", ["partNumber=2", "uploadId="])
def test_an_export_that_was_killed_is_repeated(s3, proxy, source, request_name):
    method = "POST" if request_name == "uploadId=" else "PUT"
    proxy.inject(Fault("stall", method, request_name, count=-1, seconds=60))
    url = f"{s3}/out/m.pt"
    run_and_kill(proxy, "export", source.url, "--to", "torch", url)
    store = limpet.open_store(f"{s3}/out")
    assert [stat.key for stat in store.list("")] == []
    proxy.inject()
    result = run_cli("export", source.url, "--to", "torch", url)
    assert result.code == 0, result
    result = run_cli("import", url, f"{s3}/imported", "--step", "1")
    assert result.code == 0, result
    loaded = limpet.load(f"{s3}/imported/version_1")["model"]
    assert np.array_equal(loaded["w"], STATE["w"])
    assert [stat.key for stat in store.list("")] == ["m.pt", "m.pt.limpet.json"]


def test_copies_to_s3_within_s3_and_back(s3, tmp_path):
    """A run with incremental versions, by the command."""
    state = {"w": STATE["w"].copy(), "epoch": 0}
    with limpet.Checkpointer(
        tmp_path / "run", state, save=limpet.EverySteps(1), incremental=True
    ) as ckpt:
        for epoch in range(3):
            state["epoch"] = epoch
            state["w"][0, :100] += 1
            ckpt.step()
    hops = [str(tmp_path / "run"), f"{s3}/a", f"{s3}/folder/b", str(tmp_path / "back")]
    expected = [limpet.load(s.url) for s in limpet.Run(hops[0]).snapshots()]
    assert any(s.bases for s in limpet.Run(hops[0]).snapshots())
    for a, b in pairwise(hops):
        result = run_cli("copy", a, b)
        assert result.code == 0, result
        assert "all checked" in result.out
        again = run_cli("copy", a, b)
        assert "Nothing copied" in again.out
        snapshots = limpet.Run(b).snapshots()
        assert [s.step for s in snapshots] == [1, 2, 3]
        assert not any(s.bases for s in snapshots)
        for snapshot, value in zip(snapshots, expected, strict=True):
            assert snapshot.verify().ok
            loaded = limpet.load(snapshot.url)
            assert np.array_equal(loaded["w"], value["w"])
            assert loaded["epoch"] == value["epoch"]


COPY = """
import sys, numpy as np, torch, limpet
from limpet.snapshot.location import locate
from limpet.snapshot.reader import open_snapshot
from limpet.convert.copy import copy_snapshot
from limpet.convert.export import prepare_export
from tests.memory_peak import print_peak_memory
verb, a, b = sys.argv[1:]
limpet.save(f"{b}-warm/version_1", {"model": {"x": np.ones(3)}})
snapshot = open_snapshot(a)
snapshot.indexes()
with print_peak_memory():
    if verb == "copy":
        copy_snapshot(snapshot, locate(f"{b}/version_1"))
    else:
        prepare_export(snapshot, b, verb).write()
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["copy", "safetensors"])
def test_the_memory_of_half_a_gibibyte_is_bounded(s3, proxy, tmp_path, verb):
    """A copy and an export of many leaves, small and large, whose order differs in the target."""
    model = {f"layer.{i}.w": np.full(1 << 20, i, np.int32) for i in range(120)}
    model |= {f"layer.{i}.norm": np.full(1000, i, np.float32) for i in range(120)}
    model["head"] = np.zeros((1 << 13, 1 << 10), np.float32)
    source = limpet.save(tmp_path / "run" / "version_1", {"model": model}, step=1)
    length = source.nbytes
    assert length > 512 * MIB
    del model
    [growth] = numbers_of(COPY, verb, source.url, f"{s3}/out", AWS_ENDPOINT_URL=proxy.endpoint)
    assert growth < 256 * MIB
    parts = [t for t in proxy.targets("PUT") if "partNumber" in t]
    numbers = {re.search("partNumber=[0-9]+", target)[0] for target in parts}
    assert len(numbers) == -(-length // (28 * MIB))
    # Ceph 16 ignores CRC-32C, so the first part of each thread is sent again with MD5
    assert len(parts) <= len(numbers) + 8


def upload_folder(folder, url):
    store = limpet.open_store(url)
    for file in folder.iterdir():
        store.put_if_absent(file.name, file.read_bytes())


def test_folders_of_other_tools_are_imported_from_s3(s3, tmp_path):
    tensors = {"layer.w": torch.arange(1000.0).reshape(10, 100), "layer.b": torch.ones(7)}
    source = limpet.save(tmp_path / "run" / "version_1", {"model": tensors}, step=1)
    write_dcp_as_ranks(tmp_path / "dcp", 1, lambda rank: {"model": tensors})
    assert run_cli("export", source.url, "--to", "hf", f"{s3}/hf").code == 0
    upload_folder(tmp_path / "dcp", f"{s3}/dcp")
    for kind in ("hf", "dcp"):
        result = run_cli("import", f"{s3}/{kind}", f"{s3}/run-{kind}", "--step", "3")
        assert result.code == 0, result
        found = flatten(limpet.load(f"{s3}/run-{kind}/version_3"))
        assert found.keys() == {f"model.{name}" for name in tensors}
        assert all(torch.equal(found[f"model.{name}"], value) for name, value in tensors.items())


def flatten(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix[:-1]: torch.as_tensor(tree)}
    return {
        k: v for name, below in tree.items() for k, v in flatten(below, f"{prefix}{name}.").items()
    }
