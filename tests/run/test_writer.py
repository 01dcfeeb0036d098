"""A program saves versions without a Checkpointer: ``Run.writer``."""

import subprocess
import sys
import uuid
from contextlib import suppress

import numpy as np
import pytest

import limpet
from limpet import events
from limpet.errors import AlreadyExists, Denied, LimpetError, NoSnapshot, PlanError, Unavailable
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.fakegroup import FakeGroup
from tests.trainings import flip_bit, shard_of
from tests.unreliable_stores import HookedStore


def state(value):
    return {"w": np.full(100_000, value), "fixed": np.arange(100_000.0), "note": f"value {value}"}


def versions(store):
    return [str(v) for v in limpet.Run(store).listing().versions]


def keys(store):
    return [stat.key for stat in store.list("")]


def test_versions_continue_each_other_across_programs():
    store, seen = MemoryStore(), list[str]()
    with events.attach(lambda name, fields: seen.append(name)):
        with limpet.Run(store).writer(keep=limpet.KeepLast(2)) as writer:
            assert writer.latest is None
            for step in (1, 2, 3):
                saved = writer.save(state(step), step=step, metrics={"loss": step}, note={"n": 1})
            assert "writer.json" in keys(store)
        with limpet.Run(store).writer() as writer:
            assert writer.latest.step == saved.step == 3
            writer.save(state(4), step=np.int64(4))
    assert versions(store) == ["version_2", "version_3", "version_4"]
    assert [name for name in keys(store) if "/" not in name] == [], "no lock, no pin"
    assert (saved.metadata["metrics"], saved.metadata["note"]) == ({"loss": 3}, {"n": 1})
    assert limpet.Run(store).best("loss", mode="min").step == 2
    assert [seen.count(name) for name in ("saved", "deleted", "save_failed")] == [4, 1, 0]
    with limpet.Checkpointer(store, state(0)) as ckpt:
        resumed = ckpt.resume()
        assert (resumed and resumed.step, ckpt.state["note"]) == (4, "value 4")


def test_a_save_of_the_same_step_returns_the_version_of_an_unknown_outcome():
    """It saves nothing again, and the version keeps the state and the metrics of the first save."""
    store = HookedStore(MemoryStore())

    def lose_the_reply(method, key):
        if (method, key) == ("put_if_absent", "version_1/manifest.json"):
            store.after = lambda method, key: None
            raise Unavailable("The reply was lost", outcome="unknown")

    with limpet.Run(store).writer() as writer:
        store.after = lose_the_reply
        with pytest.raises(Unavailable, match="unknown whether this version was committed"):
            writer.save(state(1), step=1, metrics={"loss": 1})
        assert writer.latest is None
        again = writer.save(state(2), step=1, metrics={"loss": 2})
        assert writer.latest is not None
        assert (again.step, again["note"], again.metrics) == (1, "value 1", {"loss": 1})
        writer.save(state(3), step=2)
    assert versions(store) == ["version_1", "version_2"]


def test_incremental_versions_refer_to_the_one_before():
    store = MemoryStore()
    with limpet.Run(store).writer(incremental=3) as writer:
        snapshots = [writer.save(state(step), step=step) for step in range(1, 6)]
    assert [s.nbytes < 1_000_000 for s in snapshots] == [False, True, True, False, True]
    assert all(s.verify().ok for s in snapshots)
    limpet.Run(store).retain(limpet.KeepLast(1))
    assert versions(store) == ["version_4", "version_5"], "version 5 refers to 4"


@pytest.mark.parametrize("step", [-1, True, 2.0, 3, 10**18, "7"])
def test_arguments_are_checked_before_anything_is_written(step):
    store = MemoryStore()
    with limpet.Run(store).writer() as writer:
        writer.save(state(3), step=3)
        before = keys(store)
        with pytest.raises(LimpetError):
            writer.save(state(4), step=step)
        with pytest.raises(PlanError, match="not a number"):
            writer.save(state(4), step=4, metrics={"loss": "low"})
        assert keys(store) == before
    with pytest.raises(LimpetError, match="only in a with block"):
        writer.save(state(4), step=4)
    with pytest.raises(LimpetError, match="keep= must be"):
        limpet.Run(store).writer(keep=3)


def test_a_second_program_is_refused_while_the_first_one_writes(tmp_path):
    code = (
        "import limpet, sys, numpy as np\n"
        f"with limpet.Run({str(tmp_path / 'a')!r}).writer() as writer:\n"
        "    writer.save({'x': np.ones(3)}, step=1); print('saved', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "saved\n"
        with (
            pytest.raises(LimpetError, match="Another training writes to this run"),
            limpet.Run(tmp_path / "a").writer(),
        ):
            pytest.fail("two writers")
        first.kill()
    with limpet.Run(tmp_path / "a").writer() as writer:  # a process that was killed blocks nobody
        writer.save({"x": np.ones(3)}, step=2)
    assert versions(tmp_path / "a") == ["version_1", "version_2"]


def test_a_writer_that_was_taken_over_commits_nothing_more():
    store = MemoryStore()
    with limpet.Run(store).writer() as first:
        first.save(state(1), step=1)
        with limpet.Run(store).writer() as second:
            with pytest.raises(LimpetError, match="Another training has taken this run over"):
                first.save(state(2), step=2)
            assert versions(store) == ["version_1"]
            second.save(state(3), step=3)
    assert versions(store) == ["version_1", "version_3"]


def test_another_writer_of_the_same_step_is_found():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    with limpet.Run(store).writer() as writer:
        limpet.save(f"{store.url}/version_5", state(0))
        with pytest.raises(LimpetError, match="Another training has saved version_5") as caught:
            writer.save(state(5), step=5)
        assert isinstance(caught.value.__cause__, AlreadyExists)


def test_after_damage_a_branch_begins_at_the_newest_intact_version():
    store = MemoryStore()
    with limpet.Run(store).writer() as writer:
        for step in (1, 2):
            writer.save(state(step), step=step)
    store.delete(shard_of(store, "version_2"))
    with limpet.Run(store).writer() as writer:
        assert writer.latest.step == 1
        writer.save(state(2), step=2)
    assert [str(v) for v in limpet.Run(store).line()] == ["version_1", "version_2.1"]
    for version in ("version_1", "version_2.1"):
        flip_bit(store, f"{version}/manifest.json")
    with pytest.raises(NoSnapshot), limpet.Run(store).writer():
        pytest.fail("nothing to continue from")
    assert "writer.json" not in keys(store)


def test_a_version_is_saved_although_old_ones_cannot_be_deleted():
    store = HookedStore(MemoryStore())
    with limpet.Run(store).writer(keep=limpet.KeepLast(1)) as writer:
        writer.save(state(1), step=1)

        def deny(method, key):
            if method == "delete" and key == "version_1/manifest.json":
                raise Denied("no", key=key, store=store.url)

        store.before = deny
        with pytest.raises(Denied, match="could not be deleted") as caught:
            writer.save(state(2), step=2)
        assert caught.value.fields["committed"] == "version_2"
        store.before = lambda method, key: None
        writer.save(state(3), step=3)
    assert versions(store.inner) == ["version_3"]


def test_the_ranks_of_a_group_write_one_version():
    """For example, servers of which each has a part of a table."""
    store = MemoryStore()

    def serve(rank):
        part = {"rows": limpet.PerRank({"ids": np.arange(rank, 30, 3)})}
        with limpet.Run(store).writer(keep=limpet.KeepLast(1), incremental=True) as writer:
            known = 0 if writer.latest is None else writer.latest.step or 0
            return [writer.save(part, step=known + n).step or 0 for n in (1, 2)]

    for expected in ([1, 2], [3, 4]):
        with FakeGroup(3) as group:
            assert group.run(serve) == [expected] * 3
    newest = limpet.Run(store).latest()
    assert (newest.step, newest.verify().ok) == (4, True)
    assert versions(store)[-1] == "version_4"


@pytest.mark.parametrize("call", [0, 5, 15, 25, 35, 45, 55])
def test_a_writer_that_was_taken_over_by_one_that_has_ended_deletes_nothing_of_it(call):
    """For example, a process was stopped for hours. ``call``: of the store, before which."""
    store, calls = HookedStore(MemoryStore()), list[str]()

    def take_over(method, key):
        calls.append(method)
        if len(calls) == call + 1:
            with limpet.Run(store.inner).writer() as second:
                last = second.latest.step or 0
                second.save(state(100), step=last + 4)

    with limpet.Run(store).writer(keep=limpet.KeepLast(1), incremental=True) as first:
        first.save(state(1), step=1)
        store.before = take_over
        for step in (2, 3):
            with suppress(LimpetError):  # from the moment of the takeover
                first.save(state(step), step=step)
        with pytest.raises(LimpetError, match="taken this run over, and has ended"):
            first.save(state(9), step=9)
    run = limpet.Run(store.inner)
    newest = run.latest()
    assert (newest["note"], newest.verify().ok) == ("value 100", True)


def test_a_lock_that_was_removed_by_hand_is_written_again():
    store = MemoryStore()
    with limpet.Run(store).writer() as writer:
        for step in (1, 2):
            store.delete("writer.json")
            writer.save(state(step), step=step)
        assert "writer.json" in keys(store)
        limpet.Run(store).delete(1)
        store.delete("writer.json")
        writer.save(state(3), step=3)
    with limpet.Run(store).writer() as writer:
        store.delete("writer.json")
        writer.save(state(4), step=4)
    assert versions(store) == ["version_2", "version_3", "version_4"]
