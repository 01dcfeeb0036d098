"""Pipeline stages: the different keys of the ranks form one state, and mismatches raise on all."""

import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import (
    DigestMismatch,
    DTypeMismatch,
    MissingLeaf,
    PlanError,
    RankFailed,
    ShapeMismatch,
    UnexpectedLeaf,
)
from limpet.loading.snapshot import reader_of
from limpet.state.sharding import Boxed
from tests.fakegroup import FakeGroup
from tests.ranks.rank_threads import (
    floats,
    for_each_rank,
    load_errors,
    load_on_ranks,
    save_error,
    save_on_ranks,
)
from tests.states import assert_same, clone

LAYERS = 6


class Net(nn.Module):
    """Some of the layers of a model, under their names in the whole model."""

    def __init__(self, layers, seed):
        super().__init__()
        torch.manual_seed(seed)
        for i in layers:
            self.add_module(f"l{i}", nn.Linear(4, 4))
            self.add_module(f"n{i}", nn.BatchNorm1d(4))


def trained_stage(layers, seed, optimizer_type=torch.optim.AdamW, **options):
    net = Net(layers, seed)
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = optimizer_type(groups, lr=0.1, **options)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return {"model": net, "optimizer": optimizer, "step": 1}


def stages(size, seed, optimizer_type=torch.optim.AdamW, **options):
    """Return the states of ``size`` stages of contiguous layers, split as evenly as possible."""
    bounds = [LAYERS * r // size for r in range(size + 1)]
    return [
        trained_stage(range(bounds[r], bounds[r + 1]), seed + r, optimizer_type, **options)
        for r in range(size)
    ]


def slots(state):
    """Return the optimizer's slots by parameter name."""
    names = {p: n for n, p in state["model"].named_parameters()}
    return {names[p]: dict(s) for p, s in state["optimizer"].state.items()}


OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adafactor, {}),
    (torch.optim.RMSprop, {"centered": True}),
]


@pytest.mark.parametrize(
    ("optimizer_type", "options"), OPTIMIZERS, ids=lambda k: getattr(k, "__name__", "")
)
@pytest.mark.parametrize(("saving_ranks", "loading_ranks"), [(2, 1), (2, 3), (3, 2), (1, 6)])
def test_stages_load_into_a_different_number_of_stages(
    saving_ranks, loading_ranks, optimizer_type, options
):
    saved = stages(saving_ranks, 0, optimizer_type, **options)
    store = save_on_ranks(*saved)
    loaded = stages(loading_ranks, 50, optimizer_type, **options)
    load_on_ranks(store, *loaded)
    all_tensors, all_slots = {}, {}
    for state in saved:
        all_tensors |= state["model"].state_dict()
        all_slots |= slots(state)
    for state in loaded:
        for name, value in state["model"].state_dict().items():
            assert torch.equal(value, all_tensors[name])
        assert_same({n: all_slots[n] for n in slots(state)}, slots(state))
    tree = limpet.load(store)
    assert set(tree["model"]) == set(all_tensors)
    assert [sorted(g["params"]) for g in tree["optimizer"]["groups"]] == [
        sorted(f"model.l{i}.weight" for i in range(LAYERS)),
        sorted(
            f"model.{n}"
            for i in range(LAYERS)
            for n in (f"l{i}.bias", f"n{i}.weight", f"n{i}.bias")
        ),
    ]


def test_an_optimizer_that_has_not_stepped_gets_its_slots():
    store = save_on_ranks(*stages(3, 0))
    loaded = stages(2, 9)
    unstepped = []
    for state in loaded:
        groups = [
            {k: g[k] for k in ("params", "weight_decay")} for g in state["optimizer"].param_groups
        ]
        unstepped.append(state | {"optimizer": torch.optim.AdamW(groups, lr=0.1)})
    load_on_ranks(store, *unstepped)
    tree = limpet.load(store)["optimizer"]["state"]
    for state in unstepped:
        for name, values in slots(state).items():
            assert_same(tree[f"model.{name}"], values)


def test_different_optimizer_options_of_stages_raise():
    states = stages(2, 0)
    states[1]["optimizer"].param_groups[1]["lr"] = 0.5
    e = save_error(PlanError, *states)
    assert "optimizer/groups/1/lr: 0.1 on rank 0, 0.5 on rank 1" in str(e)


def test_nested_containers_of_stages_merge_in_rank_order():
    states = [
        {"d": {"a": floats(0), "z": (1, {"x": 1})}, "o": OrderedDict(q=1)},
        {"d": {"b": {3: floats(1)}, "z": (1, {"y": floats(2)})}},
        {"d": {"b": {4: "x"}, "a": floats(0)}, "o": OrderedDict(p=floats(3)), "n": None},
    ]
    loaded = limpet.load(save_on_ranks(*states))
    expected = {
        "d": {"a": floats(0), "z": (1, {"x": 1, "y": floats(2)}), "b": {3: floats(1), 4: "x"}},
        "o": OrderedDict(q=1, p=floats(3)),
        "n": None,
    }
    assert_same(expected, loaded)
    live_states = [clone(s) for s in states]
    for live in live_states:
        live["d"].get("b", {}).pop(4, None)
    live_states[2]["d"]["b"] = {4: None}
    load_on_ranks(save_on_ranks(*states), *live_states)
    assert_same(list(states), live_states)


def test_a_dict_of_plain_values_takes_what_no_other_stage_has():
    """A member that another stage expects is its own; one that none expects was added later."""
    grown = {"a": 1, "deep": {"b": [2, floats(1)]}, "none": {}}
    saved = [{"best": grown, "d": {"x": {}, 0: 1}}, {"best": grown, "d": {"x": {"y": 5}, 1: 2}}]
    live = [{"best": {}, "d": {"x": {}, 0: 0}}, {"best": {"old": 3}, "d": {"x": {}, 1: 0}}]
    load_on_ranks(save_on_ranks(*saved), *live)
    saved[0]["d"]["x"] = {"y": 5}
    assert_same(saved, live)


def save_two_stages():
    return save_on_ranks(
        {"a": floats(1), "m": {"x": floats(2)}}, {"b": floats(3), "m": {"y": floats(4)}}
    )


def two_live_stages(*extra):
    """Return two stages other than the saved ones, which together expect all saved leaves."""
    states = [
        {"a": floats(0), "m": {"y": floats(0)}},
        {"b": floats(0), "m": {"x": floats(0), "y": floats(0)}},
    ]
    return [s | e for s, e in zip(states, extra, strict=True)] if extra else states


def load_errors_without_changes(store, kind, states, **options):
    before = clone(states)
    errors = load_errors(store, kind, *states, **options)
    assert_same(before, states)
    return errors


def test_a_saved_leaf_is_expected_if_any_stage_has_it():
    states = two_live_stages()
    load_on_ranks(save_two_stages(), *states)
    assert_same([{"a": floats(1), "m": {"y": floats(4)}},
          {"b": floats(3), "m": {"x": floats(2), "y": floats(4)}}], states)  # fmt: skip


def test_a_leaf_that_no_rank_expects_raises_on_all_ranks():
    states = two_live_stages()
    del states[1]["m"]["x"]
    for e in load_errors_without_changes(save_two_stages(), UnexpectedLeaf, states):
        assert e.unexpected == ("m/x",)
    load_on_ranks(save_two_stages(), *states, unexpected="ignore")
    assert_same(floats(1), states[0]["a"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_leaf_that_is_missing_for_one_rank_raises_on_all_ranks(rank):
    extra = [{}, {}]
    extra[rank] = {"new": floats(7), "c": 8}
    states = two_live_stages(*extra)
    errors = load_errors_without_changes(save_two_stages(), MissingLeaf, states)
    for e in errors:
        assert e.missing == ("new", "c")
        assert f"does not fit the live state of rank {rank}; nothing was changed" in str(e)
    load_on_ranks(save_two_stages(), *states, missing="keep")
    assert_same(floats(7), states[rank]["new"])
    assert_same(floats(4), states[0]["m"]["y"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (floats(1, 2), ShapeMismatch),
        (torch.ones(1).int(), DTypeMismatch),
        ({"x": 1}, DTypeMismatch),
        (Boxed(floats(1), (0,), (2,)), ShapeMismatch),
    ],
)
def test_a_mismatched_leaf_on_one_rank_raises_on_all_ranks(rank, value, kind):
    store = save_on_ranks(*for_each_rank(2, lambda r: {"w": floats(1), "z": floats(2)}))
    states = for_each_rank(2, lambda r: {"w": floats(0), "z": floats(0)})
    states[rank]["w"] = value
    for e in load_errors(store, kind, *states):
        assert "w" in str(e)
    for state in states:
        assert_same(floats(0), state["z"])
    assert_same(floats(0), states[1 - rank]["w"])


def test_nothing_is_changed_if_an_object_of_one_rank_refuses_its_state():
    class Refusing:
        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, state):
            raise AssertionError("it refused the state before")

        def check_state_dict(self, state):
            if self.refuses:
                raise PlanError("not with me")

    def state(r):
        obj = Refusing()
        obj.refuses = False
        return {"o": obj, "w": floats(1)}

    store = save_on_ranks(*for_each_rank(3, state))
    states = [s | {"w": floats(0)} for s in for_each_rank(3, state)]
    states[2]["o"].refuses = True
    for e in load_errors(store, PlanError, *states):
        assert "not with me" in str(e)
    for live in states:
        assert_same(floats(0), live["w"])


def test_rename_and_cast_with_different_layouts():
    whole = torch.arange(12, dtype=torch.float64).reshape(6, 2)
    parts = [Boxed(whole[3 * r : 3 * r + 3], (3 * r, 0), (6, 2)) for r in range(2)]
    store = save_on_ranks(*[{"old": {"w": part}} for part in parts])
    parts = [Boxed(torch.zeros(2, 2).bfloat16(), (2 * r, 0), (6, 2)) for r in range(3)]
    states = [{"new": {"w": part}} for part in parts]
    errors = load_errors(store, DTypeMismatch, *states, rename={"old": "new"})
    assert "new/w float64, live bfloat16" in str(errors[0])
    load_on_ranks(store, *states, rename={"old": "new"}, cast=True)
    for r, part in enumerate(parts):
        assert torch.equal(part.tensor, whole[2 * r : 2 * r + 2].bfloat16())


@pytest.mark.parametrize("reader", [0, 2])
def test_damage_that_one_rank_reads_raises_on_all_ranks(reader):
    """The error says that the live states are not valid, because some ranks have changed theirs."""
    whole = torch.arange(4 * 40_000, dtype=torch.int32).reshape(4, -1)

    def part(r, empty=False):
        rows = whole[r : r + 1].clone()
        return {"w": Boxed(rows.zero_() if empty else rows, (r, 0), tuple(whole.shape))}

    store = save_on_ranks(*for_each_rank(4, part))
    name = next(
        s.name
        for s in reader_of(limpet.open(store)).manifest.shards
        if f"0000{reader}-of" in s.name
    )
    data, modified = store._objects[name]
    store._objects[name] = (data[:-1] + bytes([data[-1] ^ 1]), modified)
    states = for_each_rank(4, lambda r: part(r, empty=True))
    for rank, e in enumerate(load_errors(store, DigestMismatch, *states)):
        assert e.live_state == "not valid"
        assert "is not valid" in str(e)
        assert e.leaf == "w"
        assert name in str(e)
        if rank != reader:
            assert e.rank == reader
    assert not states[reader]["w"].tensor.any()  # a damaged chunk is not copied
    states = for_each_rank(4, lambda r: part(r, empty=True))
    with pytest.raises(DigestMismatch):
        limpet.load(store, into=states[reader], group="alone")
    other = (reader + 1) % 4
    limpet.load(store, into=states[other], group="alone")
    assert torch.equal(states[other]["w"].tensor, whole[other : other + 1])


class UserObject:
    """An object whose ``load_state_dict`` waits for all ranks and then optionally fails."""

    def __init__(self, fails, all_arrived):
        self.fails, self.all_arrived = fails, all_arrived

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        self.all_arrived.wait(20)
        if self.fails:
            raise ZeroDivisionError("in its own code")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_user_object_that_fails_on_one_rank_raises_on_all_ranks(rank):
    all_arrived = threading.Barrier(3)
    store = save_on_ranks(
        *for_each_rank(3, lambda r: {"o": UserObject(False, all_arrived), "w": floats(1)})
    )
    with FakeGroup(3) as group:
        states = for_each_rank(
            3, lambda r: {"o": UserObject(r == rank, all_arrived), "w": floats(0)}
        )
        errors = group.outcomes(lambda r: limpet.load(store, into=states[r]))
        for r, e in enumerate(errors):
            if r == rank:
                assert isinstance(e.__cause__, ZeroDivisionError)
                assert (e.member, e.live_state) == ("o", "not valid")
            else:
                assert isinstance(e, RankFailed)
                assert (e.rank, e.live_state) == (rank, "not valid")
                assert "ZeroDivisionError: in its own code" in str(e)
        states = for_each_rank(3, lambda r: {"o": UserObject(False, all_arrived), "w": floats(0)})
        group.run(lambda r: limpet.load(store, into=states[r]))  # the next one works
        assert all(state["w"].item() == 1 for state in states)
