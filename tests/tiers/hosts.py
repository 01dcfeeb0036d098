"""A host with a memory tier, on which trainings run and die."""

import shutil
import warnings
from pathlib import Path
from typing import Any

from limpet.errors import SkippedVersion
from limpet.format.names import MANIFEST
from limpet.run.policy import AtEnd, EverySteps
from limpet.storage.memory import MemoryStore
from limpet.tiers.settings import MemoryTier
from limpet.training.checkpointer import Checkpointer
from tests.trainings import forget, initial_state, train_step


def train(state, ckpt, last_step):
    """Train, so slowly that no capture is skipped because the one before has not ended."""
    while state["progress"].step < last_step:
        ckpt.step({"loss": train_step(state)})
        if ckpt._tiers.memory is not None:
            ckpt._tiers.memory.wait()


class Host:
    """A host with a folder in memory, on which trainings run one after the other."""

    def __init__(self, path):
        self.path = path
        self.run = MemoryStore()
        self.ckpts: list[Checkpointer] = []
        self.resumed: Any = None
        self.warnings: list[str] = []

    def start(self, every=10, save=50):
        state = initial_state()
        tier = MemoryTier(every=EverySteps(every), copies=1, path=self.path)
        ckpt = Checkpointer(self.run, state, save=EverySteps(save) | AtEnd(), tiers=[tier])
        self.ckpts.append(ckpt)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.resumed = ckpt.resume()
        self.warnings = [str(w.message) for w in caught if w.category is SkippedVersion]
        return state, ckpt

    def train_and_die(self, last_step, **options):
        """Train until a step, then end without an end, as SIGKILL does."""
        state, ckpt = self.start(**options)
        train(state, ckpt, last_step)
        ckpt._saver.wait()
        ckpt._saver.writer_lock.release()
        forget(ckpt)

    @property
    def folder(self):
        (own,) = Path(self.path).iterdir()
        (folder,) = own.iterdir()
        return folder

    @property
    def captured(self):
        """The folders of the states in memory, with their manifest."""
        found = [p.parent.name for p in self.folder.rglob(MANIFEST)]
        return sorted(found, key=lambda name: int(name[8:].partition(".")[0]))

    def file(self, version, suffix):
        files = (self.folder / version).iterdir()
        (path,) = (p for p in files if p.name.endswith(suffix) and not p.name.startswith("."))
        return path


class Hosts:
    """Hosts on which jobs of several ranks run one after the other. A test says which ``folder`` a
    host has."""

    def __init__(self):
        self.run = MemoryStore()
        self.folders: dict[str, Path] = {}
        self.resumed: list[Any] = []
        self.warnings: list[str] = []

    def folder(self, host):
        if host not in self.folders:
            self.folders[host] = self.make_folder(host)
        return self.folders[host]

    def make_folder(self, host) -> Path:
        raise NotImplementedError

    def lose(self, host):
        """Lose a host with what it has. A new one takes its name."""
        shutil.rmtree(self.folders.pop(host))

    def files(self, host, suffix):
        found = self.folder(host).rglob(f"*{suffix}")
        return sorted(p for p in found if not p.name.startswith("."))

    def captured(self, host):
        names = {p.parent.name for p in self.files(host, MANIFEST)}
        return sorted(names, key=lambda name: int(name[8:].partition(".")[0]))

    def work_on_ranks(self, job, work):
        """Let all ranks of a job work, and keep what they have resumed and their warnings."""
        with job, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.run(work)
        self.resumed = [trainer.resumed for trainer in job.ranks]
        self.warnings = [str(w.message) for w in caught if w.category is SkippedVersion]

    @property
    def resumed_step(self):
        (step,) = {0 if s is None else s.step for s in self.resumed}
        return step


def flip_bit(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.unlink()  # the file itself is never modified
    path.write_bytes(data)


def end_as_killed(ckpt, rank):
    """End the threads of a training without anything that its end does, as SIGKILL does."""
    ckpt._tiers.close(is_complete=False)
    ckpt._agreement.close()
    ckpt._preemption.close()
    ckpt._watcher.close()
    ckpt._saver.close()
    if rank == 0:
        ckpt._saver.writer_lock.release()
    forget(ckpt)
