"""The work of a queue does not grow with its tasks, and its state stays small. Lines are counted,
not seconds."""

import json
import math
from typing import Any

import pytest

from limpet.tasks import Queue
from tests.test_growth import count_lines

TASKS = 100_000


def a_queue(tasks, kind="training", **options):
    queue = Queue(**options)
    queue.add(kind, tasks * 32, task_size=32, name="t")
    return queue


def lines_of_a_task(tasks):
    """The lines of one get, consumed, and done, when half of the tasks are complete in a pattern
    that is bad for intervals."""
    queue = a_queue(tasks)
    held = [queue.get("training", f"w{i}") for i in range(tasks)]
    for task in held[::2]:
        task.done()
    for task in held[1::2]:
        task.release()

    def work():
        task: Any = queue.get("training")
        task.consumed(5)
        task.done()
        queue.get("training", "lost")
        queue.recover("lost")

    return count_lines(work)[0]


def test_a_task_costs_at_most_the_logarithm_of_their_number():
    lines_of_a_task(10)
    few, many = lines_of_a_task(64), lines_of_a_task(4096)
    assert many <= few * math.log2(4096) / math.log2(64)


def test_adding_and_loading_100_000_tasks_costs_as_much_as_10():
    a_queue(10)
    assert count_lines(lambda: a_queue(TASKS))[0] <= count_lines(lambda: a_queue(10))[0] + 5
    lines = []
    for tasks in (10, TASKS):
        state = a_queue(tasks).state_dict()
        lines.append(count_lines(lambda s=state: Queue().load_state_dict(s))[0])
    assert lines[1] <= lines[0] + 5


@pytest.mark.slow
def test_the_state_of_100_000_tasks_is_small_at_every_moment():
    queue = a_queue(TASKS)
    largest = 0
    held: list[Any] = [queue.get("training", f"w{i}") for i in range(8)]
    step = 0
    while held[step % 8] is not None:
        held[step % 8].done()
        held[step % 8] = queue.get("training", f"w{step % 8}")
        step += 1
        if step % 997 == 0:
            largest = max(largest, len(json.dumps(queue.state_dict())))
    assert step == TASKS
    assert largest < 400  # bytes
    assert queue.finished("training")


def test_jobs_that_have_ended_cost_nothing():
    """Evaluations leave the queue when somebody has waited for them."""
    queue = Queue()
    lines = []
    for i in range(200):
        job = queue.add("evaluation", 2, task_size=1, name=f"e{i}")

        def work():
            while queue.evaluation.evaluate_one(lambda task: 1):
                pass
            assert queue.finished("evaluation")

        lines.append(count_lines(work)[0])
        assert job.results() == [1, 1]
    assert lines[-1] <= lines[1] + 5
    assert queue.state_dict()["jobs"] == []


def test_many_jobs_in_a_row_cost_as_much_as_one():
    def lines(jobs):
        queue = Queue()
        for i in range(jobs):
            queue.add("training", 1, task_size=1, name=f"t{i}", after=f"t{i - 1}" if i else None)

        def work():
            task: Any = queue.get("training")
            task.done()
            assert not queue.finished("training")

        return count_lines(work)[0]

    lines(2)
    assert lines(300) <= lines(3) + 20
