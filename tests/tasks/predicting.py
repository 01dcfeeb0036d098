"""A worker process of ``test_prediction``: ``python -m tests.tasks.predicting ADDRESS RUN OUT``.

It is written as a user writes it, but begins at the end of its input. With a fourth argument, it
stops in the middle of its third task, after it has stored a part of the output.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import limpet


def inputs(start, stop):
    return torch.arange(start, stop, dtype=torch.float32).reshape(-1, 1)


def main(address, run, out, *hangs):
    sys.stdin.read()
    model = torch.nn.Linear(1, 1)
    limpet.load(f"{run}@best", into={"model": model}, keys="model/**")
    with limpet.tasks.RemoteQueue.connect(address) as queue, torch.no_grad():
        done = 0
        while not queue.finished("prediction"):
            task = queue.prediction.get(timeout=0.2)
            if task is None:
                continue
            outputs = model(inputs(task.start, task.stop))[:, 0].tolist()
            lines = [f"{i} {y:.1f}\n" for i, y in enumerate(outputs, task.start)]
            part = Path(out, f"{task.id}.txt.{os.getpid()}")
            if hangs and done == 2:
                part.write_text("".join(lines[:10]))
                print(task.id, flush=True)
                signal.pause()
            part.write_text("".join(lines))
            part.rename(Path(out, f"{task.id}.txt"))  # the same file in every attempt
            task.done()
            done += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
