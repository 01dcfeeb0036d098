"""Loads that keep live values of another shape, and the report of a load."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

import limpet
from limpet.errors import DTypeMismatch, PlanError, ShapeMismatch
from tests.states import assert_same, clone, save_state

ADAM_SLOTS = ("step", "exp_avg", "exp_avg_sq")


class ResNet(nn.Module):
    """The structure of a ResNet, in small."""

    def __init__(self, classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        x = self.bn1(self.conv1(x))
        return self.fc((x + self.layer1(x)).mean((2, 3)))


def training(classes, steps=0, kind=optim.Adam, **options):
    model = ResNet(classes)
    state = {"optimizer": kind(model.parameters(), **options), "model": model, "n": 0}
    for _ in range(steps):
        step(state)
    return state


def step(state):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(2, 3, 8, 8)).square().sum().backward()
    state["optimizer"].step()
    state["n"] += 1


def slots_of(state):
    slots, model = state["optimizer"].state, state["model"]
    return {n: clone(dict(slots[p])) for n, p in model.named_parameters() if p in slots}


@pytest.mark.parametrize("reverse", [False, True], ids=["optimizer first", "model first"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_head_of_another_size_is_kept_with_its_slots(steps, reverse):
    saved, live = training(1000, 2), training(10, steps)
    if reverse:
        live = dict(reversed(live.items()))
    before, slots = clone(live["model"].state_dict()), slots_of(live)
    report = limpet.load(save_state(saved), into=live, mismatched="keep")
    expected = clone(saved["model"].state_dict())
    expected |= {key: before[key] for key in ("fc.weight", "fc.bias")}
    assert_same(expected, clone(live["model"].state_dict()))
    of_head = {name: slots[name] for name in ("fc.weight", "fc.bias") if name in slots}
    of_rest = {n: s for n, s in slots_of(saved).items() if not n.startswith("fc")}
    assert_same(of_rest | of_head, slots_of(live))
    assert live["n"] == 2
    model, slot = "saved [1000, 8], live [10, 8]", "slot of a parameter [1000, 8], live [10, 8]"
    assert report.kept["model/fc.weight"] == model
    for name in ADAM_SLOTS:
        assert report.kept[f"optimizer/state/model.fc.weight/{name}"] == slot
    assert len(report.kept) == 2 + 2 * len(ADAM_SLOTS)
    assert not report.is_complete
    step(live)  # a half of the saved slots would raise here, or count from the saved step
    optimizer, model = live["optimizer"], live["model"]
    assert optimizer.state[model.fc.weight]["step"] == steps + 1
    assert optimizer.state[model.conv1.weight]["step"] == 3


def test_the_load_stays_strict_by_default():
    saved, live = training(1000, 1), training(10, 1)
    url, before = save_state(saved), (clone(live["model"].state_dict()), slots_of(live))
    for options in ({}, {"missing": "keep", "unexpected": "ignore", "cast": True}):
        with pytest.raises(ShapeMismatch) as e:
            limpet.load(url, into=live, **options)
        assert e.value.mismatched == e.value.misfits == ("model/fc.weight", "model/fc.bias")
        assert str(e.value).endswith('as needed: mismatched="keep".')
    assert_same(before, (clone(live["model"].state_dict()), slots_of(live)))


@pytest.mark.parametrize("keys", ["optimizer", ["optimizer/state", "n"]])
def test_slots_of_a_parameter_of_another_shape_are_never_loaded(keys):
    """Also if only the optimizer is loaded. They would break the next step."""
    saved, live = training(1000, 2), training(10)
    url = save_state(saved)
    with pytest.raises(ShapeMismatch, match=r"6 with a different shape: optimizer/state"):
        limpet.load(url, into=live, keys=keys)
    assert not live["optimizer"].state
    report = limpet.load(url, into=live, keys=keys, mismatched="keep")
    assert len(report.kept) == 6
    step(live)
    assert live["optimizer"].state[live["model"].fc.weight]["step"] == 1
    assert live["optimizer"].state[live["model"].conv1.weight]["step"] == 3


def test_a_strict_load_of_the_rest_of_the_model_needs_no_option():
    saved, live = training(1000, 2), training(10)
    rest = ["model/conv1.*", "model/bn1.*", "model/layer1.*", "n"]
    report = limpet.load(save_state(saved), into=live, keys=rest)
    assert report.is_complete
    assert len(report.loaded) == 15
    assert torch.equal(live["model"].conv1.weight, saved["model"].conv1.weight)


def test_a_parameter_outside_of_modules_keeps_its_slots():
    def make(size, steps):
        prompt = nn.Parameter(torch.ones(size))
        optimizer = optim.SGD([prompt], lr=0.1, momentum=0.9)
        for _ in range(steps):
            prompt.sum().backward()
            optimizer.step()
        return {"optimizer": optimizer, "prompt": prompt}

    saved = make(5, 2)
    for reverse in (False, True):
        live = make(3, 0)
        into = dict(reversed(live.items())) if reverse else live
        report = limpet.load(save_state(saved), into=into, mismatched="keep")
        assert [*report.kept] == (
            ["prompt", "optimizer/state/prompt/momentum_buffer"]
            if reverse
            else ["optimizer/state/prompt/momentum_buffer", "prompt"]
        )
        assert torch.equal(live["prompt"], torch.ones(3))
        assert not live["optimizer"].state
        live["prompt"].sum().backward()
        live["optimizer"].step()


def test_an_optimizer_with_its_own_loading_is_refused_by_name():
    """It would load the saved slots of all parameters."""

    class Own(optim.Adam):
        def load_state_dict(self, state):
            super().load_state_dict(state)

    saved, live = training(1000, 2, Own), training(10, 0, Own)
    url = save_state(saved)
    message = r"optimizer the state of all parameters, live Own with model\.fc\.weight of another"
    with pytest.raises(DTypeMismatch, match=message):
        limpet.load(url, into=live, mismatched="keep")
    assert not live["optimizer"].state
    assert limpet.load(url, into=live, mismatched="keep", keys=["model", "n"]).kept


def test_frozen_and_added_layers():
    """A frozen trunk has no slots; an adapter is added, and the head has another size."""
    saved, live = training(1000), training(10)
    for state in (saved, live):
        for p in [*state["model"].conv1.parameters(), *state["model"].layer1.parameters()]:
            p.requires_grad_(False)
    step(saved)
    live["model"].adapter = nn.Linear(8, 2)
    live["optimizer"] = optim.Adam(live["model"].parameters())
    with pytest.raises(PlanError, match=r'missing="keep", mismatched="keep"\.$'):
        limpet.load(url := save_state(saved), into=live)
    report = limpet.load(url, into=live, mismatched="keep", missing="keep")
    added = [key for key, reason in report.kept.items() if reason == "missing in the snapshot"]
    assert [key for key in added if key.startswith("model")] == [
        "model/adapter.weight", "model/adapter.bias",
    ]  # fmt: skip
    assert set(slots_of(live)) == {"bn1.weight", "bn1.bias"}
    assert torch.equal(live["model"].conv1.weight, saved["model"].conv1.weight)


def test_arrays_tensors_and_sparse_tensors_are_kept_whole():
    import numpy as np

    sparse = torch.eye(3).to_sparse()
    saved = {"a": np.ones(3), "t": torch.ones(2, 3), "s": sparse, "deep": [{"x": torch.ones(4)}]}
    live = {
        "a": np.zeros(2), "t": torch.zeros(3), "s": torch.eye(2).to_sparse(),
        "deep": [{"x": torch.zeros(1)}],
    }  # fmt: skip
    before = clone(live)
    report = limpet.load(save_state(saved), into=live, mismatched="keep")
    assert_same(before, live)
    assert report.kept == {
        "a": "saved [3], live [2]",
        "t": "saved [2, 3], live [3]",
        "s": "saved [3, 3], live [2, 2]",
        "deep/0/x": "saved [4], live [1]",
    }
    assert not report.loaded


def test_another_kind_or_dtype_is_not_kept():
    """``mismatched=`` is about shapes: a value of another kind is probably another object."""
    for saved, live in (
        (torch.ones(2), 1), (1, torch.ones(2)), ([1], torch.ones(2)), (torch.ones(2), {"x": 1}),
        (torch.ones(2), torch.ones(2).int()), (torch.ones(2), torch.ones(2).double()),
    ):  # fmt: skip
        with pytest.raises(DTypeMismatch):
            limpet.load(save_state({"x": saved}), into={"x": live}, mismatched="keep")
    live = {"x": torch.ones(3).double()}  # both differ, so that no element could be loaded
    limpet.load(save_state({"x": torch.ones(2)}), into=live, mismatched="keep")


def test_the_error_names_the_options_and_slots_follow_a_rename():
    saved, live = training(10, 2), training(10)
    live["model"].head = live["model"].fc
    del live["model"].fc
    live["optimizer"] = optim.Adam(live["model"].parameters())
    with pytest.raises(PlanError, match=r"as needed: rename=\{OLD: NEW\}, "):
        limpet.load(url := save_state(saved), into=live)
    report = limpet.load(url, into=live, rename={"model/fc": "model/head"})
    assert report.is_complete
    assert report.renamed == {"model/fc": "model/head"}
    weight, source = live["model"].head.weight, saved["model"].fc.weight
    assert torch.equal(weight, source)
    exp_avg = live["optimizer"].state[weight]["exp_avg"]
    assert torch.equal(exp_avg, saved["optimizer"].state[source]["exp_avg"])


def test_the_report_says_what_was_loaded_kept_ignored_and_cast():
    saved = {
        "model": {"body": torch.ones(2), "fc": torch.ones(4), "n": torch.ones(1).int()},
        "z": 1,
    }
    n = torch.ones(1).int()
    model = {"trunk": torch.zeros(2).bfloat16(), "fc": torch.ones(3), "n": n}
    live = {"model": model, "new": {"a": 1, "b": 2}}
    events = []
    with limpet.attach(lambda name, fields: events.append((name, fields))):
        report = limpet.load(
            save_state(saved, "memory://report/version_1"), into=live, missing="keep",
            unexpected="ignore", mismatched="keep", cast=True, rename={"model/body": "model/trunk"},
        )  # fmt: skip
    text = (
        "loaded 2 values of memory://report/version_1\n"
        "kept 1 of another shape: model/fc saved [4], live [3]\n"
        "kept 2 missing in the snapshot: new (2 leaves)\n"
        "ignored 1 of the snapshot: z\n"
        "cast 1: model/trunk float32 to bfloat16\n"
        "renamed 1: model/body to model/trunk"
    )
    assert str(report) == repr(report) == text
    assert report.loaded == ("model/trunk", "model/n")
    name, fields = events[-1]
    assert name == "loaded"
    assert fields["summary"] == text
    assert [fields[k] for k in ("kept", "ignored", "cast")] == [3, 1, 1]


def test_a_complete_load_is_reported_but_not_shown(capsys):
    with limpet.attach(limpet.sinks.Terminal()):
        url = save_state({"a": 1, "t": torch.ones(2)}, "memory://complete/version_1")
        report = limpet.load(url, into={"a": 0, "t": torch.zeros(2)})
        assert capsys.readouterr().err == ""
        assert str(report) == "loaded 2 values of memory://complete/version_1"
        limpet.load(url, into={"a": 0}, unexpected="ignore")
        assert capsys.readouterr().err == (
            "limpet: loaded 1 values of memory://complete/version_1; ignored 1 of the snapshot: t\n"
        )


@pytest.mark.parametrize("steps", [0, 1])
def test_slots_are_cast_with_their_parameter(steps):
    saved, live = training(10, 2), training(10)
    live["model"].bfloat16()
    for _ in range(steps):
        live["model"](torch.randn(2, 3, 8, 8).bfloat16()).sum().backward()
        live["optimizer"].step()
    report = limpet.load(save_state(saved), into=live, cast=True)
    slots, source = slots_of(live)["fc.weight"], slots_of(saved)["fc.weight"]
    assert torch.equal(slots["exp_avg"], source["exp_avg"].bfloat16())
    assert_same(source["step"], slots["step"])
    key = "optimizer/state/model.fc.weight/exp_avg"
    assert report.cast[key] == report.cast["model/fc.weight"] == "float32 to bfloat16"
    live["model"](torch.randn(2, 3, 8, 8).bfloat16()).sum().backward()
    live["optimizer"].step()


def test_a_slot_in_a_higher_precision_keeps_it():
    saved, live = training(10), training(10)
    for state in (saved, live):
        state["model"].bfloat16()
    for p in saved["model"].parameters():
        saved["optimizer"].state[p] = {"master": p.detach().float(), "step": torch.tensor(1.0)}
    report = limpet.load(save_state(saved), into=live, cast=True)
    assert not report.cast
    assert_same(slots_of(saved), slots_of(live))


LEAVES = st.tuples(st.integers(0, 3), st.sampled_from([torch.float32, torch.float64]))
MEMBERS = st.dictionaries(st.sampled_from("xyz"), LEAVES, min_size=1)
TREES = st.dictionaries(st.sampled_from("abcd"), MEMBERS)


@settings(max_examples=40)
@given(TREES, TREES)
def test_every_leaf_is_loaded_or_kept_as_a_whole_and_reported(saved, live):
    def make(tree, value):
        return {
            name: {
                n: torch.full((size,), value, dtype=dtype) for n, (size, dtype) in members.items()
            }
            for name, members in tree.items()
        }

    state, url = make(live, 0.0), save_state({**make(saved, 1.0), "always": 1})
    report = limpet.load(
        url, into={**state, "always": 0}, missing="keep", unexpected="ignore", mismatched="keep",
        cast=True,
    )  # fmt: skip
    saved_leaves = {f"{name}/{n}": leaf for name, m in saved.items() for n, leaf in m.items()}
    live_leaves = {f"{name}/{n}": leaf for name, m in live.items() for n, leaf in m.items()}
    fits = {k for k, leaf in live_leaves.items() if saved_leaves.get(k, (None,))[0] == leaf[0]}
    for key, (size, dtype) in live_leaves.items():
        name, n = key.split("/")
        assert_same(torch.full((size,), float(key in fits), dtype=dtype), state[name][n])
    assert set(report.loaded) == fits | {"always"}
    assert report.kept.keys() == live_leaves.keys() - fits
    assert set(report.ignored) == saved_leaves.keys() - live_leaves.keys()
    assert report.cast.keys() == {k for k in fits if saved_leaves[k][1] != live_leaves[k][1]}


def test_texts_show_no_control_characters_of_keys(tmp_path):
    limpet.save(tmp_path / "s", {"a\x1b[2J\n": torch.ones(2), "b\x1b": torch.ones(3), "c": 1})
    live = {"b\x1b": torch.zeros(2), "c": 0}
    with pytest.raises(PlanError) as failure:
        limpet.load(tmp_path / "s", into=live)
    report = limpet.load(tmp_path / "s", into=live, unexpected="ignore", mismatched="keep")
    assert report.ignored == ("a\x1b[2J\n",)
    for text in (str(failure.value), *str(report).split("\n")):
        assert text.isprintable(), text


def test_a_dict_of_plain_values_takes_members_beside_a_kept_leaf():
    saved = {"w": torch.zeros(3), "history": {"a": 1, "b": 2}}
    live = {"w": torch.ones(4), "history": {"a": 0}}
    report = limpet.load(save_state(saved), into=live, mismatched="keep")
    assert live["history"] == saved["history"]
    assert [*report.kept] == ["w"]
    assert not report.ignored
