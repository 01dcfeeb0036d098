"""The slots of an optimizer are compared with the live ones before anything is loaded, so that the
next step works."""

import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import DTypeMismatch, MissingLeaf, PlanError, ShapeMismatch
from tests.states import assert_same, clone, save_state

X = torch.randn(5, 4)
WEIGHT = "optimizer/state/model.weight"


def training(steps=2, kind=optim.Adam, dtype=torch.float32, **options):
    model = nn.Linear(4, 3).to(dtype)
    state = {"model": model, "optimizer": kind(model.parameters(), **{"lr": 0.01, **options})}
    for _ in range(steps):
        step(state)
    return state


def step(state):
    model, optimizer = state["model"], state["optimizer"]
    optimizer.zero_grad()
    model(X.to(model.weight.dtype)).square().mean().backward()
    optimizer.step()


def slots(state, name="weight"):
    return state["optimizer"].state[getattr(state["model"], name)]


def contents(state):
    model, optimizer = state["model"], state["optimizer"]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return clone([dict(model.state_dict()), [slots(state, n) for n in ("weight", "bias")], groups])


def save_with(change, **options):
    """Save a training whose slots of the weight are changed."""
    saved = training(**options)
    change(slots(saved))
    return save_state(saved)


def assert_refused(url, live, error, *parts, **options):
    """Assert that a load raises an error with all parts and changes nothing, so that the live
    training continues."""
    before = contents(live)
    with pytest.raises(PlanError) as e:
        limpet.load(url, into=live, **options)
    assert type(e.value) is error, e.value
    for part in parts:
        assert part in str(e.value), part
    assert_same(before, contents(live))
    step(live)
    return e.value


def set_slot(slot, value):
    return lambda of_weight: of_weight.update({slot: value(of_weight[slot])})


@pytest.mark.parametrize("foreach", [False, True])
def test_a_slot_of_another_dtype_is_refused_or_cast(foreach):
    url = save_with(set_slot("exp_avg", torch.Tensor.double), foreach=foreach)
    live = training(foreach=foreach)
    described = f"{WEIGHT}/exp_avg float64, live float32"
    error = assert_refused(url, live, DTypeMismatch, described, "as needed: cast=True")
    assert error.dtypes == (f"{WEIGHT}/exp_avg",)
    report = limpet.load(url, into=live, cast=True)
    assert report.cast == {f"{WEIGHT}/exp_avg": "float64 to float32"}
    assert slots(live)["exp_avg"].dtype == torch.float32
    step(live)


def test_a_slot_that_cannot_be_converted_is_refused():
    """As with 8-bit optimizers, which keep the slots of small parameters in float32."""
    live = training()
    slots(live)["exp_avg_sq"] = slots(live)["exp_avg_sq"].to(torch.uint8)
    with pytest.raises(DTypeMismatch, match="exp_avg_sq float32, live uint8") as e:
        limpet.load(save_state(training()), into=live, cast=True)
    assert "cast=True" not in str(e.value)


def test_the_optimizer_alone_does_not_load_into_a_model_of_another_dtype():
    url, live = save_state(training()), training(dtype=torch.bfloat16)
    assert_refused(url, live, DTypeMismatch, "exp_avg_sq float32, live bfloat16", keys="optimizer")
    limpet.load(url, into=live, keys="optimizer", cast=True)
    step(live)


@pytest.mark.parametrize("kind", [optim.Adam, optim.NAdam, optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_counter_of_another_dtype_gets_the_live_one(kind, dtype, steps):
    url = save_with(set_slot("step", lambda t: t.to(dtype)), kind=kind)
    live = training(steps, kind)
    report = limpet.load(url, into=live)
    assert slots(live)["step"] == 2
    if steps or kind is optim.Adagrad:  # which has slots from the beginning
        assert slots(live)["step"].dtype == torch.float32
        assert f"{WEIGHT}/step" in report.cast
    step(live)
    assert slots(live)["step"] == 3


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.ASGD])
def test_a_step_counter_that_is_a_number_loads_as_a_tensor(kind, foreach, steps):
    """Early versions of PyTorch saved it as an int."""
    saved, live = training(kind=kind, foreach=foreach), training(steps, kind, foreach=foreach)
    for name in ("weight", "bias"):
        slots(saved, name)["step"] = int(slots(saved, name)["step"])
        if kind is optim.NAdam:
            slots(saved, name)["mu_product"] = slots(saved, name)["mu_product"].item()
    report = limpet.load(save_state(saved), into=live)
    assert not report.summary
    assert_same(torch.tensor(2.0), slots(live)["step"])
    step(live)
    assert_same(torch.tensor(3.0), slots(live)["step"])


@pytest.mark.parametrize("value", [0.5, "text", [1.0], {"a": 1}, True])
def test_a_value_in_place_of_a_tensor_is_refused(value):
    url, live = save_with(set_slot("exp_avg", lambda _: value)), training()
    assert_refused(url, live, DTypeMismatch, f"{WEIGHT}/exp_avg ", "live tensor", cast=True)


def test_a_tensor_in_place_of_a_value_is_refused():
    url, live = save_state(training()), training()
    for value in (0, [1.0], "text"):
        slots(live)["exp_avg"] = value
        with pytest.raises(DTypeMismatch, match=f"exp_avg tensor, live {type(value).__name__}"):
            limpet.load(url, into=live)


def test_an_unused_momentum_buffer_is_none():
    """Early versions of PyTorch kept such a buffer if there was no momentum."""
    saved, live = training(kind=optim.SGD), training(kind=optim.SGD, momentum=0.9)
    slots(saved)["momentum_buffer"] = None
    url = save_state(saved)
    limpet.load(url, into=live)
    assert slots(live)["momentum_buffer"] is None
    step(live)
    assert live["optimizer"].param_groups[0]["momentum"] == 0
    slots(live)["momentum_buffer"] = None
    with_buffer = training(kind=optim.SGD, momentum=0.9)
    limpet.load(save_state(with_buffer), into=live)
    step(live), step(with_buffer)
    assert_same(contents(with_buffer), contents(live))


def test_a_missing_slot_is_refused_or_kept():
    saved, live = training(), training()
    del slots(saved)["exp_avg_sq"]
    url = save_state(saved)
    key = f"{WEIGHT}/exp_avg_sq"
    described = f"1 missing in the snapshot: {key}"
    assert assert_refused(url, live, MissingLeaf, described, 'missing="keep"').missing == (key,)
    before = clone(slots(live)["exp_avg_sq"])
    assert limpet.load(url, into=live, missing="keep").kept == {key: "missing in the snapshot"}
    assert_same(before, slots(live)["exp_avg_sq"])
    assert_same(slots(saved)["exp_avg"], slots(live)["exp_avg"])
    step(live)


def test_a_live_slot_may_have_another_name_than_a_string():
    live = training()
    slots(live)[0] = torch.ones(2)
    with pytest.raises(MissingLeaf, match=f"1 missing in the snapshot: {WEIGHT}/0"):
        limpet.load(save_state(training()), into=live)


def test_the_slots_of_another_class_with_similar_options_are_refused():
    saved, live = training(kind=optim.Adamax), training()
    assert_refused(save_state(saved), live, MissingLeaf, "2 missing", "exp_avg_sq")


@pytest.mark.parametrize(
    ("kind", "without", "with_slot"),
    [
        (optim.Adam, {}, {"amsgrad": True}),
        (optim.SGD, {}, {"momentum": 0.9}),
        (optim.RMSprop, {}, {"momentum": 0.9, "centered": True}),
        (optim.Adafactor, {}, {"d": 2.0}),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_slots_that_differ_with_the_options_are_the_saved_ones(kind, without, with_slot, reverse):
    if kind is optim.Adafactor and not hasattr(optim, "Adafactor"):
        pytest.skip("this PyTorch has no Adafactor")
    both = training(kind=kind, **without), training(kind=kind, **with_slot)
    saved, live = reversed(both) if reverse else both
    limpet.load(save_state(saved), into=live)
    assert_same(contents(saved), contents(live))
    step(saved), step(live)
    assert_same(contents(saved), contents(live))


def test_without_its_options_a_slot_is_missing():
    live = training(amsgrad=True)
    assert_refused(
        save_state(training()), live, MissingLeaf, "max_exp_avg_sq", keys="optimizer/state"
    )


@pytest.mark.parametrize("keys", ["optimizer/state/**/exp_avg", f"{WEIGHT}/exp_avg"])
def test_some_slots_are_loaded_only_next_to_live_ones(keys):
    url = save_state(training())
    live = training(0)
    with pytest.raises(DTypeMismatch, match=rf"{WEIGHT} exp_avg selected, live no slots") as e:
        limpet.load(url, into=live, keys=keys)
    assert "step" in str(e.value)
    assert not live["optimizer"].state
    step(live)
    limpet.load(url, into=live, keys=keys)
    assert slots(live)["step"] == 1
    assert_same(limpet.load(url, keys=f"{WEIGHT}/exp_avg")["optimizer"]["state"]["model.weight"],
                {"exp_avg": slots(live)["exp_avg"]})  # fmt: skip
    step(live)


def test_a_slot_of_another_shape_is_refused_or_kept_with_all_slots_of_the_parameter():
    url, live = save_with(set_slot("exp_avg", lambda t: t[:2].clone())), training(3)
    error = assert_refused(
        url, live, ShapeMismatch, f"{WEIGHT}/exp_avg [2, 4], live [3, 4]", 'mismatched="keep"'
    )
    assert error.mismatched == (f"{WEIGHT}/exp_avg",)
    before = clone(slots(live))
    report = limpet.load(url, into=live, mismatched="keep")
    assert_same(before, clone(slots(live)))
    assert {*report.kept} == {f"{WEIGHT}/{slot}" for slot in before}
    assert slots(live, "bias")["step"] == 2
    step(live)


def test_one_error_lists_the_problems_of_all_slots():
    saved, live = training(), training()
    slots(saved)["exp_avg_sq"] = torch.ones(7)
    slots(saved, "bias")["exp_avg"] = slots(saved, "bias")["exp_avg"].double()
    slots(saved, "bias")["step"] = [1]
    del slots(saved, "bias")["exp_avg_sq"]
    error = assert_refused(
        save_state(saved), live, PlanError, "1 missing", "1 with a different shape", "2 with a"
    )
    assert 'missing="keep"' in str(error)
    assert len(error.misfits) == 3


def test_the_slots_of_a_foreign_checkpoint_are_compared_too(tmp_path):
    saved, live = training(), training()
    content = {name: value.state_dict() for name, value in saved.items()}
    content["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3, 4, dtype=torch.float64)
    del content["optimizer"]["state"][1]["exp_avg_sq"]
    torch.save(content, tmp_path / "c.pt")
    limpet.import_checkpoint(tmp_path / "c.pt", tmp_path / "s")
    assert_refused(tmp_path / "s", live, PlanError, "exp_avg float64", "model.bias/exp_avg_sq")
    limpet.load(tmp_path / "s", into=live, cast=True, missing="keep")
    step(live)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_foreign_checkpoint_of_an_early_pytorch_continues(tmp_path, steps):
    saved, live = training(foreach=True), training(steps, foreach=True)
    content = clone({name: value.state_dict() for name, value in saved.items()})
    for values in content["optimizer"]["state"].values():
        values["step"] = 2
    torch.save(content, tmp_path / "c.pt")
    limpet.import_checkpoint(tmp_path / "c.pt", tmp_path / "s")
    limpet.load(tmp_path / "s", into=live)
    step(saved), step(live)
    assert_same(contents(saved), contents(live))
