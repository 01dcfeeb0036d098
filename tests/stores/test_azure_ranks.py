"""Ranks train with ``az://`` on Azurite, and go on with another number of ranks."""

import limpet
from limpet.testing.contract import partial_keys
from tests.stores.torchrun import run_torchrun

SCRIPT = """
import sys
import torch, torch.distributed as dist, limpet
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(6 << 20, dtype=torch.int32).reshape(6, -1)
state = {
    "same": torch.zeros(3 << 20, dtype=torch.int32),
    "rows": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]),
    "progress": limpet.Progress(),
}
with limpet.Checkpointer(sys.argv[1], state, save=limpet.EverySteps(2)) as ckpt:
    ckpt.resume()
    began = ckpt.current_step
    assert int(state["same"][0]) == began
    assert torch.equal(state["rows"].full_tensor(), whole * began)
    for step in range(began + 1, began + 5):
        state["same"].fill_(step)
        with torch.no_grad():
            state["rows"].copy_(distribute_tensor(whole * step, mesh, [Shard(0)]))
        ckpt.step()
print(f"rank {rank} of {size} began at {began}")
dist.destroy_process_group()
"""


def train(folder, url, ranks):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return run_torchrun(script, url, ranks=ranks)


def test_a_training_goes_on_with_another_number_of_ranks(az, tmp_path):
    url = f"{az}/run"
    assert train(tmp_path, url, 2) == [f"rank {n} of 2 began at 0" for n in range(2)]
    assert train(tmp_path, url, 3) == [f"rank {n} of 3 began at 4" for n in range(3)]
    run = limpet.Run(url)
    assert [s.step for s in run.snapshots()][-1] == 8
    for snapshot in run.snapshots():
        assert snapshot.verify().ok
    assert partial_keys(run.store) == []
    loaded = limpet.load(f"{url}/version_8")
    assert int(loaded["same"][-1]) == 8
    assert loaded["rows"].shape == (6, 1 << 20)
    assert int(loaded["rows"][5, 7]) == 8 * (5 * (1 << 20) + 7)
