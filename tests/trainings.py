"""A tiny deterministic training for tests. Every step changes the whole state."""

import threading
from contextlib import contextmanager
from weakref import ref

import numpy as np

import limpet
from limpet.format.names import MANIFEST
from limpet.loading.snapshot import reader_of
from limpet.run.lineage import start_branch
from limpet.run.policy import EverySteps
from limpet.storage.memory import MemoryStore
from limpet.training import ending


def initial_state():
    """Return the state before the first step."""
    return {
        "weights": np.zeros(1000, np.float32),
        "small": {"bias": np.ones(3, np.float64)},
        "history": [0.0],
        "progress": limpet.Progress(),
    }


def train_step(state):
    """Compute one step, which depends on all earlier steps, and return its loss."""
    step = state["progress"].step + 1
    state["weights"] += np.float32(step) * state["small"]["bias"][0].astype(np.float32)
    state["small"]["bias"] *= 1.001
    loss = float(state["weights"].sum() % 97)
    state["history"] = [*state["history"][-4:], loss]
    return loss


def state_after(steps):
    """Return the state after ``steps`` steps without an interruption."""
    state = initial_state()
    for _ in range(steps):
        train_step(state)
        state["progress"].step += 1
    return state


def states_equal(a, b):
    """Return True if two states are equal bit for bit."""
    return (
        a["weights"].tobytes() == b["weights"].tobytes()
        and a["small"]["bias"].tobytes() == b["small"]["bias"].tobytes()
        and a["history"] == b["history"]
        and a["progress"].state_dict() == b["progress"].state_dict()
    )


@contextmanager
def missing_metrics():
    """Collect the fields ``metrics`` and ``given`` of the events ``metric_missing``."""
    found: list[tuple[list[str], list[str]]] = []

    def collect(name, fields):
        if name == "metric_missing":
            found.append((fields["metrics"], fields["given"]))

    with limpet.attach(collect):
        yield found


@contextmanager
def training(store, save, keep=None, **options):
    state = initial_state()
    with limpet.Checkpointer(store, state, save=save, keep=keep, **options) as ckpt:
        yield state, ckpt


def train(state, ckpt, last_step):
    """Train until ``last_step`` steps are done."""
    while state["progress"].step < last_step:
        ckpt.step({"loss": train_step(state)})


def trained_run(last_step=60, every=20):
    """Return the store of a run with a version, and its metric ``loss``, every ``every`` steps.

    The default versions are 20, 40, and 60.
    """
    store = MemoryStore()
    with training(store, EverySteps(every)) as (state, ckpt):
        train(state, ckpt, last_step)
    return store


def flip_bit(store, key, byte=-1, bit=0):
    """Flip one bit of an object, as a faulty disk could."""
    raw = bytearray(store.get(key, 1 << 30))
    raw[byte] ^= 1 << bit
    store.delete(key)
    store.put_if_absent(key, bytes(raw))


def damage_version(store, folder, damage):
    """Damage a version of one shard: its ``manifest``, or a shard that is ``short`` or
    ``missing``."""
    if damage == "manifest":
        flip_bit(store, f"{folder}/{MANIFEST}")
        return
    shard = shard_of(store, folder)
    raw = store.get(shard, 1 << 20)
    store.delete(shard)
    if damage == "short":
        store.put_if_absent(shard, raw[:-1])


def shard_of(store, folder):
    """Return the key of the only shard of a version."""
    [key] = [s.key for s in store.list(folder) if s.key.endswith(".safetensors")]
    return key


def forget(ckpt):
    """Let later trainings of this process not know of this one, as if it were in another process
    or had been killed: otherwise, they would close it."""
    ending._trainings.pop(ref(ckpt._saver), None)


def delete_version(store, step):
    """Delete a version, also one from which a training continues, which ``Run.delete`` refuses."""
    for stat in list(store.list(f"version_{step}")):
        store.delete(stat.key)


def threads_of_trainings():
    """Return the threads of Limpet in this process, without those that an earlier test with
    several ranks may have left: a training of one process starts none of that name. A thread whose
    start a signal interrupted never ran, although Python lists it for ever."""
    threads = (t for t in threading.enumerate() if t.name.startswith("limpet") and t.is_alive())
    return [t for t in threads if t.name != "limpet-ranks"]


def leave_from(run, snapshot, version, reason):
    """Start a branch at a version, as a resume does; return its number."""
    return start_branch(run.catalog, reader_of(snapshot), version, reason)
