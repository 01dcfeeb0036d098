"""A state may be any mapping: a state_dict(), a read-only view of a dict, or one of the user's."""

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import LimpetError, PlanError
from tests.fakegroup import FakeGroup


class View(Mapping):
    """A read-only mapping of one's own, whose members are looked up when they are asked for."""

    def __init__(self, members):
        self.members = members

    def __getitem__(self, key):
        return self.members[key]

    def __iter__(self):
        return iter(self.members)

    def __len__(self):
        return len(self.members)


KINDS = [OrderedDict, UserDict, MappingProxyType, View]


def stored_tree(snapshot):
    return limpet.open(snapshot)._reader.manifest.tree


def test_a_state_dict_is_saved_and_loaded_in_place(tmp_path):
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    snapshot = limpet.save(tmp_path / "version_1", model.state_dict())
    as_dict = limpet.save(tmp_path / "version_2", dict(model.state_dict()))
    assert stored_tree(snapshot) == stored_tree(as_dict)
    found = limpet.load(snapshot)
    assert type(found) is dict
    assert torch.equal(found["weight"], model.weight)
    assert limpet.load(snapshot, into=other.state_dict()).is_exact
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(PlanError, match=r"2 missing in the snapshot: 0\.weight"):
        snapshot.load(into=nn.Sequential(other).state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_any_mapping_is_saved_as_a_dict_and_filled(tmp_path, kind):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "t": torch.ones(2), "config": {"lr": 1}}
    snapshot = limpet.save(tmp_path / "version_1", kind(state))
    assert stored_tree(snapshot) == stored_tree(limpet.save(tmp_path / "version_2", state))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    live = {"model": other, "optimizer": optimizer, "t": torch.zeros(2), "config": {}}
    assert limpet.load(snapshot, into=kind(live)).is_exact
    assert torch.equal(other.weight, model.weight)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[other.weight]["momentum_buffer"] is not None
    assert (live["t"].tolist(), live["config"]) == ([1, 1], {"lr": 1})


@pytest.mark.parametrize("kind", [OrderedDict, UserDict])
def test_plain_values_are_assigned_to_the_mapping(tmp_path, kind):
    snapshot = limpet.save(tmp_path / "version_1", {"n": 1, "pair": (1, 2), "w": torch.ones(2)})
    live = kind({"n": 0, "pair": (0, 0), "w": (w := torch.zeros(2))})
    snapshot.load(into=live)
    assert (live["n"], live["pair"], live["w"] is w, w.tolist()) == (1, (1, 2), True, [1, 1])


@pytest.mark.parametrize("kind", [MappingProxyType, View])
def test_a_read_only_mapping_cannot_take_plain_values(tmp_path, kind):
    snapshot = limpet.save(tmp_path / "version_1", kind({"n": 1, "w": torch.ones(2)}))
    assert snapshot.load(keys="n") == {"n": 1}
    live = {"n": 0, "w": torch.zeros(2)}
    with pytest.raises(LimpetError, match=r"into= is a.* read-only.* plain values of n: pass a d"):
        snapshot.load(into=kind(live))
    with pytest.raises(LimpetError, match=r"state is a.* read-only.* plain values of n: pass a d"):
        limpet.Checkpointer(tmp_path / "run", kind(live))
    assert live["w"].tolist() == [0, 0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_function", [False, True])
def test_a_training_with_any_mapping_resumes(tmp_path, kind, is_function):
    def make():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        members = {"model": model, "optimizer": optimizer, "progress": limpet.Progress()}
        return members, kind(members)

    members, state = make()
    policy = limpet.EverySteps(1) | limpet.OnException()
    with limpet.Checkpointer(
        tmp_path / "run", (lambda: state) if is_function else state, save=policy
    ) as ckpt:
        ckpt.resume()
        for _ in range(2):
            ckpt.step()
        ckpt.wait()
        with torch.no_grad():
            members["model"].weight.fill_(3)
        ckpt.step()
    weight = members["model"].weight
    members, state = make()
    with limpet.Checkpointer(
        tmp_path / "run", (lambda: state) if is_function else state, save=policy
    ) as ckpt:
        ckpt.resume(check=True)
        assert (ckpt.current_step, members["progress"].step) == (3, 3)
    assert torch.equal(members["model"].weight, weight)


def test_a_mapping_is_read_by_each_save(tmp_path):
    members = {"w": torch.zeros(2)}
    with limpet.Checkpointer(tmp_path / "run", View(members)) as ckpt:
        ckpt.save()
        members["w"] = torch.ones(2)
        ckpt.step()
    assert limpet.load(f"{tmp_path}/run@latest")["w"].tolist() == [1, 1]


def test_copies_are_refused_also_at_the_top(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for name, copied in (("an optimizer", optimizer), ("a scheduler", schedule)):
        with pytest.raises(PlanError, match=rf"The state is the state_dict\(\) of {name}, a copy"):
            limpet.Checkpointer(tmp_path / "run", copied.state_dict())
        with pytest.raises(PlanError, match=rf"o in the state is the state_dict\(\) of {name}"):
            limpet.Checkpointer(tmp_path / "run", OrderedDict(o=copied.state_dict()))

    class Counter(nn.Linear):
        def get_extra_state(self):
            return 5

        def set_extra_state(self, state):
            pass

    with pytest.raises(PlanError, match=r"The state is the state_dict\(\) of a model"):
        limpet.Checkpointer(tmp_path / "run", Counter(2, 2).state_dict())


def test_what_is_no_mapping_is_refused(tmp_path):
    for state in ([("a", 1)], {1, 2}, "model", None, nn.Linear(2, 2), torch.ones(2)):
        for call in (
            lambda state=state: limpet.save(tmp_path / "version_1", state),
            lambda state=state: limpet.Checkpointer(tmp_path / "run", state),
        ):
            with pytest.raises(LimpetError, match="state must be a dict"):
                call()


def test_ranks_save_and_load_mappings(tmp_path):
    with FakeGroup(2) as group:
        group.run(
            lambda rank: limpet.save(
                tmp_path / "version_1", View({"w": torch.ones(2), "r": limpet.PerRank({"n": rank})})
            )
        )
    live = [UserDict(w=torch.zeros(2), r=limpet.PerRank({"n": 9})) for _ in range(2)]
    with FakeGroup(2) as group:
        group.run(lambda rank: limpet.load(tmp_path / "version_1", into=live[rank]))
    assert [(state["w"].tolist(), state["r"].value["n"]) for state in live] == [
        ([1, 1], 0),
        ([1, 1], 1),
    ]
