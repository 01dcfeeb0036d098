"""A worker process of the tests: ``python -m tests.tasks.worker FD MODE``,
or with an address instead of ``FD``.

It evaluates tasks: the sum and the number of the squares of the records. Modes: ``work`` until the
owner has no task for it; ``hang`` with the first task until it is killed; ``train``: consume tasks
of the training, one record at a time, and hang after 5 records.
"""

import signal
import socket
import sys

from limpet.tasks import RemoteQueue


def evaluate(task):
    records = range(task.start, task.stop)
    return {"squares": [float(sum(i * i for i in records)), len(records)]}


def hang(report):
    print(report, flush=True)
    while True:
        signal.pause()


def connect(to):
    if to.isdigit():
        return RemoteQueue(socket.socket(fileno=int(to)))
    return RemoteQueue.connect(to)


def main(to, mode):
    with connect(to) as queue:
        if mode == "work":
            print("ready", flush=True)
            while not queue.finished("evaluation"):
                task = queue.evaluation.get(timeout=0.2)
                if task is not None:
                    task.done(evaluate(task))
        elif mode == "hang":
            task = queue.evaluation.get(timeout=30)
            hang(str(task and task.id))
        elif mode == "train":
            training = queue.training.get(timeout=30)
            for _ in range(5):
                training.consumed(1)
            hang(str(training and training.position))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
