"""Strict loads of objects with ``state_dict`` and ``load_state_dict``: which saved keys fit, and
which objects may have other keys than their saved state."""

import copy
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import limpet
from limpet.errors import DTypeMismatch, MissingLeaf, PlanError, UnexpectedLeaf
from tests.loading.test_live_objects import SCHEDULERS
from tests.states import save_state


class Stateful:
    """An object that counts the calls of its methods."""

    def __init__(self, state):
        self.state = state
        self.saves = 0
        self.loaded = []

    def state_dict(self):
        self.saves += 1
        return self.state

    def load_state_dict(self, state):
        self.loaded.append(state)


def load_object(saved, live, **options):
    """Save one object's state, load it into another, and return that object."""
    url = save_state({"o": Stateful(saved)})
    obj = live if hasattr(live, "state_dict") else Stateful(live)
    limpet.load(url, into={"o": obj}, **options)
    return obj


def assert_refused(saved, live, kind, missing=(), unexpected=(), options=None):
    """Assert that the load raises exactly ``kind`` with these keys and does not call the object."""
    obj = Stateful(live)
    url = save_state({"o": Stateful(saved), "t": torch.ones(2)})
    tensor = torch.zeros(2)
    with pytest.raises(PlanError) as e:
        limpet.load(url, into={"o": obj, "t": tensor}, **options or {})
    assert type(e.value) is kind, e.value
    assert (set(e.value.missing), set(e.value.unexpected)) == (set(missing), set(unexpected))
    assert obj.loaded == []
    assert tensor.tolist() == [0, 0]
    return str(e.value)


def test_keys_that_one_side_lacks_are_refused():
    assert_refused({"a": 1}, {"b": 1}, PlanError, ["o/b"], ["o/a"])
    assert_refused({"a": 1}, {"a": 1, "b": 2}, MissingLeaf, ["o/b"])
    assert_refused(
        {"a": 1, "b": {"c": 1, "d": 2}}, {"a": 1}, UnexpectedLeaf, (), ["o/b/c", "o/b/d"]
    )
    assert_refused({}, {"a": 1}, MissingLeaf, ["o/a"])
    assert_refused({"x/y": 1}, {"x~y": 1}, PlanError, ["o/x~0y"], ["o/x~1y"])
    assert_refused(
        OrderedDict(a=torch.ones(3)), OrderedDict(b=torch.ones(3)), PlanError, ["o/b"], ["o/a"]
    )
    message = assert_refused({"1": 0, "a": 1}, {"b": 1}, PlanError, ["o/b"], ["o/a"])
    assert "check_state_dict(state) in a class whose keys change" in message


def test_a_state_of_another_kind_is_refused():
    assert_refused({"a": 1}, [1], DTypeMismatch)
    assert_refused([1], {"a": 1}, DTypeMismatch)
    assert_refused(torch.ones(1), {"a": 1}, DTypeMismatch)
    assert_refused({"a": 1}, torch.ones(1), DTypeMismatch)


def test_one_error_names_the_differences_of_all_objects_and_of_the_rest():
    state = {"o": Stateful({"a": 1}), "p": Stateful({"a": 1, "c": 3}), "t": torch.ones(2), "k": 1}
    live = {"o": Stateful({"b": 1}), "p": Stateful({"a": 1}), "t": torch.ones(3), "l": 1}
    with pytest.raises(PlanError) as e:
        limpet.load(save_state(state), into=live)
    assert set(e.value.missing) == {"o/b", "l"}
    assert set(e.value.unexpected) == {"o/a", "p/c", "k"}
    assert e.value.misfits == ("t",)


def test_objects_in_containers_and_wrappers_are_compared():
    def nest(state):
        return {
            "list": [Stateful(state)],
            "rank": limpet.PerRank(Stateful(state)),
            "first": limpet.Replicated(Stateful(state)),
        }

    with pytest.raises(PlanError) as e:
        limpet.load(save_state(nest({"a": 1})), into=nest({"b": 1}))
    assert len(e.value.missing) == len(e.value.unexpected) == 3


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"loss": [1.0, 2.0], "lr": [0.1]}, {}),  # filled later
        ({"a": 1}, None),
        ([1, 2], None),
        ({"size": 3, "0": 1, "1": 1, "2": 1}, {"size": 0}),  # items
        ({"size": 0}, {"size": 3, "item_0": 1, "item_12": 1}),
        ({1: "a", (2, 3): "b"}, {4: "c", 5: "d"}),
        ({"n": 1, "_cache": 2}, {"n": 1, "_last": 3}),  # internal
        (Counter(cat=3, dog=1), Counter(bird=1)),
        ({"state": {0: {"m": 1}}, "param_groups": [{"lr": 1}]}, {"state": {}, "param_groups": []}),
        ({"best": None, "x": 1}, {"best": torch.ones(3), "x": [2]}),  # values may change their type
        ({"t": torch.ones(7)}, {"t": torch.ones(2)}),  # and tensors their shape
        ([1, 2, 3], [1]),
        (5, "text"),
    ],
)
def test_states_that_differ_only_in_what_training_changes_are_loaded(saved, live):
    obj = load_object(saved, live)
    assert len(obj.loaded) == 1
    assert type(obj.loaded[0]) is type(saved)
    assert len(obj.loaded[0]) == len(saved) if hasattr(saved, "__len__") else obj.loaded == [saved]


def test_an_object_with_its_own_check_may_have_any_keys():
    class Checked(Stateful):
        def check_state_dict(self, state):
            self.checked = state

    obj = load_object({"a": 1, "b": 2}, Checked({"c": 1}))
    assert obj.loaded == [{"a": 1, "b": 2}] == [obj.checked]
    assert obj.saves == 0


def test_an_object_that_has_no_state_before_its_first_load_is_loaded():
    class Unready(Stateful):
        def state_dict(self):
            raise RuntimeError("consolidate first")  # as ZeroRedundancyOptimizer

    assert load_object({"a": 1}, Unready(None)).loaded == [{"a": 1}]


def test_lenient_loads_pass_the_keys_of_the_live_object():
    saved, live = {"a": 1, "old": 2, "_x": 3, "5": 4}, {"a": 5, "new": torch.ones(2), "_y": 6}
    assert_refused(saved, live, MissingLeaf, ["o/new"], options={"unexpected": "ignore"})
    assert_refused(saved, live, UnexpectedLeaf, (), ["o/old"], options={"missing": "keep"})
    obj = load_object(saved, live, missing="keep", unexpected="ignore")
    assert obj.loaded == [{"a": 1, "_x": 3, "5": 4, "new": live["new"], "_y": 6}]
    assert obj.loaded[0]["new"] is live["new"]


def test_differences_outside_of_the_selected_keys_are_no_errors():
    saved, live = {"a": 1, "old": 2}, {"a": 5, "new": 6}
    assert load_object(saved, live, keys="o/a").loaded == [{"a": 1, "new": 6}]
    assert_refused(saved, live, UnexpectedLeaf, (), ["o/old"], {"keys": ["t", "o/a", "o/old"]})
    obj = Stateful(live)
    limpet.load(save_state({"o": Stateful(saved), "t": 1}), into={"o": obj, "t": 0}, keys="t")
    assert (obj.saves, obj.loaded) == (0, [])


def test_a_load_calls_state_dict_once():
    assert load_object({"a": 1}, {"a": 2}).saves == 1
    # a data loader with workers would start them
    assert load_object({"_snapshot": 1, "_steps": 2}, {"_snapshot": 1}).saves == 0
    absent = Stateful({"a": 1})
    with pytest.raises(MissingLeaf):
        limpet.load(save_state({"t": 1}), into={"t": 1, "o": absent})
    assert absent.saves == 0


def test_random_generators_of_other_devices_are_no_difference():
    state = limpet.RNG().state_dict()
    url = save_state({"rng": Stateful({"0": {**state, "xpu": [state["torch"]]}})})
    limpet.load(url, into={"rng": limpet.RNG()})
    del state["torch"]
    limpet.load(save_state({"rng": Stateful(state)}), into={"rng": limpet.RNG()})


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_is_restored(workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return stateful.StatefulDataLoader(list(range(12)), batch_size=2, num_workers=workers)

    a, b = make(), make()
    batches = iter(a)
    next(batches)
    limpet.load(save_state({"loader": a}), into={"loader": b})
    assert [x.tolist() for x in b] == [x.tolist() for x in batches]


def make_scheduler(name):
    opt = optim.SGD(nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)
    return SCHEDULERS[name](opt)


@pytest.mark.filterwarnings("ignore:.*epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_another_class_of_scheduler_is_refused(name):
    url = save_state({"s": make_scheduler(name)})
    for other in SCHEDULERS:
        live = make_scheduler(other)
        before = copy.deepcopy(live.state_dict())
        if {name, other} <= {"LambdaLR", "MultiplicativeLR"} or name == other:
            limpet.load(url, into={"s": live})  # equal keys: a snapshot does not name classes
            continue
        with pytest.raises(PlanError, match="s/"):
            limpet.load(url, into={"s": live})
        assert live.state_dict() == before


def test_a_scheduler_inside_a_scheduler_is_compared():
    def make(inner):
        opt = optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        return {"s": lrs.SequentialLR(opt, [lrs.LinearLR(opt), *inner(opt)], [3] * len(inner(opt)))}

    cosine = make(lambda o: [lrs.CosineAnnealingLR(o, 5)])
    url = save_state(make(lambda o: [lrs.StepLR(o, 2)]))
    with pytest.raises(PlanError) as e:
        limpet.load(url, into=cosine)
    assert e.value.missing == ("s/_schedulers/1/T_max", "s/_schedulers/1/eta_min")
    assert e.value.unexpected == ("s/_schedulers/1/step_size", "s/_schedulers/1/gamma")
    limpet.load(url, into=cosine, missing="keep", unexpected="ignore")
    assert cosine["s"].state_dict()["_schedulers"][1]["T_max"] == 5
    three = make(lambda o: [lrs.StepLR(o, 2), lrs.StepLR(o, 3)])
    with pytest.raises(MissingLeaf, match="s/_schedulers/2"):
        limpet.load(url, into=three)
    limpet.load(url, into=three, missing="keep")
    assert three["s"].state_dict()["_schedulers"][2]["step_size"] == 3
    with pytest.raises(UnexpectedLeaf, match="s/_schedulers/2"):
        limpet.load(save_state(three), into=make(lambda o: [lrs.StepLR(o, 2)]))


@pytest.mark.parametrize("name", ["StepLR", "SequentialLR", "ChainedScheduler"])
def test_states_of_other_releases_of_pytorch_are_loaded(name):
    """PyTorch 2.6 to 2.13 differ in ``verbose``, ``_is_initial``, and ``default_min_lr``."""
    other = make_scheduler(name)
    state = other.state_dict()
    for one in [state, *state.get("_schedulers", ())]:
        one.pop("_is_initial", None)
        one |= {"verbose": False, "_new": 1}
    for saved, live in ((Stateful(state), make_scheduler(name)), (make_scheduler(name), other)):
        limpet.load(save_state({"s": saved}), into={"s": live})
    plateau = lrs.ReduceLROnPlateau(optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
    old = plateau.state_dict()
    old.pop("default_min_lr", None)
    old.pop("_last_lr")
    limpet.load(save_state({"s": Stateful(old)}), into={"s": plateau})


@pytest.mark.parametrize("saved_on", [True, False])
def test_a_disabled_grad_scaler_has_no_keys(saved_on):
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    if saved_on:
        limpet.load(save_state({"s": on}), into={"s": off})  # GradScaler ignores the state
    else:
        url = save_state({"s": off})
        with pytest.raises(MissingLeaf, match=r"missing in the snapshot: s \(4 leaves\)"):
            limpet.load(url, into={"s": on})
        limpet.load(url, into={"s": on}, missing="keep")
        assert on.get_scale() == 65536
