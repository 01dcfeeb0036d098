"""What each rank keeps of its own: saved by some ranks, loaded by more, fewer, or one."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from threading import Lock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.data.rng import RNG
from holdfast.engine.state.replication import PerRank, Replicated
from holdfast.engine.state.sharding import Boxed
from holdfast.errors import DTypeMismatch, PlanError, RanksChanged, ShapeMismatch, Unsupported
from holdfast.storage.memory import MemoryStore
from tests.engine.states import assert_same
from tests.ranks import rank_threads as acting
from tests.ranks.rank_threads import (
    floats,
    for_each_rank,
    load_errors,
    load_on_ranks,
    save_error,
    save_on_ranks,
)


class Place:
    """Something with a state, such as a data loader."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "seen": torch.arange(self.at)}

    def load_state_dict(self, state):
        assert state["seen"].tolist() == list(range(state["at"]))
        self.at = state["at"]


def own(rank, value=None):
    """A state whose PerRank values are of every kind, of another shape on each rank."""
    n = rank + 10 if value is None else value
    return {
        "t": PerRank(torch.full((3, rank), n)),
        "nested": [PerRank({"n": n, "t": floats(n), "l": [n] * rank, "a": np.full(2, n)})],
        "place": PerRank(Place(n)),
        "common": floats(1, 2),
    }


def told(state):
    """What is in it, without what wraps it."""
    inner = state["nested"][0].value
    return [state["t"].value, inner, state["place"].value.at, state["common"]]


def other(ranks, later, match=None):
    """Where other ranks load what ranks keep of their own, that is told; else nothing is."""
    return nullcontext() if ranks == later else pytest.warns(RanksChanged, match=match)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("later", [1, 2, 4])
def test_each_rank_gets_its_own_back_and_new_ones_keep_what_they_have(ranks, later):
    store = save_on_ranks(*for_each_rank(ranks, own))
    lives = for_each_rank(later, lambda r: own(r, -1 if r < ranks else 99))
    for live in lives[:ranks]:  # lists take the length that they had
        live["place"].value.at = 0
    with other(ranks, later, r"t, nested/0, place \(saved by \d ranks?, loaded by \d\): "):
        load_on_ranks(store, *lives)
    for rank, live in enumerate(lives):
        assert_same(told(own(rank, None if rank < ranks else 99)), told(live))


def test_without_a_live_state_they_are_told_by_the_numbers_of_ranks():
    store = save_on_ranks(*for_each_rank(3, own))
    back = holdfast.load(store)
    assert list(back["t"]) == ["0", "1", "2"]
    assert [back["t"][str(r)].shape for r in range(3)] == [(3, r) for r in range(3)]
    assert back["place"]["2"]["at"] == 12
    assert back["nested"][0]["1"]["l"] == [11]
    assert_same({"1": torch.full((3, 1), 11)}, holdfast.load(store, keys="t/1")["t"])


def test_the_values_of_ranks_that_are_gone_are_not_unexpected_and_those_that_differ_are_errors():
    store = save_on_ranks(*for_each_rank(3, lambda r: {"a": PerRank(floats(*range(r + 1)))}))
    with other(
        3, 1, r"a \(saved by 3 ranks, loaded by 1\): the values of ranks 1, 2 are ignored\. If"
    ):
        load_on_ranks(store, {"a": PerRank(floats(9))})
    lives = for_each_rank(2, lambda r: {"a": PerRank(floats(9))})
    for e in load_errors(store, ShapeMismatch, *lives):
        assert "a/1 [2], live [1]" in str(e)
    assert_same(floats(9), lives[0]["a"].value)
    load_errors(store, DTypeMismatch, {"a": PerRank(torch.ones(1).int())})


def test_only_some_ranks_may_have_one():
    states = [{"x": 1}, {"x": 1, "a": PerRank([floats(1), 2])}, {"x": 1, "a": PerRank([3, 4, 5])}]
    store = save_on_ranks(*states)
    assert holdfast.open(store).keys() == ["x", "a/1/0", "a/1/1", "a/2/0", "a/2/1", "a/2/2"]
    lives = [{"x": 0}, {"x": 0, "a": PerRank([floats(0), 0])}, {"x": 0, "a": PerRank([0])}]
    load_on_ranks(store, *lives)
    assert_same([floats(1), 2], lives[1]["a"].value)
    assert lives[2]["a"].value == [3, 4, 5]


# -- other ranks than saved it -------------------------------------------------------------------


def seen(store, *lives, **options):
    """The warnings of a load by these ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_on_ranks(store, *lives, **options)
    assert {w.category for w in caught} <= {RanksChanged}
    assert {w.filename for w in caught} <= {acting.__file__}  # the line that loads
    return [
        str(w.message).partition(" load them: ")[2].partition(". If a value")[0] for w in caught
    ]


def test_that_values_of_ranks_do_not_fit_is_told_once_for_all_of_them():
    def state(r):
        return {"loader": PerRank({"at": 1, "x": floats(r)}), "a": [PerRank(r)], "w": floats(1)}

    store = save_on_ranks(*for_each_rank(4, state))
    both = "loader, a/0 (saved by 4 ranks, loaded by {}): {}"
    for later, end in (
        (1, "the values of ranks 1, 2, 3 are ignored"),
        (3, "the value of rank 3 is ignored"),
        (5, "rank 4 keeps its current value"),
        (6, "ranks 4, 5 keep their current values"),
    ):
        assert seen(store, *for_each_rank(later, state)) == [both.format(later, end)]
    assert seen(store, *for_each_rank(4, state)) == []


def test_only_what_is_asked_for_is_told_of():
    store = save_on_ranks(
        *for_each_rank(3, lambda r: {"a": PerRank(r), "b": PerRank(r), "w": floats(1)})
    )
    lives = for_each_rank(2, lambda r: {"a": PerRank(0), "b": PerRank(0), "w": floats(0)})
    assert seen(store, *lives, keys="w") == []
    assert seen(store, *lives, keys="b") == [
        "b (saved by 3 ranks, loaded by 2): the value of rank 2 is ignored"
    ]
    lives = for_each_rank(2, lambda r: {"w": floats(0)})
    assert seen(store, *lives, unexpected="ignore") == []


def test_values_of_some_ranks_fit_as_long_as_these_have_them():
    def state(r, *ranks):
        return {"x": 1, **({"a": PerRank([r, 0])} if r in ranks else {})}

    store = save_on_ranks(*for_each_rank(4, lambda r: state(r, 1, 3)))
    assert seen(store, *for_each_rank(5, lambda r: state(r, 1, 3))) == []
    assert seen(store, *for_each_rank(4, lambda r: state(r, 0, 1))) == [
        "a (saved by 2 ranks, loaded by 2): rank 0 keeps its current value,"
        " the value of rank 3 is ignored"
    ]
    assert seen(store, *for_each_rank(2, lambda r: state(r, 1))) == [
        "a (saved by 2 ranks, loaded by 1): the value of rank 3 is ignored"
    ]


def test_where_warnings_are_errors_nothing_is_changed():
    store = save_on_ranks(*for_each_rank(2, lambda r: {"a": PerRank(floats(r)), "w": floats(1, 2)}))
    live = {"a": PerRank(floats(9)), "w": floats(0, 0)}
    with pytest.raises(RanksChanged):
        load_on_ranks(store, live)
    assert_same({"a": floats(9), "w": floats(0, 0)}, {"a": live["a"].value, "w": live["w"]})


def test_generators_fit_any_ranks():
    store = save_on_ranks(*for_each_rank(2, lambda r: {"rng": Turn(r)}))
    for size in (1, 2, 4):
        assert seen(store, *for_each_rank(size, lambda r: {"rng": Turn(9)})) == []


def test_an_own_value_under_names_that_are_equal_as_text():
    states = for_each_rank(2, lambda r: {"d": {1: PerRank(r), "1": PerRank(floats(r))}})
    assert_same({"d": {1: {"0": 0, "1": 1}, "1": {"0": floats(0), "1": floats(1)}}},
         holdfast.load(save_on_ranks(*states)))  # fmt: skip


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (lambda r: Replicated({"x": PerRank(1)}), Unsupported, "'a/x'"),
        (lambda r: Replicated([Replicated(1)]), Unsupported, "'a/0'"),
        (lambda r: PerRank({"x": Replicated(1)}), Unsupported, "/x"),
        (lambda r: PerRank([PerRank(1)]), Unsupported, "/0"),
        (lambda r: PerRank(PerRank(1)), Unsupported, "'a/"),
        (lambda r: PerRank(Boxed(floats(r), (r,), (2,))), PlanError, "a/0: its boxes leave gaps"),
        (lambda r: PerRank(object()), Unsupported, "'a/"),
    ],
)  # fmt: skip
def test_what_is_refused(value, kind, words):
    e = save_error(kind, *for_each_rank(2, lambda r: {"a": value(r)}))
    assert words in str(e)


def test_the_same_memory_inside_and_outside():
    def state(r):
        x, y = floats(1, 2), floats(r)
        return {"a": x, "b": PerRank([x, y]), "c": PerRank({"z": y})}

    store = save_on_ranks(*for_each_rank(2, state))
    back = holdfast.load(store)
    assert back["a"] is back["b"]["0"][0] is back["b"]["1"][0]
    assert back["b"]["1"][1] is back["c"]["1"]["z"]
    assert back["c"]["1"]["z"].item() == 1
    lives = for_each_rank(2, lambda r: {"a": floats(0, 0), "b": PerRank([floats(0, 0), floats(9)]),
                                   "c": PerRank({"z": floats(9)})})  # fmt: skip
    load_on_ranks(store, *lives)
    for r, live in enumerate(lives):
        assert_same([floats(1, 2), floats(r)], live["b"].value)
        assert_same({"z": floats(r)}, live["c"].value)


# -- random generators ---------------------------------------------------------------------------
# The ranks are threads of one process and share its generators: here they take turns.

TURNS = Lock()


class Turn:
    """An RNG as another process would have it: its generators are set before it is asked."""

    keeps_per_rank = True

    def __init__(self, seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.state = RNG().state_dict()

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state

    def derive(self, rank):
        with TURNS:
            rng = RNG()
            rng.load_state_dict(self.state)
            rng.derive(rank)
            self.state = rng.state_dict()

    def draw(self):
        RNG().load_state_dict(self.state)
        return random.random(), float(np.random.random()), float(torch.rand(1).item())


@pytest.fixture(autouse=True)
def _generators():
    rng = RNG()
    before = rng.state_dict()
    yield
    rng.load_state_dict(before)


def drawn(store, wrap, size):
    turns = for_each_rank(size, lambda r: Turn(1000 + r))
    load_on_ranks(store, *[{"rng": wrap(turn)} for turn in turns])
    return [turn.draw() for turn in turns]


def bare(value):
    return value


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 6), st.sampled_from([bare, PerRank, lambda v: PerRank([v])])
)
def test_generators_go_on_and_new_ranks_have_seeds_of_their_own(ranks, later, wrap):
    store = save_on_ranks(*for_each_rank(ranks, lambda r: {"rng": wrap(Turn(r))}))
    expected = [Turn(r).draw() for r in range(ranks)]
    with other(ranks if wrap is not bare else later, later):
        got = drawn(store, wrap, later)
    assert got[:ranks] == expected[:later]
    if wrap is bare:
        assert got == drawn(store, wrap, later)  # of the snapshot alone
        assert len(set(got + expected)) == max(later, ranks)
        for i in range(3):  # each of the three generators
            assert len({draw[i] for draw in got + expected}) == max(later, ranks)
    else:  # a new rank keeps what it has
        assert got[ranks:] == [Turn(1000 + r).draw() for r in range(ranks, later)]


def test_generators_that_are_replicated_are_the_first_ranks_everywhere():
    store = save_on_ranks(*for_each_rank(3, lambda r: {"rng": Replicated(Turn(r))}))
    assert drawn(store, Replicated, 4) == [Turn(0).draw()] * 4


def test_the_real_thing_in_turns():
    """``RNG`` itself, by ranks that are asked one after the other."""
    store = MemoryStore()
    torch.manual_seed(5)
    holdfast.save(store, {"rng": RNG()}, group="alone")
    expected = torch.rand(3).tolist()
    load_on_ranks(store, {"rng": RNG()})
    assert torch.rand(3).tolist() == expected
