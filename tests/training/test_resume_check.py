"""What a resume reports: what has changed, and on request whether the live state is equal."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import limpet
from limpet.loading.snapshot import reader_of
from limpet.training import checkpointer, resume_check

Event = tuple[str, dict[str, Any]]


def make_state(**more):
    model = nn.Sequential(nn.Linear(8, 300), nn.Dropout(0.1), nn.Linear(300, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
        "array": np.arange(5),
        "note": "x",
        "nothing": float("nan"),
        **more,
    }


def resume(folder, state, **options):
    """Resume, and return the events about the comparison."""
    found: list[Event] = []

    def sink(name, fields):
        if name.startswith("resume_"):
            found.append((name, fields))

    with limpet.attach(sink):
        ckpt = limpet.Checkpointer(folder, state, preemption=None)
        ckpt.resume(**{"check": True, **options})
        ckpt.close()
    return found


def save_run(folder, state, steps=2, **options):
    save = limpet.EverySteps(1)
    with limpet.Checkpointer(folder, state, save=save, preemption=None, **options) as ckpt:
        ckpt.resume()
        for _ in zip(range(steps), state.get("loader", range(steps)), strict=False):
            ckpt.step()


@pytest.mark.parametrize("incremental", [False, True])
def test_an_exact_resume_is_reported_with_the_bytes_of_all_leaves(incremental, tmp_path):
    save_run(tmp_path, make_state(), incremental=incremental)
    ((name, fields),) = resume(tmp_path, make_state())
    assert (name, fields["run"]) == ("resume_checked", limpet.Run(tmp_path).url)
    snapshot = limpet.Run(tmp_path).latest()
    assert snapshot is not None
    nbytes = sum(
        np.prod(shape) * np.dtype(dtype).itemsize
        for dtype, shape in reader_of(snapshot).leaves.values()
    )
    assert fields["bytes"] == nbytes > 10_000


def test_the_state_is_not_compared_by_default(tmp_path):
    save_run(tmp_path, make_state(object=Forgetful("tensor")))
    assert resume(tmp_path, make_state(object=Forgetful("tensor")), check=False) == []


@pytest.mark.parametrize("budget", [16, 96, 1 << 20])
def test_tensors_are_compared_in_parts(budget, tmp_path, monkeypatch):
    """Also of a version that refers to another one, and of tensors that are not contiguous."""
    monkeypatch.setattr(resume_check, "_BATCH", budget)

    def make():
        weights = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
        numbers = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
        return {"w": weights.T, "n": numbers[:, ::2], "c": torch.ones(3, dtype=torch.complex64)}

    save_run(tmp_path, make(), incremental=True)
    ((name, fields),) = resume(tmp_path, make())
    assert (name, fields["bytes"]) == ("resume_checked", 240 + 32 + 24)
    check = checkpointer.check_whole_state

    def change(run, snapshot, state, group, *rest):
        state["n"][1, 1, 3] = state["w"][5, 4] = 77
        check(run, snapshot, state, group, *rest)

    monkeypatch.setattr(checkpointer, "check_whole_state", change)
    ((name, fields),) = resume(tmp_path, make())
    assert (name, fields["differing"]) == ("resume_differs", ["n", "w"])


class Forgetful:
    """An object that does not restore what it saved, in one of several ways."""

    def __init__(self, how):
        self.how, self.loads = how, 0

    def state_dict(self):
        value = torch.full((3,), float(self.loads if self.how == "tensor" else 0))
        return {"value": value, "count": self.loads if self.how == "number" else 0}

    def load_state_dict(self, state):
        self.loads += 1


@pytest.mark.parametrize(
    ("how", "key"), [("tensor", "object/value"), ("number", "object/count"), ("", "")]
)
def test_an_object_that_does_not_restore_itself_is_named(how, key, tmp_path):
    save_run(tmp_path, make_state(object=Forgetful(how)))
    ((name, fields),) = resume(tmp_path, make_state(object=Forgetful(how)))
    assert fields.get("differing", []) == [key] * bool(key)
    assert name == ("resume_differs" if key else "resume_checked")


class Changed:
    """An object whose ``state_dict()`` is another one after a load."""

    def __init__(self, after):
        self.current: Any = {"value": torch.ones(3), "flag": True, "zero": 0.0}
        self.after = after

    def state_dict(self):
        if isinstance(self.current, Exception):
            raise self.current
        return dict(self.current)

    def load_state_dict(self, state):
        self.current = self.after if isinstance(self.after, Exception) else state | self.after
        if self.after == {}:
            self.current = {}


def test_an_object_that_loses_values_in_a_load_is_named(tmp_path):
    save_run(tmp_path, make_state(object=Changed({})))
    ((name, fields),) = resume(tmp_path, make_state(object=Changed({})))
    assert name == "resume_differs"
    assert fields["differing"] == ["object/flag", "object/value", "object/zero"]


def test_a_value_of_another_type_differs(tmp_path):
    save_run(tmp_path, make_state(object=Changed({"flag": 1, "zero": -0.0})))
    ((name, fields),) = resume(tmp_path, make_state(object=Changed({"flag": 1, "zero": -0.0})))
    assert name == "resume_differs"
    assert fields["differing"] == ["object/flag", "object/zero"]


@pytest.mark.parametrize("after", [RuntimeError("boom"), {"new": object()}], ids=["raises", "new"])
def test_a_state_that_cannot_be_compared_is_reported_and_ends_no_resume(after, tmp_path):
    save_run(tmp_path, make_state(object=Changed(after)))
    state = make_state(object=Changed(after))
    ((name, fields),) = resume(tmp_path, state)
    assert name == "resume_differs"
    (problem,) = fields["differing"]
    assert problem.startswith("the state of rank 0, which cannot be compared: ")
    assert state["progress"].step == 2


def test_each_part_of_a_state_is_compared(tmp_path, monkeypatch):
    """Change one live object after the load; it alone must be named."""
    save_run(tmp_path, make_state())
    check = checkpointer.check_whole_state

    def change_model(state):
        with torch.no_grad():
            state["model"][2].weight[3, 299] += 1

    def change_slot(state):
        state["optimizer"].state[state["model"][0].bias]["exp_avg"][7] = 9

    changes: dict[str, Any] = {
        "model/2.weight": change_model,
        "optimizer/state/model.0.bias/exp_avg": change_slot,
        "rng/0/torch": lambda state: torch.rand(1),
        "scaler/scale": lambda state: setattr(state["scaler"], "_init_scale", 3.0),
        "progress/epoch": lambda state: state["progress"].load_state_dict(
            {**state["progress"].state_dict(), "epoch": 5}
        ),
        "array": lambda state: state["array"].__setitem__(0, 7),
        "note": lambda state: state.__setitem__("note", "y"),
    }
    for key, change in changes.items():

        def changed_check(run, snapshot, state, group, *rest, change=change):
            change(state)
            check(run, snapshot, state, group, *rest)

        monkeypatch.setattr(checkpointer, "check_whole_state", changed_check)
        ((name, fields),) = resume(tmp_path, make_state())
        assert name == "resume_differs"
        assert any(k == key or k.startswith(f"{key}/") for k in fields["differing"]), fields
        assert len(fields["differing"]) == 1, fields["differing"]


def test_a_start_is_compared_if_it_is_complete(tmp_path):
    save_run(tmp_path / "a", make_state())
    start = f"{tmp_path / 'a'}@latest"
    ((name, _),) = resume(tmp_path / "b", make_state(), start=start)
    assert name == "resume_checked"
    assert resume(tmp_path / "c", make_state(), start=start, keys="model") == []


def test_a_state_in_memory_is_compared(tmp_path, memory):
    tier = limpet.MemoryTier(every=limpet.EverySteps(1), copies=1, path=memory)
    found: list[Event] = []
    for number in range(2):
        state = make_state()
        options: Any = {"save": limpet.EverySteps(100), "tiers": [tier], "preemption": None}
        with (
            pytest.raises(ZeroDivisionError),
            limpet.attach(lambda *event: found.append(event)),
            limpet.Checkpointer(tmp_path / "run", state, **options) as ckpt,
        ):
            ckpt.resume(check=True)
            assert ckpt.current_step == number
            ckpt.step()
            raise ZeroDivisionError
    (fields,) = (fields for name, fields in found if name == "resume_checked")
    assert fields["bytes"] > 10_000
    assert "resume_differs" not in dict(found)
