"""A training under DDP, in processes over gloo: first three ranks, then two, then one."""

import json
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import limpet
from limpet.tasks import Queue, TaskBatches
from tests.ranks.world import TIMEOUT, run_ranks

RECORDS, EPOCHS = 41, 2


def train_rank(size, steps, rank, port, folder):
    """Train for some steps, or until the end. DDP hangs if one rank has a batch more."""
    store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    dataset = TensorDataset(torch.arange(RECORDS))
    queue = Queue()
    batches = TaskBatches(queue.training, batch_size=6)
    loader = DataLoader(dataset, batch_sampler=batches)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer, "queue": queue}
    records: list[int] = []
    save = limpet.EverySteps(2) | limpet.AtEnd()
    with limpet.Checkpointer(str(folder / "run"), state, save=save) as ckpt:
        ckpt.resume()
        queue.add("training", RECORDS, task_size=7, epochs=EPOCHS, name="train")
        for made, (numbers,) in enumerate(loader, 1):
            model(numbers[:, None].float()).square().mean().backward()
            batches.consumed()
            optimizer.step()
            optimizer.zero_grad()
            records += numbers.tolist()
            ckpt.step()
            if made == steps:
                break
        found = {"records": records, "step": ckpt.current_step}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_ddp_with_other_numbers_of_ranks_trains_on_each_record_once_per_epoch(tmp_path):
    consumed: Counter[int] = Counter()
    for size, steps in ((3, 3), (2, 5), (1, 1000)):
        found = run_ranks(partial(train_rank, size, steps), tmp_path, (0,) * size)
        assert len({rank["step"] for rank in found}) == 1
        consumed.update(n for rank in found for n in rank["records"])
    assert found[0]["step"] == 2 * 7  # batches of 6, and a rest of 5, per epoch
    assert consumed == Counter(dict.fromkeys(range(RECORDS), EPOCHS))
