"""Loads into a state with a member that restores itself."""

import numpy as np
import pytest

import limpet
from limpet.errors import (
    DigestMismatch,
    DTypeMismatch,
    LimpetError,
    MemberFailed,
    MissingLeaf,
    PlanError,
    UnexpectedLeaf,
)
from limpet.loading.snapshot import reader_of
from tests.states import unused_url
from tests.streamed_members import Table, make_table


@pytest.fixture
def saved():
    """The URL of a snapshot, and the table in it."""
    url, table = unused_url(), make_table(10, 5)
    limpet.save(url, {"tables": table, "w": np.ones(3), "n": 1})
    return url, table


def live_state(**others):
    return {"tables": Table(), "w": np.zeros(3), "n": 0, **others}


def test_a_member_restores_itself(saved):
    url, table = saved
    state = live_state()
    report = limpet.load(url, into=state)
    assert state["tables"].values() == table.values()
    assert state["tables"].calls == ["differences", "restore"]
    assert state["w"].tolist() == [1, 1, 1]
    assert report.is_exact
    assert "tables/words/segments/s0/values" in report.loaded


def test_the_snapshot_is_a_reader_and_the_key_that_of_the_member(saved):
    url, _ = saved
    found = []

    class Recorder(Table):
        def differences(self, saved):
            found.append(saved)
            return {}

        def restore(self, snapshot, key):
            found.append((snapshot.digest, key))

    limpet.load(url, into=live_state(tables=Recorder()))
    plain, restored = found
    assert plain["words"]["segments"]["s1"] == {"values": None, "counts": None}
    assert plain["words"]["dim"] == 4
    assert restored == (reader_of(limpet.open(url)).digest, "tables")


def test_a_load_without_a_state_returns_plain_arrays(saved):
    url, table = saved
    loaded = limpet.load(url)["tables"]["words"]
    assert loaded["dim"] == 4
    assert np.asarray(loaded["segments"]["s0"]["values"]).tobytes() == table.values()["s0"]


def test_all_differences_are_in_one_error_before_anything_is_changed(saved):
    url, _ = saved
    state = {"tables": Table(dim=8), "w": np.zeros(4), "n": 0}
    with pytest.raises(PlanError) as caught:
        limpet.load(url, into=state)
    assert "tables/words/dim 4, live 8" in str(caught.value)
    assert "w [3], live [4]" in str(caught.value)
    assert "restore" not in state["tables"].calls
    assert state["n"] == 0


def test_a_difference_of_a_member_alone(saved):
    with pytest.raises(DTypeMismatch, match="tables/words/dim 4, live 8"):
        limpet.load(saved[0], into=live_state(tables=Table(dim=8)), mismatched="keep")


def test_a_member_that_cannot_compare_is_named(saved):
    table = Table()
    table.fail["differences"] = KeyError("segments")
    with pytest.raises(MemberFailed, match="'tables', a Table, raised an exception in its diff"):
        limpet.load(saved[0], into=live_state(tables=table))
    assert "restore" not in table.calls


@pytest.mark.parametrize(
    "keys", ["tables/words/segments/**", "tables/words/name", ["w", "**/s0/values"]]
)
def test_a_member_is_never_partially_restored(saved, keys):
    state = live_state()
    with pytest.raises(LimpetError, match="must leave 'tables' whole") as caught:
        limpet.load(saved[0], into=state, keys=keys)
    assert "\n" not in str(caught.value)
    assert state["tables"].calls == []
    assert state["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("keys", ["tables", "tables/**", ["tables/words"], "**"])
def test_keys_may_select_all_of_a_member(saved, keys):
    url, table = saved
    state = live_state()
    limpet.load(url, into=state, keys=keys)
    assert state["tables"].values() == table.values()
    assert state["n"] == (1 if keys == "**" else 0)


@pytest.mark.parametrize("keys", ["w", ["w", "n"]])
def test_keys_may_leave_a_member_out(saved, keys):
    state = live_state()
    limpet.load(saved[0], into=state, keys=keys)
    assert state["tables"].calls == []
    assert state["w"].tolist() == [1, 1, 1]


RENAMES = [
    {"tables/words": "tables/terms"},
    {"old": "tables"},
    {"tables/words/name": "tables/words/n"},
]


@pytest.mark.parametrize("rename", RENAMES)
def test_a_member_cannot_be_renamed(rename):
    url = unused_url()
    limpet.save(url, {"old" if "old" in rename else "tables": make_table(3)})
    with pytest.raises(LimpetError, match="rename= must leave 'tables' whole"):
        limpet.load(url, into={"tables": Table()}, rename=rename)


def test_other_members_can_be_renamed(saved):
    url, table = saved
    state = {"tables": Table(), "v": np.zeros(3), "n": 0}
    limpet.load(url, into=state, rename={"w": "v"})
    assert state["tables"].values() == table.values()
    assert state["v"].tolist() == [1, 1, 1]


def test_a_member_that_the_snapshot_lacks():
    url = unused_url()
    limpet.save(url, {"w": np.ones(3)})
    state = {"tables": make_table(4), "w": np.zeros(3)}
    with pytest.raises(MissingLeaf, match="1 missing in the snapshot: tables"):
        limpet.load(url, into=state)
    report = limpet.load(url, into=state, missing="keep")
    assert [*report.kept] == ["tables"]
    assert state["tables"].calls == []
    assert state["w"].tolist() == [1, 1, 1]


def test_without_a_live_member_its_keys_are_unexpected(saved):
    with pytest.raises(UnexpectedLeaf, match="tables"):
        limpet.load(saved[0], into={"w": np.zeros(3), "n": 0})


def test_a_value_of_another_kind_is_a_difference():
    url = unused_url()
    limpet.save(url, {"tables": np.ones(3)})
    with pytest.raises(DTypeMismatch, match="tables array, live Table"):
        limpet.load(url, into={"tables": Table()})


@pytest.mark.parametrize("error", [ValueError("no such segment"), DigestMismatch("a flipped bit")])
def test_a_failed_restore_leaves_an_invalid_state(saved, error):
    table = Table()
    table.fail["restore"] = error
    with pytest.raises(LimpetError) as caught:
        limpet.load(saved[0], into=live_state(tables=table))
    assert caught.value.is_state_invalid
    assert type(caught.value) is (MemberFailed if type(error) is ValueError else DigestMismatch)
