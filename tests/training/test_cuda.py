"""Trainings on a CUDA device: every optimizer, mixed precision, deferred staging, and all tiers.

These tests are skipped on machines without a CUDA device.
"""

import copy
import gc
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

import limpet
from limpet.buffers import BufferPool, page_lock
from limpet.storage.memory import MemoryStore
from limpet.types import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"capturable": True}, "Adamax": {},
    "AdamW": {"fused": True}, "ASGD": {}, "LBFGS": {"max_iter": 3}, "NAdam": {}, "RAdam": {},
    "RMSprop": {"momentum": 0.9}, "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


class Transformer(torch.nn.Module):
    """Embeddings, attention, dropout, layer and batch norm, convolution, and a tied output."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(97, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.conv = torch.nn.Conv1d(32, 32, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(32)
        self.out = torch.nn.Linear(32, 97, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.block(self.embed(ids)).transpose(1, 2)
        return self.out(self.norm(self.conv(hidden)).transpose(1, 2))


def build(seed, name="AdamW", options=None):
    torch.manual_seed(seed)
    model = Transformer().cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **(options or {}))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
        "scaler": torch.amp.GradScaler("cuda", init_scale=256.0),
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
    }


def train_step(state, *, half=False):
    model, optimizer, scaler = state["model"], state["optimizer"], state["scaler"]
    ids = torch.randint(97, (4, 16), device="cuda")

    def loss():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=half):
            value = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        (scaler.scale(value) if half else value).backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        value = optimizer.step(loss)
    else:
        value = loss()
        if half:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    state["scheduler"].step()
    return value.item()


@pytest.fixture(autouse=True)
def deterministic():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_losses_after_a_load_equal_those_of_an_undisturbed_training(name):
    state = build(0, name, OPTIMIZERS[name])
    for _ in range(3):
        train_step(state)
    store = MemoryStore()
    limpet.save(store, state)
    expected = [train_step(state) for _ in range(4)]
    other = build(1, name, OPTIMIZERS[name])
    limpet.load(store, into=other)
    assert [train_step(other) for _ in range(4)] == expected


@pytest.mark.parametrize("to", ["compiled", "cpu and back"])
def test_a_training_in_mixed_precision_continues_exactly(to):
    state = build(0)
    for _ in range(3):
        train_step(state, half=True)
    store = MemoryStore()
    limpet.save(store, state)
    expected = [train_step(state, half=True) for _ in range(4)]
    other = build(1)
    if to == "compiled":  # only wrapped: the names of the parameters gain a prefix
        other["model"] = torch.compile(other["model"], backend="eager")
    else:
        loaded = limpet.load(store, device="cpu")
        assert loaded["model"]["embed.weight"].device.type == "cpu"
        assert loaded["scaler"]["scale"] == state["scaler"].state_dict()["scale"]
    limpet.load(store, into=other)
    assert [train_step(other, half=True) for _ in range(4)] == expected


def snapshot_of(state):
    slots = {
        f"{i}/{name}": value
        for i, group in state["optimizer"].state_dict()["state"].items()
        for name, value in group.items()
    }
    tensors = {**state["model"].state_dict(), **slots}
    return {k: v.detach().cpu().clone() for k, v in tensors.items()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("save_every", [1, 3])
def test_each_version_has_the_state_of_its_step(tmp_path, overlap, save_every):
    state, expected = build(0), {}
    # large enough that copies are still in progress when step() returns
    state["model"].register_parameter("big", torch.nn.Parameter(torch.zeros(48 * MIB // 4)))
    state["model"].cuda()
    state["optimizer"].add_param_group({"params": [state["model"].big], "lr": 0.5})
    with limpet.Checkpointer(
        str(tmp_path), state, save=limpet.EverySteps(save_every), overlap=overlap
    ) as ckpt:
        for step in range(1, 10):
            state["model"].big.grad = torch.full_like(state["model"].big, float(step))
            train_step(state)
            state["model"].big.grad = None
            if step % save_every == 0:
                expected[step] = snapshot_of(state)
            ckpt.step()
            with torch.no_grad():  # what an unsynchronized copy would see
                torch.randn(1 << 20, device="cuda").sum()
    for step, tensors in expected.items():
        other = build(1)
        other["model"].register_parameter("big", torch.nn.Parameter(torch.zeros(48 * MIB // 4)))
        other["model"].cuda()
        other["optimizer"].add_param_group({"params": [other["model"].big]})
        limpet.load(tmp_path / f"version_{step}", into=other)
        found = snapshot_of(other)
        assert found.keys() == tensors.keys()
        different = [k for k, v in tensors.items() if not torch.equal(v, found[k])]
        assert not different, (step, different)


def test_a_copy_waits_for_the_work_that_its_stream_still_has_to_do(tmp_path):
    weights = torch.zeros(4 * MIB, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for value in range(1, 4):
            torch.cuda._sleep(200_000_000)  # 0.1 s or so: the save comes before the write
            weights.fill_(value)
            limpet.save(tmp_path / str(value), {"weights": weights})
    for value in range(1, 4):
        assert limpet.load(tmp_path / str(value))["weights"].eq(value).all()


def test_buffers_are_page_locked_for_their_lifetime():
    pool = BufferPool(64 * MIB, 16 * MIB, page_lock)
    buffers = [pool.acquire() for _ in range(2)]
    for buffer in buffers:
        memory = torch.frombuffer(buffer.view, dtype=torch.uint8)
        assert memory.is_pinned()
        memory.copy_(torch.full((16 * MIB,), 7, dtype=torch.uint8, device="cuda"))
        assert memory.eq(7).all()
        del memory
        pool.release(buffer)
    del buffer, buffers
    pool.close()
    gc.collect()
    again = BufferPool(64 * MIB, 16 * MIB, page_lock)  # the driver refuses memory locked twice
    assert torch.frombuffer(again.acquire().view, dtype=torch.uint8).is_pinned()


def test_a_training_resumes_from_memory(tmp_path, memory):
    def start(state):
        tier = limpet.MemoryTier(every=limpet.EverySteps(2), copies=1, path=memory)
        return limpet.Checkpointer(str(tmp_path), state, save=limpet.EverySteps(100), tiers=[tier])

    state = build(0)
    with pytest.raises(RuntimeError, match="killed"), start(state) as ckpt:
        ckpt.resume()
        for step in range(1, 6):
            train_step(state)
            ckpt.step()
            if step == 4:
                expected = copy.deepcopy(snapshot_of(state))
        raise RuntimeError("killed")
    other = build(1)
    with start(other) as ckpt:
        snapshot = ckpt.resume()
        assert snapshot is not None
        assert snapshot.step == 4
        found = snapshot_of(other)
    assert all(torch.equal(v, found[k]) for k, v in expected.items())


def test_a_notice_saves_the_state_of_the_device(tmp_path):
    state = build(0)
    with (
        pytest.raises(SystemExit) as ended,
        limpet.Checkpointer(str(tmp_path), state, save=limpet.EverySteps(1000)) as ckpt,
    ):
        for step in range(1, 100):
            train_step(state)
            ckpt.step()
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 75
    newest = limpet.Run(str(tmp_path)).latest()
    assert newest is not None
    other = build(1)
    limpet.load(newest.url, into=other)
    found = snapshot_of(other)
    assert all(torch.equal(v, found[k]) for k, v in snapshot_of(state).items())


def test_a_cuda_graph_replays_with_the_loaded_state():
    state = {"weights": torch.zeros(1 << 16, device="cuda"), "note": "x"}
    graph, result = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
    with torch.cuda.graph(graph):
        torch.sum(state["weights"], dim=0, out=result)
    store = MemoryStore()
    state["weights"].fill_(1.0)
    limpet.save(store, state)
    state["weights"].fill_(5.0)
    limpet.load(store, into=state)  # in place: the graph has the addresses
    graph.replay()
    assert result.item() == 1 << 16


SHARDED = """
import sys, torch, limpet
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "rng": limpet.RNG()}

def train(state, ckpt, steps):
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(8, 64, device="cuda")).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
        if ckpt is not None:
            ckpt.step()
    return losses

dist.init_process_group("cuda:nccl,cpu:gloo")
mesh = init_device_mesh("cuda", (1,))
state = build(0)
with limpet.Checkpointer(sys.argv[1], state, save=limpet.EverySteps(3)) as ckpt:
    ckpt.resume()
    train(state, ckpt, 3)
    ckpt.wait()
expected = train(state, None, 3)
other = build(1)
with limpet.Checkpointer(sys.argv[1], other, save=limpet.EverySteps(100)) as ckpt:
    assert ckpt.resume().step == 3
    assert train(other, ckpt, 3) == expected
dist.destroy_process_group()
"""


def test_a_model_that_fsdp_shards_under_nccl_continues_exactly(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
