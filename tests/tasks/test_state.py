"""The state of a queue: what a load reopens, and what it refuses."""

import copy
import json
from typing import Any

import pytest

from limpet.errors import LeaseLost, PlanError, TaskError
from limpet.tasks import Queue


def training(queue, worker="w"):
    return queue.get("training", worker)


def evaluation(queue, worker="w"):
    return queue.get("evaluation", worker)


def a_queue():
    queue = Queue()
    queue.add("training", {"f": 10, "s": None}, task_size=4, name="t")
    queue.add("training", 1, task_size=1, name="end", after="t")
    queue.add("evaluation", 3, task_size=1, name="e")
    return queue


def test_a_load_reopens_exactly_what_was_not_completed():
    queue = a_queue()
    tasks = [training(queue, f"w{i}") for i in range(4)]
    tasks[1].done()
    tasks[2].consumed(1)
    tasks[3].consumed(1000)
    evaluation(queue, "a").done("first")
    held = evaluation(queue, "b")
    state = json.loads(json.dumps(queue.state_dict()))
    for loaded in (Queue(), a_queue(), queue):
        loaded.load_state_dict(copy.deepcopy(state))
        assert loaded.state_dict() == state
        again = [training(loaded, f"v{i}") for i in range(3)]
        assert [(t.id, t.start, t.position, t.stop) for t in again] == [
            (1, 0, 0, 4),
            (3, 8, 9, 10),
            (4, 0, 1000, None),
        ]
        assert loaded.get("training") is None  # "end" waits
        for task in again:
            assert not loaded.finished("training")
            task.done()
        assert training(loaded).job == "end"
        assert evaluation(loaded, "x").id == held.id
        loaded.recover("x")
        for _ in range(2):
            evaluation(loaded).done("others")
        assert loaded.job("e").results() == ["first", "others", "others"]


def test_the_state_does_not_depend_on_workers_and_leases():
    states = []
    for workers in (1, 3):
        queue = a_queue()
        held = [training(queue, f"w{i}") for i in range(workers)]
        held[0].consumed(4)
        states.append(queue.state_dict())
    assert states[0] == states[1]


def test_reports_of_leases_before_a_load_are_ignored():
    queue = a_queue()
    state = queue.state_dict()
    task, other = training(queue), evaluation(queue)
    queue.load_state_dict(state)
    again, other_again = training(queue), evaluation(queue)
    assert (again.id, other_again.id) == (task.id, other.id)
    assert again.attempt != task.attempt
    with pytest.raises(LeaseLost):
        task.consumed(1)
    assert not task.done()
    assert not task.fail("x")
    assert not other.done("from another history")
    again.consumed(1)
    assert other_again.done("from this history")


def test_jobs_keep_their_handles_across_a_load():
    queue = Queue()
    job = queue.add("training", 4, task_size=2, name="t")
    training(queue).done()
    state = queue.state_dict()
    training(queue).done()
    job.wait(0)
    queue.load_state_dict(state)
    assert job.completed == 1
    with pytest.raises(TaskError, match="did not end"):
        job.wait(0)
    training(queue).done()
    job.wait(0)


def test_a_job_that_failed_can_be_tried_again_after_a_load():
    queue = Queue(attempts=1)
    job = queue.add("training", 4, task_size=2, name="t")
    training(queue).consumed(1)
    training(queue).fail("x")
    assert job.error is not None
    queue.load_state_dict(queue.state_dict())
    assert job.error is None
    assert training(queue).position == 1
    training(queue).done()


def test_a_load_drops_jobs_that_did_not_exist_then():
    queue = Queue()
    queue.add("training", 4, task_size=2, name="t")
    state = queue.state_dict()
    training(queue).done()
    training(queue).done()
    later = queue.add("training", 2, task_size=2, name="later")
    val = queue.add("evaluation", 2, task_size=2, name="val")
    training(queue).done()
    queue.load_state_dict(state)
    for job in (val, later):
        with pytest.raises(TaskError, match=r"load has removed job .* from the queue"):
            job.wait(0)
    assert queue.finished("evaluation")
    assert queue.add("training", 2, task_size=2, name="later").completed == 0


def test_a_load_drops_a_loaded_job_that_did_not_exist_then():
    queue = Queue()
    queue.add("training", 4, task_size=2, name="t")
    before = queue.state_dict()
    queue.add("training", 4, task_size=2, name="later")
    for _ in range(3):
        training(queue).done()
    restarted = Queue()
    restarted.load_state_dict(queue.state_dict())
    restarted.load_state_dict(before)
    assert restarted.state_dict() == before


def test_a_load_refuses_to_lose_a_new_training_job():
    state = a_queue().state_dict()
    queue = a_queue()
    queue.add("training", 4, task_size=2, name="new")
    before = queue.state_dict()
    for call in (queue.check_state_dict, queue.load_state_dict):
        with pytest.raises(PlanError, match=r"'new', which would be lost.*after resume\(\)"):
            call(state)
    assert queue.state_dict() == before


@pytest.mark.parametrize(
    "change", [{"task_size": 5}, {"data": 11}, {"epochs": 2}, {"kind": "evaluation"}]
)
def test_a_load_refuses_a_job_that_differs(change):
    saved, live = Queue(), Queue()
    arguments: dict[str, Any] = {"kind": "training", "data": 10, "task_size": 4, "name": "t"}
    saved.add(**arguments)
    live.add(**{**arguments, **change})
    with pytest.raises(PlanError, match="'t' of the task queue differs"):
        live.load_state_dict(saved.state_dict())


def damaged(**change):
    queue = Queue()
    queue.add("training", {"f": 10}, task_size=2, name="t")
    task = training(queue)
    task.consumed(1)
    training(queue).done()
    queue.add("evaluation", 2, task_size=1, name="e")
    evaluation(queue).done(1)
    state = queue.state_dict()
    for path, value in change.items():
        target: Any = state
        *steps, last = path.split("__")
        for step in steps:
            target = target[int(step) if step.isdecimal() else step]
        target[int(last) if last.isdecimal() else last] = value
    return state


DAMAGE: list[Any] = [
    {"next_id": 7},
    {"next_id": "8"},
    {"jobs": {}},
    {"extra": 1},
    {"jobs__0": []},
    {"jobs__0__spec": "[]"},
    {"jobs__0__spec": 3},
    {"jobs__0__spec": '["training", "t", [["f", 0, 10]], 2, 1]'},
    {"jobs__0__spec": '["training", "t", [["f", 0, 10]], 0, 1, null]'},
    {"jobs__0__spec": '["training","t",[["f",0,10]],2,1,null]'},
    {"jobs__1__spec": '["evaluation", "t", [["", 0, 2]], 1, 1, null]'},  # one name twice
    {"jobs__0__first_id": 0},
    {"jobs__1__first_id": 5},  # an id of the first job
    {"jobs__0__completed": [[1, 6]]},
    {"jobs__0__completed": [[2, 1]]},
    {"jobs__0__completed": [[1, 2], [2, 3]]},
    {"jobs__0__completed": [[3, 4], [1, 2]]},
    {"jobs__0__completed": [[1]]},
    {"jobs__0__completed": [["1", "2"]]},
    {"jobs__0__completed": [[True, 2]]},
    {"jobs__0__completed": None},
    {"jobs__0__positions": [[0, 2]]},  # this task would be complete
    {"jobs__0__positions": [[0, 0]]},
    {"jobs__0__positions": [[1, 3]]},  # this one is complete
    {"jobs__0__positions": [[5, 1]]},
    {"jobs__0__positions": [[0, 1], [0, 1]]},
    {"jobs__0__positions": [[0, 1.0]]},
    {"jobs__1__positions": [[1, 1]]},
    {"jobs__1__results": []},
    {"jobs__1__results": [[0, 5]]},
    {"jobs__1__results": [[1, "1"]]},
    {"jobs__0__unknown": 1},
]


def test_the_state_that_is_damaged_below_is_valid():
    Queue().load_state_dict(damaged())


@pytest.mark.parametrize("change", DAMAGE, ids=str)
def test_damaged_states_are_refused(change):
    queue = Queue()
    with pytest.raises(PlanError):
        queue.check_state_dict(damaged(**change))
    with pytest.raises(PlanError):
        queue.load_state_dict(damaged(**change))
    assert queue.state_dict() == Queue().state_dict()


def test_a_state_with_more_tasks_than_a_job_can_have_is_refused():
    queue = Queue()
    queue.add("training", {"f": 1 << 60}, task_size=1, name="t")
    state = queue.state_dict()
    state["jobs"][0]["spec"] = f'["training", "t", [["f", 0, {1 << 60}]], 1, {1 << 60}, null]'
    state["jobs"][0]["completed"] = [[0, 1 << 62]]
    state["next_id"] = 1 << 63
    with pytest.raises(PlanError, match="a job that does not exist"):
        Queue().load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], 3, {}, "x"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(PlanError, match="not the state of a task queue"):
        Queue().load_state_dict(state)
