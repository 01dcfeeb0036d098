"""Trainings on Ray for ``ray_cases.py``, and a program that is the driver of one."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import limpet
from limpet import tables
from limpet.tasks import Queue

WORDS = tables.Table("words", 4, optimizer=tables.Adagrad(lr=0.05), seed=7)
RAY = {"num_cpus": 0.01}
RECORDS, BATCH = 160, 4


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.8)


def servers_alive(kind="LimpetTableServer"):
    """The process ids of the servers on the cluster of this test, oldest first."""
    found, own = [], f"TEST_FOLDER={os.environ['TEST_FOLDER']}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_server = f"ray::{kind}".encode() in (path / "cmdline").read_bytes()
            if is_server and own in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            pass
    return sorted(found)


class Train:
    """Trains ``model`` on sums of rows. ``kills``: at which record which process is killed, once:
    this one, a server, or the driver, with which signal."""

    def __init__(self, folder, kills=()):
        self.folder, self.kills, self.driver = str(folder), dict(kills), os.getpid()

    def __call__(self, worker):
        torch.set_num_threads(1)
        model, *_ = make_model()
        bag = tables.EmbeddingBag(worker.tables, "words", mode="sum")
        worker.dense(model)
        while (records := worker.next(BATCH)) is not None:
            out = model(bag(torch.tensor([[r, r * r % 97, -r] for r in records])))
            loss = (out - torch.tensor(records)[:, None] % 3).square().mean()
            loss.backward()
            for record in records:
                if record in self.kills:
                    self.kill(record, *self.kills[record])
            worker.step({"loss": loss.item()})

    def kill(self, record, whom, number=signal.SIGKILL):
        try:
            os.close(os.open(f"{self.folder}/killed-{record}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        pids = {"worker": os.getpid(), "driver": self.driver}
        os.kill(pids[whom] if whom in pids else servers_alive()[-1], number)
        if whom == "driver":
            time.sleep(60)  # the driver ends this worker


def run(url, train, *, servers, workers, engine="ray", epochs=2, **options):
    """Train two synchronous epochs of the records, or the rest of them. Return the last step."""
    queue = Queue()
    queue.add("training", RECORDS, task_size=16, epochs=epochs, name="train")
    more = {"engine": "ray", "ray": RAY} if engine == "ray" else {}
    options = {"grads_to_wait": 3, **options}
    with tables.Servers([WORDS], servers, dense=make_model, **options, **more) as found:
        state = {"tables": found, "queue": queue}
        with limpet.Checkpointer(url, state, save=limpet.EverySteps(3), incremental=True) as ckpt:
            ckpt.resume()
            more = {"ray": RAY} if engine == "ray" else {}
            found.train(train, workers=workers, queue=queue, ckpt=ckpt, **more)
            return ckpt.current_step


if __name__ == "__main__":
    _url, _servers, _workers, _record, _signal = sys.argv[1:]
    _kills = {int(_record): ("driver", int(_signal))}
    _train = Train(Path(_url).parent, _kills)
    run(_url, _train, servers=int(_servers), workers=int(_workers))
