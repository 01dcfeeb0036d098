"""Several ranks keep the same live values of another shape."""

import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import ShapeMismatch
from limpet.state.sharding import Boxed
from tests.fakegroup import FakeGroup
from tests.ranks.rank_threads import for_each_rank, load_errors, save_on_ranks
from tests.states import assert_same, clone


def make(size, steps=0):
    torch.manual_seed(size)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, size))
    optimizer = optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"optimizer": optimizer, "model": model}


def load(store, *states, **options):
    with FakeGroup(len(states)) as group:
        return group.run(lambda rank: limpet.load(store, into=states[rank], **options))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_leaf_that_one_rank_keeps_is_kept_by_all_ranks(steps):
    """Only the head of rank 1 has another size. If rank 0 loaded its own, the ranks would train two
    models."""
    store = save_on_ranks(*[make(5, 2) for _ in range(2)])
    live = [make(5, steps), make(4, steps)]
    before = [clone(state["model"][1].state_dict()) for state in live]
    slots = [
        clone(dict(state["optimizer"].state.get(state["model"][1].weight, {}))) for state in live
    ]
    errors = load_errors(store, ShapeMismatch, *live)
    assert all(e.mismatched == ("model/1.weight", "model/1.bias") for e in errors)
    reports = load(store, *live, mismatched="keep")
    assert reports[0].kept == reports[1].kept
    assert reports[0].loaded == reports[1].loaded
    assert reports[0].kept["model/1.weight"] == "saved [5, 3], live [4, 3]"
    for state, kept, own in zip(live, before, slots, strict=True):
        assert_same(kept, clone(state["model"][1].state_dict()))
        head = state["model"][1].weight
        assert_same(own, clone(dict(state["optimizer"].state.get(head, {}))))
        assert state["optimizer"].state[state["model"][0].weight]["step"] == 2
    body = [clone(state["model"][0].state_dict()) for state in live]
    assert_same(*body)


def test_parts_of_a_larger_tensor_are_kept_on_all_ranks():
    def part(rank, rows, value):
        box = torch.full((rows, 2), value)
        return {"w": Boxed(box, (rows * rank, 0), (2 * rows, 2)), "x": torch.full((1,), value)}

    store = save_on_ranks(*for_each_rank(2, lambda rank: part(rank, 3, 1.0)))
    live = for_each_rank(2, lambda rank: part(rank, 4, 0.0))
    reports = load(store, *live, mismatched="keep")
    assert [r.kept for r in reports] == [{"w": "saved [6, 2], live [8, 2]"}] * 2
    for state in live:
        assert torch.equal(state["w"].tensor, torch.zeros(4, 2))
        assert torch.equal(state["x"], torch.ones(1))


def test_stages_keep_what_their_own_layers_lack():
    """Each rank has other layers. The report names those of all ranks."""
    stages = [{"m": {f"l{r}": torch.ones(2)}} for r in range(2)]
    store = save_on_ranks(*stages)
    live = [{"m": {"l0": torch.zeros(2)}}, {"m": {"l1": torch.zeros(3)}}]
    reports = load(store, *live, mismatched="keep")
    assert [r.kept for r in reports] == [{"m/l1": "saved [2], live [3]"}] * 2
    assert [r.loaded for r in reports] == [("m/l0",)] * 2
    assert torch.equal(live[0]["m"]["l0"], torch.ones(2))
    assert torch.equal(live[1]["m"]["l1"], torch.zeros(3))
