"""The restore ladder of trainings in one process, which die again and again."""

import sys
import warnings
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch

import limpet
from limpet import Preemption
from limpet.errors import Denied, NoProgress, Preempted, SkippedVersion, StoreError, Unavailable
from limpet.format.names import Version
from limpet.notices import exit_status
from limpet.notices.exit_status import DONE, GIVE_UP, SAVED, UNSAVED, read_records
from limpet.notices.notice import Notice
from limpet.run.policy import AtEnd, EverySteps, Never
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.tiers.restarts import read_restarts
from limpet.training import response, step_savepoint
from limpet.training.checkpointer import Checkpointer
from tests.notices.announced import Announced
from tests.tiers.hosts import flip_bit
from tests.trainings import initial_state, state_after, states_equal, train_step
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until

Status = Callable[[], list[Any]]


@pytest.fixture
def statuses(tmp_path, monkeypatch):
    """Be under ``limpet run``. Returns a function that reads the statuses."""
    folder = tmp_path / "statuses"
    folder.mkdir()
    monkeypatch.setenv("LIMPET_STATUS", str(folder))
    return lambda: [r.status for r in read_records(str(folder))]


class Job:
    """A training in a run, which is started again and again, and dies at some step."""

    def __init__(self, store=None):
        self.store: Any = MemoryStore() if store is None else store
        self.run = Run(self.store)
        self.messages: list[str] = []
        self.skipped: list[str] = []
        self.state: dict[str, Any] = {}
        self.began: int | None = None

    def start(self, **options):
        self.state = initial_state()
        ckpt = Checkpointer(self.store, self.state, save=EverySteps(10) | AtEnd())
        uncounted: list[str] = []

        def collect(name, fields):
            if name == "restarts_uncounted":
                uncounted.append(fields["error"])

        with warnings.catch_warnings(record=True) as caught, limpet.attach(collect):
            warnings.simplefilter("always")
            try:
                snapshot = ckpt.resume(**options)
            except BaseException:
                ckpt.close()
                raise
        self.messages = [*(str(w.message) for w in caught), *uncounted]
        self.skipped = [str(w.message) for w in caught if w.category is SkippedVersion]
        self.began = None if snapshot is None else snapshot.step
        assert states_equal(self.state, state_after(self.began or 0))
        return ckpt

    def train(self, ckpt, last_step):
        while self.state["progress"].step < last_step:
            ckpt.step({"loss": train_step(self.state)})
        ckpt._saver.wait()

    def die_at(self, last_step):
        """Train until a step, and die as if by SIGKILL. Return the step that it resumed from."""
        ckpt = self.start()
        self.train(ckpt, last_step)
        ckpt._ending.ladder._key = ""
        ckpt._release()
        return self.began

    @property
    def records(self):
        return sorted(s.key for s in self.store.list("") if s.key.startswith("restart-"))


def killed_job(times, last_step, store=None):
    """A job that has been killed several times at the same step."""
    job = Job(store)
    for _ in range(times):
        job.die_at(last_step)
    return job


def why_it_gives_up(job):
    """Start it, which must raise. Return the reason."""
    with pytest.raises(NoProgress) as left:
        job.start()
    return left.value.reason


def rungs(job):
    return [int(name[8]) for name in job.records]


def test_three_restarts_then_one_version_back_three_times_then_93(statuses, capsys):
    job = Job()
    assert job.die_at(25) is None
    assert [job.die_at(27) for _ in range(3)] == [20, 20, 20]
    assert job.messages == []
    assert rungs(job) == [0, 0, 0], "the first start has made progress"

    assert job.die_at(15) == 10
    (message, left) = job.skipped
    assert "3 restarts have made no progress beyond step 20" in message
    assert "This is restart 1 of 3 on this rung of the restore ladder" in message
    assert 'call resume(at="20.0") once' in message
    assert message.count("from version_20") == 3
    assert left == "version_20 is skipped. 3 restarts made no progress."
    assert job.run.branch() == 1
    assert job.run.read_branch(1).reason == "restarts without progress"

    assert job.die_at(27) == 10, "it saves step 20 again, which is no progress"
    assert job.run.line() == [Version(10), Version(20, 1)]
    assert "This is restart 2 of 3" in job.messages[0]
    assert job.die_at(27) == 20
    assert job.run.branch() == 1
    assert rungs(job) == [0, 0, 0, 2, 2, 2]

    before = {s.key for s in job.store.list("")}
    for _ in range(2):
        with pytest.raises(NoProgress) as e:
            job.start()
        assert e.value.code == 0, "limpet run returns the code"
        assert {s.key for s in job.store.list("")} == before
        status = statuses()[-1]
        assert (status.code, status.rank, status.why) == (GIVE_UP, 0, e.value.reason)
    assert e.value.reason in capsys.readouterr().err
    assert "6 restarts have made no progress beyond step 20: 2" in e.value.reason
    assert "delete the files restart-*.json in memory://" in e.value.reason


def test_the_states_in_memory_are_set_aside_first(statuses, host):
    host.train_and_die(137)
    for _ in range(3):
        host.train_and_die(137)
        assert host.resumed.step == 130
        assert host.warnings == []
    for number in (1, 2, 3):
        host.train_and_die(137)
        assert host.resumed.step == 100
        assert "The snapshots in tiers are left out" in host.warnings[0]
        assert f"This is restart {number} of 3" in host.warnings[0]
        assert Run(host.run).branch() == number, "newer states in memory were left out"
    for number in (1, 2, 3):
        host.train_and_die(97)
        assert host.resumed.step == 50
        assert "left version_100 behind" in host.warnings[0]
        assert f"This is restart {number} of 3" in host.warnings[0]
    assert why_it_gives_up(host).startswith("9 restarts have made no progress beyond step 130: 2")
    assert statuses()[-1].code == GIVE_UP
    assert host.captured, "what is in memory stays"


def die_with_nan(host, nan_step, last_step):
    """Train until a step, with a loss that is NaN from another one on, and die."""
    state, ckpt = host.start()
    while state["progress"].step < last_step:
        loss = train_step(state)
        ckpt.step({"loss": nan if state["progress"].step + 1 >= nan_step else loss})
        ckpt._tiers.memory.wait()
    ckpt._saver.wait()
    ckpt._saver.writer_lock.release()


def test_a_nan_soon_after_a_restore_from_memory_leaves_it_out_at_once(statuses, host):
    host.train_and_die(137)
    die_with_nan(host, 133, 135)
    assert host.resumed.step == 130
    (record,) = read_restarts(host.run).values()
    assert (record.has_nan, record.goal, record.tier) == (True, 133, "memory")
    host.train_and_die(137)
    assert host.resumed.step == 100
    assert host.path not in host.resumed.url
    assert "version_130 in memory, then NaN" in host.warnings[0]
    assert Run(host.run).branch() == 1


@pytest.mark.parametrize(("nan_step", "last_step"), [(151, 155), (133, 147)])
def test_a_nan_much_later_or_before_a_newer_state_is_no_reason(statuses, host, nan_step, last_step):
    host.train_and_die(137)
    die_with_nan(host, nan_step, last_step)
    host.train_and_die(last_step)
    assert host.resumed.step == last_step // 10 * 10
    assert host.warnings == []


def test_a_nan_after_a_version_of_the_run_is_no_reason(statuses):
    job = Job()
    job.die_at(27)
    ckpt = job.start()
    train_step(job.state)
    ckpt.step({"loss": nan})
    (record,) = read_restarts(job.store).values()
    assert not record.has_nan
    ckpt._ending.ladder._key = ""
    ckpt._release()
    assert (job.die_at(27), job.skipped) == (20, [])


def test_progress_of_a_restart_without_memory_ends_the_ladder(statuses, host):
    host.train_and_die(77)
    for _ in range(3):
        host.train_and_die(77)
    host.train_and_die(87)
    assert host.resumed.step == 50
    host.train_and_die(97)
    assert host.resumed.step == 80
    assert host.path in host.resumed.url
    assert host.warnings == []
    assert len(read_restarts(host.run)) == 1


def test_memory_that_was_not_used_is_not_set_aside(statuses, host):
    """Another rung on which nothing is different would only cost time."""
    host.train_and_die(107, every=1000)
    for _ in range(3):
        host.train_and_die(107, every=1000)
    host.train_and_die(107, every=1000)
    assert host.resumed.step == 50
    assert "left version_100 behind" in host.warnings[0]


def test_without_any_version_it_begins_from_scratch_and_then_gives_up(statuses, host):
    host.train_and_die(17)
    for _ in range(3):
        host.train_and_die(17)
        assert host.resumed.step == 10
    for _ in range(3):
        host.train_and_die(7)
        assert host.resumed is None
        assert "The snapshots in tiers are left out" in host.warnings[0]
    assert "resumed from all states that a restart tries" in why_it_gives_up(host)


def test_a_training_that_dies_before_its_first_version(statuses):
    job = Job()
    assert [job.die_at(5) for _ in range(3)] == [None] * 3
    reason = why_it_gives_up(job)
    assert reason.startswith("3 restarts have made no progress at all: 2")
    assert reason.count(" from an empty run") == 3


def test_any_newer_version_is_progress(statuses):
    job = Job()
    for last in (25, 27, 27, 37, 38, 39, 45):
        job.die_at(last)
        assert job.messages == []
    assert rungs(job) == [0, 0, 0]
    assert job.die_at(45) == 40
    assert rungs(job) == [0]


def test_a_training_that_completes_removes_its_record(statuses):
    job = Job()
    for _ in range(5):
        with job.start() as ckpt:
            job.train(ckpt, 25)
        assert job.records == []
    ckpt = job.start()
    job.train(ckpt, 30)
    assert rungs(job) == [0]
    ckpt.close()
    assert job.records == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), SystemExit()])
def test_a_person_who_ends_the_training_is_no_failure(statuses, error):
    job = Job()
    with pytest.raises(type(error)), job.start() as ckpt:
        job.train(ckpt, 12)
        raise error
    assert job.records == []


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), SystemExit("x"), MemoryError()])
@pytest.mark.parametrize("entered", [True, False])
def test_a_training_that_raises_leaves_its_record(statuses, error, entered):
    job = Job()
    ckpt = job.start()
    with pytest.raises(type(error)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if entered:
            with ckpt:
                job.train(ckpt, 12)
                raise error
        try:
            job.train(ckpt, 12)
            raise error
        finally:
            ckpt.close()
    assert rungs(job) == [0]
    ckpt.close()
    assert rungs(job) == [0], "a second close() does nothing"


def leave_after_a_notice(job, last_step, **settings):
    """Train until a step, where a notice arrives. Return the exception, if the training raises."""
    source = Announced()
    state = initial_state()
    save = settings.pop("save", EverySteps(10))
    preemption = Preemption(notices=[source], **settings)
    ckpt = Checkpointer(job.store, state, save=save, preemption=preemption)
    ckpt.resume()
    try:
        while not ckpt.should_stop:
            if ckpt.current_step == last_step:
                source.announce(60)
            ckpt.step({"loss": train_step(state)})
    except Preempted as left:
        ckpt._release()
        return left
    ckpt.close()
    return None


@pytest.mark.parametrize("last_step", [12, 9])
def test_a_training_that_leaves_with_75_removes_its_record(statuses, last_step):
    """Without a ``with`` block too, and even if its last step was saved before."""
    job = Job()
    left = leave_after_a_notice(job, last_step)
    assert left is not None
    assert [s.code for s in statuses()] == [SAVED]
    assert job.records == []


def test_a_training_that_is_ended_in_a_long_step_with_75_removes_its_record(statuses, monkeypatch):
    """The thread of the savepoint has saved the last step, and the exit timer ends the process."""
    ends: list[int] = []
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append(code))
    monkeypatch.setattr(step_savepoint, "SHARE", 1e9)  # the steps of this test are short
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {**initial_state(), "model": model, "optimizer": optimizer}
    run = MemoryStore()
    ckpt = Checkpointer(run, state, save=EverySteps(10), preemption=Preemption(notices=[]))
    try:
        ckpt.resume()
        for _ in range(3):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            ckpt.step()
        assert [s.key for s in run.list("") if s.key.startswith("restart-")] != []
        ckpt._preemption.on_notice(Notice("a test", 3.0))
        wait_until(lambda: ends)
        assert [s.code for s in statuses()] == [SAVED]
        assert [s.key for s in run.list("") if s.key.startswith("restart-")] == []
    finally:
        ckpt._release()


def test_a_training_that_leaves_with_76_keeps_its_record(statuses):
    job = Job(HookedStore(MemoryStore()))

    def fail(method, key):
        if method == "put_if_absent" and key.endswith("manifest.json"):
            raise Denied("No")

    job.store.before = fail
    # a save that is due before the notice is answered would raise its own error
    assert leave_after_a_notice(job, 5, save=EverySteps(10**6)) is not None
    assert [s.code for s in statuses()] == [UNSAVED]
    assert rungs(job) == [0]


def test_a_training_that_never_saves_is_not_counted(statuses):
    """Its progress is not visible. An evaluation is such a training."""
    job = Job()
    for _ in range(5):
        job.die_at(5)
        assert leave_after_a_notice(Job(job.store), 5, save=Never()) is not None
        assert rungs(job) == [0]
        for key in job.records:
            job.store.delete(key)


def test_resuming_again_in_one_process_is_no_restart(statuses):
    job = Job()
    ckpt = job.start()
    with ckpt:
        job.train(ckpt, 25)
        for _ in range(5):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                snapshot = ckpt.resume()
            assert snapshot is not None
            assert snapshot.step == 20
            assert len(job.records) == 1
            job.train(ckpt, 25)
    assert job.records == []


def test_resuming_again_in_one_process_does_not_go_back_again(statuses):
    job = killed_job(4, 35)
    ckpt = job.start()
    assert job.began == 20
    for _ in range(3):
        with pytest.warns(SkippedVersion, match="restart 1 of 3"):
            snapshot = ckpt.resume()
        assert snapshot is not None
        assert snapshot.version == Version(20)
    assert job.run.branch() == 1
    assert rungs(job) == [0, 0, 0, 2]
    ckpt._release()


def test_a_person_who_starts_it_by_hand_is_not_moved_back(statuses, monkeypatch):
    job = killed_job(4, 25)
    monkeypatch.delenv("LIMPET_STATUS")
    for _ in range(4):
        assert job.die_at(25) == 20
    assert rungs(job) == [0, 0, 0]
    assert job.run.branch() == 0


@pytest.mark.parametrize("under", [True, False])
def test_to_return_to_the_version_that_was_left_behind(statuses, under, monkeypatch):
    job = killed_job(5, 25)
    assert job.run.line() == [Version(10), Version(20, 1)]
    if not under:
        monkeypatch.delenv("LIMPET_STATUS")
    ckpt = job.start(at="20.0")
    assert job.began == 20
    assert job.records == []
    ckpt._release()
    monkeypatch.undo()
    assert job.die_at(25) == 20
    assert job.run.line() == [Version(10), Version(20)]
    assert job.messages == []


def test_damaged_records_are_not_counted_and_are_deleted(statuses):
    job = killed_job(4, 25)
    damaged = job.records[0]
    job.store.delete(damaged)
    job.store.put_if_absent(damaged, b'{"limpet":1,"digest":"')
    assert job.die_at(25) == 20
    assert damaged not in job.records
    assert job.die_at(25) == 10


@pytest.mark.parametrize("last_step", [35, 25])
def test_an_older_version_that_is_damaged_too(statuses, tmp_path, last_step):
    """It falls back further, and gives up if nothing is left."""
    job = killed_job(4, last_step, limpet.open_store(str(tmp_path / "run")))
    (shard,) = (tmp_path / "run" / f"version_{last_step - 15}").glob("*.safetensors")
    flip_bit(shard, shard.stat().st_size // 2)
    if last_step == 35:
        assert job.die_at(35) == 10
        assert len(job.skipped) == 3
        assert job.run.line()[:1] == [Version(10)]
    else:
        assert "resumed from all states that a restart tries" in why_it_gives_up(job)
        assert job.run.branch() == 0


class Killed(BaseException):
    """The process ends at this moment, as by SIGKILL."""


def failing_job(restarts=4, last_step=25):
    return killed_job(restarts, last_step, HookedStore(MemoryStore()))


def fail_once(job, method, beginning, error):
    """Make the first call of a method with such a key raise. Return the keys that failed."""
    failed: list[str] = []

    def before(called, key):
        if not failed and called == method and key.startswith(beginning):
            failed.append(key)
            raise error

    job.store.before = before
    return failed


@pytest.mark.parametrize("error", [Unavailable("It is away"), Denied("No"), StoreError("EIO")])
def test_a_record_that_cannot_be_written_is_reported(statuses, error):
    job = failing_job(1)
    failed = fail_once(job, "put_if_absent", "restart-0", error)
    ckpt = job.start()
    assert failed
    assert job.began == 20
    (message,) = job.messages
    assert "is not counted" in message
    assert str(error) in message
    with ckpt:
        job.train(ckpt, 35)
    assert job.records == []


def test_a_record_that_was_written_although_the_store_failed_is_removed(statuses):
    job = failing_job(1)

    def after(method, key):
        if method == "put_if_absent" and key.startswith("restart-"):
            raise Unavailable("The reply is lost")

    job.store.after = after
    with job.start() as ckpt:
        job.train(ckpt, 22)
        assert "is not counted" in job.messages[0]
        assert rungs(job) == [0]
    assert job.records == []


@pytest.mark.parametrize("method", ["list", "get"])
@pytest.mark.parametrize("error", [Unavailable("It is away"), Denied("No")])
def test_records_that_cannot_be_read_keep_no_training_from_resuming(statuses, method, error):
    job = failing_job()
    failed = fail_once(job, method, "" if method == "list" else "restart-", error)
    ckpt = job.start()
    assert failed
    assert job.began == 20, "without the records, nothing is left out"
    assert "cannot be counted" in job.messages[0]
    assert job.run.branch() == 0
    ckpt._release()
    job.store.before = lambda *_: None
    assert job.die_at(25) == 10


@pytest.mark.parametrize("error", [Unavailable("It is away"), Denied("No")])
def test_it_does_not_go_back_without_a_record_of_it(statuses, error):
    """It would go back one more version at every restart."""
    job = failing_job(last_step=45)
    fail_once(job, "put_if_absent", "restart-2", error)
    for _ in range(2):
        fail_once(job, "put_if_absent", "restart-2", error)
        with pytest.raises(type(error)):
            job.start()
        assert job.run.branch() == 0
        assert rungs(job) == [0, 0, 0]
    job.store.before = lambda *_: None
    assert job.die_at(45) == 30
    fail_once(job, "put_if_absent", "restart-2", error)
    assert job.die_at(39) == 40, "the second one on this rung may go on without"
    assert "is not counted" in job.messages[1]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("key", ["restart-2", "branch-1"])
def test_a_process_that_dies_while_it_goes_back_goes_back_one_version_only(statuses, key, moment):
    job = failing_job(last_step=45)

    def kill(method, written):
        if method == "put_if_absent" and written.startswith(key):
            raise Killed

    setattr(job.store, moment, kill)
    with pytest.raises(Killed):
        job.start()
    setattr(job.store, moment, lambda *_: None)
    assert job.die_at(35) == 30
    assert job.run.branch() == 1
    assert Version(40) in job.run.listing().versions, "nothing is lost"


@pytest.mark.parametrize("error", [Unavailable("It is away"), Denied("No")])
def test_a_record_that_cannot_be_deleted_at_the_end_is_reported(statuses, error, capsys):
    job = failing_job(0)
    with job.start() as ckpt:
        job.train(ckpt, 12)
        fail_once(job, "delete", "restart-", error)
    (name,) = job.records
    assert f"{name} was not deleted, so this restart may count as failed" in capsys.readouterr().err


def test_a_notice_that_came_before_does_not_turn_93_into_0(statuses, monkeypatch):
    """After a notice, a training that ends leaves the status that it is complete."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    exit_status.leave_code(exit_status.Status(GIVE_UP))
    exit_status.leave_done(exit_status.Status(DONE))
    assert [s.code for s in statuses()] == [GIVE_UP]
