"""Savepoints: they return the exact state before a failed step, or no state at all."""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.errors import Unsupported
from limpet.state.flatten import flatten
from limpet.state.savepoint import Savepoint
from tests.states import TORCH_DTYPES, random_tensor, save_state, tensor_bytes

Json = dict[str, Any]


class Scale(torch.nn.Module):
    """A layer that changes everything that a forward pass may change."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("amax", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)
        self.history = [1.0]

    def get_extra_state(self):
        return {"history": self.history, "scale": torch.tensor(self.history[-1:])}

    def set_extra_state(self, state):
        self.history = state["history"]

    def forward(self, x):
        self.amax = torch.roll(self.amax, 1) + x.detach().abs().max()  # a new tensor each time
        self.hidden += 1
        self.history.append(float(x.detach().sum()))
        return x * self.weight


def network():
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), Scale(), frozen, torch.nn.Dropout()
    )


def make_training(make, seed=0):
    torch.manual_seed(seed)
    model = network()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        "scaler": torch.amp.GradScaler("cpu"),
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
        "plain": {"t": torch.zeros(2), "a": np.zeros(3), "l": [1, [2.0]], "s": {1}},
        "alias": [model[1].running_mean, model[0].weight.data],
    }


def forward(state):
    """Do everything before the optimizer's step, and change values of every kind."""
    loss = state["model"](torch.randn(8, 3)).square().sum()
    random.random()
    np.random.rand()
    state["progress"].samples += 8
    state["plain"]["t"] += 1
    state["plain"]["a"][1] += 1
    state["plain"]["l"][1].append(len(state["plain"]["l"][1]))
    state["plain"]["s"].add(state["progress"].samples)
    state["plain"][f"new{state['progress'].samples}"] = 1
    state["optimizer"].zero_grad()
    loss.backward()
    return loss


def step(state):
    state["optimizer"].step()
    state["scheduler"].step()
    state["progress"].step += 1


class StateCopy:
    """A copy of the tree and of the bytes of a flat state."""

    def __init__(self, flat):
        self.tree = flat.tree
        self.leaves = [(x.key, x.dtype, x.shape, self._bytes(x.source)) for x in flat.leaves]

    def __eq__(self, other):
        assert isinstance(other, StateCopy)
        assert self.tree == other.tree
        assert self.leaves == other.leaves
        return True

    __hash__ = None

    @staticmethod
    def _bytes(source):
        return source.tobytes() if isinstance(source, np.ndarray) else tensor_bytes(source)


def copy_state(state):
    return StateCopy(flatten(state))


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "lists": lambda p: torch.optim.LBFGS(p, history_size=2),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_savepoint_returns_the_state_before_the_current_step(make):
    state = make_training(make)
    savepoint = Savepoint(state)
    assert savepoint.invalid_reason
    assert savepoint.flatten_captured() is None
    for _ in range(4):
        savepoint.capture()
        assert savepoint.invalid_reason is None
        expected = copy_state(state)
        assert StateCopy(savepoint.flatten_captured()) == expected
        loss = forward(state)
        assert StateCopy(savepoint.flatten_captured()) == expected
        forward(state)  # gradient accumulation
        assert StateCopy(savepoint.flatten_captured()) == expected
        if isinstance(state["optimizer"], torch.optim.LBFGS):
            state["optimizer"].step(lambda loss=loss: loss)
        finish_step(state)
        assert savepoint.invalid_reason
        assert savepoint.flatten_captured() is None


def finish_step(state):
    if not isinstance(state["optimizer"], torch.optim.LBFGS):
        state["optimizer"].step()
    state["scheduler"].step()
    state["progress"].step += 1


def test_a_closure_that_raises_invalidates_the_savepoint():
    state = make_training(MAKERS["lists"])
    savepoint = Savepoint(state)
    savepoint.capture()

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        state["optimizer"].step(closure)
    assert savepoint.flatten_captured() is None


def test_parameters_and_slots_are_not_copied():
    state = make_training(MAKERS["adam"])
    forward(state)
    step(state)
    savepoint = Savepoint(state)
    savepoint.capture()
    flat = savepoint.flatten_captured()
    live = {leaf.key: leaf.source for leaf in flatten(state).leaves}
    shared = {
        leaf.key
        for leaf in flat.leaves
        if isinstance(leaf.source, torch.Tensor)
        and leaf.source.data_ptr() == live[leaf.key].data_ptr()
    }
    assert {k for k in shared if k.startswith("model/")} == {
        f"model/{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")
    }
    assert sum(k.startswith("optimizer/") for k in shared) == 5 * 3
    assert not [k for k in shared if not k.startswith(("model/", "optimizer/"))]


def _no_grad(change):
    return torch.no_grad()(change)


STEP_BEGUN = "the optimizer had begun the next step"
CHANGED = "a parameter was changed outside of an optimizer step"
STRUCTURE_CHANGED = "the structure of the state changed"
LOAD_BEGUN = "a load into the state had begun"
INTERRUPTED = "the copy of the mutable state was interrupted"

INVALIDATING_CHANGES: dict[str, Callable[[Json], object]] = {
    "in place": _no_grad(lambda s: s["model"][0].weight.add_(1)),
    "a slot": lambda s: s["optimizer"].state[s["model"][0].weight]["exp_avg"].zero_(),
    "a view": lambda s: s["model"][0].weight.detach()[0].zero_(),
    "other memory": lambda s: setattr(s["model"][0].weight, "data", torch.zeros(4, 3)),
    "another parameter": lambda s: setattr(
        s["model"][0], "weight", torch.nn.Parameter(torch.zeros(4, 3))
    ),
    "slots removed": lambda s: s["optimizer"].state.clear(),
    "a new group": lambda s: s["optimizer"].add_param_group(
        {"params": [torch.nn.Parameter(torch.zeros(1))]}
    ),
    "a group removed": lambda s: s["optimizer"].param_groups.pop(),
    "an empty group": lambda s: s["optimizer"].param_groups.append({"params": []}),
    "a buffer added": lambda s: s["model"][0].register_buffer("b", torch.zeros(1)),
    "a buffer removed": lambda s: delattr(s["model"][1], "running_mean"),
    "a buffer renamed": lambda s: (
        delattr(s["model"][1], "running_mean"),
        s["model"][1].register_buffer("mean", torch.zeros(4)),
    ),
    "a buffer made non-persistent": lambda s: s["model"][2]._non_persistent_buffers_set.add("amax"),
    "a buffer made persistent": lambda s: s["model"][2]._non_persistent_buffers_set.clear(),
    "a layer added": lambda s: s["model"].append(torch.nn.Linear(2, 2)),
    "a layer removed": lambda s: s["model"].pop(3),
    "a hook": lambda s: s["model"]._register_state_dict_hook(lambda *_: None),
    "another module": lambda s: s.update(
        model=(made := network()), optimizer=torch.optim.SGD(made.parameters(), lr=0.1)
    ),
    "another optimizer": lambda s: s.update(
        optimizer=torch.optim.SGD(s["model"].parameters(), lr=0.1)
    ),
    "a load": lambda s: s["model"].load_state_dict(network().state_dict()),
    "a load by limpet": lambda s: limpet.load(
        save_state({"model": network()}), into={"model": s["model"]}
    ),
    "through .data": lambda s: s["model"][0].weight.data.copy_(torch.zeros(4, 3)),
    "a slot through .data": lambda s: (
        s["optimizer"].state[s["model"][2].weight]["step"].data.add_(1)
    ),
    "through NumPy": lambda s: s["model"][0].bias.detach().numpy().fill(7),
    "a fused optimizer outside the state": lambda s: torch.optim.SGD(
        [p for p in s["model"].parameters() if p.requires_grad], lr=0.1, fused=True
    ).step(),
}


@pytest.mark.parametrize("change", INVALIDATING_CHANGES.values(), ids=INVALIDATING_CHANGES)
def test_a_change_outside_a_forward_pass_invalidates_the_savepoint(change):
    state = make_training(MAKERS["adam"])
    forward(state)
    step(state)
    savepoint = Savepoint(state)
    savepoint.capture()
    assert savepoint.flatten_captured() is not None
    change(state)
    assert savepoint.flatten_captured() is None
    assert savepoint.invalid_reason in (CHANGED, STRUCTURE_CHANGED, STEP_BEGUN)
    if len(state["optimizer"].param_groups) and "params" in state["optimizer"].param_groups[0]:
        savepoint.capture()  # the next capture is valid again
        expected = copy_state(state)
        forward_remaining(state)
        assert StateCopy(savepoint.flatten_captured()) == expected


def forward_remaining(state):
    torch.rand(1)
    state["plain"]["t"] += 1
    state["model"][2](torch.ones(4))


def test_an_invalidated_savepoint_is_invalid_until_the_next_capture():
    state = make_training(MAKERS["adam"])
    savepoint = Savepoint(state)
    for _ in range(2):
        savepoint.capture()
        assert savepoint.flatten_captured() is not None
        savepoint.invalidate()
        assert savepoint.invalid_reason == LOAD_BEGUN
        assert savepoint.flatten_captured() is None
        forward(state)
        step(state)
        assert savepoint.invalid_reason == LOAD_BEGUN


def test_a_change_that_is_undone_does_not_invalidate_the_savepoint():
    """An evaluation may swap averaged weights in and out again."""
    state = make_training(MAKERS["adam"])
    savepoint = Savepoint(state)
    savepoint.capture()
    expected = copy_state(state)
    parameters = list(state["model"].parameters())
    saved = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.data.zero_()
    assert savepoint.invalid_reason == CHANGED or not parameters
    for p, value in zip(parameters, saved, strict=True):
        p.data.copy_(value)
    assert StateCopy(savepoint.flatten_captured()) == expected


def test_an_optimizer_that_was_added_later_invalidates_the_savepoint():
    state = make_training(MAKERS["adam"])
    savepoint = Savepoint(state)
    savepoint.capture()
    old, state["optimizer"] = (
        state["optimizer"],
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    )
    savepoint.capture()
    assert not old._optimizer_step_pre_hooks
    state["optimizer"].step()
    assert savepoint.invalid_reason


def test_an_interrupted_capture_leaves_no_valid_savepoint():
    class Failing:
        def __init__(self):
            self.fail = False

        def state_dict(self):
            if self.fail:
                raise KeyboardInterrupt
            return {}

        def load_state_dict(self, state): ...

    state = {"t": torch.zeros(3), "f": Failing(), "u": torch.zeros(3)}
    savepoint = Savepoint(state)
    savepoint.capture()
    state["f"].fail = True
    with pytest.raises(KeyboardInterrupt):
        savepoint.capture()
    assert savepoint.invalid_reason == INTERRUPTED
    assert savepoint.flatten_captured() is None
    state["f"].fail = False
    savepoint.capture()
    assert StateCopy(savepoint.flatten_captured()) == copy_state(state)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype_are_captured_bit_for_bit(dtype):
    t = random_tensor(dtype, (3, 4))
    state = {"t": t, "part": t[:, 1:3], "scalar": random_tensor(dtype, (), 1), "e": t[:0]}
    savepoint = Savepoint(state)
    for seed in (1, 2):
        savepoint.capture()
        expected = copy_state(state)
        bits = t.view(torch.uint8)
        bits.copy_(random_tensor(dtype, (3, 4), seed).view(torch.uint8))
        assert StateCopy(savepoint.flatten_captured()) == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant")
def test_special_tensors_arrays_and_containers_are_captured():
    z = torch.randn(3, dtype=torch.complex64)
    state = {
        "z": z,
        "conj": z.conj(),
        "neg": z.conj().imag,
        "expanded": torch.ones(1).expand(5),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "structured": np.zeros(2, [("a", "<i4"), ("b", "u1")]),
        "big endian": np.arange(3, dtype=">i8"),
        "times": np.array(["2020-01-01"], "M8[D]"),
        "text": np.array(["ab", "c"]),
        "strided": np.arange(6)[::2],
        "blob": bytearray(b"x" * 5000),
        "ordered": OrderedDict(b=torch.ones(1), a=2),
        "counter": Counter("aab"),
        "module's": torch.nn.Linear(1, 1).state_dict(),
        "tuple": (torch.ones(1), [np.int8(3), None]),
        1: {(2, 3): 4.0},
    }
    savepoint = Savepoint(state)
    savepoint.capture()
    expected = copy_state(state)
    z.zero_()
    state["coo"].mul_(3)
    state["csr"].values().mul_(3)
    for name in ("structured", "big endian", "strided"):
        state[name][...] = np.ones(1, state[name].dtype)
    state["text"][0] = "z"
    state["blob"][0] = 0
    state["ordered"]["a"] = 3
    state["counter"]["b"] = 9
    state["tuple"][0].zero_()
    state["tuple"][1].append(1)
    state["module's"]["weight"].zero_()
    del state[1][2, 3]
    assert StateCopy(savepoint.flatten_captured()) == expected


def test_tied_tensors_stay_tied():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = {
        "ema": [model[1].running_mean, model[0].weight.data],
        "model": model,
        "frozen": model[0].bias.data,
        "o": torch.optim.SGD([model[0].weight], lr=0.1),
    }
    savepoint = Savepoint(state)
    savepoint.capture()
    expected = copy_state(state)
    assert sum("tied" in str(v) for v in expected.tree["dict"].values()) == 2
    assert StateCopy(savepoint.flatten_captured()) == expected


def test_short_lived_tensors_that_could_reuse_memory_are_not_confused():
    """Each ``state_dict`` creates a tensor. If it were freed immediately, the next one could get
    the same address."""

    class CreatesTensor:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"t": torch.full((1000,), self.value)}

        def load_state_dict(self, state): ...

    state = {str(i): CreatesTensor(i) for i in range(20)}
    savepoint = Savepoint(state)
    for _ in range(2):
        savepoint.capture()
        assert StateCopy(savepoint.flatten_captured()) == copy_state(state)
    assert not savepoint._memo


class Counting(torch.nn.Linear):
    """A layer without buffers whose attribute changes in every forward pass."""

    def __init__(self):
        super().__init__(2, 2)
        self.count = torch.zeros(1)

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class ExtraState(Counting):
    def get_extra_state(self):
        return self.count


class SaveToStateDict(Counting):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "twice"] = self.count * 2


class StateDict(Counting):
    def state_dict(self, *args, **options):
        return super().state_dict(*args, **options) | {"weight": self.weight + self.count}


def pre_hook(module, prefix, keep_vars):
    module.running_var.copy_(module.running_mean * 2)


def post_hook(module, state, prefix, local):
    state[prefix + "x"] = module.running_mean * 2


def norm(**hooks):
    made = torch.nn.BatchNorm1d(2)
    for name, hook in hooks.items():
        getattr(made, name)(hook)
    return made


class OwnParameter(torch.nn.Parameter): ...


@pytest.mark.parametrize("size", [2, 2000])
def test_a_frozen_parameter_of_a_class_of_its_own_is_copied_as_a_state_dict_has_it(size):
    trained, frozen = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(size)
    frozen.weight = OwnParameter(torch.ones(size), requires_grad=False)
    frozen.bias.requires_grad_(False)
    state = {
        "m": torch.nn.ModuleList([trained, frozen]),
        "o": torch.optim.Adam(trained.parameters()),
    }
    savepoint = Savepoint(state)
    for _ in range(2):
        savepoint.capture()
        expected = copy_state(state)
        frozen.weight.add_(1)
        assert StateCopy(savepoint.flatten_captured()) == expected


@pytest.mark.parametrize(
    "make",
    [
        ExtraState,
        SaveToStateDict,
        StateDict,
        lambda: norm(register_state_dict_pre_hook=pre_hook),
        lambda: norm(_register_state_dict_hook=post_hook),
        lambda: torch.compile(norm(), backend="eager"),
        lambda: torch.nn.DataParallel(norm()),
    ],
    ids=[
        "extra_state", "save_to_state_dict", "state_dict", "pre_hook", "post_hook", "compiled",
        "parallel",
    ],
)  # fmt: skip
def test_modules_with_overridden_methods_hooks_or_wrappers_are_captured(make):
    inner = make()
    state: Json = {"m": inner, "n": torch.nn.Sequential(inner)}
    if isinstance(inner, StateDict):
        del state["n"]
    state["o"] = torch.optim.Adam(inner.parameters())
    savepoint = Savepoint(state)
    for _ in range(2):
        savepoint.capture()
        expected = copy_state(state)
        assert StateCopy(savepoint.flatten_captured()) == expected
        getattr(inner, "_orig_mod", getattr(inner, "module", inner))(torch.randn(4, 2))
        assert StateCopy(savepoint.flatten_captured()) == expected


def test_an_optimizer_with_a_state_dict_hook_is_captured():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_state_dict_post_hook(lambda o, s: None)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model, "o": optimizer}
    savepoint = Savepoint(state)
    savepoint.capture()
    expected = copy_state(state)
    optimizer.param_groups[0]["lr"] = 5
    assert StateCopy(savepoint.flatten_captured()) == expected
    optimizer.step()
    assert savepoint.flatten_captured() is None


def test_slots_that_are_not_stable_are_copied():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.register_buffer("of", optimizer.state[model.bias]["momentum_buffer"], persistent=False)
    state = {"model": model, "o": optimizer}
    savepoint = Savepoint(state)
    savepoint.capture()
    expected = copy_state(state)
    model.of.add_(1)
    optimizer.param_groups[0]["lr"] = 5
    assert StateCopy(savepoint.flatten_captured()) == expected


def test_parameters_without_a_version_counter_are_copied():
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
    sparse = torch.nn.Parameter(torch.eye(2).to_sparse())
    state = {
        "model": model,
        "sparse": sparse,
        "o": torch.optim.SGD([*model.parameters(), sparse], lr=0.1),
    }
    savepoint = Savepoint(state)
    savepoint.capture()
    expected = copy_state(state)
    with torch.inference_mode():
        model.weight.add_(1)
    assert StateCopy(savepoint.flatten_captured()) == expected


def test_deep_values_are_captured_and_unsupported_ones_are_refused():
    class ReturnsItself:
        def state_dict(self):
            return self

        def load_state_dict(self, state): ...

    deep: Any = []
    for _ in range(300):
        deep = [deep]
    fine: Any = torch.zeros(1)
    for _ in range(95):
        fine = [fine]
    savepoint = Savepoint({"fine": fine})
    savepoint.capture()
    expected = copy_state({"fine": fine})
    bottom = fine
    while isinstance(bottom, list):
        bottom = bottom[0]
    bottom.add_(1)
    assert StateCopy(savepoint.flatten_captured()) == expected
    for bad in (object(), deep, ReturnsItself(), np.array([None]), torch.empty(1, device="meta")):
        savepoint = Savepoint({"bad": bad})
        savepoint.capture()
        with pytest.raises(Unsupported, match="bad"):
            savepoint.flatten_captured()


def test_a_state_without_torch_objects_is_captured():
    state = {"x": np.arange(3), "n": [1]}
    savepoint = Savepoint(state)
    savepoint.capture()
    expected = copy_state(state)
    state["x"] += 1
    state["n"].append(2)
    assert StateCopy(savepoint.flatten_captured()) == expected


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["forward", "step", "capture", "change", "restore"]), max_size=12))
def test_a_savepoint_is_correct_after_any_order_of_events(events):
    state = make_training(MAKERS["adam"])
    savepoint = Savepoint(state)
    expected: StateCopy | None = None
    for event in events:
        if event == "forward":
            forward(state)
        elif event == "step":
            step(state)
            expected = None
        elif event == "capture":
            savepoint.capture()
            expected = copy_state(state)
        elif event == "change":
            state["plain"]["t"] = torch.randn(2)
        else:
            state["scheduler"].load_state_dict(state["scheduler"].state_dict())
        found = savepoint.flatten_captured()
        assert (found is None) == (expected is None)
        if expected is not None:
            assert StateCopy(found) == expected
    savepoint.close()


def set_member(name, value):
    """Return a change that replaces a buffer of the second layer by a function of it."""

    def change(s):
        setattr(s["model"][1], name, value(getattr(s["model"][1], name)))

    return change


def set_data(name, value):
    """Return a change that gives the same buffer object other memory, or another view of it."""

    def change(s):
        member = getattr(s["model"][1], name)
        member.data = value(member.data)

    return change


WIDE = "square"
MEMBER_CHANGES: dict[str, Callable[[Json], object]] = {
    "another dtype": set_member("running_mean", torch.Tensor.double),
    "another dtype of the same size": set_data("running_mean", lambda b: b.view(torch.int32)),
    "another shape": set_member("running_mean", lambda b: b[:2].clone()),
    "another shape of the same memory": set_data(WIDE, lambda b: b.view(2, 8)),
    "transposed": set_data(WIDE, torch.Tensor.t),
    "transposed in place": lambda s: s["model"][1].square.t_(),
    "resized in place": lambda s: s["model"][1].square.resize_(2, 2),
    "negated": set_data(WIDE, torch._neg_view),
    "expanded": set_member(WIDE, lambda b: b[:1].expand(4, 4)),
    "sparse": set_member(WIDE, torch.Tensor.to_sparse),
    "complex": set_member(WIDE, lambda b: torch.complex(b, b).conj()),
    "empty": set_member(WIDE, lambda b: b[:0]),
    "large": set_member(WIDE, lambda b: torch.randn(100, 100)),
    "a parameter": set_member(WIDE, lambda b: torch.nn.Parameter(b, requires_grad=False)),
    "removed, as None": set_member(WIDE, lambda b: None),
    "removed": lambda s: delattr(s["model"][1], WIDE),
    "not persistent": lambda s: s["model"][1]._non_persistent_buffers_set.add(WIDE),
    "exchanged": lambda s: s["model"][1]._buffers.update(
        running_mean=s["model"][1].running_var, running_var=s["model"][1].running_mean
    ),
    "tied": lambda s: s["model"][1].register_buffer("running_mean", s["model"][1].running_var),
    "tied to a member elsewhere": lambda s: s.update(z=s["model"][1].square.detach()),
    "tied to an earlier member": lambda s: s["first"].append(s["model"][1].square.detach()),
    "tied to a parameter": lambda s: s["model"][1].register_buffer(
        WIDE, s["model"][0].weight.detach()
    ),
    "another order": lambda s: s["model"][1]._buffers.update(
        running_mean=s["model"][1]._buffers.pop("running_mean")
    ),
    "renamed": lambda s: s["model"][1]._buffers.update(x=s["model"][1]._buffers.pop(WIDE)),
    "a frozen parameter renamed": lambda s: s["model"][2]._parameters.update(
        x=s["model"][2]._parameters.pop("bias")
    ),
    "a frozen parameter replaced": lambda s: setattr(
        s["model"][2], "bias", torch.nn.Parameter(torch.randn(4))
    ),
    "a frozen parameter in other memory": lambda s: setattr(
        s["model"][2].bias, "data", torch.randn(4)
    ),
    "a frozen parameter tied to one that trains": lambda s: setattr(
        s["model"][2].bias, "data", s["model"][1].bias.data
    ),
    "a child named otherwise": lambda s: s["model"]._modules.update(y=s["model"]._modules.pop("1")),
    "a submodule in two places": lambda s: s["model"].append(s["model"][1]),
}


@pytest.mark.parametrize("change", MEMBER_CHANGES.values(), ids=MEMBER_CHANGES)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:ComplexHalf")
def test_members_of_modules_are_copied_as_they_are_at_the_moment(change):
    torch.manual_seed(0)
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), frozen)
    model[1].register_buffer("square", torch.randn(4, 4))
    trained = [p for p in model.parameters() if p.requires_grad]
    state: Json = {"first": [], "model": model, "optimizer": torch.optim.AdamW(trained)}

    def overwrite():
        """Change every value in memory that a forward pass may change."""
        stable = {p.data_ptr() for p in trained}
        for leaf in flatten(state).leaves:
            source = leaf.source
            is_mutable = leaf.key.startswith(("model", "z", "first")) and "/indices" not in leaf.key
            if is_mutable and source.data_ptr() not in stable:
                live = source.data if source._base is None else source
                if source.untyped_storage().data_ptr() not in stable:
                    live.untyped_storage().copy_(
                        torch.randint(
                            0, 64, (live.untyped_storage().nbytes(),), dtype=torch.uint8
                        ).untyped_storage()
                    )

    savepoint = Savepoint(state)
    for begin in (lambda _: None, lambda _: None, change, lambda _: None):
        with torch.no_grad():
            begin(state)
        savepoint.capture()
        expected = copy_state(state)
        overwrite()
        assert StateCopy(savepoint.flatten_captured()) == expected


def test_changes_of_buffers_that_pytorch_does_not_count_are_copied():
    """Version counters stay the same, but the copy never depends on them."""
    model = torch.nn.BatchNorm1d(3)
    state: Json = {"model": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    savepoint = Savepoint(state)
    for i in range(3):
        versions = [b._version for b in model.buffers()]
        model.running_mean.data.add_(i)
        model.running_var.numpy().fill(i + 5)
        assert versions == [b._version for b in model.buffers()]
        savepoint.capture()
        expected = copy_state(state)
        model.running_var.data.zero_()
        assert StateCopy(savepoint.flatten_captured()) == expected
