"""The key, the names, and the step of an imported state."""

import pytest
import torch
from torch import nn

import limpet
from limpet.convert.arrange import arrange_state, step_from_name, step_from_state, unwrap_names
from limpet.convert.import_ import read_foreign_checkpoint
from tests.convert.checkpoints import import_and_load, import_checkpoint
from tests.states import assert_same

STEPS = {
    1000: [
        "step_1000", "step-1000", "step=1000", "step1000", "steps_1000.pt", "checkpoint-1000",
        "model_step_1000.safetensors", "checkpoint_1000.pth", "ckpt1000.pt", "global_step1000",
        "Global-Step-1000", "iter_0001000", "epoch=3-step=1000.ckpt", "checkpoint-1000-step_1000",
    ],
    0: ["global_step_0"],
    7: ["iteration-7.pt"],
    None: [
        "checkpoint-3-step_1000", "epoch_3.pt", "version_3", "model.pt", "1000.pt", "laststep.ckpt",
        "doorstep_3", "step_", "step_1234567890123456789", "",
    ],
}  # fmt: skip


def test_the_step_in_a_name():
    for step, names in STEPS.items():
        assert {name: step_from_name(name) for name in names} == dict.fromkeys(names, step)


@pytest.mark.parametrize(
    ("value", "step"),
    [
        ({"global_step": 7, "step": 8}, 7), ({"step": 8}, 8), ({"iteration": 9}, 9),
        ({"iter_num": 9}, 9), ({"step": torch.tensor(5)}, 5), ({"global_step": "x", "step": 3}, 3),
        ({"step": torch.tensor([5])}, None), ({"step": torch.tensor(5.0)}, None),
        ({"step": True}, None), ({"step": -1}, None), ({"step": 10**18}, None),
        ({"epoch": 3}, None), ({"model": {"step": 3}}, None), ([3], None),
    ],
)  # fmt: skip
def test_the_step_in_a_state(value, step):
    assert step_from_state(value) == step


def test_the_step_comes_from_the_content_then_the_file_name_then_the_folder(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    torch.save({"global_step": 1, "m": {}}, folder / "step_2.pt")
    torch.save({"m": {}}, folder / "step_4.pt")
    torch.save({"m": {}}, folder / "x.pt")
    found = [
        read_foreign_checkpoint(str(folder / n)).step for n in ("step_2.pt", "step_4.pt", "x.pt")
    ]
    assert found == [1, 4, 3]


ONE = torch.ones(1)
NUMBERED = {"state": {0: {"m": ONE}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


@pytest.mark.parametrize(
    ("value", "under", "keys"),
    [
        ({"w": ONE}, None, ["model"]),
        ({"w": ONE, "a._extra_state": {"x": 1}}, None, ["model"]),
        (ONE, None, ["model"]),
        ([ONE], None, ["model"]),
        ({"model": {"w": ONE}}, None, ["model"]),
        ({"model": {"w": ONE}, "epoch": 3}, None, ["model", "epoch"]),
        ({"w": ONE, "epoch": 3}, None, ["w", "epoch"]),
        ({0: ONE}, None, [0]),
        (NUMBERED, None, ["optimizer"]),
        ({"param_groups": [{"params": []}]}, None, ["optimizer"]),
        ({**NUMBERED, "epoch": 3}, None, ["state", "param_groups", "epoch"]),
        ({"state": {}, "param_groups": []}, None, ["state", "param_groups"]),
        ({"state": {}, "param_groups": {"params": [0]}}, None, ["state", "param_groups"]),
        ({"state": {}, "model": {"w": ONE}}, None, ["state", "model"]),
        (NUMBERED, "adam", ["adam"]),
        ({"w": ONE}, "net", ["net"]),
        ({"model": {"w": ONE}, "epoch": 3}, "all", ["all"]),
    ],
)
def test_the_key_of_an_imported_state(value, under, keys):
    assert list(arrange_state(value, under).state) == keys


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["a.w", "b"], ["a.w", "b"]),
        (["module.a.w", "module.b"], ["a.w", "b"]),
        (["module.a.w", "b"], ["module.a.w", "b"]),
        (["_orig_mod.a.w"], ["a.w"]),
        (["module._orig_mod.a.w"], ["a.w"]),
        (["a._fsdp_wrapped_module.b._checkpoint_wrapped_module.w"], ["a.b.w"]),
        (["module.module.w"], ["module.w"]),
        (["modules.w"], ["modules.w"]),
    ],
)
def test_wrapper_prefixes_are_removed(names, plain):
    assert unwrap_names(names) == plain


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(model, make, steps=2):
    """Return an optimizer with state."""
    optimizer = make(model)
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.ones(5, 3) * torch.arange(1.0, 6.0)[:, None] * (i + 1)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        pytest.param(lambda m: torch.compile(m, backend="eager"), marks=pytest.mark.slow),
    ],
    ids=["DataParallel", "compile"],
)
def test_the_state_of_a_wrapped_model_loads_into_the_plain_model(tmp_path, wrap, bare):
    model, other = net(), net()
    state = wrap(model).state_dict()
    assert "0.weight" not in state
    torch.save(state if bare else {"model": state, "epoch": 1}, tmp_path / "x.pt")
    imported = import_checkpoint(tmp_path / "x.pt")
    limpet.load(imported.url, into={"model": other} if bare else {"model": other, "epoch": 0})
    assert_same(model.state_dict(), other.state_dict())
    # the versions of the modules are unchanged under the new names
    fresh = limpet.load(imported.url)["model"]
    assert fresh._metadata["1"] == {"version": 2}
    net().load_state_dict(fresh)
    unchanged = import_and_load(tmp_path / "x.pt", keep_names=True)["model"]
    assert list(unchanged) == list(state)


def test_names_are_kept_if_removing_prefixes_would_make_them_equal():
    state = {"model": {"_orig_mod.w": ONE, "w": ONE.clone()}}
    imported = arrange_state(state, None)
    assert (imported.state, imported.renamed) == (state, [])


def same_optimizer(a, b):
    assert_same(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.1),
        lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1),
        lambda m: torch.optim.Adam(
            [
                {"params": list(m[2].named_parameters(prefix="2")), "lr": 0.5},
                {"params": list(m[0].named_parameters(prefix="0"))},
            ]
        ),
    ],
    ids=["adamw", "momentum", "no state", "groups"],
)
def test_an_optimizer_with_parameter_names_can_be_loaded(tmp_path, make, wrapped):
    model, other = net(), net()
    optimizer, fresh = trained(model, make), make(other)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}
    if wrapped:
        state["model"] = nn.DataParallel(model).state_dict()
        for group in state["optim"]["param_groups"]:
            group["param_names"] = [f"module.{n}" for n in group["param_names"]]
    torch.save(state, tmp_path / "x.pt")
    imported = import_checkpoint(tmp_path / "x.pt")
    into = {"model": other, "optim": fresh, "epoch": 0}
    assert limpet.load(imported.url, into=into).is_complete
    assert into["epoch"] == 3
    assert_same(model.state_dict(), other.state_dict())
    same_optimizer(optimizer, fresh)


def test_the_state_of_a_single_optimizer_loads_into_a_live_one(tmp_path):
    """A file for the model, and another one for the optimizer."""
    model = net()
    optimizer = trained(model, lambda m: torch.optim.Adam(m.parameters()))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    fresh = torch.optim.Adam(model.parameters())
    imported = import_checkpoint(tmp_path / "optimizer.pt")
    limpet.load(imported.url, into={"model": model, "optimizer": fresh}, missing="keep")
    same_optimizer(optimizer, fresh)


def state_with_names(names, **changes):
    """Return a state with an optimizer of two parameters with these names."""
    group = {"lr": 0.1, "params": [0, 1], "param_names": names} | changes
    return {
        "model": {"a": ONE, "b": ONE},
        "optimizer": {"state": {0: {"m": ONE}}, "param_groups": [group]},
    }


@pytest.mark.parametrize(
    "state",
    [
        state_with_names(["a", "c"]),
        state_with_names(["a", "a"]),
        state_with_names(["a"]),
        state_with_names(["a", 3]),
        state_with_names(None),
        state_with_names(["a", "b"], params=[0, 0]),
        state_with_names(["a", "b"], params=[0, 1.5]),
        state_with_names(["a", "b"], params=None),
        state_with_names(["a", "b"]) | {"model": 3},
        {k: v for k, v in state_with_names(["a", "b"]).items() if k != "model"},
        {"x": {"a": ONE, "b": ONE}, "y": {"a": ONE, "b": ONE}}
        | {"optimizer": state_with_names(["a", "b"])["optimizer"]},
        {"model": {"a": ONE}, "optimizer": {"state": {}, "param_groups": []}},
        {"model": {"a": ONE}, "optimizer": {"state": {}, "param_groups": [3]}},
        {"model": {"a": ONE}, "optimizer": {"state": [], "param_groups": [{"params": ["a"]}]}},
        {"model": {"a": ONE}, "optimizer": {"state": {9: {}}, "param_groups": [{"params": ["a"]}]}},
        {
            "model": {"a": ONE},
            "optimizer": {"state": {"a": 3}, "param_groups": [{"params": ["a"]}]},
        },
        {"model": {"a": ONE}, "optimizer": {"more": 1, "param_groups": [{"params": ["a"]}]}},
    ],
)
def test_an_optimizer_that_does_not_match_is_not_converted(state):
    imported = arrange_state(state, None)
    assert (imported.state, imported.converted) == (state, [])
