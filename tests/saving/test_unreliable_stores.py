"""Saves to stores that answer late or not at all, or that receive each request twice."""

import threading
import time

import pytest

import limpet
from limpet import events
from limpet.errors import AlreadyExists, CommitError, LimpetError, NotFound, Unavailable
from limpet.format.names import MANIFEST
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.crash.promises import check_promises
from tests.saving.saves import keys, save
from tests.trainings import initial_state, train, train_step
from tests.unreliable_stores import HookedStore


def lose_answer(method, part):
    """Return a function that raises ``Unavailable`` for calls of ``method`` with ``part`` in the
    key."""

    def act(called, key):
        if called == method and part in key:
            raise Unavailable(f"No answer for {key}", key=key, store="memory://")

    return act


@pytest.mark.parametrize(
    ("method", "part", "committed"),
    [
        ("put_if_absent", "pin-", False),
        ("put", ".safetensors", False),
        ("write_at", ".safetensors", False),
        ("commit", ".safetensors", False),
        ("put_if_absent", ".index.json", False),
        ("stat", ".safetensors", False),
        ("put_if_absent", MANIFEST, True),
    ],
)
def test_a_lost_answer_fails_the_save(method, part, committed):
    """The call succeeds, but its answer is lost, and the store raises an error. This violates the
    contract of a store."""
    store = HookedStore(MemoryStore())
    store.after = lose_answer(method, part)
    with pytest.raises(Unavailable) as caught:
        save(store, 1)
    assert (caught.value.fields.get("outcome") == "unknown") is committed
    store.after = lambda method, key: None
    assert not [key for key in keys(store) if "pin-" in key]
    versions = Run(store).listing().versions
    assert bool(versions) is committed
    if committed:
        assert "limpet ls" in str(caught.value)
        with pytest.raises(AlreadyExists):
            save(store, 1)
    else:
        save(store, 1)
    assert check_promises(store, [1]) == [1]


def test_a_lost_answer_to_the_deletion_of_a_pin_does_not_fail_the_save():
    store = HookedStore(MemoryStore())
    store.after = lose_answer("delete", "pin-")
    emitted: list[str] = []
    with events.attach(lambda name, fields: emitted.append(name)):
        assert save(store, 1).verify().ok
    assert emitted == ["staged", "pin_left", "committed"]


def test_a_save_succeeds_if_every_call_is_made_twice():
    """A proxy may repeat requests in this way."""
    store = HookedStore(MemoryStore())

    class Twice(HookedStore):
        def put_if_absent(self, key, data):
            self.inner.put_if_absent(key, data)
            return self.inner.put_if_absent(key, data)

        def delete(self, key):
            self.inner.delete(key)
            self.inner.delete(key)

    save(Twice(store), 1)
    assert check_promises(store, [1]) == [1]


def test_a_manifest_that_becomes_visible_late_is_not_replaced():
    store = HookedStore(MemoryStore())
    first = save(store, 1)

    def not_yet(method, key):
        if method in ("stat", "get") and key.endswith(MANIFEST):
            raise NotFound(f"There is no {key} yet", key=key, store="memory://")

    store.before = not_yet
    with pytest.raises(CommitError, match="another save"):
        save(store, 1)
    store.before = lambda method, key: None
    assert reader_of(Run(store).open(first.version)).digest == first.digest


def test_nothing_is_committed_if_a_shard_becomes_visible_late():
    store = HookedStore(MemoryStore())
    store.before = hide_shards
    with pytest.raises(CommitError, match="no such file"):
        save(store, 1)
    store.before = lambda method, key: None
    assert Run(store).listing().versions == []
    save(store, 1)
    check_promises(store, [1])


def hide_shards(method, key):
    if method == "stat" and key.endswith(".safetensors"):
        raise NotFound(f"There is no {key} yet", key=key, store="memory://")


def test_nothing_is_committed_if_a_shard_has_the_wrong_length():
    """This happens if the process that commits sees another folder than the process that wrote."""
    store = HookedStore(MemoryStore())
    inner = store.inner

    class Other(HookedStore):
        def stat(self, key):
            stat = self.inner.stat(key)
            return type(stat)(stat.key, stat.length - 1, stat.modified)

    with pytest.raises(CommitError, match=r"Nothing was committed.*wrong length"):
        save(Other(inner), 1)
    assert Run(inner).listing().versions == []


def test_saves_to_a_slow_store_succeed_after_a_wait_timed_out():
    store = HookedStore(MemoryStore())
    answer = threading.Event()
    store.before = lambda method, key: answer.wait(20) if method == "commit" else time.sleep(0.002)
    state = initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        train(state, ckpt, 1)
        pending = ckpt._saver.pending
        with pytest.raises(TimeoutError, match="did not finish"):
            pending.wait(0.05)
        assert not pending.done
        answer.set()
        assert pending.wait().step == 1
        train(state, ckpt, 3)
    store.before = lambda method, key: None
    assert check_promises(store, [1, 2, 3]) == [1, 2, 3]


def test_resume_does_not_treat_an_unavailable_store_as_damage():
    store = HookedStore(MemoryStore())
    for step in (1, 2):
        save(store, step)
    for method in ("get", "stat", "get_range", "list"):
        store.before = lose_answer(method, "")
        ckpt = limpet.Checkpointer(store, initial_state())
        with pytest.raises(Unavailable):
            ckpt.resume()
        store.before = lambda method, key: None
        assert Run(store).branch() == 0
        assert ckpt.resume().step == 2
        ckpt.close()


def test_a_checkpointer_continues_after_a_save_with_an_unknown_outcome():
    store = HookedStore(MemoryStore())
    state = initial_state()
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(1))
    store.after = lose_answer("put_if_absent", MANIFEST)
    train(state, ckpt, 1)
    with pytest.raises(Unavailable):
        ckpt.wait()
    store.after = lambda method, key: None
    ckpt.step({"loss": train_step(state)})
    ckpt.close()
    assert check_promises(store, [1, 2]) == [1, 2]


def test_a_retry_finds_the_version_of_a_save_with_an_unknown_outcome():
    store = HookedStore(MemoryStore())
    state = initial_state()
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(100))
    train(state, ckpt, 1)
    store.after = lose_answer("put_if_absent", MANIFEST)
    with pytest.raises(Unavailable, match="unknown whether this version was committed"):
        ckpt.save()
    store.after = lambda method, key: None
    found = ckpt.save()
    assert found.step == 1
    train(state, ckpt, 2)
    parent = reader_of(ckpt.save()).manifest.parent
    assert (parent.version, parent.digest) == ("version_1", reader_of(found).digest)
    ckpt.close()
    assert check_promises(store, [1, 2]) == [1, 2]


def test_a_version_of_another_training_is_not_mistaken_for_one_of_this_training():
    store = MemoryStore()
    state = initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(100)) as ckpt:
        train(state, ckpt, 1)
        save(store, 1)
        with pytest.raises(LimpetError, match="Another training has saved version_1"):
            ckpt.save()
        train(state, ckpt, 2)
        assert ckpt.save().step == 2
    assert check_promises(store, [1, 2]) == [1, 2]
