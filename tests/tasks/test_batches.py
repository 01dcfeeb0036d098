"""Batches that a loader reads ahead: steps count, and evaluation tasks stay where they are."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from limpet.errors import LeaseLost, LimpetError, TaskError
from limpet.tasks import Queue, TaskBatches
from tests.tasks.clock import FakeClock


class Records(Dataset[int]):
    """Returns the number of each record."""

    def __getitem__(self, key):
        return int(key)


def a_queue(records=20, task_size=6, epochs=1, **options):
    queue = Queue(**options)
    queue.add("training", records, task_size=task_size, epochs=epochs, name="t")
    return queue


def numbers(batches):
    """One pass, in which a step consumes each batch."""
    found = []
    for batch in batches:
        found.append(batch)
        batches.consumed()
    return found


def test_batches_cross_tasks_but_not_epochs():
    queue = a_queue(10, task_size=3, epochs=2)
    assert numbers(TaskBatches(queue.training, 4)) == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    ]  # fmt: skip
    assert queue.finished("training")


def test_records_of_named_data_sets_have_names():
    queue = a_queue({"f": 2, "g": range(5, 7)}, task_size=9)
    assert numbers(TaskBatches(queue.training, 3)) == [[("f", 0), ("f", 1), ("g", 5)], [("g", 6)]]


def test_a_batch_has_records_of_one_job():
    queue = a_queue(3, task_size=2)
    queue.add("training", 3, task_size=2, name="u")
    assert numbers(TaskBatches(queue.training, 4)) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_prefetches_takes_no_evaluation_task(workers):
    """The cause that seeds/003 names: a pipeline that prefetches looks for its next training task,
    and takes all evaluation tasks on the way."""
    queue = a_queue(60, task_size=4)
    job = queue.add("evaluation", 9, task_size=1, name="e")
    batches = TaskBatches(queue.training, 3)
    loader = DataLoader(
        Records(),
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
    )
    trained: list[int] = []
    evaluated: Counter[str] = Counter()

    def evaluate(task):
        return task.start

    for step, batch in enumerate(loader):
        # whatever was prefetched, the evaluation tasks are all there, until a step asks for one
        assert job.completed == min(9, 2 * step)
        assert batches.pending >= (8 if workers and step < 5 else 1)
        for worker in ("this worker", "another worker"):
            evaluated[worker] += queue.evaluation.evaluate_one(evaluate, worker)
        trained += batch.tolist()
        batches.consumed()
    assert evaluated == {"this worker": 5, "another worker": 4}
    assert sorted(trained) == list(range(60))
    assert job.results() == list(range(9))
    assert queue.finished("training")


def test_a_pipeline_has_no_way_to_ask_for_evaluation_tasks():
    queue = a_queue(1)
    queue.add("evaluation", 1, task_size=1, name="e")
    batches = TaskBatches(queue.training, 3)
    assert not hasattr(batches, "evaluation")
    assert not hasattr(queue.training, "evaluation")
    for wrong in (queue, queue.evaluation):
        with pytest.raises(LimpetError, match="must be the training side"):
            TaskBatches(wrong, 3)
    numbers(batches)
    assert queue.training.get() is None  # and not the evaluation task


def test_52_what_was_read_ahead_is_pending_and_not_consumed():
    queue = a_queue(20, task_size=6)
    batches = TaskBatches(queue.training, 4)
    ahead = [batch for _, batch in zip(range(4), batches)]
    assert ahead[-1] == [12, 13, 14, 15]
    assert queue.state_dict()["jobs"][0]["positions"] == []
    batches.consumed()
    batches.consumed(2)
    state = queue.state_dict()["jobs"][0]
    assert (state["completed"], state["positions"]) == ([[0, 2]], [])
    assert numbers(batches) == [[12, 13, 14, 15], [16, 17, 18, 19]]  # after a break


def test_a_step_cannot_consume_what_was_not_yielded():
    batches = TaskBatches(a_queue().training, 4)
    for count in (1, 0, -1, 1.0, None, True):
        with pytest.raises(TaskError, match="more batches than were yielded"):
            batches.consumed(count)


def test_passes_without_steps_are_an_error():
    batches = TaskBatches(a_queue().training, 4)
    first = [list(batches) for _ in range(2)]
    assert first[0] == first[1]
    with pytest.raises(TaskError, match="No step has consumed"):
        list(batches)
    batches.consumed()  # the last pass
    assert next(iter(batches))[0] == 4


def test_an_older_pass_raises():
    batches = TaskBatches(a_queue().training, 4)
    old = iter(batches)
    next(old)
    new = iter(batches)
    assert next(new)[0] == 0
    with pytest.raises(TaskError, match="no longer the latest"):
        next(old)
    assert next(new)[0] == 4


def test_a_stream_is_refused():
    queue = a_queue({"s": None}, task_size=1)
    with pytest.raises(TaskError, match="cannot read stream 's'"):
        list(TaskBatches(queue.training, 4))
    assert queue.training.get() is not None


def test_a_pass_that_ends_within_a_batch_loses_no_task(monkeypatch):
    """Such as by Ctrl-C while it waits for the second task of a batch."""
    queue = a_queue(5, task_size=3)
    batches = TaskBatches(queue.training, 5)
    get, calls = queue.get, [0]

    def interrupted(*args):
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return get(*args)

    monkeypatch.setattr(queue, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(batches)
    assert numbers(batches) == [[0, 1, 2, 3, 4]]
    assert queue.finished("training")


def test_after_a_load_a_step_of_the_old_pass_is_refused():
    queue = a_queue()
    batches = TaskBatches(queue.training, 4)
    state = queue.state_dict()
    old = iter(batches)
    next(old)
    batches.consumed()
    next(old)
    queue.load_state_dict(state)
    with pytest.raises(LeaseLost):
        batches.consumed()
    assert [n for batch in numbers(batches) for n in batch] == list(range(20))


def test_each_step_renews_the_leases_of_what_is_read_ahead():
    clock = FakeClock()
    queue = a_queue(12, task_size=2, clock=clock, attempts=99)
    batches = TaskBatches(queue.training, 2, lease_seconds=10)
    for _ in zip(range(4), batches):
        pass
    for _ in range(4):
        clock.advance(9)
        assert getattr(queue.training.get("other"), "start", None) in (8, 10)
        queue.recover("other")
        batches.consumed()
    queue.training.get("other")
    ahead = iter(batches)
    next(ahead)
    clock.advance(11)
    assert queue.training.get("another") is not None
    with pytest.raises(LeaseLost):
        batches.consumed()


def test_leases_of_batches_in_the_process_of_the_queue_do_not_end():
    clock = FakeClock()
    queue = a_queue(clock=clock)
    batches = TaskBatches(queue.training, 4)
    for _ in batches:
        clock.advance(1e6)
        queue.training.get("other")
        queue.recover("other")
        batches.consumed()
    assert queue.finished("training")


def test_workers_share_the_tasks_of_one_queue():
    queue = a_queue(100, task_size=3, epochs=2)
    workers = [TaskBatches(queue.training, 4, worker=f"w{i}", rank=0, ranks=1) for i in range(3)]
    passes: list[Iterator[Any]] = [iter(w) for w in workers]
    consumed: Counter[int] = Counter()
    while not queue.finished("training"):
        for i, batches in enumerate(workers):
            batch = next(passes[i], None)
            if batch is None:
                passes[i] = iter(batches)
                continue
            consumed.update(batch)
            batches.consumed()
    assert consumed == Counter(dict.fromkeys(range(100), 2))


@pytest.mark.slow
@given(
    records=st.integers(1, 40),
    task_size=st.integers(1, 9),
    epochs=st.integers(1, 2),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 5)), max_size=4),
)
@settings(max_examples=60)
def test_ranks_get_equally_many_batches_and_all_records_once(records, task_size, epochs, legs):
    """A training that restarts with other numbers of ranks and batch sizes.

    ``legs``: the number of ranks, the size of a batch, and the number of steps until the end.
    """
    state: Any = None
    consumed: Counter[int] = Counter()
    padded = 0
    for ranks, batch_size, steps in [*legs, (3, 4, 1000)]:
        queues = [a_queue(records, task_size, epochs) for _ in range(ranks)]
        replicas = []
        for rank, queue in enumerate(queues):
            if state is not None:
                queue.load_state_dict(state)
            replicas.append(TaskBatches(queue.training, batch_size, rank=rank, ranks=ranks))
        passes = [iter(batches) for batches in replicas]
        for _ in range(steps):
            parts = [next(batches, None) for batches in passes]
            if any(part is None for part in parts):
                assert parts == [None] * ranks  # all ranks end at the same step
                break
            lengths = [len(part or ()) for part in parts]
            assert 1 <= min(lengths) <= max(lengths) <= min(lengths) + 1
            padded += sum(lengths) - len({number for part in parts for number in part})
            for batches, part in zip(replicas, parts):
                consumed.update(part)
                batches.consumed()
            states = [queue.state_dict() for queue in queues]
            assert all(s == states[0] for s in states)  # so that a version stores one of them
        state = queues[0].state_dict()
    assert queues[0].finished("training")
    assert all(n >= epochs for n in consumed.values())
    assert consumed.total() == records * epochs + padded


def test_ranks_are_those_of_torch_distributed_by_default(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    batches = TaskBatches(a_queue(9, task_size=5).training, 6)
    assert numbers(batches) == [[1, 4], [7]]


def test_the_tensors_of_a_loader_are_those_of_the_records():
    batches = TaskBatches(a_queue(5, task_size=2).training, 2)
    loader = DataLoader(Records(), batch_sampler=batches)
    assert torch.cat(list(loader)).tolist() == list(range(5))
