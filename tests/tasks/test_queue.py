"""The queue, behavior by behavior. The numbers are those of BEHAVIOURS.md, section B."""

import copy
import os
import pickle
import threading
import time
from collections import Counter
from typing import Any

import pytest

from limpet.errors import JobFailed, LeaseLost, LimpetError, TaskError
from limpet.tasks import EvaluationTask, Queue
from tests.tasks.clock import FakeClock


def drain(queue, kind="training"):
    """Lease and complete all tasks."""
    tasks = []
    while (task := queue.get(kind)) is not None:
        tasks.append(task)
        assert task.done(None) if isinstance(task, EvaluationTask) else task.done()
    return tasks


def ranges(tasks):
    return [(t.data, t.start, t.stop) for t in tasks]


CUTS: list[tuple[Any, int, list[tuple[str, int, int | None]]]] = [
    # 33: tasks of batch x minibatches; the remainder is kept
    ({"f": 10}, 2 * 2, [("f", 0, 4), ("f", 4, 8), ("f", 8, 10)]),
    ({"f": 8, "g": 5}, 4, [("f", 0, 4), ("f", 4, 8), ("g", 0, 4), ("g", 4, 5)]),
    ({"f": 3}, 100, [("f", 0, 3)]),
    # 34: a start that is not zero
    ({"f": range(5, 12)}, 3, [("f", 5, 8), ("f", 8, 11), ("f", 11, 12)]),
    ({"e": 0, "f": range(7, 9), "g": range(4, 4)}, 1, [("f", 7, 8), ("f", 8, 9)]),
    # 42: a data set size
    (10, 3, [("", 0, 3), ("", 3, 6), ("", 6, 9), ("", 9, 10)]),
    # streams: one task without a known end
    ({"s": None, "f": 2}, 1, [("s", 0, None), ("f", 0, 1), ("f", 1, 2)]),
]


@pytest.mark.parametrize(("data", "task_size", "expected"), CUTS)
def test_33_34_42_data_sets_are_cut_into_tasks(data, task_size, expected):
    queue = Queue()
    assert queue.add("training", data, task_size=task_size, name="t").tasks == len(expected)
    assert ranges(drain(queue)) == expected


def test_35_ids_start_at_1_and_an_empty_queue_has_no_task():
    queue = Queue()
    assert queue.get("training") is None
    assert queue.get("evaluation") is None
    queue.add("training", 3, task_size=1, name="a")
    queue.add("evaluation", 2, task_size=1, name="b")
    queue.add("training", 2, task_size=1, name="c")
    assert [t.id for t in drain(queue)] == [1, 2, 3, 6, 7]
    assert [t.id for t in drain(queue, "evaluation")] == [4, 5]
    assert queue.get("training") is None


def test_36_done_removes_a_task_and_fail_returns_it_under_a_new_attempt():
    queue = Queue()
    queue.add("evaluation", 2, task_size=1, name="e")
    first = queue.get("evaluation", "w")
    assert first.fail(ValueError("bad"))
    again = queue.get("evaluation", "v")
    assert (again.id, again.start, again.stop) == (first.id, first.start, first.stop)
    assert again.attempt != first.attempt
    assert again.done(1)
    assert [t.id for t in drain(queue, "evaluation")] == [2]


def test_37_53_recover_returns_all_tasks_of_a_worker_and_no_other():
    queue = Queue()
    queue.add("training", 6, task_size=1, name="t")
    queue.add("evaluation", 2, task_size=1, name="e")
    lost = [queue.get("training", "lost") for _ in range(3)]
    other = queue.get("training", "other")
    assert queue.get("evaluation", "lost") is not None
    assert queue.recover("lost") == 4
    assert queue.recover("lost") == 0
    tasks = [queue.get("training", "new") for _ in range(5)]
    assert [t.id for t in tasks if t] == [*(t.id for t in lost if t), 5, 6]
    other.renew()  # still leased
    assert (queue.get("evaluation", "new") or lost[0]).id == 7


def test_38_finished_only_when_no_task_is_open_or_leased():
    queue = Queue()
    assert queue.finished("training")
    queue.add("training", 2, task_size=1, name="t")
    queue.add("evaluation", 1, task_size=1, name="e")
    assert not queue.finished("training")
    tasks = [queue.get("training") for _ in range(2)]
    assert queue.get("training") is None
    for task in tasks:
        assert not queue.finished("training")
        task.done()
    assert queue.finished("training")
    assert not queue.finished("evaluation")


def test_39_every_epoch_creates_the_same_tasks():
    queue = Queue()
    queue.add("training", {"f": 5, "g": range(2, 4)}, task_size=2, epochs=3, name="t")
    tasks = drain(queue)
    by_epoch = [[t for t in tasks if t.epoch == epoch] for epoch in range(3)]
    assert ranges(by_epoch[0]) == ranges(by_epoch[1]) == ranges(by_epoch[2])
    assert [t.id for t in tasks] == list(range(1, 13))


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_40_a_task_without_report_returns_after_its_time(kind):
    clock = FakeClock()
    queue = Queue(lease_seconds=999.5, clock=clock)
    queue.add(kind, 1, task_size=1, name="t")
    task = queue.get(kind, "slow")
    clock.advance(999)
    assert queue.get(kind, "other") is None
    clock.advance(1)
    again = queue.get(kind, "other")
    assert (again.id, again.attempt) == (task.id, task.attempt + 1)
    with pytest.raises(LeaseLost, match="lease of task 1 of job 't' is over"):
        task.renew()


def test_40_a_real_wait_ends_when_a_lease_ends(monkeypatch):
    monkeypatch.setattr("limpet.tasks.queue._LONGEST_WAIT", 60.0)
    queue = Queue(lease_seconds=0.05)
    queue.add("training", 1, task_size=1, name="t")
    assert queue.get("training", "hangs") is not None
    start = time.monotonic()
    assert queue.get("training", "waits", timeout=8) is not None
    assert time.monotonic() - start < 7


def test_a_lease_can_be_renewed_again_and_again():
    clock = FakeClock()
    queue = Queue(lease_seconds=10, clock=clock)
    queue.add("training", {"s": None, "f": 4}, task_size=4, name="t")
    stream, task = queue.get("training", "w"), queue.get("training", "w")
    for _ in range(3):
        clock.advance(8)
        stream.consumed(100)  # renews too
        task.renew()
        assert queue.get("training", "other") is None
    clock.advance(10)
    assert queue.get("training", "other") is not None


def test_41_the_longest_time_is_kept_per_kind():
    clock = FakeClock()
    queue = Queue(clock=clock)
    queue.add("training", 4, task_size=2, name="t")
    queue.add("evaluation", 4, task_size=1, name="e")
    assert queue.longest_seconds("training") == queue.longest_seconds("evaluation") == 0
    for kind, seconds in (("training", 3), ("evaluation", 7), ("evaluation", 5)):
        task: Any = queue.get(kind)
        clock.advance(seconds)
        task.done(*([None] if kind == "evaluation" else []))
    failed: Any = queue.get("evaluation")
    clock.advance(100)
    failed.fail("too slow")
    assert (queue.longest_seconds("training"), queue.longest_seconds("evaluation")) == (3, 7)
    last: Any = queue.get("training")
    clock.advance(4)
    last.consumed(2)
    assert queue.longest_seconds("training") == 4
    late: Any = queue.get("evaluation", "late")
    queue.recover("late")
    queue.get("evaluation", "new")
    clock.advance(50)
    late.done(None)  # its own time is not known
    assert queue.longest_seconds("evaluation") == 7


def test_43_a_job_after_another_one_comes_when_all_its_tasks_are_done():
    queue = Queue()
    queue.add("training", 3, task_size=1, epochs=2, name="train")
    queue.add("training", 1, task_size=1, name="end", after="train")
    queue.add("training", 1, task_size=1, name="independent")
    tasks: list[Any] = [queue.get("training") for _ in range(8)]
    assert [t.job for t in tasks if t] == ["train"] * 6 + ["independent"]
    for task in tasks[:5]:
        task.done()
        assert queue.get("training") is None
    tasks[5].done()
    end: Any = queue.get("training")
    assert end.job == "end"
    assert not queue.finished("training")
    end.done()
    tasks[6].done()
    assert queue.finished("training")


def test_44_each_range_is_handed_out_once_per_epoch_and_failure():
    queue = Queue(attempts=3)
    queue.add("training", {"f": 6}, task_size=2, epochs=3, name="t")
    handed_out: Counter[int] = Counter()
    failures: Counter[int] = Counter()
    while (task := queue.get("training")) is not None:
        handed_out[task.start] += 1
        if task.start == 2 and failures[task.epoch] < 2:
            failures[task.epoch] += 1
            task.fail("again")
        else:
            task.done()
    assert handed_out == {0: 3, 2: 3 + 6, 4: 3}
    assert queue.finished("training")


def fail_completely(queue, kind, attempts=3):
    for i in range(attempts):
        task = queue.get(kind, f"w{i}")
        task.fail(ZeroDivisionError("division by zero"))
    return task


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_a_task_without_attempts_left_fails_its_job_and_no_other(kind):
    queue = Queue(attempts=3)
    bad = queue.add(kind, {"f": 10}, task_size=4, name="bad")
    good = queue.add(kind, 2, task_size=1, name="good")
    first = queue.get(kind, "w0")
    held = queue.get(kind, "slow")
    assert held is not None
    first.fail("no")
    fail_completely(queue, kind, 2)
    assert isinstance(bad.error, JobFailed)
    with pytest.raises(JobFailed) as caught:
        bad.wait(0)
    for part in ("'bad'", "task 1", "records 0 to 3", "'f'", "3 attempts", "division by zero"):
        assert part in str(caught.value)
    assert (caught.value.task, caught.value.attempts) == (1, 3)
    # nothing else is blocked, and who works on the failed job learns of it
    with pytest.raises(LeaseLost):
        held.renew()
    assert [t.job for t in drain(queue, kind)] == ["good", "good"]
    good.wait(0)


def test_a_training_job_that_failed_does_not_look_complete():
    queue = Queue(attempts=1)
    queue.add("training", 1, task_size=1, name="bad")
    queue.add("training", 1, task_size=1, name="good")
    fail_completely(queue, "training", 1)
    assert not queue.finished("training")
    drain(queue, "training")
    with pytest.raises(JobFailed, match="'bad'"):
        queue.finished("training")


def test_an_evaluation_that_failed_is_no_error_of_its_workers():
    queue = Queue(attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="bad")
    fail_completely(queue, "evaluation", 1)
    assert queue.finished("evaluation")
    with pytest.raises(JobFailed, match="'bad'"):
        job.wait(0)


def test_a_lost_worker_is_to_blame_for_the_task_at_work_only():
    """Otherwise, the tasks that workers read ahead would fail before anybody has begun them."""
    queue = Queue(attempts=2)
    job = queue.add("training", 4, task_size=1, name="t")
    for _ in range(4):
        tasks: list[Any] = [queue.get("training", "w") for _ in range(4)]
        first = next(task for task in tasks if task)
        first.done()
        assert queue.recover("w") == len([task for task in tasks if task]) - 1
    job.wait(0)
    assert job.completed == 4


def test_all_tasks_of_a_lost_worker_return_also_if_its_job_fails():
    queue = Queue(attempts=1)
    bad = queue.add("training", 3, task_size=1, name="bad")
    queue.add("training", 2, task_size=1, name="good")
    assert all(queue.get("training", "w") for _ in range(5))
    assert queue.recover("w", "killed by signal 9") == 5
    with pytest.raises(JobFailed, match="killed by signal 9"):
        bad.wait(0)
    assert [t.job for t in drain(queue)] == ["good", "good"]


def test_the_cause_of_a_failure_is_kept_within_limits():
    queue = Queue(attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    evaluation(queue, "w").fail("x" * 1_000_000)
    assert job.error is not None
    assert 10_000 <= len(str(job.error)) < 11_000


def test_a_failed_job_fails_those_that_wait_for_it():
    queue = Queue(attempts=1)
    queue.add("training", 2, task_size=1, name="a")
    later = [
        queue.add("training", 1, task_size=1, name=name, after=after)
        for name, after in (("b", "a"), ("c", "b"), ("d", "a"))
    ]
    fail_completely(queue, "training", 1)
    later.append(queue.add("training", 1, task_size=1, name="e", after="c"))
    for job in later:
        with pytest.raises(JobFailed, match=r"job before it has failed.*division by zero"):
            job.wait(0)
    assert queue.get("training") is None


def test_every_end_of_an_attempt_without_result_counts():
    """A task that kills its workers must not be handed out forever."""
    clock = FakeClock()
    queue = Queue(attempts=4, lease_seconds=5, clock=clock)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    queue.get("evaluation", "crashes")
    queue.recover("crashes")
    queue.get("evaluation", "hangs")
    clock.advance(5)
    queue.get("evaluation", "forgets")
    assert job.error is None
    assert queue.get("evaluation", "forgets") is not None  # reported nothing, and asks again
    queue.recover("forgets")
    with pytest.raises(JobFailed, match=r"4 attempts.*'forgets' was lost"):
        job.wait(0)


def test_an_attempt_that_consumed_records_uses_up_nothing():
    """Otherwise, a stream would end at the third worker that is preempted."""
    queue = Queue(attempts=2)
    job = queue.add("training", {"s": None}, task_size=1, name="t")
    for i in range(20):
        task: Any = queue.get("training", "w")
        assert task.position == 10 * i
        task.consumed(10)
        queue.recover("w")
        queue.get("training", "w")
        queue.recover("w")  # this one counts
    assert job.error is None


def test_a_released_task_uses_up_nothing():
    queue = Queue(attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    for _ in range(5):
        task = queue.get("evaluation")
        assert task.release()
        assert not task.release()
    assert job.error is None


def evaluation(queue, worker):
    return queue.get("evaluation", worker)


def test_the_first_result_of_any_attempt_counts_once():
    clock = FakeClock()
    queue = Queue(lease_seconds=10, clock=clock)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    old = evaluation(queue, "old")
    clock.advance(10)
    new = evaluation(queue, "new")
    assert old.done("from the old attempt")
    assert not old.done("again")
    assert not new.done("from the new attempt")
    assert not new.fail("too late")
    assert job.results() == ["from the old attempt"]


def test_a_late_result_of_a_task_that_nobody_has_leased_counts():
    clock = FakeClock()
    queue = Queue(lease_seconds=10, clock=clock)
    job = queue.add("evaluation", 2, task_size=1, name="e")
    old = evaluation(queue, "old")
    clock.advance(10)
    assert queue.get("evaluation", "x") is not None
    queue.recover("x")
    assert old.done(1)
    assert evaluation(queue, "new").id == 2  # and task 1 is not handed out again
    assert evaluation(queue, "new").done(2)
    assert job.results() == [1, 2]


def test_a_late_failure_does_not_end_the_new_attempt():
    queue = Queue(attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    old = evaluation(queue, "old")
    old.release()
    new = evaluation(queue, "new")
    assert not old.fail("late")
    assert not old.release()
    assert new.done(3)
    assert job.results() == [3]


def test_an_old_attempt_cannot_consume_or_complete_what_a_newer_one_has_begun():
    queue = Queue()
    queue.add("training", 10, task_size=10, name="t")
    old: Any = queue.get("training", "old")
    old.consumed(2)
    queue.recover("old")
    new: Any = queue.get("training", "new")
    assert new.position == 2
    with pytest.raises(LeaseLost, match="Discard this step"):
        old.consumed(3)
    assert old.position == 2
    new.consumed(3)
    assert not old.done()
    new.consumed(5)
    assert queue.finished("training")
    assert not new.done()


def test_a_late_done_that_overlaps_with_no_other_work_counts():
    queue = Queue()
    queue.add("training", 10, task_size=10, name="t")
    old: Any = queue.get("training", "old")
    queue.recover("old")
    new: Any = queue.get("training", "new")
    assert old.done()
    with pytest.raises(LeaseLost):
        new.consumed(1)
    assert queue.finished("training")


def test_45_48_a_job_ends_with_the_last_of_its_tasks_and_not_before():
    queue = Queue()
    job = queue.add("evaluation", 64, task_size=8, name="e")
    assert job.tasks == 8
    for completed in range(8):
        assert not queue.finished("evaluation")
        with pytest.raises(TaskError, match=f": {completed} of 8 .*, and 0 at work"):
            job.wait(0)
        assert evaluation(queue, "w").done(completed)
    job.wait(0)
    assert job.results() == [*range(8)]
    assert queue.evaluation.get("w") is None


def test_47_metrics_without_a_job_are_refused():
    """A report names a job, so no metrics of another time can reach the next one."""
    queue, other = Queue(), Queue()
    job = queue.add("evaluation", 1, task_size=1, name="e")
    task = evaluation(queue, "w")
    with pytest.raises(TaskError, match="never made"):
        other.report_done(task.report, {"loss": [9.0, 1]})
    assert task.done({"loss": [1.0, 1]})
    assert not queue.report_done(task.report, {"loss": [9.0, 1]})
    assert job.results() == [{"loss": [1.0, 1]}]
    assert not queue.report_done(task.report, {"loss": [9.0, 1]}), "the job has left the queue"
    assert job.results() == [{"loss": [1.0, 1]}]


def test_49_a_queue_of_evaluations_alone_is_finished_and_keeps_its_results():
    queue = Queue()
    job = queue.add("evaluation", {"v": 4}, task_size=2, name="e")
    assert queue.finished("training"), "there is none"
    assert [evaluation(queue, "w").done(i) for i in range(2)] == [True, True]
    assert queue.finished("evaluation")
    assert queue.job("e").completed == 2, "the job stays until somebody has waited for it"
    assert job.results() == job.results() == [0, 1]
    assert queue.finished("evaluation")


def test_late_results_of_a_failed_or_collected_job_are_ignored():
    queue = Queue(attempts=1)
    bad = queue.add("evaluation", 2, task_size=1, name="e")
    late = evaluation(queue, "late")
    evaluation(queue, "bad").fail("x")
    assert not late.done(1)
    with pytest.raises(JobFailed):
        bad.wait(0)
    good = queue.add("evaluation", 2, task_size=1, name="e")  # the name is free: a retry
    assert not late.done(1)
    for i in range(2):
        evaluation(queue, f"w{i}").done(i)
    assert good.results() == [0, 1]


@pytest.mark.parametrize("attempt", [0, 2, 99, -1, "1", 1.5, None, True])
def test_a_report_of_an_attempt_that_never_was_is_refused(attempt):
    queue = Queue()
    queue.add("evaluation", 1, task_size=1, name="e")
    task = evaluation(queue, "w")
    with pytest.raises(TaskError, match="never made"):
        queue.report_done(task.report._replace(attempt=attempt), 1)


def test_a_report_cannot_end_the_lease_of_another_task():
    queue = Queue()
    queue.add("training", 2, task_size=1, name="t")
    a, b = queue.get("training"), queue.get("training")
    assert not queue.report_failed(a.report._replace(task=b.id), "x")
    with pytest.raises(LeaseLost):
        queue.renew(a.report._replace(task=b.id))
    a.renew()
    b.renew()


def test_consuming_the_last_record_completes_a_task():
    queue = Queue()
    job = queue.add("training", 5, task_size=5, name="t")
    task: Any = queue.get("training")
    task.consumed(2)
    assert (task.position, task.records_left, job.completed) == (2, 3, 0)
    task.consumed(3)
    assert (task.records_left, job.completed) == (0, 1)
    job.wait(0)
    assert job.results() == []


@pytest.mark.parametrize("records", [0, -1, 6, 2.0, "1", None, True])
def test_wrong_numbers_of_records_are_refused(records):
    queue = Queue()
    queue.add("training", 5, task_size=5, name="t")
    task: Any = queue.get("training")
    with pytest.raises(TaskError, match="Invalid number of consumed records of task 1"):
        task.consumed(records)
    assert task.position == 0


def test_records_of_several_tasks_are_consumed_together_or_not_at_all():
    queue = Queue()
    queue.add("training", 4, task_size=2, name="t")
    a: Any = queue.get("training", "a")
    b: Any = queue.get("training", "b")
    queue.recover("b")
    before = queue.state_dict()
    with pytest.raises(LeaseLost):
        queue.training.consume([(a, 1), (b, 1)])
    assert queue.state_dict() == before
    assert (a.position, b.position) == (0, 2)
    queue.training.consume([(a, 1)])
    assert a.position == 1


@pytest.mark.parametrize("records", [1, 2])
def test_a_step_cannot_report_one_task_twice(records):
    """Positions are absolute: the second report would replace the first, or complete a task that is
    complete, and the job would count a task that nobody has processed."""
    queue = Queue()
    queue.add("training", 4, task_size=2, name="t")
    task: Any = queue.get("training")
    before = queue.state_dict()
    with pytest.raises(TaskError, match="one task twice"):
        queue.training.consume([(task, records), (task, records)])
    assert (queue.state_dict(), task.position) == (before, 0)


def test_an_evaluation_task_cannot_be_consumed_in_part():
    queue = Queue()
    queue.add("evaluation", 5, task_size=5, name="e")
    task = evaluation(queue, "w")
    assert not hasattr(task, "consumed")
    with pytest.raises(TaskError, match="must be a training task"):
        queue.report_consumed([task.report._replace(position=2)])


def test_a_worker_holds_one_evaluation_task_at_most():
    queue = Queue()
    queue.add("evaluation", 3, task_size=1, name="e")
    greedy = [evaluation(queue, "greedy") for _ in range(2)]
    assert [t.id for t in greedy] == [1, 1]
    assert [evaluation(queue, w).id for w in ("a", "b")] == [2, 3]


def test_each_worker_asks_for_one_evaluation_task_before_each_batch():
    """The workers of seeds/003 share an evaluation evenly, and training goes on meanwhile."""
    queue = Queue()
    queue.add("training", 100, task_size=1, name="t")
    job = queue.add("evaluation", 12, task_size=1, name="e")
    evaluated: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for _ in range(6):
        for worker in ("a", "b", "c"):
            evaluated[worker] += queue.evaluation.evaluate_one(lambda task: task.start, worker)
            task: Any = queue.get("training", worker)
            trained[worker] += task.done()
    assert evaluated == {"a": 4, "b": 4, "c": 4}
    assert trained == {"a": 6, "b": 6, "c": 6}
    assert job.results() == list(range(12))


def test_an_error_of_evaluate_fails_the_task_and_training_goes_on():
    queue = Queue(attempts=2)
    job = queue.add("evaluation", 2, task_size=1, name="e")

    def evaluate(task):
        return 1 / task.start

    for _ in range(3):
        assert queue.evaluation.evaluate_one(evaluate) in (True, False)
    assert not queue.evaluation.evaluate_one(evaluate)
    with pytest.raises(JobFailed, match="ZeroDivisionError"):
        job.results()


@pytest.mark.parametrize("result", [{1: 2}, (1, 2), {"a": [object()]}, b"x", {"a": {2}}])
def test_a_result_that_is_not_plain_is_refused(result):
    queue = Queue(attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    task = evaluation(queue, "w")
    with pytest.raises(TaskError, match=r"cannot return .*texts as keys"):
        task.done(result)
    task.release()
    queue.evaluation.evaluate_one(lambda _: result)
    with pytest.raises(JobFailed, match="texts as keys"):
        job.results()


def test_a_result_with_more_digits_than_python_writes_is_refused():
    queue = Queue(attempts=1)
    queue.add("evaluation", 1, task_size=1, name="e")
    with pytest.raises(TaskError, match="so many digits"):
        evaluation(queue, "w").done({"a": 10**5000})


def test_results_keep_their_values_exactly():
    nan, results = float("nan"), [None, True, 1 << 80, -0.0, 0.1, "ü\n", [[], {"a": {}}], [1e308]]
    queue = Queue()
    job = queue.add("evaluation", len(results) + 1, task_size=1, name="e")
    for result in [*results, [nan, float("inf")]]:
        evaluation(queue, "w").done(result)
    found = job.results()
    assert repr(found[:-1]) == repr(results)
    assert repr(found[-1]) == "[nan, inf]"
    assert job.results() is not found
    assert repr(job.results()) == repr(found)  # and each once


def test_a_system_exit_in_evaluate_releases_the_task():
    queue = Queue(attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")

    def leave(task):
        raise SystemExit(75)

    with pytest.raises(SystemExit):
        queue.evaluation.evaluate_one(leave)
    assert job.error is None
    assert queue.evaluation.evaluate_one(lambda task: 7)
    assert job.results() == [7]


def test_a_wait_for_a_job_ends_with_the_job_or_with_the_time():
    clock = FakeClock()
    queue = Queue(clock=clock)
    job = queue.add("evaluation", 2, task_size=1, name="e")
    evaluation(queue, "w").done(1)
    evaluation(queue, "w")
    with pytest.raises(TaskError, match=r"did not end within 0 s: 1 of 2 .*, and 1 at"):
        job.wait(0)
    with pytest.raises(TaskError, match="did not end"):
        job.results()
    with pytest.raises(LimpetError, match="timeout= must be"):
        job.wait(float("inf"))


def test_threads_wait_for_tasks_and_for_jobs(monkeypatch):
    """They are woken up by what they wait for, and do not look again and again."""
    monkeypatch.setattr("limpet.tasks.queue._LONGEST_WAIT", 60.0)
    queue = Queue()
    got: list[Any] = []

    def work():
        while True:
            task = queue.evaluation.get(timeout=30)
            if task.job == "stop":
                task.done(None)
                return
            task.done(task.start)
            got.append(task.start)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(3):
        job = queue.add("evaluation", 20, task_size=1, name=f"e{i}")
        job.wait(30)
        assert job.results() == list(range(20))
    queue.add("evaluation", 3, task_size=1, name="stop").wait(30)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(got) == sorted([*range(20)] * 3)


def test_adding_a_job_again_returns_it_as_it_is():
    queue = Queue()
    queue.add("training", 3, task_size=1, name="t")
    drain(queue)
    assert queue.add("training", {"": range(3)}, task_size=1, name="t").completed == 3
    assert queue.get("training") is None
    with pytest.raises(TaskError, match=r"another job with the name 't'.*Use another name"):
        queue.add("training", 4, task_size=1, name="t")
    assert queue.job("t").completed == 3
    with pytest.raises(TaskError, match="no job with the name 'x'"):
        queue.job("x")


BAD: list[dict[str, Any]] = [
    {"kind": "test"}, {"data": 0}, {"data": {}}, {"data": -1}, {"data": {"f": range(0, 4, 2)}},
    {"data": {"f": range(4, 2)}}, {"data": {"f": range(-2, 2)}}, {"data": {"f": 1.5}},
    {"data": {3: 1}}, {"data": True}, {"data": {"\udcff": 1}}, {"name": "\udcff"},
    {"data": 1 << 70}, {"data": 1 << 40, "epochs": 1 << 40},
    {"data": {"s": None}, "kind": "evaluation"}, {"task_size": 0}, {"task_size": 1.0},
    {"task_size": True}, {"epochs": 0}, {"name": ""}, {"name": 3}, {"after": "missing"},
    {"after": 3},
]  # fmt: skip


@pytest.mark.parametrize("change", BAD, ids=str)
def test_bad_jobs_are_refused(change):
    queue = Queue()
    before = queue.state_dict()
    arguments = {"kind": "training", "data": 5, "task_size": 2, "name": "t", **change}
    with pytest.raises(LimpetError):
        queue.add(**arguments)
    assert queue.state_dict() == before


@pytest.mark.parametrize("kind", ["train", None, 3, ""])
def test_unknown_kinds_are_refused(kind):
    queue = Queue()
    for call in (queue.get, queue.finished, queue.longest_seconds):
        with pytest.raises(LimpetError, match="kind of a task must be"):
            call(kind)


def test_a_queue_is_not_copied_to_other_processes():
    """Each copy would hand out all tasks again."""
    queue = Queue()
    for copied in (queue, queue.training):
        with pytest.raises(LimpetError, match="TaskServer"):
            pickle.dumps(copied)
        with pytest.raises(LimpetError, match="TaskServer"):
            copy.deepcopy(copied)
    queue.add("training", 1, task_size=1, name="t")
    pid = os.fork()
    if pid == 0:
        try:
            queue.training.get()
        except LimpetError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_final_failure_uses_up_all_attempts():
    queue = Queue(attempts=3)
    job = queue.add("evaluation", 2, task_size=1, name="e")
    task: Any = queue.evaluation.get()
    assert task.fail("no other worker can do it", final=True)
    with pytest.raises(JobFailed, match="no other worker can do it") as caught:
        job.wait(0)
    assert (caught.value.start, caught.value.stop, caught.value.attempts) == (0, 1, 1)
    assert queue.evaluation.get() is None


def test_a_lease_may_get_another_length_and_its_end_is_reported():
    clock, overdue = FakeClock(), []
    queue = Queue(lease_seconds=10, clock=clock)
    queue.on_overdue = overdue.append
    queue.add("evaluation", 1, task_size=1, name="e")
    task: Any = queue.evaluation.get("w")
    task.renew(100)
    clock.advance(50)
    task.renew()
    clock.advance(99)
    task.renew(5)
    assert overdue == []
    clock.advance(6)
    assert queue.evaluation.get("other") is not None
    assert overdue == ["w"]
    with pytest.raises(LimpetError, match="seconds= must be"):
        task.renew(float("inf"))


def test_a_canceled_job_hands_out_nothing_and_leaves():
    queue = Queue()
    job = queue.add("evaluation", 2, task_size=1, name="e")
    task: Any = queue.evaluation.get()
    job.cancel()
    assert queue.evaluation.get() is None
    assert not task.done(1)
    with pytest.raises(TaskError, match="was canceled"):
        job.wait(0)
    done = queue.add("evaluation", 1, task_size=1, name="e")
    queue.evaluation.evaluate_one(lambda task: 5)
    done.cancel()
    assert done.results() == [5]
    assert queue.state_dict()["jobs"] == []
