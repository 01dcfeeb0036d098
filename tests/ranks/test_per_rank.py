"""Per-rank values: saved by some ranks, and loaded by more ranks, fewer ranks, or one process."""

import random
import warnings
from contextlib import nullcontext
from threading import Lock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.data.rng import RNG
from limpet.errors import DTypeMismatch, InexactResume, PlanError, ShapeMismatch, Unsupported
from limpet.state.replication import PerRank, Replicated
from limpet.state.sharding import Boxed
from tests.ranks import rank_threads
from tests.ranks.rank_threads import (
    floats,
    for_each_rank,
    load_errors,
    load_on_ranks,
    save_error,
    save_on_ranks,
)
from tests.states import assert_same


class Loader:
    """A stateful object, such as a data loader."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"at": self.position, "seen": torch.arange(self.position)}

    def load_state_dict(self, state):
        assert state["seen"].tolist() == list(range(state["at"]))
        self.position = state["at"]


def per_rank_state(rank, value=None):
    """Return a state with PerRank values of every kind. Their shapes differ between ranks."""
    n = rank + 10 if value is None else value
    return {
        "t": PerRank(torch.full((3, rank), n)),
        "nested": [PerRank({"n": n, "t": floats(n), "l": [n] * rank, "a": np.full(2, n)})],
        "loader": PerRank(Loader(n)),
        "common": floats(1, 2),
    }


def unwrapped(state):
    """Return the values of a state without their wrappers."""
    inner = state["nested"][0].value
    return [state["t"].value, inner, state["loader"].value.position, state["common"]]


def warns_if_ranks_changed(saving_ranks, loading_ranks, match=None):
    """Expect a warning if the number of ranks that load differs from the number that saved."""
    unchanged = saving_ranks == loading_ranks
    return nullcontext() if unchanged else pytest.warns(InexactResume, match=match)


@pytest.mark.parametrize("saving_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("loading_ranks", [1, 2, 4])
def test_each_rank_loads_its_own_values_and_new_ranks_keep_theirs(saving_ranks, loading_ranks):
    store = save_on_ranks(*for_each_rank(saving_ranks, per_rank_state))
    live_states = for_each_rank(
        loading_ranks, lambda r: per_rank_state(r, -1 if r < saving_ranks else 99)
    )
    for live in live_states[:saving_ranks]:  # lists get the saved length
        live["loader"].value.position = 0
    message = r"t, nested/0, loader \(saved by ranks? .*, loaded by ranks? .*\)\. A rank without"
    with warns_if_ranks_changed(saving_ranks, loading_ranks, message):
        load_on_ranks(store, *live_states)
    for rank, live in enumerate(live_states):
        expected = per_rank_state(rank, None if rank < saving_ranks else 99)
        assert_same(unwrapped(expected), unwrapped(live))


def test_a_load_without_a_live_state_returns_per_rank_values_by_rank_number():
    store = save_on_ranks(*for_each_rank(3, per_rank_state))
    loaded = limpet.load(store)
    assert list(loaded["t"]) == ["0", "1", "2"]
    assert [loaded["t"][str(r)].shape for r in range(3)] == [(3, r) for r in range(3)]
    assert loaded["loader"]["2"]["at"] == 12
    assert loaded["nested"][0]["1"]["l"] == [11]
    assert_same({"1": torch.full((3, 1), 11)}, limpet.load(store, keys="t/1")["t"])


def test_values_of_absent_ranks_are_ignored_and_mismatched_ones_are_errors():
    store = save_on_ranks(*for_each_rank(3, lambda r: {"a": PerRank(floats(*range(r + 1)))}))
    with warns_if_ranks_changed(3, 1, r"a \(saved by ranks 0, 1, 2, loaded by rank 0\)\."):
        load_on_ranks(store, {"a": PerRank(floats(9))})
    live_states = for_each_rank(2, lambda r: {"a": PerRank(floats(9))})
    for e in load_errors(store, ShapeMismatch, *live_states):
        assert "a/1 [2], live [1]" in str(e)
    assert_same(floats(9), live_states[0]["a"].value)
    load_errors(store, DTypeMismatch, {"a": PerRank(torch.ones(1).int())})


def test_only_some_ranks_may_have_a_per_rank_value():
    states = [{"x": 1}, {"x": 1, "a": PerRank([floats(1), 2])}, {"x": 1, "a": PerRank([3, 4, 5])}]
    store = save_on_ranks(*states)
    assert limpet.open(store).keys() == ["x", "a/1/0", "a/1/1", "a/2/0", "a/2/1", "a/2/2"]
    live_states = [{"x": 0}, {"x": 0, "a": PerRank([floats(0), 0])}, {"x": 0, "a": PerRank([0])}]
    load_on_ranks(store, *live_states)
    assert_same([floats(1), 2], live_states[1]["a"].value)
    assert live_states[2]["a"].value == [3, 4, 5]


def load_warnings(store, *live_states, **options):
    """Load on ranks, and return the middle part of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_on_ranks(store, *live_states, **options)
    assert {w.category for w in caught} <= {InexactResume}
    # the warning points to the line that calls load
    assert {w.filename for w in caught} <= {rank_threads.__file__}
    return [str(w.message).partition(" load them: ")[2].partition(". A rank")[0] for w in caught]


def test_one_warning_names_all_values_of_other_ranks():
    def state(r):
        return {"loader": PerRank({"at": 1, "x": floats(r)}), "a": [PerRank(r)], "w": floats(1)}

    store = save_on_ranks(*for_each_rank(4, state))
    for loading_ranks, loaded in ((1, "rank 0"), (5, "ranks 0, 1, 2, 3, 4")):
        assert load_warnings(store, *for_each_rank(loading_ranks, state)) == [
            f"loader, a/0 (saved by ranks 0, 1, 2, 3, loaded by {loaded})"
        ]
    assert load_warnings(store, *for_each_rank(4, state)) == []


def test_no_warning_if_the_ranks_with_a_per_rank_value_are_the_same():
    def state(r, *ranks):
        return {"x": 1, **({"a": PerRank([r, 0])} if r in ranks else {})}

    store = save_on_ranks(*for_each_rank(4, lambda r: state(r, 1, 3)))
    assert load_warnings(store, *for_each_rank(5, lambda r: state(r, 1, 3))) == []
    assert load_warnings(store, *for_each_rank(4, lambda r: state(r, 0, 1))) == [
        "a (saved by ranks 1, 3, loaded by ranks 0, 1)"
    ]
    assert load_warnings(store, *for_each_rank(2, lambda r: state(r, 1))) == [
        "a (saved by ranks 1, 3, loaded by rank 1)"
    ]


def test_nothing_is_changed_if_the_warning_is_an_error():
    store = save_on_ranks(*for_each_rank(2, lambda r: {"a": PerRank(floats(r)), "w": floats(1, 2)}))
    live = {"a": PerRank(floats(9)), "w": floats(0, 0)}
    with pytest.raises(InexactResume):
        load_on_ranks(store, live)
    assert_same({"a": floats(9), "w": floats(0, 0)}, {"a": live["a"].value, "w": live["w"]})


def test_random_generators_load_on_any_number_of_ranks_without_a_warning():
    store = save_on_ranks(*for_each_rank(2, lambda r: {"rng": RankRNG(r)}))
    for size in (1, 2, 4):
        assert load_warnings(store, *for_each_rank(size, lambda r: {"rng": RankRNG(9)})) == []


def test_per_rank_values_under_names_that_are_equal_as_text():
    states = for_each_rank(2, lambda r: {"d": {1: PerRank(r), "1": PerRank(floats(r))}})
    assert_same({"d": {1: {"0": 0, "1": 1}, "1": {"0": floats(0), "1": floats(1)}}},
         limpet.load(save_on_ranks(*states)))  # fmt: skip


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
def test_invalid_per_rank_and_replicated_values_are_refused(value, kind, words):
    e = save_error(kind, *for_each_rank(2, lambda r: {"a": value(r)}))
    assert words in str(e)


def test_memory_shared_between_per_rank_and_other_values_stays_shared():
    def state(r):
        x, y = floats(1, 2), floats(r)
        return {"a": x, "b": PerRank([x, y]), "c": PerRank({"z": y})}

    store = save_on_ranks(*for_each_rank(2, state))
    loaded = limpet.load(store)
    assert loaded["a"] is loaded["b"]["0"][0] is loaded["b"]["1"][0]
    assert loaded["b"]["1"][1] is loaded["c"]["1"]["z"]
    assert loaded["c"]["1"]["z"].item() == 1
    live_states = for_each_rank(
        2,
        lambda r: {
            "a": floats(0, 0),
            "b": PerRank([floats(0, 0), floats(9)]),
            "c": PerRank({"z": floats(9)}),
        },
    )
    load_on_ranks(store, *live_states)
    for r, live in enumerate(live_states):
        assert_same([floats(1, 2), floats(r)], live["b"].value)
        assert_same({"z": floats(r)}, live["c"].value)


# -- random generators ---------------------------------------------------------------------------
# The ranks are threads of one process and share its generators, so they take turns.

GENERATOR_LOCK = Lock()


class RankRNG:
    """An RNG as a rank in its own process has it, with its own state of the generators."""

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
        with GENERATOR_LOCK:
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


def load_and_draw(store, wrap, size):
    """Load the generators on ``size`` ranks. Return the next numbers of each rank."""
    rngs = for_each_rank(size, lambda r: RankRNG(1000 + r))
    load_on_ranks(store, *[{"rng": wrap(rng)} for rng in rngs])
    return [rng.draw() for rng in rngs]


def unwrapped_rng(value):
    return value


@settings(max_examples=20)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([unwrapped_rng, PerRank, lambda v: PerRank([v])]),
)
def test_generators_continue_and_new_ranks_get_their_own_seeds(saving_ranks, loading_ranks, wrap):
    store = save_on_ranks(*for_each_rank(saving_ranks, lambda r: {"rng": wrap(RankRNG(r))}))
    expected = [RankRNG(r).draw() for r in range(saving_ranks)]
    with warns_if_ranks_changed(
        saving_ranks if wrap is not unwrapped_rng else loading_ranks, loading_ranks
    ):
        draws = load_and_draw(store, wrap, loading_ranks)
    assert draws[:saving_ranks] == expected[:loading_ranks]
    if wrap is unwrapped_rng:
        assert draws == load_and_draw(store, wrap, loading_ranks)  # it depends only on the snapshot
        assert len(set(draws + expected)) == max(loading_ranks, saving_ranks)
        for i in range(3):  # each of the three generators
            assert len({draw[i] for draw in draws + expected}) == max(loading_ranks, saving_ranks)
    else:  # a new rank keeps its generators
        assert draws[saving_ranks:] == [
            RankRNG(1000 + r).draw() for r in range(saving_ranks, loading_ranks)
        ]


def test_replicated_generators_are_those_of_rank_0_on_all_ranks():
    store = save_on_ranks(*for_each_rank(3, lambda r: {"rng": Replicated(RankRNG(r))}))
    assert load_and_draw(store, Replicated, 4) == [RankRNG(0).draw()] * 4


@pytest.mark.parametrize("wrap", [PerRank, Replicated])
@pytest.mark.parametrize("value", [None, 0, "", False, [], {}, (None,), float("nan")], ids=repr)
def test_any_plain_value_can_be_per_rank_or_replicated(wrap, value):
    """None is a value too. It does not mean that there is no wrapper."""
    store = save_on_ranks({"x": wrap(value)}, {"x": wrap(value)})
    live_states = [{"x": wrap(None if value is None else type(value)())} for _ in range(2)]
    load_on_ranks(store, *live_states)
    assert [repr(live["x"].value) for live in live_states] == [repr(value)] * 2
