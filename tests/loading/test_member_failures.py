"""An exception in the code of an object names the object, and says what happened to the state."""

import traceback

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import MemberFailed, PlanError, RankFailed
from tests.fakegroup import FakeGroup
from tests.states import unused_url


class Broken(Exception):
    """The exception of a user's class."""


class Member:
    """An object whose method ``fails`` raises ``error``."""

    def __init__(self, fails="", error=None):
        self.fails, self.error = fails, error or Broken("no connection")
        self.value = 1

    def state_dict(self):
        self.call("state_dict")
        return {"value": self.value}

    def load_state_dict(self, state):
        self.call("load_state_dict")
        self.value = state["value"]

    def call(self, method):
        if self.fails == method:
            raise self.error


class Checked(Member):
    def check_state_dict(self, state):
        self.call("check_state_dict")


class Derived(Member):
    keeps_per_rank = True

    def derive(self, rank):
        self.call("derive")


class Module(torch.nn.Linear):
    """A module whose extra state fails."""

    def __init__(self, fails=""):
        super().__init__(1, 1)
        self.fails = fails

    def get_extra_state(self):
        if self.fails == "state_dict":
            raise Broken("no connection")
        return {"n": 1}

    def set_extra_state(self, state):
        if self.fails == "load_state_dict":
            raise Broken("no connection")


def saved(member):
    url = unused_url()
    limpet.save(url, {"w": np.ones(2), "in": {"a/b": member}})
    return url


def failure(call):
    with pytest.raises(MemberFailed) as e:
        call()
    assert e.value.member == "in/a~1b"
    assert isinstance(e.value.__cause__, Broken)
    assert "'in/a~1b', a" in str(e.value)
    assert "Broken: no connection" in str(e.value)
    assert "call(self" not in str(e.value)
    assert "raise self.error" in (text := "".join(traceback.format_exception(e.value))) or (
        'raise Broken("no connection")' in text
    )
    return e.value


@pytest.mark.parametrize("make", [Member, Module])
@pytest.mark.parametrize("save", [limpet.save, limpet.save_async])
def test_state_dict_in_a_save(make, save):
    error = failure(lambda: save(unused_url(), {"in": {"a/b": make("state_dict")}}))
    assert "state_dict(): Broken" in str(error)
    assert "Nothing was saved. Limpet has not modified the live state." in str(error)
    assert not error.is_state_invalid


def test_state_dict_in_a_step_and_the_next_step(tmp_path):
    member = Member()
    state = {"progress": limpet.Progress(), "in": {"a/b": member}}
    with limpet.Checkpointer(str(tmp_path), state, save=limpet.EverySteps(1)) as ckpt:
        ckpt.step()
        ckpt.wait()
        member.fails = "state_dict"
        failure(ckpt.step)
        member.fails = ""
        ckpt.step()
    assert [s.step for s in limpet.Run(str(tmp_path)).snapshots()] == [1, 3]


@pytest.mark.parametrize("make", [Member, Module])
def test_load_state_dict(make):
    live = {"w": np.zeros(2), "in": {"a/b": make("load_state_dict")}}
    error = failure(lambda: limpet.load(saved(make()), into=live))
    assert error.is_state_invalid
    assert "The live state may be partly overwritten and is not valid" in str(error)


def test_check_state_dict_is_called_before_anything_changes():
    live = {"w": np.zeros(2), "in": {"a/b": Checked("check_state_dict")}}
    error = failure(lambda: limpet.load(saved(Checked()), into=live))
    assert not error.is_state_invalid
    assert "Nothing was loaded. Limpet has not modified the live state." in str(error)
    assert live["w"].tolist() == [0, 0]


def test_state_dict_of_a_module_before_anything_changes():
    live = {"w": np.zeros(2), "in": {"a/b": Module("state_dict")}}
    error = failure(lambda: limpet.load(saved(Module()), into=live))
    assert not error.is_state_invalid
    assert live["w"].tolist() == [0, 0]


def test_derive_of_a_rank_without_a_saved_value():
    url = saved(Derived())
    with FakeGroup(2) as group:
        states = [{"w": np.zeros(2), "in": {"a/b": Derived("derive" * r)}} for r in range(2)]
        errors = group.outcomes(lambda r: limpet.load(url, into=states[r]))
    assert isinstance(errors[1], MemberFailed)
    assert errors[1].member == "in/a~1b"
    assert isinstance(errors[0], RankFailed)
    assert errors[0].is_state_invalid


def test_the_other_ranks_of_a_save_name_the_rank_and_the_member():
    url = unused_url()
    with FakeGroup(2) as group:
        states = [{"in": {"a/b": Member("state_dict" * r)}} for r in range(2)]
        errors = group.outcomes(lambda r: limpet.save(url, states[r]))
    assert isinstance(errors[1], MemberFailed)
    assert isinstance(errors[0], RankFailed)
    assert (errors[0].rank, errors[0].member) == (1, "in/a~1b")
    assert "MemberFailed: 'in/a~1b', a Member, raised an exception" in str(errors[0])


def test_errors_of_limpet_and_interrupts_pass():
    refused = PlanError("not this one")
    with pytest.raises(PlanError) as e:
        limpet.save(unused_url(), {"m": Member("state_dict", refused)})
    assert e.value is refused
    with pytest.raises(KeyboardInterrupt):
        limpet.save(unused_url(), {"m": Member("state_dict", KeyboardInterrupt())})


def test_a_resume_does_not_go_back_to_an_older_version(tmp_path):
    """The exception is not about the files, so an older version would not help."""
    state = {"progress": limpet.Progress(), "m": Member()}
    with limpet.Checkpointer(str(tmp_path), state, save=limpet.EverySteps(1)) as ckpt:
        for _ in range(2):
            ckpt.step()
            ckpt.wait()
    state["m"] = Member("load_state_dict")
    with limpet.Checkpointer(str(tmp_path), state) as ckpt:
        with pytest.raises(MemberFailed) as e:
            ckpt.resume()
        assert isinstance(e.value.__cause__, Broken)
        assert e.value.is_state_invalid
