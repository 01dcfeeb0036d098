"""Saves from a CUDA device, loads onto it, and loads into live state on it.

These tests are skipped on machines without a CUDA device.
"""

import numpy as np
import pytest
import torch

import limpet
from limpet import tables
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.types import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(10),
    ).cuda()
    model(torch.zeros(2, 3, 8, 8, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return {"model": model, "optimizer": optimizer, "rng": limpet.RNG()}


def train(state, steps):
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(16, 3, 8, 8, device="cuda")).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def deterministic():
    torch.backends.cudnn.deterministic = True


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}, {"amsgrad": True}])
def test_training_continues_exactly_after_a_load(options):
    state = make(**options)
    train(state, 3)
    store = MemoryStore()
    limpet.save(store, state)
    expected = train(state, 3)
    other = make(seed=1, **options)
    limpet.load(store, into=other)
    assert train(other, 3) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_tensors_are_loaded_to_the_requested_device(dtype):
    x = torch.randn(33, 65, device="cuda").to(dtype)
    store = MemoryStore()
    limpet.save(store, {"x": x, "y": x.t(), "scalar": x[0, 0]})
    for device in ("cpu", "cuda:0"):
        back = limpet.load(store, device=device)
        assert back["x"].device.type == device[:4].rstrip(":")
        assert torch.equal(back["x"].cpu().view(torch.uint8), x.cpu().view(torch.uint8))
        y = x.t().contiguous().cpu().view(torch.uint8)
        assert torch.equal(back["y"].cpu().contiguous().view(torch.uint8), y)


def test_live_tensors_with_any_strides_are_filled_in_place():
    values = {"plain": torch.randn(64, 48), "t": torch.randn(48, 64), "cl": torch.randn(2, 3, 9, 7)}
    store = MemoryStore()
    limpet.save(store, values)
    live = {
        "plain": torch.zeros(64, 48, device="cuda"),
        "t": torch.zeros(64, 48, device="cuda").t(),
        "cl": torch.zeros(2, 3, 9, 7, device="cuda").to(memory_format=torch.channels_last),
    }
    before = {k: v.data_ptr() for k, v in live.items()}
    limpet.load(store, into=live)
    for k, v in live.items():
        assert v.data_ptr() == before[k]
        assert torch.equal(v.cpu(), values[k])


def test_the_state_may_change_as_soon_as_an_asynchronous_save_returns(tmp_path):
    big = torch.randn(64 * MIB // 4, device="cuda")
    expected = big.cpu()
    pending = limpet.save_async(LocalStore(tmp_path), {"big": big})
    big.zero_()
    pending.wait()
    assert torch.equal(limpet.load(LocalStore(tmp_path))["big"], expected)


def test_the_cuda_random_number_sequence_continues_after_a_load():
    torch.zeros(1, device="cuda")  # a generator that is not used yet is not saved
    torch.cuda.manual_seed(3)
    store = MemoryStore()
    limpet.save(store, {"rng": limpet.RNG()})
    expected = torch.randn(5, device="cuda").tolist()
    torch.randn(7, device="cuda")
    limpet.load(store, into={"rng": limpet.RNG()})
    assert torch.randn(5, device="cuda").tolist() == expected


def test_a_slice_of_a_leaf_is_read_and_a_load_can_cast():
    x = torch.arange(1000.0, device="cuda").view(50, 20)
    store = MemoryStore()
    limpet.save(store, {"x": x, "a": np.arange(3)})
    assert torch.equal(limpet.open(store)["x"][10:20, 3:5], x[10:20, 3:5].cpu())
    live = {"x": torch.zeros(50, 20, dtype=torch.float16, device="cuda")}
    limpet.load(store, into=live, keys="x", cast=True)
    assert torch.equal(live["x"], x.half())


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_of_tables_are_used_on_the_device_of_the_ids(padding):
    found = []
    for device in ("cpu", "cuda"):
        servers = tables.Servers([tables.Table("words", 4, optimizer=tables.SGD(0.5))])
        module = tables.EmbeddingBag(servers, "words", mode="sum", padding_idx=padding)
        ids = torch.tensor([[1, 3], [2, 1]], device=device)
        bags = module(ids)
        assert bags.device.type == device
        bags.sum().backward()
        servers.step()
        servers.fill("words", ids[1, :1], torch.ones(1, 4, device=device))
        found.append([bags.cpu(), servers.lookup("words", ids.flatten())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
