"""Trainings whose state has a member that is streamed."""

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import LimpetError, MemberFailed, NoSnapshot, Preempted, SkippedVersion
from limpet.loading.snapshot import reader_of
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.notices.announced import Announced
from tests.streamed_members import Table, make_table
from tests.trainings import flip_bit, shard_of
from tests.waiting import wait_until

ROWS = 30_000


def make_state(table=None):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "tables": table or make_table(ROWS)}


def train_step(state, step):
    state["optimizer"].zero_grad()
    state["model"](torch.ones(3, 4)).sum().backward()
    state["optimizer"].step()
    state["tables"].append(6000, float(step))


def train(store, state, steps, **options):
    """Train, and return the values of the table after each step."""
    found = {}
    options = {"save": limpet.EverySteps(1), **options}
    with limpet.Checkpointer(store, state, **options) as ckpt:
        ckpt.resume()
        while ckpt.current_step < steps:
            train_step(state, ckpt.current_step + 1)
            ckpt.step()
            found[ckpt.current_step] = state["tables"].values()
    return found


def ends_of(table):
    return [call for call in table.calls if type(call) is tuple]


def test_versions_hold_the_member_at_their_step():
    store, state = MemoryStore(), make_state()
    values = train(store, state, 4, incremental=True)
    versions = Run(store).snapshots()
    assert [version.step for version in versions] == [1, 2, 3, 4]
    for version in versions:
        table = Table()
        version.load({"tables": table}, keys="tables")
        assert table.values() == values[version.step]
        assert version.metadata["tables"] == ["tables/words"]
    assert [version.chain for version in versions] == [0, 1, 2, 3]
    digests = [reader_of(version).digest for version in versions]
    assert ends_of(state["tables"]) == [(digest, None) for digest in digests]
    # nothing but the four saves has called the member
    assert state["tables"].calls.count("begin") == 4


@pytest.mark.parametrize("check", [False, True])
def test_a_resume_restores_the_member(check):
    store = MemoryStore()
    values = train(store, make_state(), 3)
    state, found = make_state(Table()), []
    with (
        limpet.attach(lambda name, fields: found.append(name)),
        limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt,
    ):
        assert ckpt.resume(check=check).step == 3
        assert state["tables"].values() == values[3]
        assert state["tables"].bytes_read == 0
        train_step(state, 4)
        ckpt.step()
    assert ("resume_checked" in found) is check
    assert "resume_differs" not in found
    table = Table()
    Run(store).latest().load({"tables": table}, keys="tables")
    assert table.values() == state["tables"].values()


def test_a_check_of_a_resume_finds_what_another_member_does_not_restore():
    class Forgetful:
        def state_dict(self):
            return {"n": 1 if self.saves else 2}

        def load_state_dict(self, state):
            self.saves = False

        saves = True

    store = MemoryStore()
    train(store, make_state() | {"other": Forgetful()}, 1)
    found = []
    with (
        limpet.attach(lambda name, fields: found.append((name, fields))),
        limpet.Checkpointer(store, make_state(Table()) | {"other": Forgetful()}) as ckpt,
    ):
        ckpt.resume(check=True)
    (differing,) = [fields["differing"] for name, fields in found if name == "resume_differs"]
    assert differing == ["other/n"]


def test_damage_in_carried_rows_makes_a_resume_fall_back():
    """Version 3 is full, and 4 to 5 refer to it. A bit of its rows is flipped."""
    store = MemoryStore()
    values = train(store, make_state(), 5, incremental=2)
    assert [version.chain for version in Run(store).snapshots()] == [0, 1, 0, 1, 0]
    flip_bit(store, shard_of(store, "version_5"))
    flip_bit(store, shard_of(store, "version_3"), byte=-200_000)
    state = make_state(Table())
    checkpointer = limpet.Checkpointer(store, state, save=limpet.Never())
    with checkpointer as ckpt, pytest.warns(SkippedVersion):
        assert ckpt.resume().step == 2
    assert state["tables"].values() == values[2]
    assert state["tables"].calls.count("restore") >= 2


def test_if_no_version_can_be_restored_the_training_cannot_go_on():
    store = MemoryStore()
    train(store, make_state(), 1)
    flip_bit(store, shard_of(store, "version_1"))
    with limpet.Checkpointer(store, make_state(Table()), save=limpet.Never()) as ckpt:
        with pytest.raises(NoSnapshot):
            ckpt.resume()
        with pytest.raises(LimpetError, match="invalid"):
            ckpt.step()


def test_an_error_of_a_restore_that_is_no_damage_ends_the_resume():
    store, table = MemoryStore(), Table()
    train(store, make_state(), 2)
    table.fail["restore"] = ValueError("a mistake")
    checkpointer = limpet.Checkpointer(store, make_state(table), save=limpet.Never())
    with checkpointer as ckpt, pytest.raises(MemberFailed, match="a mistake"):
        ckpt.resume()
    assert table.calls.count("restore") == 1


# -- options that need a copy of the state ---------------------------------------------------------

REFUSED = [
    ("tiers=", {"tiers": [limpet.MemoryTier(every=limpet.EverySteps(1))]}),
    ("overlap=True", {"overlap": True}),
    ("OnException", {"save": limpet.EverySteps(2) | limpet.OnException()}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED)
@pytest.mark.parametrize("is_function", [False, True])
def test_options_that_need_a_copy_are_refused(name, options, is_function):
    state = {"w": np.ones(3), "words": make_table(3)}
    match = f"^{name} cannot be combined with 'words' in the state[^.\n]*[.]$"
    if not is_function:
        with pytest.raises(LimpetError, match=match):
            limpet.Checkpointer(MemoryStore(), state, **options)
    else:
        checkpointer = limpet.Checkpointer(MemoryStore(), lambda: state, **options)
        with checkpointer as ckpt, pytest.raises(LimpetError, match=match):
            ckpt.resume()
    assert state["words"].calls == []


@pytest.mark.parametrize(("name", "options"), REFUSED)
def test_without_such_a_member_they_are_accepted(name, options):
    limpet.Checkpointer(MemoryStore(), {"w": np.ones(3)}, **options).close()


@pytest.mark.parametrize("is_function", [False, True])
def test_no_savepoint_is_captured(is_function):
    state, store = make_state(), MemoryStore()
    given = (lambda: state) if is_function else state
    with limpet.Checkpointer(store, given, save=limpet.EverySteps(3)) as ckpt:
        ckpt.resume()
        for step in range(1, 6):
            train_step(state, step)
            ckpt.step()
            assert ckpt._savepoint.step == 0
            assert not ckpt._savepoint.hold()
    assert state["tables"].calls.count("begin") == 2


def test_a_failed_save_is_raised_and_the_next_one_works():
    state, store = make_state(), MemoryStore()
    table = state["tables"]
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1), incremental=True) as ckpt:
        ckpt.step()
        ckpt.wait()
        table.before_read = lambda: (_ for _ in ()).throw(LimpetError("a server is gone"))
        train_step(state, 2)
        with pytest.raises(LimpetError, match="a server is gone"):
            ckpt.step()
            ckpt.wait()
        table.before_read = lambda: None
        train_step(state, 3)
        ckpt.step()
    assert [digest is not None for digest, _ in ends_of(table)] == [True, False, True]
    table = Table()
    Run(store).latest().load({"tables": table}, keys="tables")
    assert table.values() == state["tables"].values()


def test_an_error_of_the_member_after_a_commit_is_raised_once():
    state, store = make_state(), MemoryStore()
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
        state["tables"].fail["end"] = ValueError("cannot forget the cut")
        ckpt.step()
        with pytest.raises(MemberFailed, match="The version is saved"):
            ckpt.wait()
        state["tables"].fail.clear()
        ckpt.step()
    assert [version.step for version in Run(store).snapshots()] == [1, 2]


def test_a_notice_saves_the_last_step_and_its_tables():
    state, store, source = make_state(), MemoryStore(), Announced()
    preemption = limpet.Preemption(notices=[source])
    with (
        pytest.raises(Preempted) as left,
        limpet.Checkpointer(
            store, state, save=limpet.EverySteps(100), preemption=preemption
        ) as ckpt,
    ):
        ckpt.resume()
        for step in range(1, 20):
            train_step(state, step)
            if step == 3:
                source.announce()
                wait_until(lambda: ckpt._preemption.is_pending)
            ckpt.step()
    assert left.value.code == 75
    table, newest = Table(), Run(store).latest()
    newest.load({"tables": table}, keys="tables")
    assert newest.step >= 3
    assert table.values() == state["tables"].values()
