"""A queue in the state of a Checkpointer: "completed at step s"."""

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import limpet
from limpet.errors import LimpetError
from limpet.storage.memory import MemoryStore
from limpet.tasks import Queue, TaskBatches, TrainingTask
from tests.ranks.trainings import TrainingJob

DATA: dict[str, Any] = {"f": 11, "g": range(4, 13)}
EPOCHS = 2
UNDISTURBED = Counter(
    (name, i, epoch)
    for name, records in (("f", range(11)), ("g", range(4, 13)))
    for i in records
    for epoch in range(EPOCHS)
)


class Crash(Exception):
    """The process is gone: nothing after the last version is left."""


class Consumed:
    """The records that the model was trained on: part of the state, as the weights are."""

    def __init__(self):
        self.records: list[list[Any]] = []

    def state_dict(self):
        return {"records": [[*r] for r in self.records]}

    def load_state_dict(self, state):
        self.records = state["records"]

    def counted(self):
        return Counter(map(tuple, self.records))


def train(store, workers, steps, rng):
    """Train until the end, or make some steps and crash, with workers that take turns at random.

    A worker reads its task ahead, and a step consumes up to 3 records of it. At the crash, leases
    are under way, and the steps since the last version are lost.
    """
    queue, consumed = Queue(), Consumed()
    state = {"queue": queue, "consumed": consumed, "progress": limpet.Progress()}
    held: dict[int, TrainingTask | None] = dict.fromkeys(range(workers))
    save = limpet.EverySteps(rng.randint(1, 3))
    arguments: Any = {"kind": "training", "data": DATA, "task_size": 4, "epochs": EPOCHS}
    if rng.random() < 0.5:
        queue.add(**arguments, name="train")
    with limpet.Checkpointer(store, state, save=save | limpet.AtEnd()) as ckpt:
        ckpt.resume()
        queue.add(**arguments, name="train")
        while not queue.finished("training"):
            worker = rng.randrange(workers)
            task = held[worker] = held[worker] or queue.training.get(f"w{worker}")
            if task is None:
                continue
            records = min(rng.randint(1, 3), task.records_left or 0)
            start = task.position
            task.consumed(records)
            consumed.records += [[task.data, start + i, task.epoch] for i in range(records)]
            if not task.records_left:
                held[worker] = None
            ckpt.step()
            ckpt.wait()
            steps = None if steps is None else steps - 1
            if steps == 0:
                raise Crash
    return consumed.counted()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_training_that_crashes_again_and_again_loses_and_repeats_nothing(seed):
    rng = random.Random(seed)
    store = MemoryStore()
    for _ in range(100):
        try:
            found = train(store, rng.randint(1, 5), rng.randint(1, 6), rng)
        except Crash:
            continue
        break
    else:
        pytest.fail("the training has not ended")
    assert found == UNDISTURBED
    assert train(store, 2, None, rng) == UNDISTURBED  # a run that has ended stays ended


@pytest.mark.slow
def test_a_training_can_go_on_from_each_of_its_versions():
    store = MemoryStore()
    assert train(store, 3, None, random.Random(1)) == UNDISTURBED
    versions = [snapshot.step or 0 for snapshot in limpet.Run(store).snapshots()]
    assert len(versions) > 5
    for at in versions:
        queue, consumed = Queue(), Consumed()
        state = {"queue": queue, "consumed": consumed, "progress": limpet.Progress()}
        with limpet.Checkpointer(store, state, save=limpet.Never()) as ckpt:
            ckpt.resume(at=str(at))
        while (task := queue.training.get()) is not None:
            assert task.stop is not None
            rest = range(task.position, task.stop)
            consumed.records += [[task.data, i, task.epoch] for i in rest]
            task.done()
        assert consumed.counted() == UNDISTURBED


def test_going_back_within_one_process_reopens_what_came_later():
    queue, progress = Queue(), limpet.Progress()
    queue.add("training", 6, task_size=2, name="t")
    state = {"queue": queue, "progress": progress}
    with limpet.Checkpointer(MemoryStore(), state, save=limpet.EverySteps(1)) as ckpt:
        ckpt.resume()
        for _ in range(4):
            task: Any = queue.get("training")
            task.consumed(1)
            task.release()
            ckpt.step()
        ckpt.wait()
        ckpt.resume(at=3)
        task = queue.get("training")
        assert (task.id, task.position) == (2, 3)


def test_a_step_that_fails_has_consumed_nothing():
    """The version that ``OnException`` saves has what complete steps have consumed, although the
    step that failed had reported its records, and the loader has read ahead."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    queue, store = Queue(), MemoryStore()
    queue.add("training", 40, task_size=6, name="t")
    batches = TaskBatches(queue.training, 4, rank=0, ranks=1)
    loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_sampler=batches, num_workers=2)
    state = {"model": model, "optimizer": optimizer, "queue": queue}
    with pytest.raises(Crash), limpet.Checkpointer(store, state, save=limpet.OnException()) as ckpt:
        for made, (numbers,) in enumerate(loader):
            model(numbers[:, None]).sum().backward()
            batches.consumed()
            if made == 3:
                raise Crash
            optimizer.step()
            ckpt.step()
    state["queue"] = resumed = Queue()
    with limpet.Checkpointer(store, state, save=limpet.Never()) as ckpt:
        ckpt.resume()
        assert ckpt.current_step == 3
    assert next(iter(TaskBatches(resumed.training, 4, rank=0, ranks=1))) == [12, 13, 14, 15]


def lines_of_a_stream():
    """A stream that can only be read from its beginning."""
    yield from range(1000, 1025)


def test_a_stream_and_a_slice_of_a_file_resume_at_the_exact_record(tmp_path):
    """With readers that run ahead of the steps by up to 4 records."""
    file = tmp_path / "lines"
    file.write_text("".join(f"{i}\n" for i in range(40)))
    store, seen = MemoryStore(), []
    for _ in range(40):
        queue = Queue()
        state = {"queue": queue, "progress": limpet.Progress()}
        with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
            ckpt.resume()
            data: Any = {"file": range(10, 31), "stream": None}
            queue.add("training", data, task_size=8, name="t")
            steps = 0
            while steps < 3 and (task := queue.training.get()) is not None:
                lines = map(int, file.read_text().split())
                source = lines if task.data == "file" else lines_of_a_stream()
                reader = islice(source, task.position, task.stop)
                ahead = list(islice(reader, 4))
                while ahead and steps < 3:
                    task.consumed(1)
                    seen.append(ahead.pop(0))
                    ahead += islice(reader, 1)
                    ckpt.step()
                    steps += 1
                if not ahead and task.stop is None:
                    task.done()
                    ckpt.step()
            ckpt.wait()
            if queue.finished("training"):
                break
    assert seen == [*range(10, 31), *range(1000, 1025)]


def train_on_ranks(store, ranks, steps):
    """Train on ranks in threads, each with its own queue. Returns the records of each rank."""
    with TrainingJob(ranks, inner=store, lockstep=False) as job:

        def work(trainer):
            queue = Queue()
            queue.add("training", 50, task_size=7, name="t")
            state = {"queue": queue, "progress": limpet.Progress()}
            batches = TaskBatches(queue.training, 6, rank=trainer.rank, ranks=ranks)
            records: list[int] = []
            save = limpet.EverySteps(2)
            with trainer.make_checkpointer(state=state, save=save) as ckpt:
                ckpt.resume()
                for made, part in enumerate(batches, 1):
                    records += part
                    batches.consumed()
                    ckpt.step()
                    if made == steps:
                        break
                ckpt.wait()
            return records

        return job.run(work)


@pytest.mark.slow
def test_ranks_store_one_queue_and_resume_with_any_number_of_ranks():
    store, found = MemoryStore(), Counter[int]()
    for ranks, steps in ((3, 2), (2, 4), (1, None)):
        for records in train_on_ranks(store, ranks, steps):
            found.update(records)
    assert found == Counter(range(50))


@pytest.mark.slow
def test_ranks_whose_queues_differ_cannot_be_saved():
    """One rank has consumed something by itself: no version contains one of two truths."""
    with TrainingJob(2, lockstep=False) as job:

        def work(trainer):
            queue = Queue()
            queue.add("training", 50, task_size=7, name="t")
            if trainer.rank:
                task: Any = queue.get("training")
                task.done()
            state = {"queue": queue, "progress": limpet.Progress()}
            with trainer.make_checkpointer(state=state, save=limpet.EverySteps(1)) as ckpt:
                ckpt.step()
                ckpt.wait()

        with pytest.raises(LimpetError, match="queue/jobs"):
            job.run(work)
