"""Checkpoints of other libraries load into live objects in one call, and training continues."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import limpet
from limpet.errors import (
    FormatError,
    MissingLeaf,
    NotFound,
    PlanError,
    ShapeMismatch,
    UnexpectedLeaf,
    Unsupported,
)
from tests.fakegroup import FakeGroup
from tests.interop.checkpoints import MaliciousPickle, write_dcp_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore:Not loaded from"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

X, Y = torch.randn(16, 4), torch.randn(16, 2)


class Net(nn.Module):
    """A model with a frozen layer, a tied weight, and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(3))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.frozen(self.first(x)) + self.tied(x)))


def make(seed=None, optimizer_class=torch.optim.AdamW, **options):
    """Return a fresh state: a model, its optimizer with two groups, and a scheduler."""
    if seed is not None:
        torch.manual_seed(seed)
    net = Net()
    decay = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decay, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = optimizer_class(groups, lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}


def train(state, steps=2):
    """Train and return a copy of everything."""
    model, optimizer = state["model"], state["optimizer"]
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - Y).square().mean().backward()
        optimizer.step()
        if "scheduler" in state:
            state["scheduler"].step()
    return snapshot_of(state)


def snapshot_of(state):
    values = [state["model"].state_dict(), state["optimizer"].state_dict()]
    return json.dumps([_plain(v) for v in values])


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().double().tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def state_dicts(state):
    return {name: value.state_dict() for name, value in state.items()}


def assert_continues(original, path, **options):
    """Load a checkpoint of ``original`` into fresh objects. Both make the same two steps."""
    restored = make()
    limpet.load(path, into=restored, **options)
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)


# -- files of torch.save -------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "_state_dict"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_with_numbered_state_continues(tmp_path, suffix, zipped):
    original = make()
    train(original, 3)
    content = {name + suffix: value for name, value in state_dicts(original).items()}
    torch.save(content, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    assert_continues(original, tmp_path / "c.pt")


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS]
)
def test_other_optimizers(tmp_path, optimizer_class):
    net = nn.Linear(4, 2)
    original = {"model": net, "optimizer": optimizer_class(net.parameters(), lr=0.01)}

    def step(state):
        def closure():
            state["optimizer"].zero_grad()
            loss = (state["model"](X) - Y).square().mean()
            loss.backward()
            return loss

        state["optimizer"].step(closure)

    step(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    other = nn.Linear(4, 2)
    restored = {"model": other, "optimizer": optimizer_class(other.parameters(), lr=0.5)}
    if optimizer_class is torch.optim.LBFGS:  # its slots have the length of all parameters
        with pytest.raises(ShapeMismatch, match="step once before the load"):
            limpet.load(tmp_path / "c.pt", into=restored)
        step(restored)
    limpet.load(tmp_path / "c.pt", into=restored)
    step(original), step(restored)
    assert snapshot_of(original) == snapshot_of(restored)


def test_what_is_left_out_is_listed_and_reported(tmp_path):
    original = make()
    train(original)
    content = state_dicts(original) | {"epoch": 3, "args": {"lr": 0.1}, "ema": {"a": torch.ones(1)}}
    torch.save(content, tmp_path / "step_7.pt")
    events = []
    with (
        limpet.attach(lambda name, fields: events.append((name, fields))),
        pytest.warns(UserWarning, match=r"Not loaded from .*step_7\.pt: epoch, args, ema$"),
    ):
        limpet.load(tmp_path / "step_7.pt", into=make())
    imported = dict(events)["imported"]
    assert imported["left_out"] == ["epoch", "args", "ema"]
    assert (imported["kind"], imported["step"]) == ("torch", 7)


def test_a_complete_load_warns_of_nothing(tmp_path):
    original = make()
    torch.save(state_dicts(original), tmp_path / "c.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limpet.load(tmp_path / "c.pt", into=make())


def test_a_file_of_one_optimizer_loads_into_it(tmp_path):
    original = make()
    train(original)
    torch.save(original["optimizer"].state_dict(), tmp_path / "optimizer.pt")
    restored = make()
    restored["model"].load_state_dict(original["model"].state_dict())
    restored["scheduler"].load_state_dict(original["scheduler"].state_dict())
    limpet.load(tmp_path / "optimizer.pt", into={k: restored[k] for k in ("model", "optimizer")},
                  missing="keep")  # fmt: skip
    assert train(restored) == train(original)


def test_members_of_other_names_are_found_by_kind(tmp_path):
    original = make()
    train(original)
    content = dict(zip(("net", "optim", "lr"), state_dicts(original).values(), strict=True))
    torch.save(content, tmp_path / "c.pt")
    assert_continues(original, tmp_path / "c.pt")


def test_several_members_of_a_kind_need_names(tmp_path):
    original = make()
    train(original)
    content = state_dicts(original)
    content["net"] = content.pop("model")
    content["ema"] = {n: v + 1 for n, v in content["net"].items()}
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(PlanError, match=r'found net, ema.*rename=\{"net": "model"\}'):
        limpet.load(tmp_path / "c.pt", into=make())
    assert_continues(original, tmp_path / "c.pt", rename={"net": "model"})
    with pytest.raises(PlanError, match=r"Members to rename are not in .*: nte"):
        limpet.load(tmp_path / "c.pt", into=make(), rename={"nte": "model"})


def test_a_member_of_another_name_goes_to_no_second_module(tmp_path):
    net, ema = nn.Linear(4, 2), nn.Linear(4, 2)
    content = {"model": net.state_dict(), "critic": nn.Linear(4, 2).state_dict()}
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(MissingLeaf, match="ema"):
        limpet.load(tmp_path / "c.pt", into={"model": nn.Linear(4, 2), "ema": ema})


def test_what_is_no_state_is_refused(tmp_path):
    torch.save({"model": nn.Linear(4, 2).state_dict()}, tmp_path / "c.pt")
    for wrong in ([nn.Linear(4, 2)], nn.Linear(4, 2)):
        with pytest.raises(PlanError, match="into= is"):
            limpet.load(tmp_path / "c.pt", into=wrong)


def test_other_functions_say_what_to_do(tmp_path):
    torch.save({"model": nn.Linear(4, 2).state_dict()}, tmp_path / "c.pt")
    with pytest.raises(NotFound, match=r"load it with limpet\.load"):
        limpet.open(tmp_path / "c.pt")
    with (
        limpet.Checkpointer(tmp_path / "run", make()) as ckpt,
        pytest.raises(NotFound, match=r"load it with limpet\.load"),
    ):
        ckpt.resume(start=tmp_path / "c.pt")


@pytest.mark.parametrize("order", [("ema", "model"), ("model", "ema")])
def test_a_folder_of_one_model_goes_to_the_live_model(tmp_path, order):
    net = nn.Linear(4, 2)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    into = {name: nn.Linear(4, 2) for name in order}
    limpet.load(tmp_path, into=into, missing="keep")
    assert torch.equal(into["model"].weight, net.weight)
    assert not torch.equal(into["ema"].weight, net.weight)


def test_a_rename_within_a_member_applies(tmp_path):
    original = make()
    train(original)
    content = state_dicts(original)
    content["model"] = {n.replace("last", "head"): v for n, v in content["model"].items()}
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(PlanError, match=r"model/head\.weight"):
        limpet.load(tmp_path / "c.pt", into=make())
    assert_continues(original, tmp_path / "c.pt", rename={"model/head": "model/last"})


def test_a_member_that_the_checkpoint_lacks_is_an_error(tmp_path):
    original = make()
    torch.save({"model": original["model"].state_dict()}, tmp_path / "c.pt")
    live = make()
    before = snapshot_of(live)
    with pytest.raises(MissingLeaf, match="optimizer, scheduler"):
        limpet.load(tmp_path / "c.pt", into=live)
    assert snapshot_of(live) == before
    limpet.load(tmp_path / "c.pt", into=live, missing="keep")
    assert torch.equal(live["model"].last.weight, original["model"].last.weight)


@pytest.mark.parametrize("keys", ["model", ["model/first*", "model/last.*"]])
def test_only_selected_members_are_read(tmp_path, keys):
    original = make()
    content = {"model": original["model"].state_dict()}
    content["optimizer"] = torch.optim.SGD([nn.Parameter(torch.ones(9))]).state_dict()
    torch.save(content, tmp_path / "c.pt")
    live = make()
    limpet.load(tmp_path / "c.pt", into=live, keys=keys)
    assert torch.equal(live["model"].last.weight, original["model"].last.weight)


@pytest.mark.parametrize("kind", ["zip", "safetensors"])
def test_a_file_without_into_is_returned(tmp_path, kind):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}
    if kind == "zip":
        torch.save(tensors, tmp_path / "x")
    else:
        save_file(tensors, tmp_path / "x")
    loaded = limpet.load(tmp_path / "x")
    assert loaded.keys() == {"model"}
    assert all(torch.equal(loaded["model"][n], t) for n, t in tensors.items())
    loaded["model"]["a"] += 1  # not the mapped file
    assert torch.equal(limpet.load(tmp_path / "x")["model"]["a"], tensors["a"])


def test_a_gradient_scaler(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    torch.save({"scaler": scaler.state_dict()}, tmp_path / "c.pt")
    other = torch.amp.GradScaler("cpu")
    limpet.load(tmp_path / "c.pt", into={"amp": other})
    assert other.get_scale() == 4096.0


# -- the order of parameters ---------------------------------------------------------------------


def test_every_slot_of_another_shape_is_listed_and_nothing_changes(tmp_path):
    original = make()
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    live = make()
    for group in live["optimizer"].param_groups:
        group["params"].reverse()
    before = snapshot_of(live)
    with pytest.raises(ShapeMismatch) as caught:
        limpet.load(tmp_path / "c.pt", into=live)
    # of the first group, two of three parameters have slots, and the frozen one in the middle none
    slots = ("exp_avg", "exp_avg_sq")
    expected = {
        f"optimizer/state/model.{n}/{s}" for s in slots for n in ("last.weight", "first.weight")
    }
    assert expected <= set(caught.value.misfits)
    assert all(name in str(caught.value) for name in expected)
    assert snapshot_of(live) == before


@pytest.mark.parametrize("lacking", [0, 1])
def test_other_groups_are_refused(tmp_path, lacking):
    original = make()
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    live = make()
    groups = live["optimizer"].param_groups
    if lacking:
        groups[0]["params"].pop()
    else:
        groups[:] = [groups[0] | {"params": groups[0]["params"] + groups[1]["params"]}]
    with pytest.raises(PlanError, match=r"Expected groups of 3, 4 parameters, found groups of"):
        limpet.load(tmp_path / "c.pt", into=live)


def test_slots_are_compared_with_live_slots(tmp_path):
    original = make(optimizer_class=torch.optim.Adafactor)
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    restored = make(optimizer_class=torch.optim.Adafactor)
    with pytest.raises(ShapeMismatch, match="step once before the load"):
        limpet.load(tmp_path / "c.pt", into=restored)
    train(restored, 1)
    limpet.load(tmp_path / "c.pt", into=restored)
    assert train(restored) == train(original)


def test_recorded_names_count_more_than_the_order(tmp_path):
    torch.manual_seed(0)
    net = Net()
    original = {"model": net, "optimizer": torch.optim.AdamW(net.named_parameters(), lr=0.1)}
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    other = Net()
    reverse = list(other.parameters())[::-1]
    restored = {"model": other, "optimizer": torch.optim.AdamW(reverse, lr=0.5)}
    limpet.load(tmp_path / "c.pt", into=restored)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        slots, copies = original["optimizer"].state[p], restored["optimizer"].state[q]
        assert slots.keys() == copies.keys()
        assert all(torch.equal(slots[s], copies[s]) for s in slots)
    train(original), train(restored)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_recorded_names_without_a_live_parameter(tmp_path):
    net = Net()
    torch.save(
        {
            "model": net.state_dict(),
            "optimizer": torch.optim.SGD(net.named_parameters()).state_dict(),
        },
        tmp_path / "c.pt",
    )
    live = {"model": net, "optimizer": torch.optim.SGD(net.last.parameters())}
    with pytest.raises(UnexpectedLeaf, match="all of which the live optimizer trains"):
        limpet.load(tmp_path / "c.pt", into=live)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s["state"].update({99: {"exp_avg": torch.ones(1)}}),
        lambda s: s["state"].update({0: torch.ones(1)}),
        lambda s: s["param_groups"][0].pop("params"),
        lambda s: s["param_groups"][1].update(params=[0, 1, 2, 3]),
        lambda s: s.update(param_groups=3),
    ],
)
def test_an_invalid_optimizer_state_is_refused(tmp_path, damage):
    original = make()
    train(original)
    content = state_dicts(original)
    damage(content["optimizer"])
    torch.save(content, tmp_path / "c.pt")
    live = make()
    before = snapshot_of(live)
    with pytest.raises((FormatError, PlanError)):
        limpet.load(tmp_path / "c.pt", into=live)
    assert snapshot_of(live) == before


def test_an_optimizer_with_its_own_state_dict(tmp_path):
    class Wrapped(torch.optim.AdamW):
        def state_dict(self):
            return super().state_dict()

    original, restored = make(), make(optimizer_class=Wrapped)
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    limpet.load(tmp_path / "c.pt", into=restored)
    assert train(restored) == train(original)
    wrong = make(optimizer_class=Wrapped)
    for group in wrong["optimizer"].param_groups:
        group["params"].reverse()
    with pytest.raises(ShapeMismatch):
        limpet.load(tmp_path / "c.pt", into=wrong)


# -- DCP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numbered", "named"])
def test_a_dcp_folder(tmp_path, kind):
    original = make()
    train(original)
    if kind == "numbered":
        content = state_dicts(original)
    else:
        model, optimizer = get_state_dict(original["model"], original["optimizer"])
        content = {"model": model, "optimizer": optimizer}
        content["scheduler"] = original["scheduler"].state_dict()
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    assert_continues(original, tmp_path / "d")


def test_tied_weights_that_differ_or_are_saved_once(tmp_path):
    net = Net()
    content = dict(net.state_dict())
    del content["tied.weight"]  # as Transformers does
    save_file(content, tmp_path / "x")
    other = Net()
    limpet.load(tmp_path / "x", into={"model": other})
    assert torch.equal(other.tied.weight, net.first.weight)
    save_file(content | {"tied.weight": torch.ones(8, 4)}, tmp_path / "y")
    with pytest.raises(PlanError, match="is tied to another tensor"):
        limpet.load(tmp_path / "y", into={"model": other})
    assert torch.equal(other.tied.weight, net.first.weight)


def test_a_dcp_tensor_in_several_boxes(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    boxes = [((0, 0), whole[:2, :4]), ((0, 4), whole[:2, 4:]), ((2, 0), whole[2:])]
    parts = [(offsets, part.clone()) for offsets, part in boxes]
    write_dcp_folder(tmp_path / "d", {"w": (whole.shape, torch.float32, parts)})
    for live in (torch.zeros(4, 6), torch.zeros(6, 4).t()):
        limpet.load(tmp_path / "d", into={"model": {"w": live}})
        assert torch.equal(live, whole)
    half = torch.zeros(4, 6, dtype=torch.float64)
    limpet.load(tmp_path / "d", into={"model": {"w": half}}, cast=True)
    assert torch.equal(half, whole.double())


# -- safetensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spaces", [1, 7, 8, 5000])
def test_spaces_before_the_header(tmp_path, spaces):
    raw = save({"a": torch.arange(3.0), "b": torch.ones(2)})
    size = int.from_bytes(raw[:8], "little")
    padded = (size + spaces).to_bytes(8, "little") + b" " * spaces + raw[8:]
    (tmp_path / "x").write_bytes(padded)
    loaded = limpet.load(tmp_path / "x")["model"]
    assert torch.equal(loaded["a"], torch.arange(3.0))
    (tmp_path / "y").write_bytes(raw[:8] + b" " * size)
    with pytest.raises(Unsupported, match="not a checkpoint"):
        limpet.load(tmp_path / "y")


def test_a_folder_in_a_store(tmp_path):
    original = make()
    train(original)
    store = limpet.open_store("memory://foreign-folder")
    files = {
        "model.safetensors": save(_untied(original["model"])),
        "optimizer.bin": _torch_bytes(original["optimizer"].state_dict(), tmp_path),
        "scheduler.bin": _torch_bytes(original["scheduler"].state_dict(), tmp_path),
    }
    for name, raw in files.items():
        store.put_if_absent(f"c/{name}", raw)
    restored = make()
    limpet.load("memory://foreign-folder/c", into=restored, timeout=60)
    assert train(restored) == train(original)


def _untied(net):
    return net.state_dict() | {"tied.weight": net.tied.weight.detach().clone()}


def _torch_bytes(value, folder: Path) -> bytes:
    torch.save(value, folder / "t")
    return (folder / "t").read_bytes()


# -- several ranks -------------------------------------------------------------------------------


def test_all_ranks_load_or_none_does(tmp_path):
    original = make()
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    live = [make(), make()]
    group = FakeGroup(2)
    group.run(lambda rank: limpet.load(tmp_path / "c.pt", into=live[rank]))
    assert all(snapshot_of(state) == snapshot_of(original) for state in live)
    other = [make(), make()]
    other[1]["optimizer"].param_groups[0]["params"].reverse()
    before = [snapshot_of(state) for state in other]
    errors = []

    def load(rank):
        with pytest.raises(ShapeMismatch) as caught:
            limpet.load(tmp_path / "c.pt", into=other[rank])
        errors.append(caught.type)

    group.run(load)
    assert errors == [ShapeMismatch, ShapeMismatch]
    assert [snapshot_of(state) for state in other] == before


# -- what is not a checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.rand(3), torch.tensor(0), [1], "text", None])
def test_a_file_without_members_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "value.pt")
    live = make(1)
    with pytest.raises(PlanError):
        limpet.load(tmp_path / "value.pt", into=live)


def test_other_folders_are_no_checkpoints(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("x")
    for path in ("a", "absent"):
        with pytest.raises(NotFound, match="There is no snapshot at"):
            limpet.load(tmp_path / path, into=make())


def test_no_code_in_a_file_is_run(tmp_path):
    canary = tmp_path / "canary"
    torch.save({"model": Net().state_dict(), "x": MaliciousPickle(canary)}, tmp_path / "c.pt")
    live = make()
    before = snapshot_of(live)
    with pytest.raises(Unsupported, match="nothing was run"):
        limpet.load(tmp_path / "c.pt", into=live)
    assert not canary.exists()
    assert snapshot_of(live) == before


def test_a_damaged_file_changes_nothing(tmp_path):
    original = make()
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    raw = bytearray((tmp_path / "c.pt").read_bytes())
    raw[raw.index(original["model"].last.weight.detach().numpy().tobytes())] ^= 1
    (tmp_path / "c.pt").write_bytes(raw)
    live = make()
    before = snapshot_of(live)
    with pytest.raises(FormatError):
        limpet.load(tmp_path / "c.pt", into=live)
    assert snapshot_of(live) == before
