"""docs/errors.md describes every error, warning, and exit, with messages that Limpet writes.

A new class in ``limpet.errors`` needs a section. A section with a message needs a function here
that causes it.
"""

import errno
import inspect
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import limpet
from limpet import errors
from limpet.run.save_request import request_and_wait
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.testing import Fault, FaultFs
from tests.docs.test_docs import ROOT
from tests.fakegroup import FakeGroup
from tests.forging import seal
from tests.unreliable_stores import HookedStore

PAGE = (ROOT / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
MESSAGE = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, BaseException) and not name.startswith("_")
}


CAUSES: dict[str, Callable[[], str | None]] = {}
"""Each function returns the message of an error, or None after it caused a warning."""


def causes(cause):
    """Register a function under the name of the class that it causes."""
    CAUSES[cause.__name__] = cause
    return cause


def raising(cause):
    """Register a function that raises the class of its name."""

    def message():
        with pytest.raises(CLASSES[cause.__name__]) as caught:
            cause()
        return str(caught.value)

    CAUSES[cause.__name__] = message
    return message


def linear():
    return torch.nn.Linear(4, 2)


def save_snapshot(**more):
    limpet.save("snap", {"model": linear(), **more})
    return Path("snap")


def save_run(last=40, run="runs/a", leave=False):
    state = {"model": linear(), "progress": limpet.Progress()}
    with limpet.Checkpointer(run, state, save=limpet.EverySteps(10)) as ckpt:
        while ckpt.current_step < last:
            ckpt.step()
        if leave:
            raise SystemExit(0)
    return state


def shard_of(snapshot):
    (path,) = Path(snapshot).glob("shard-*.safetensors")
    return path


def flip_last_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@raising
def LimpetError():
    limpet.EverySteps(0)


@raising
def FormatError():
    shard = shard_of(save_snapshot())
    shard.write_bytes(shard.read_bytes()[:-10])
    limpet.load("snap")


@raising
def ManifestInvalid():
    Path(save_snapshot(), "manifest.json").write_text("{}")
    limpet.open("snap")


@raising
def FormatTooNew():
    Path(save_snapshot(), "manifest.json").write_bytes(seal({"new": 1}, 99))
    limpet.open("snap")


@raising
def DigestMismatch():
    flip_last_bit(shard_of(save_snapshot()))
    limpet.load("snap")


@raising
def NotFound():
    limpet.open("runs/typo")


@raising
def AlreadyExists():
    save_snapshot()
    save_snapshot()


def save_with_fault(error):
    fs = FaultFs(None, Fault("open", error=error, lasting=True))
    limpet.save(LocalStore("runs/a", fs=fs), {"model": linear()})


@raising
def Denied():
    save_with_fault(errno.EACCES)


@raising
def NoSpace():
    save_with_fault(errno.ENOSPC)


@raising
def Unavailable():
    save_with_fault(errno.ESTALE)


@raising
def StoreError():
    save_with_fault(errno.EIO)


@raising
def BrokenLink():
    shard = shard_of(save_snapshot())
    shard.unlink()
    shard.symlink_to("/mnt/disk-2/shard.safetensors")
    limpet.load("snap")


@raising
def PlanError():
    save_snapshot(note="x")
    limpet.load("snap", into={"model": linear(), "ema": torch.zeros(3)})


@raising
def MissingLeaf():
    save_snapshot()
    limpet.load("snap", into={"model": linear(), "ema": torch.zeros(3)})


@raising
def UnexpectedLeaf():
    save_snapshot(note="x")
    limpet.load("snap", into={"model": linear()})


@raising
def ShapeMismatch():
    save_snapshot()
    limpet.load("snap", into={"model": torch.nn.Linear(4, 3)})


@raising
def DTypeMismatch():
    save_snapshot()
    limpet.load("snap", into={"model": linear().double()})


@raising
def Unsupported():
    limpet.save("snap", {"model": linear(), "path": Path("data")})


@raising
def MemberFailed():
    class Bad:
        def state_dict(self):
            raise KeyError("average")

        def load_state_dict(self, state): ...

    limpet.save("snap", {"model": linear(), "ema": Bad()})


@raising
def RankFailed():
    def save(rank):
        fs = FaultFs(None, *[Fault("open", error=errno.ENOSPC, lasting=True)] * rank)
        limpet.save(LocalStore("runs/a", fs=fs), {"value": limpet.PerRank(torch.zeros(4))})

    group = FakeGroup(2)
    raise next(e for e in group.outcomes(save) if isinstance(e, errors.RankFailed))


@raising
def DeadlinePassed():
    save_run()
    request_and_wait(limpet.Run("runs/a"), 0.1)


@raising
def NoSnapshot():
    state = save_run(10)
    flip_last_bit(shard_of("runs/a/version_10"))
    with limpet.Checkpointer("runs/a", state) as ckpt:
        ckpt.resume()


@raising
def TaskError():
    limpet.tasks.Queue().job("val@100")


@raising
def LeaseLost():
    queue = limpet.tasks.Queue(lease_seconds=0.001)
    queue.add("training", 10, task_size=5, name="train")
    task = queue.training.get()
    time.sleep(0.01)
    task.consumed(5)


@raising
def JobFailed():
    queue = limpet.tasks.Queue(attempts=1)
    job = queue.add("evaluation", 10, task_size=5, name="val@100")
    queue.evaluation.get().fail("ValueError: bad record")
    job.wait(timeout=1)


@causes
def Preempted():
    state = {"model": linear(), "progress": limpet.Progress()}
    with pytest.raises(errors.Preempted) as caught, limpet.Checkpointer("runs/a", state) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            ckpt.step()
            time.sleep(0.001)
    assert caught.value.code == 75
    return f"limpet: {caught.value.reason}"


@causes
def SkippedVersion():
    state = save_run()
    flip_last_bit(shard_of("runs/a/version_40"))
    with limpet.Checkpointer("runs/a", state) as ckpt:
        ckpt.resume()


@causes
def SaveFailed():
    def fail(method, key):
        if method == "put":
            raise errors.NoSpace("Cannot write the shard: No space left on device")

    store = HookedStore(MemoryStore())
    state = {"model": linear(), "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(10), on_error="warn") as ckpt:
        ckpt.step()
        store.before = fail
        while ckpt.current_step < 10:
            ckpt.step()


@causes
def UnsavedSteps():
    with pytest.raises(SystemExit):
        save_run(25, leave=True)


class Images(torch.utils.data.Dataset[float]):
    rng = random.Random(0)

    def __getitem__(self, i):
        return self.rng.random()

    def __len__(self):
        return 4


@causes
def InexactResume():
    list(limpet.DataLoader(Images()))


@causes
def SinkFailed():
    def to_dashboard(name, fields):
        raise ConnectionError("no route to host")

    with limpet.attach(to_dashboard):
        save_snapshot()


def test_the_page_describes_every_class_and_nothing_else():
    missing, unknown = CLASSES.keys() - SECTIONS.keys(), SECTIONS.keys() - CLASSES.keys()
    assert not missing, f"write a section of docs/errors.md for {sorted(missing)}"
    assert not unknown, f"docs/errors.md describes classes that do not exist: {sorted(unknown)}"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_says_what_to_do(name):
    assert "**What to do:**" in SECTIONS[name]


def test_every_message_of_the_page_is_checked():
    assert {name for name, text in SECTIONS.items() if MESSAGE.search(text)} == CAUSES.keys()


@pytest.mark.parametrize("name", sorted(SECTIONS.keys() & CAUSES.keys()))
def test_the_message_is_what_limpet_writes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = CAUSES[name]()
    if message is None:
        message = next(str(w.message) for w in caught if w.category is CLASSES[name])
    (shown,) = MESSAGE.findall(SECTIONS[name])
    pattern = ".*".join(map(re.escape, " ".join(shown.split()).split("...")))
    assert re.fullmatch(pattern, " ".join(message.split())), message
