"""Exports from which PyTorch, Accelerate, Transformers, and Lightning continue a training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import AlreadyExists, LimpetError, Unsupported
from tests.cli.invoke import run_cli
from tests.interop.test_load_foreign import make, snapshot_of, train
from tests.interop.test_load_libraries import (
    DATA,
    _StopAfter,
    make_module,
    make_net,
    make_state,
    make_trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def save_trained(tmp_path, steps=2, **more):
    """Save a state after some steps. Return the live state."""
    state = make(seed=0)
    train(state, steps)
    limpet.save(tmp_path / "run" / f"version_{steps}", state | more, step=steps)
    return state


# -- torch ---------------------------------------------------------------------------------------


def test_pytorch_continues(tmp_path):
    original = save_trained(tmp_path)
    limpet.export(tmp_path / "run" / "version_2", tmp_path / "x.pt", to="torch")
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    expected = original["optimizer"].state_dict()
    assert content["optimizer"]["param_groups"] == expected["param_groups"]
    assert content["optimizer"]["state"].keys() == expected["state"].keys()
    restored = make(seed=1)
    for name, value in restored.items():
        value.load_state_dict(content[name])
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)


def test_one_optimizer_is_the_root(tmp_path):
    original = save_trained(tmp_path)
    url = tmp_path / "run" / "version_2"
    limpet.export(url, tmp_path / "o.pt", to="torch", root="optimizer")
    restored = make(seed=0)
    restored["optimizer"].load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    states = (s["optimizer"].state_dict()["param_groups"] for s in (restored, original))
    assert next(states) == next(states)


def test_a_new_optimizer_and_tied_weights(tmp_path):
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    limpet.save(tmp_path / "v", {"nested": {"o": optimizer}, "model": net})
    limpet.export(tmp_path / "v", tmp_path / "o.pt", to="torch")
    content = torch.load(tmp_path / "o.pt", weights_only=True)
    assert content["nested"]["o"] == optimizer.state_dict()


def test_state_of_an_unknown_parameter_is_refused(tmp_path):
    forged = {"state": {"a": {"m": 1}, "b": {}}, "groups": [{"lr": 1, "params": ["a"]}]}
    limpet.save(tmp_path / "v", {"o": forged})
    with pytest.raises(Unsupported, match="state of b, which is not in one group of o"):
        limpet.export(tmp_path / "v", tmp_path / "o.pt", to="torch")
    assert not (tmp_path / "o.pt").exists()
    double = {"state": {"a": {}}, "groups": [{"params": ["a"]}, {"params": ["a"]}]}
    limpet.save(tmp_path / "w", {"o": double})
    with pytest.raises(Unsupported, match="not in one group"):
        limpet.export(tmp_path / "w", tmp_path / "o.pt", to="torch")


def test_an_exported_file_is_imported_again(tmp_path):
    original = save_trained(tmp_path)
    limpet.export(tmp_path / "run" / "version_2", tmp_path / "x.pt", to="torch")
    restored = make(seed=1)
    limpet.load(tmp_path / "x.pt", into=restored)
    assert train(restored) == train(original)


# -- Accelerate, Transformers, Lightning ---------------------------------------------------------


def save_library_state(tmp_path, state, steps=3, **more):
    """Save a state after some steps, with a ``Progress``. Return the URL of the version."""
    train(state, steps)
    progress = limpet.Progress()
    progress.step, progress.epoch = steps, 0
    saved = {**state, "progress": progress, "rng": limpet.RNG(), **more}
    limpet.save(tmp_path / "run" / f"version_{steps}", saved, step=steps)
    return f"{tmp_path}/run@{steps}"


def assert_verified(folder):
    """`limpet verify` knows every file of an export, and finds a flipped bit."""
    result = run_cli("verify", folder)
    assert result.code == 0, result.err
    target = folder if folder.is_file() else next(folder.glob("optimizer.*"))
    raw = bytearray(target.read_bytes())
    raw[len(raw) // 2] ^= 1
    target.write_bytes(raw)
    assert run_cli("verify", folder).code == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_accelerate_resumes(tmp_path, is_tied):
    accelerate = pytest.importorskip("accelerate")
    original = make(seed=0) if is_tied else make_state(make_net(0))
    url = save_library_state(tmp_path, original)
    with pytest.warns(UserWarning, match="Not in the checkpoint for accelerate: progress, rng"):
        limpet.export(url, tmp_path / "c", to="accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    restored = make(seed=1) if is_tied else make_state(make_net(1))
    accelerator.prepare(*restored.values())
    accelerator.load_state(tmp_path / "c")
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)
    again = make(seed=2) if is_tied else make_state(make_net(2))
    limpet.load(tmp_path / "c", into=again)  # and back
    assert train(again, 2) == snapshot_of(original)
    assert_verified(tmp_path / "c")


@pytest.mark.slow
def test_transformers_resumes_and_ends_with_the_same_weights(tmp_path):
    whole = make_trainer(tmp_path / "whole", 0)
    whole.train()
    half = make_trainer(tmp_path / "half", 0, save_steps=100)
    half.add_callback(_StopAfter(2))
    half.train()
    state = {
        "model": half.model,
        "optimizer": half.optimizer.optimizer,
        "scheduler": half.lr_scheduler,
    }
    limpet.save(tmp_path / "run" / "version_2", state, step=2)
    url = f"{tmp_path}/run@2"
    limpet.export(url, tmp_path / "checkpoint-2", to="transformers")
    text = tmp_path / "checkpoint-2" / "trainer_state.json"
    text.write_text(text.read_text().replace('"logging_steps": 500', '"logging_steps": 1'))
    resumed = make_trainer(tmp_path / "resumed", 1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert [row["loss"] for row in resumed.state.log_history if "loss" in row] == losses[2:]
    limpet.export(url, tmp_path / "verified", to="transformers", max_shard_size=200)
    assert (tmp_path / "verified" / "model.safetensors.index.json").exists()
    assert_verified(tmp_path / "verified")


@pytest.mark.slow
def test_lightning_resumes(tmp_path):
    lightning = pytest.importorskip("lightning")
    module = make_module(make_net(0))
    [optimizer], [schedule] = module.configure_optimizers()
    state = {"model": module, "optimizer": optimizer, "scheduler": schedule["scheduler"]}
    url = save_library_state(tmp_path, state)
    limpet.export(url, tmp_path / "last.ckpt", to="lightning")
    assert_same_training(lightning, tmp_path / "last.ckpt", state)
    assert_verified(tmp_path / "last.ckpt")


def assert_same_training(lightning, path, state):
    """Lightning continues from a file for two steps, as the live state does."""
    resumed = make_module(make_net(1))
    trainer = lightning.Trainer(
        max_steps=5, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    # one batch is all data, as in ``train``
    trainer.fit(resumed, torch.utils.data.DataLoader(DATA, 16), ckpt_path=str(path))
    assert trainer.global_step == 5
    [optimizer] = trainer.optimizers
    train(state, 2)
    assert snapshot_of({"model": resumed, "optimizer": optimizer}) == snapshot_of(state)


def test_what_a_library_needs_is_checked(tmp_path):
    state = make_state(make_net(0))
    train(state)
    limpet.save(tmp_path / "a", {k: state[k] for k in ("model", "optimizer")}, step=1)
    with pytest.raises(Unsupported, match="it needs of a scheduler"):
        limpet.export(tmp_path / "a", tmp_path / "x", to="transformers")
    limpet.save(tmp_path / "b", {"model": state["model"]}, step=1)
    for kind in ("accelerate", "lightning", "transformers"):
        with pytest.raises(Unsupported, match="it needs of an optimizer"):
            limpet.export(tmp_path / "b", tmp_path / "x", to=kind)
        with pytest.raises(LimpetError, match="contains the whole model"):
            limpet.export(tmp_path / "b", tmp_path / "x", to=kind, keys="model")
    assert not (tmp_path / "x").exists()


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    state = make_state(make_net(0))
    other = make_net(1)
    both = torch.optim.SGD([*state["model"].parameters(), *other.parameters()])
    limpet.save(tmp_path / "v", {**state, "other": other, "both": both}, step=1)
    with pytest.raises(Unsupported, match=r"both in .* trains parameters outside of model"):
        limpet.export(tmp_path / "v", tmp_path / "x", to="accelerate")
    limpet.save(tmp_path / "w", {**state, "other": other}, step=1)
    with pytest.warns(UserWarning, match="for accelerate: other"):
        limpet.export(tmp_path / "w", tmp_path / "x", to="accelerate")


@pytest.mark.slow
def test_accelerate_resumes_two_optimizers_and_a_scaler(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def make_two(seed):
        net = make_net(seed)
        first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam(net[3].parameters(), lr=0.01)
        return {"model": net, "first": first, "second": second}

    def step(state):
        for _ in range(2):
            (state["model"](DATA.tensors[0]) - DATA.tensors[1]).square().mean().backward()
            for name in ("first", "second"):
                state[name].step()
                state[name].zero_grad()
        return [p.tolist() for p in state["model"].parameters()]

    original = make_two(0)
    step(original)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    limpet.save(tmp_path / "v", original | {"scaler": scaler}, step=2)
    limpet.export(tmp_path / "v", tmp_path / "c", to="accelerate")
    assert (tmp_path / "c" / "optimizer_1.bin").exists()
    assert torch.load(tmp_path / "c" / "scaler.pt", weights_only=True)["scale"] == 512.0
    restored = make_two(1)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*restored.values())
    accelerator.load_state(tmp_path / "c")
    assert step(restored) == step(original)


@pytest.mark.parametrize(
    "kind", ["StepLR", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"]
)
def test_each_kind_of_scheduler_is_exported_and_imported(tmp_path, kind):
    def make_with(kind):
        schedulers, state = torch.optim.lr_scheduler, make(seed=0)
        optimizer, inner = state["optimizer"], state["scheduler"]
        if kind == "ReduceLROnPlateau":
            return state | {"scheduler": schedulers.ReduceLROnPlateau(optimizer)}
        if kind == "SequentialLR":
            second = schedulers.ConstantLR(optimizer)
            return state | {"scheduler": schedulers.SequentialLR(optimizer, [inner, second], [2])}
        if kind == "ChainedScheduler":
            return state | {"scheduler": schedulers.ChainedScheduler([inner])}
        return state

    state = make_with(kind)
    for _ in range(3):
        state["optimizer"].step()
        state["scheduler"].step(*([1.0] if kind == "ReduceLROnPlateau" else []))
    limpet.save(tmp_path / "v", state, step=3)
    limpet.export(tmp_path / "v", tmp_path / "c", to="accelerate")
    saved = torch.load(tmp_path / "c" / "scheduler.bin", weights_only=True)
    assert saved == state["scheduler"].state_dict()
    # under a name that the live state does not have, only the fields say what it is
    torch.save({"model": state["model"].state_dict(), "lr": saved}, tmp_path / "other.pt")
    restored = {k: v for k, v in make_with(kind).items() if k != "optimizer"}
    limpet.load(tmp_path / "other.pt", into=restored)
    assert restored["scheduler"].state_dict() == saved


def test_a_failed_export_leaves_nothing(tmp_path):
    state = make_state(make_net(0))
    url = save_library_state(tmp_path, state)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "scheduler.bin").write_text("mine")
    with pytest.raises(AlreadyExists, match=r"scheduler\.bin"):
        limpet.export(url, tmp_path / "x", to="accelerate")
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["scheduler.bin"]


def test_the_command_lists_what_is_left_out(tmp_path):
    url = save_library_state(tmp_path, make_state(make_net(0)))
    result = run_cli("export", url, "--to", "accelerate", tmp_path / "x")
    assert result.code == 0, result.err
    assert "Not in the checkpoint for accelerate: progress, rng" in result.err
    names = {p.name for p in (tmp_path / "x").iterdir()}
    assert names == {
        "model.safetensors",
        "optimizer.bin",
        "scheduler.bin",
        "checkpoint.limpet.json",
    }


def test_the_epoch_of_a_progress_is_that_of_lightning(tmp_path):
    pytest.importorskip("lightning")
    state, progress = make_state(make_net(0)), limpet.Progress()
    progress.step, progress.epoch = 20, 3  # its state then says where the epoch began
    limpet.save(tmp_path / "run" / "version_20", {**state, "progress": progress}, step=20)
    with pytest.warns(UserWarning, match="Not in the checkpoint"):
        limpet.export(tmp_path / "run" / "version_20", tmp_path / "c.ckpt", to="lightning")
    assert torch.load(tmp_path / "c.ckpt", weights_only=True)["epoch"] == 3
