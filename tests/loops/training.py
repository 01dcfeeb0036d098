"""The trainings: each does what a script does, and records what it has seen and drawn."""

import hashlib
import os
import random
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import limpet
from tests.forks import send_sigterm
from tests.loops.datasets import BATCH, LENGTH, BadSample, Images, make_loader


class Interrupted(Exception):
    """Ends a training."""


@dataclass(frozen=True)
class Case:
    """A training. ``loop``: one of ``LOOPS``. ``kills``: where its processes are killed, one after
    the other, or end by an exception ("!"), or after a notice ("~").
    ``lost``: the records that a resume may repeat, because they followed a save.
    A tuple for ``workers`` or ``ranks`` has the number of each process in turn."""

    loop: str = "epochs"
    data: str = "torch"
    workers: Any = 0
    ranks: Any = 1
    kills: tuple[str, ...] = ("step 2", "batch 5", "validation 0", "epoch 1", "step 13")
    lost: int = 0
    save: str = "EverySteps(1)"
    epochs: int = 3
    sampler: str = ""
    collate: bool = False
    single: bool = False
    total: int = 0
    drop_last: bool = False
    replay: bool = False
    persistent: bool = False
    pin_memory: bool = False
    context: str | None = None
    validation: str = "torch"
    inside: bool = False
    second: bool = False
    progress: bool = True


def digest(*tensors):
    found = hashlib.sha1()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def draw():
    """Return the next numbers of all generators."""
    return [random.random(), random.gauss(0, 1), np.random.random(), torch.rand(()).item()]


class Training:
    """A training in its process. It seeds as a script does at its first start. ``is_restart``: and
    then differently, so that nothing can depend on the history of the generators."""

    def __init__(self, case, folder, log, place, kill, is_restart, workers):
        self.case, self.kill, self.folder = case, kill, folder
        self.rank, self.ranks = place
        self.log, self.ckpt = log, None
        self.samples = []
        random.seed()
        np.random.seed()
        torch.manual_seed(random.getrandbits(32) if is_restart else 5)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.net: Any = self.model
        if self.ranks > 1:
            # otherwise it sums in another order from the second step of a process on
            options = {"find_unused_parameters": True}
            self.net = nn.parallel.DistributedDataParallel(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4)
        self.loader: Any = make_loader(case, workers, folder, *place)
        self.second: Any = make_loader(Case(data="python"), 0, folder, *place)
        kind, workers = case.validation, 1 if "workers" in case.validation else 0
        self.validation = (limpet.DataLoader if "limpet" in kind else DataLoader)(
            Images("torch numpy python", folder),
            batch_size=8,
            shuffle=True,
            num_workers=workers,
            **({"seed": 1} if "limpet" in kind else {}),
        )
        for _ in range(random.randrange(9) if is_restart else 0):
            draw()
        self.state = {
            "model": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        if case.loop != "steps":
            self.state["loader"] = self.loader
        if case.second:
            self.state["second"] = self.second
        if case.progress:
            self.state["progress"] = limpet.Progress()
        self.seen: list[str] = []
        self.has_grown = False

    def record(self, *parts):
        self.log.write(" ".join(map(str, parts)) + "\n")
        self.log.flush()

    def at(self, place, ckpt, number):
        """End at this place, if the case says so: by SIGKILL, by an exception, or by SIGTERM."""
        if self.kill is None or self.kill.rstrip("!~") != f"{place} {number}":
            return
        if self.kill.endswith("!"):
            raise Interrupted
        if self.kill.endswith("~"):
            send_sigterm(ckpt)  # it ends after the next step
            return
        if place != "save":
            ckpt.wait()
        if self.rank == self.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the driver ends the other ranks, as a launcher does

    def backward(self, ckpt, batch, other=None, scale=1):
        (self.loss(ckpt, batch, other) * scale).backward()

    def loss(self, ckpt, batch, other=None):
        """Return the loss of a batch, for which all generators are used."""
        self.at("batch", ckpt, ckpt.current_step)
        x, i = (t if t.dim() > j else t[None].expand(2, *t.shape) for j, t in zip((1, 0), batch))
        if len(x) == 1:  # BatchNorm1d needs two
            x, i = x.expand(2, -1), i.expand(2)
        self.seen.append(digest(x, i))
        if self.case.ranks != 1:
            self.samples += [f"{number} {digest(row)}" for number, row in zip(i.tolist(), x)]
        x = x + 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.normal())
        loss = (self.net(x).squeeze(1) - x.sum(1)).square().mean()
        if other is not None:
            self.seen.append(digest(*other))
            loss = loss + self.net(other[0]).var()
        return loss

    def update(self, ckpt, batches=1):
        """Make a step of the optimizer, which consists of this many batches."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.count(ckpt, batches)

    def count(self, ckpt, batches=1):
        """Record what the step has seen and done, and count it."""
        step, number = ckpt.current_step + 1, self.loader.batch if batches else "none"
        parameters = digest(*self.model.state_dict().values())
        self.record("step", step, "batch", number, *self.seen, parameters, *draw())
        if self.case.ranks != 1:
            Path(self.folder, f"samples-{step}-{self.rank}").write_text("\n".join(self.samples))
        self.seen, self.samples = [], []
        if "growing" in self.case.data and step == 4:
            Path(self.folder, "length").write_text(f"{LENGTH + 5}")
        ckpt.step({"loss": step / 7}, **({} if batches == 1 else {"batches": batches}))
        self.at("save", ckpt, step)
        self.at("step", ckpt, step)
        if self.case.inside and step % 3 == 0:
            self.record("inside", step, self.validate(ckpt, -1))

    def validate(self, ckpt, epoch):
        """Draw in any order, and also by the batches: the model is in training mode."""
        found = []
        before = {k: v.clone() for k, v in self.model.state_dict().items()}
        with torch.no_grad():
            for x, i in self.validation if self.case.validation != "none" else ():
                found.append(digest(x, i, self.model(x)))
                self.at("validation", ckpt, epoch)
        self.model.load_state_dict(before)
        return hashlib.sha1(repr(found).encode()).hexdigest()[:12]

    def end_epoch(self, ckpt, epoch):
        """What follows a pass: a validation, and random numbers between two epochs."""
        value = int(self.validate(ckpt, epoch)[:8], 16)
        self.record("validation", epoch, value, *draw())
        ckpt.metrics({"val": value, "drawn": torch.rand(()).item()})

    def train(self, ckpt, batch, *other):
        self.backward(ckpt, batch, *other)
        self.update(ckpt)

    def epochs(self, ckpt):
        for epoch in ckpt.epochs(self.case.epochs):
            self.at("epoch", ckpt, epoch)
            yield epoch


# -- the loops -----------------------------------------------------------------------------------


def in_epochs(t, ckpt):
    for epoch in t.epochs(ckpt):
        for batch in t.loader:
            t.train(ckpt, batch)
        t.end_epoch(ckpt, epoch)


def manual(t, ckpt):
    ckpt.resume()
    while t.state["progress"].epoch < t.case.epochs:
        epoch = t.state["progress"].epoch
        t.at("epoch", ckpt, epoch)
        for batch in t.loader:
            t.train(ckpt, batch)
        value = t.validate(ckpt, epoch)
        t.record("validation", epoch, value, *draw())
        ckpt.end_epoch({"val": int(value[:8], 16)})


def with_break(t, ckpt):
    """It ends each epoch after four batches: ``loader.batch`` counts from the epoch's first."""
    for epoch in t.epochs(ckpt):
        for batch in t.loader:
            if t.loader.batch == 4:
                break
            t.train(ckpt, batch)
        t.end_epoch(ckpt, epoch)


def with_continue(t, ckpt):
    """It skips batches, and ends an epoch early."""
    for epoch in t.epochs(ckpt):
        skipped = 0
        for batch in t.loader:
            if t.loader.batch % 3 == 1:
                skipped += 1
                continue
            t.backward(ckpt, batch)
            t.update(ckpt, 1 + skipped)
            skipped = 0
        if epoch == 1:
            continue
        t.end_epoch(ckpt, epoch)


def caught(t, ckpt):
    """An exception in the body of the loop is caught, and the batch is skipped."""
    for epoch in t.epochs(ckpt):
        batches = 0
        for batch in t.loader:
            batches += 1
            try:
                if t.loader.batch == 2:
                    raise FloatingPointError
                t.backward(ckpt, batch)
                t.update(ckpt, batches)
                batches = 0
            except FloatingPointError:
                draw()
        t.end_epoch(ckpt, epoch)


def bad_sample(t, ckpt):
    """A sample cannot be read, and is repaired: the pass begins again at the counted position."""
    for epoch in t.epochs(ckpt):
        while True:
            try:
                for batch in t.loader:
                    t.train(ckpt, batch)
                break
            except BadSample:
                draw()
        t.end_epoch(ckpt, epoch)


def statistics_first(t, ckpt):
    """A pass that no step counts, before that of the training, and another after half of it."""
    for epoch in t.epochs(ckpt):
        sum(len(x) for x, _ in t.loader)
        for batch in t.loader:
            t.train(ckpt, batch)
            if t.loader.batch == 2:
                break
        list(t.loader)
        for batch in t.loader:
            t.train(ckpt, batch)
        t.end_epoch(ckpt, epoch)


def zipped(t, ckpt):
    for epoch in t.epochs(ckpt):
        for batch, other in zip(t.loader, t.second):
            t.train(ckpt, batch, other)
        t.end_epoch(ckpt, epoch)


def forever(loader):
    while True:
        yield from loader


def second_endless(t, ckpt):
    others = forever(t.second)
    for epoch in t.epochs(ckpt):
        for batch in t.loader:
            if t.loader.batch == 4:
                break
            t.train(ckpt, batch, next(others))
        t.end_epoch(ckpt, epoch)


def numbered(t, ckpt):
    """The number of a batch in the epoch decides, also after a resume."""
    for epoch in t.epochs(ckpt):
        for batch in t.loader:
            scale = 1 + t.loader.batch / 10
            t.backward(ckpt, batch, None, scale)
            t.update(ckpt)
        t.end_epoch(ckpt, epoch)


def accumulate(t, ckpt, batch, waiting):
    """Train a batch, of which four make a step. Return how many wait for their step."""
    t.backward(ckpt, batch)
    if waiting < 3:
        return waiting + 1
    t.update(ckpt, 4)
    return 0


def dropped(t, ckpt):
    """Accumulation over four batches. The last two of an epoch are trained in no step."""
    for epoch in t.epochs(ckpt):
        waiting = 0
        for batch in t.loader:
            waiting = accumulate(t, ckpt, batch, waiting)
        t.optimizer.zero_grad()
        t.seen = []
        t.end_epoch(ckpt, epoch)


def carried(t, ckpt):
    """Accumulation over four batches, also of two epochs."""
    waiting = 0
    for epoch in t.epochs(ckpt):
        for batch in t.loader:
            waiting = accumulate(t, ckpt, batch, waiting)
        t.end_epoch(ckpt, epoch)


def fewer(t, ckpt):
    """Accumulation over four batches. The last step of an epoch has two."""
    for epoch in t.epochs(ckpt):
        waiting = 0
        for batch in t.loader:
            t.backward(ckpt, batch)
            waiting += 1
            if waiting == 4 or t.loader.batch == len(t.loader) - 1:
                t.update(ckpt, waiting)
                waiting = 0
        t.end_epoch(ckpt, epoch)


def after_the_pass(t, ckpt):
    """Accumulation over four batches. The last step of an epoch follows the pass."""
    for epoch in t.epochs(ckpt):
        waiting = 0
        for batch in t.loader:
            waiting = accumulate(t, ckpt, batch, waiting)
        if waiting:
            t.update(ckpt, waiting)
        t.end_epoch(ckpt, epoch)


def one_ahead(loader):
    batches = iter(loader)
    for ahead in batches:
        for following in batches:
            yield ahead
            ahead = following
        yield ahead


def prefetched(t, ckpt):
    """A wrapper fetches one batch ahead, as those of Lightning and Accelerate do."""
    for epoch in t.epochs(ckpt):
        for batch in one_ahead(t.loader):
            t.train(ckpt, batch)
        t.end_epoch(ckpt, epoch)


def peeking(t, ckpt):
    """It looks at batches before the first epoch, and before each. See also ``peek_first``."""
    next(iter(t.loader))
    for epoch in t.epochs(ckpt):
        batches = iter(t.loader)
        next(batches, None), next(batches, None)  # a resumed epoch may be at its end
        for batch in t.loader:
            t.train(ckpt, batch)
        next(iter(t.validation))
        t.end_epoch(ckpt, epoch)


def several_passes(t, ckpt):
    """Its epochs have two passes, and it looks at a batch before each of them."""
    for epoch in t.epochs(ckpt):
        for _ in range(2):
            for _ in t.loader:
                break
            for batch in t.loader:
                t.train(ckpt, batch)
        t.end_epoch(ckpt, epoch)


def endless_passes(t, ckpt):
    """It counts steps only, and looks at a batch before each pass."""
    ckpt.resume()
    while ckpt.current_step < 6 * t.case.epochs:
        for _ in t.loader:
            break
        for batch in t.loader:
            t.train(ckpt, batch)


def early_iterator(t, ckpt):
    """The iterator of the first pass is older than the resume."""
    batches = iter(t.loader)
    ckpt.resume()
    for epoch in t.epochs(ckpt):
        for batch in batches:
            t.train(ckpt, batch)
        t.end_epoch(ckpt, epoch)
        batches = iter(t.loader)


def in_steps(t, ckpt):
    """A loop without a loader, which draws its data."""
    for step in ckpt.steps(6 * t.case.epochs):
        t.train(ckpt, (torch.randn(BATCH, 4), torch.arange(BATCH) + step))


def steps_of_passes(t, ckpt):
    """A loop that counts steps, with an endless iterator over the loader."""
    batches = forever(t.loader)
    for _ in ckpt.steps(6 * t.case.epochs):
        t.train(ckpt, next(batches))


def in_parts(t, ckpt):
    """A loop over fewer epochs, and then over more, in one process."""
    for count in range(1, t.case.epochs + 1):
        for epoch in ckpt.epochs(count):
            t.at("epoch", ckpt, epoch)
            for batch in t.loader:
                t.train(ckpt, batch)
            t.end_epoch(ckpt, epoch)


def two_loops(t, ckpt):
    """The step of the first phase trains on the loader, that of the second phase draws its data."""
    for epoch in ckpt.epochs(1):
        for batch in t.loader:
            t.train(ckpt, batch)
        t.end_epoch(ckpt, epoch)
    for step in ckpt.steps(15):
        t.seen = []
        x = torch.randn(BATCH, 4)
        t.backward(ckpt, (x, torch.arange(BATCH) + step))
        t.update(ckpt, 0)


def peek_first(t):
    next(iter(t.loader))
    list(t.loader)


LOOPS = {
    "epochs": in_epochs,
    "manual": manual,
    "break": with_break,
    "continue": with_continue,
    "caught": caught,
    "bad sample": bad_sample,
    "statistics first": statistics_first,
    "zip": zipped,
    "second endless": second_endless,
    "numbered": numbered,
    "dropped": dropped,
    "carried": carried,
    "fewer": fewer,
    "after the pass": after_the_pass,
    "prefetched": prefetched,
    "peeking": peeking,
    "several passes": several_passes,
    "endless passes": endless_passes,
    "early iterator": early_iterator,
    "steps": in_steps,
    "steps of passes": steps_of_passes,
    "in parts": in_parts,
    "two loops": two_loops,
}
BEFORE = {"peeking": peek_first}
"""What the script does before it makes the Checkpointer."""


def run_training(case, folder, log_path, place, kill, workers):
    """Train until ``kill``, or to the end. ``place``: the rank, and the number of ranks."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", "This DataLoader will create 4 worker")
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")
    is_restart = any(True for _ in limpet.Run(folder).snapshots())
    torch.set_num_threads(1)
    with open(log_path, "a") as log:
        t = Training(case, folder, log, place, kill, is_restart, workers)
        BEFORE.get(case.loop, lambda t: None)(t)
        policy = eval(f"limpet.{case.save}") | limpet.AtEnd()
        with limpet.Checkpointer(folder, t.state, save=policy, quiet=True) as t.ckpt:
            LOOPS[case.loop](t, t.ckpt)
            t.ckpt.save()
            t.at("end", t.ckpt, 0)
        t.record("end", digest(*t.model.parameters()), t.ckpt.current_step)
