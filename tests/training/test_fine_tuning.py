"""Fine-tuning as users do it: an empty run starts from a version of a model that has changed."""

import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import DTypeMismatch, PlanError, ShapeMismatch
from limpet.training.checkpointer import Checkpointer


def training(classes, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes)).to(dtype)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    schedule = optim.lr_scheduler.StepLR(optimizer, 2)
    progress = limpet.Progress()
    return {"optimizer": optimizer, "model": model, "schedule": schedule, "progress": progress}


def train(state, ckpt, steps):
    dtype = state["model"][0].weight.dtype
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(2, 4, dtype=dtype)).square().mean().backward()
        state["optimizer"].step()
        state["schedule"].step()
        ckpt.step()


@pytest.fixture
def pretrained(tmp_path):
    state = training(1000)
    with Checkpointer(tmp_path / "pretrained", state) as ckpt:
        train(state, ckpt, 3)
    return f"{tmp_path}/pretrained@latest", state


def test_a_resized_head_starts_anew_and_its_run_restarts_strictly(pretrained, tmp_path):
    (start, old), run = pretrained, tmp_path / "tuned"
    for attempt in range(3):
        state = training(10)
        with Checkpointer(run, state, save=limpet.EverySteps(1)) as ckpt:
            ckpt.resume(start=start, mismatched="keep")
            head, body = state["model"][2].weight, state["model"][0].weight
            if attempt == 0:
                assert ckpt.start_report is not None
                kept = [k for k in ckpt.start_report.kept if k.startswith("model")]
                assert kept == ["model/2.weight", "model/2.bias"]
                assert torch.equal(body, old["model"][0].weight)
                assert head not in state["optimizer"].state
            else:
                assert ckpt.start_report is None
            assert ckpt.current_step == 3 + attempt
            train(state, ckpt, 1)
            slots = state["optimizer"].state
            assert (slots[head]["step"], slots[body]["step"]) == (attempt + 1, attempt + 4)
            ckpt.save() if attempt == 2 else ckpt.wait()
    # leniency is for the start only: another head does not fit the run's own versions
    with Checkpointer(run, training(7)) as ckpt, pytest.raises(ShapeMismatch):
        ckpt.resume(start=start, mismatched="keep")


def test_steps_begin_at_0_if_only_the_weights_are_taken(pretrained, tmp_path):
    state = training(10)
    with Checkpointer(tmp_path / "weights", state) as ckpt:
        ckpt.resume(start=pretrained[0], keys="model", mismatched="keep")
        assert ckpt.current_step == 0
        assert not state["optimizer"].state
        train(state, ckpt, 1)


def test_a_start_with_cast_is_complete(pretrained, tmp_path):
    """Only dtypes change, so steps continue also without a Progress in the state."""
    start, old = pretrained
    with (
        Checkpointer(tmp_path / "refused", training(1000, torch.bfloat16)) as ckpt,
        pytest.raises(DTypeMismatch, match=r"mismatched=\"cast\""),
    ):
        ckpt.resume(start=start)
    state = training(1000, torch.bfloat16)
    with Checkpointer(tmp_path / "cast", state) as ckpt:
        ckpt.resume(start=start, mismatched="cast")
        assert ckpt.start_report is not None
        assert ckpt.start_report.is_complete
        assert ckpt.start_report.cast["model/0.weight"] == "float32 to bfloat16"
        assert torch.equal(state["model"][0].weight, old["model"][0].weight.bfloat16())
        slots = state["optimizer"].state[state["model"][0].weight]
        assert (slots["exp_avg"].dtype, slots["step"].dtype) == (torch.bfloat16, torch.float32)
        train(state, ckpt, 1)
        assert ckpt.current_step == 4
    own = {"t": torch.ones(2)}
    with Checkpointer(tmp_path / "old", own) as ckpt:
        ckpt.step()
        ckpt.save()
    own = {"t": torch.ones(2).double()}
    with Checkpointer(tmp_path / "new", own) as ckpt:
        ckpt.resume(start=f"{tmp_path}/old@1", mismatched="cast")
        assert ckpt.current_step == 1


@pytest.mark.slow
def test_lora_of_peft_starts_from_the_plain_model(pretrained, tmp_path):
    peft = pytest.importorskip("peft")
    start, old = pretrained
    config = peft.LoraConfig(target_modules=["0"], r=2)
    model = peft.get_peft_model(training(10)["model"], config)
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    names = {"0": "base_model.model.0.base_layer", "2": "base_model.model.2"}
    with Checkpointer(tmp_path / "lora", {"model": model}) as ckpt:
        ckpt.resume(
            start=start, keys="model", missing="keep", mismatched="keep",
            rename={f"model/{old}": f"model/{new}" for old, new in names.items()},
        )  # fmt: skip
        assert ckpt.start_report is not None
        kept = ckpt.start_report.kept
        assert len(kept) == 4
        for key in kept:
            name = key.removeprefix("model/")
            assert "lora" in name or name.startswith("base_model.model.2")
            assert torch.equal(model.state_dict()[name], initial[name])
    assert torch.equal(model.base_model.model[0].base_layer.weight, old["model"][0].weight)


class Wrap(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


def resume_renamed(run, state, rename):
    """Return the report of a new run that starts from the newest version of ``run``, as the error
    of a resume in ``run`` advises."""
    advice = rf'resume\(start="{run}@latest"\), with options as needed: rename=\{{OLD: NEW\}}'
    with Checkpointer(run, state) as ckpt, pytest.raises(PlanError, match=advice):
        ckpt.resume()
    with Checkpointer(f"{run}-next", state) as ckpt:
        ckpt.resume(start=f"{run}@latest", rename=rename)
        return ckpt.start_report


def test_a_model_that_was_wrapped_continues_with_renames(tmp_path):
    def make(is_wrapped):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        schedule = optim.lr_scheduler.StepLR(optimizer, 2)
        state = {"optimizer": optimizer, "schedule": schedule, "progress": limpet.Progress()}
        return state | {"model": Wrap(model) if is_wrapped else model}

    old = make(is_wrapped=False)
    with Checkpointer(tmp_path / "own", old) as ckpt:
        train(old, ckpt, 3)
    state = make(is_wrapped=True)
    names = {"model/0": "model/net.0", "model/1": "model/net.1"}
    assert resume_renamed(tmp_path / "own", state, names).is_complete
    weight = state["model"].net[0].weight
    assert torch.equal(weight, old["model"][0].weight)
    assert state["optimizer"].state[weight]["step"] == 3
    assert state["progress"].step == 3
    # the run itself continues with the inner model
    state = make(is_wrapped=True)
    state["model"] = state["model"].net
    with Checkpointer(tmp_path / "own", state) as ckpt:
        assert ckpt.resume() is not None
