"""Statements of the README and the documents that no other test shows."""

import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import limpet
from limpet.errors import DigestMismatch, Unsupported
from limpet.storage.memory import MemoryStore
from tests.ranks.trainings import TrainingJob
from tests.unreliable_stores import HookedStore

ROOT = Path(__file__).parents[2]

ALL_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
WHOLE_BYTE_INTEGERS = {
    getattr(torch, f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)
}


def is_claimed(dtype):
    """Return True for the dtypes that the README names."""
    return (
        dtype.is_floating_point
        or dtype.is_complex
        or dtype == torch.bool
        or dtype in WHOLE_BYTE_INTEGERS
    )


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_is_saved_exactly_or_refused(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental or deprecated
        tensor = torch.empty(4, dtype=dtype)
    store = MemoryStore()
    if is_claimed(dtype):
        raw = torch.arange(tensor.nbytes, dtype=torch.uint8)
        tensor.untyped_storage().copy_(raw.untyped_storage())
        if dtype == torch.bool:
            tensor = torch.tensor([True, False, False, True])
        limpet.save(store, {"x": tensor})
        loaded = limpet.load(store)["x"]
        assert loaded.dtype == dtype
        assert bytes(loaded.untyped_storage()) == bytes(tensor.untyped_storage())
    else:
        with pytest.raises(Unsupported, match="cannot be saved faithfully"):
            limpet.save(store, {"x": tensor})
        assert list(store.list("")) == []


def training_thread_calls(store):
    """Return a list that receives the calls of the store from this thread."""
    calls: list[tuple[str, str]] = []
    thread = threading.current_thread()

    def record(method, key):
        if threading.current_thread() is thread:
            calls.append((method, key))

    store.before = record
    return calls


def test_a_step_that_does_not_save_does_not_access_the_store():
    """With policies of every kind, early stopping, and incremental versions."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "progress": limpet.Progress()}
    store = HookedStore(MemoryStore())
    with limpet.Checkpointer(
        store,
        state,
        save=limpet.EverySteps(500) | limpet.EverySeconds(600) | limpet.OnException(),
        keep=limpet.KeepLast(3) | limpet.KeepEvery(10_000) | limpet.KeepBest(2, "val_loss"),
        stop=limpet.StopWhen("val_loss", patience=3),
        incremental=True,
    ) as ckpt:
        ckpt.resume()
        ckpt.step({"val_loss": 1.0})
        calls = training_thread_calls(store)
        for step in range(2, 500):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            ckpt.step({"val_loss": 1.0 / step})
        assert calls == []
        ckpt.step({"val_loss": 0.0})
        assert ("stat", "version_500/manifest.json") in calls


def test_a_step_that_does_not_save_waits_for_no_other_rank():
    """A rank makes 100 steps while the others are stopped, and calls no store from its thread."""
    with TrainingJob(3, lockstep=False) as job:
        running = [threading.Event() for _ in range(3)]

        def work(trainer):
            rank = trainer.rank
            with trainer.make_checkpointer(save=limpet.EverySteps(1000)):
                trainer.train_steps(1)  # the first step checks the run, on all ranks
                if rank:
                    running[rank - 1].wait(30)  # rank 0 is far ahead, rank 1 waits for it
                calls = training_thread_calls(trainer.store)
                trainer.train_steps(101)
                assert calls == []
                running[rank].set()
            return trainer.ckpt.current_step

        assert job.run(work) == [101] * 3


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(100).numpy().tobytes()) + 200] ^= 1
    path.write_bytes(data)


def load_dcp(path):
    state = {"w": torch.zeros(5000)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore:.*single process")
def test_only_limpet_notices_a_flipped_bit(tmp_path):
    """The first row of the table in docs/comparison.md."""
    weights = {"w": torch.ones(5000)}
    torch.save(weights, tmp_path / "torch.pt")
    save_file(weights, tmp_path / "model.safetensors")
    dcp.save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    limpet.save(tmp_path / "snap", weights)
    for pattern in ("torch.pt", "model.safetensors", "dcp/*.distcp", "snap/*.safetensors"):
        (path,) = tmp_path.glob(pattern)
        flip_a_bit(path)

    for loaded in (
        torch.load(tmp_path / "torch.pt"),
        load_file(tmp_path / "model.safetensors"),
        load_dcp(tmp_path / "dcp"),
    ):
        assert int((loaded["w"] != 1).sum()) == 1
    with pytest.raises(DigestMismatch):
        limpet.load(tmp_path / "snap")
