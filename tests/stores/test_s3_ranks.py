"""Two ranks save to S3. A fault of one of them fails both, in time, with the rank and the cause."""

import pytest

import limpet
from limpet.testing.contract import partial_keys
from tests.stores.fault_proxy import Fault
from tests.stores.torchrun import run_torchrun

SCRIPT = """
import sys, time
import torch, torch.distributed as dist, limpet
dist.init_process_group("gloo")
rank = dist.get_rank()
store = limpet.open_store(sys.argv[1], timeout=4)
state = {"own": limpet.PerRank(torch.arange(9 << 19) + rank), "same": torch.arange(1000)}
for step in (1, 2):
    began = time.monotonic()
    try:
        limpet.save(store.at(f"version_{step}"), state, step=step)
        print(f"rank {rank} step {step} saved", flush=True)
    except limpet.errors.LimpetError as e:
        took = time.monotonic() - began
        print(f"rank {rank} step {step} failed in {took:.0f} s: {e}", flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("action", ["status", "reset"])
def test_all_ranks_fail_when_one_cannot_write(s3, proxy, action, tmp_path):
    # no try of rank 1 to write its shard of version 1 succeeds
    path = r"version_1/shard-00001-of-00002\.[^.]*\.safetensors.*partNumber"
    proxy.inject(Fault(action, "PUT", path, count=-1))
    script = tmp_path / "save.py"
    script.write_text(SCRIPT)
    lines = run_script(script, f"{s3}/run", proxy)
    for line in (lines[0], lines[2]):
        assert "step 1 failed in" in line
        assert int(line.split(" failed in ")[1].split()[0]) < 20
    assert "rank 1" in lines[0].partition(":")[2].lower()
    assert "shard-00001-of-00002" in lines[0]
    assert "Gave up after" in lines[0]
    assert "Gave up after" in lines[2]
    assert lines[1] == "rank 0 step 2 saved"
    assert lines[3] == "rank 1 step 2 saved"
    run = limpet.Run(f"{s3}/run")
    assert [s.step for s in run.snapshots()] == [2]
    assert run.latest().verify().ok
    assert partial_keys(run.store) == []


def run_script(script, url, proxy):
    lines = run_torchrun(script, url, AWS_ENDPOINT_URL=proxy.endpoint)
    assert len(lines) == 4, lines
    return lines


LOAD = """
import sys, time
import torch, torch.distributed as dist, limpet
dist.init_process_group("gloo")
rank = dist.get_rank()
store = limpet.open_store(sys.argv[1], timeout=4)
state = {"same": torch.arange(8 << 20, dtype=torch.int32)}
for step in (1, 2):
    limpet.save(store.at(f"version_{step}"), state, step=step)
for step in (1, 2):
    live = {"same": torch.zeros(8 << 20, dtype=torch.int32)}
    began = time.monotonic()
    try:
        limpet.load(store.at(f"version_{step}"), into=live)
        print(f"rank {rank} step {step} loaded {torch.equal(live['same'], state['same'])}")
    except limpet.errors.LimpetError as e:
        took = time.monotonic() - began
        print(f"rank {rank} step {step} failed in {took:.0f} s: {e}".replace(chr(10), " "))
    dist.barrier()
dist.destroy_process_group()
"""


def test_faults_of_what_one_rank_reads_for_both(s3, proxy, tmp_path):
    """A flipped bit is read again. A stall fails both ranks, which name the rank and the file."""
    shard = r"shard-00001-of-00002\.[^.]*\.safetensors"
    flip = Fault("flip_reply", "GET", rf"version_1/{shard}", after=1 << 20)
    proxy.inject(flip, Fault("stall", "GET", rf"version_2/{shard}", count=-1))
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    lines = run_script(script, f"{s3}/run", proxy)
    assert flip.hits == 1
    assert lines[0] == "rank 0 step 1 loaded True"
    assert lines[2] == "rank 1 step 1 loaded True"
    read = [t for t in proxy.targets("GET") if "version_1/" in t and t.endswith(".safetensors")]
    assert len(read) == 8 + 1  # one rank reads each block, and the damaged one again
    for line in (lines[1], lines[3]):
        assert "step 2 failed in" in line
        assert int(line.split(" failed in ")[1].split()[0]) < 25
        assert "shard-00001-of-00002" in line
    assert "rank 1" in lines[1].lower()
