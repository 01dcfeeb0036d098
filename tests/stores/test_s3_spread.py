"""A run in S3 that spreads its shards: saves of two ranks, resuming, retention, sweep, copies."""

import boto3
import torch

import limpet
from limpet.format import names
from limpet.run.policy import KeepLast
from limpet.testing.contract import keys, partial_keys, put
from tests.cli.invoke import run_cli
from tests.stores.torchrun import run_torchrun

SCRIPT = """
import sys
import torch, torch.distributed as dist, limpet
dist.init_process_group("gloo")
state = {"same": torch.zeros(9 << 18), "more": torch.zeros(9 << 18)}  # 9 MiB for each rank
state["progress"] = limpet.Progress()
with limpet.Checkpointer(
    limpet.open_store(sys.argv[1], spread=16), state, save=limpet.EverySteps(1),
    keep=limpet.KeepLast(3),
) as ckpt:
    for step in range(3):
        state["same"] += 1
        ckpt.step()
        ckpt.wait()
dist.barrier()
dist.destroy_process_group()
"""


def train_two_ranks(script, url):
    script.write_text(SCRIPT)
    run_torchrun(script, url)


def shards_in(bucket):
    """Return the keys of all shards and indexes of the run, as the server has them."""
    found = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix="a/run/")["Contents"]
    found = [entry["Key"].removeprefix("a/run/") for entry in found]
    return [key for key in found if names.parse_attempt(key.rpartition("/")[2]) is not None]


def test_the_life_of_a_spread_run(s3, tmp_path):
    bucket, url = s3.removeprefix("s3://"), f"{s3}/a/run"
    train_two_ranks(tmp_path / "train.py", url)
    shards = shards_in(bucket)
    assert len(shards) == 3 * 2 * 2
    assert all(key.startswith("spread-") for key in shards)
    assert len({key.partition("/")[0] for key in shards}) >= 4
    state = {"same": torch.zeros(9 << 18), "more": torch.zeros(9 << 18)}
    state["progress"] = limpet.Progress()
    store = limpet.open_store(url, part_size=5 << 20, spread=16)
    with limpet.Checkpointer(store, state, keep=KeepLast(3)) as ckpt:
        assert ckpt.resume().step == 3
        state["same"] += 1
        ckpt.step()
    run = limpet.Run(store)
    assert [s.step for s in run.snapshots()] == [2, 3, 4]
    assert len(shards_in(bucket)) == 2 * 2 * 2 + 2
    assert torch.equal(limpet.load(f"{url}/version_4", keys="same")["same"], state["same"])
    assert state["same"][7] == 4
    assert run.spread_folders()[15] == f"{url}/spread-0f"
    # a killed save: parts of a shard, and a whole one
    left = run.store.put(f"spread-01/version_9/{names.shard_name(0, 2, 'a' * 12)}", 12 << 20)
    left.write_at(0, memoryview(bytes(5 << 20)))
    put(run.store, f"spread-02/version_9/{names.shard_name(1, 2, 'a' * 12)}", b"1")
    assert len(partial_keys(run.store)) == 1
    assert run.sweep().removed == []  # they are too young
    swept = run.sweep(grace=0, now=2e12)
    assert len(swept.removed) == 2
    assert partial_keys(limpet.Run(url).store) == []
    assert len(shards_in(bucket)) == 10
    assert run.retain(KeepLast(1))
    assert len(shards_in(bucket)) == 2
    assert run_cli("copy", url, tmp_path / "copy").code == 0
    assert run_cli("verify", tmp_path / "copy").code == 0
    # as by "aws s3 sync"
    for key in keys(run.store):
        path = tmp_path / "synced" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(run.store.get(key, 1 << 30))
    loaded = limpet.load(tmp_path / "synced" / "version_4")
    assert torch.equal(loaded["same"], state["same"])
