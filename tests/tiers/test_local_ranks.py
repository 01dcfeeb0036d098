"""Saves of several ranks to the local disks of their hosts, which are folders, and the promotion to
the run."""

import threading
import warnings
from typing import Any

import pytest

from limpet.errors import LimpetError, RankFailed, StoreError
from limpet.format.names import Version
from limpet.run.policy import AtEnd, EverySteps
from limpet.run.run import Run
from limpet.tiers.settings import LocalTier
from tests.ranks.trainings import TrainingJob, matches_uninterrupted
from tests.tiers.hosts import Hosts, end_as_killed
from tests.tiers.test_memory_ranks import flip_bit

pytestmark = pytest.mark.slow


class Cluster(Hosts):
    """Hosts with disks, and a durable store that may be away for shards."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.before_put: Any = lambda rank, key: None

    def make_folder(self, host):
        folder = self.path / host
        folder.mkdir(exist_ok=True)  # the ranks are threads
        return folder

    def make_checkpointer(self, trainer, hosts, **options):
        """Make that of a rank, with a tier on the disk of its host."""
        tiers = [LocalTier(self.folder(hosts[trainer.rank]))]
        return trainer.make_checkpointer(tiers=tiers, **options)

    @property
    def promoted(self):
        return Run(self.run).line()

    def train_and_die(self, hosts, last_step):
        """Resume, check the state, train, wait for all that can be promoted, and die. Return the
        error of each rank."""
        job = TrainingJob(len(hosts), self.run)
        errors: list[BaseException | None] = [None] * len(hosts)
        for rank in range(len(hosts)):

            def before(method, key, rank=rank):
                if method == "put" and key.endswith(".safetensors"):
                    self.before_put(rank, key)

            job.set_before_call(rank, before)

        def work(trainer):
            ckpt = self.make_checkpointer(trainer, hosts, save=EverySteps(5))
            try:
                trainer.resumed = ckpt.resume()
                step = 0 if trainer.resumed is None else trainer.resumed.step
                if sorted(hosts) == sorted("aabb"):
                    assert matches_uninterrupted(trainer.state, trainer.rank, job.size, step)
                trainer.train_steps(last_step)
                ckpt._saver.wait()
            except LimpetError as e:
                errors[trainer.rank] = e
            finally:
                for pending, _ in ckpt._saver._saves:
                    pending.wait_ended()
                    if pending.error is not None:
                        with pytest.raises(type(pending.error)):
                            pending.wait()
                end_as_killed(ckpt, trainer.rank)

        self.work_on_ranks(job, work)
        return errors

    def capture_only(self, hosts, last_step):
        """Train until the version of a step is on the disks, but not in the run."""

        def fail(rank, key):
            if key.startswith(f"version_{last_step // 5 * 5}"):
                raise StoreError("The store is away")

        self.before_put = fail
        errors = self.train_and_die(hosts, last_step)
        assert all(isinstance(e, StoreError | RankFailed) for e in errors), errors
        self.before_put = lambda rank, key: None


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


@pytest.mark.parametrize("hosts", ["aa", "aabb", "abcd"])
def test_all_versions_are_promoted_in_order(cluster, hosts):
    job = TrainingJob(len(hosts), cluster.run)

    def work(trainer):
        with cluster.make_checkpointer(trainer, hosts, save=EverySteps(3) | AtEnd()):
            trainer.train_steps(20)

    with job:
        job.run(work)
        assert job.leftover_keys() == []
    assert cluster.promoted == [Version(n) for n in (3, 6, 9, 12, 15, 18, 20)]
    assert all(s.verify().ok for s in Run(cluster.run).snapshots())
    assert [cluster.captured(host) for host in set(hosts)] == [[]] * len(set(hosts))


def test_the_disks_have_what_the_store_lacks(cluster):
    cluster.capture_only("aabb", 17)
    assert cluster.promoted == [Version(5), Version(10)]
    assert cluster.captured("a") == cluster.captured("b") == ["version_10", "version_15"]
    assert {len(cluster.files(h, ".safetensors")) for h in "ab"} == {4}
    assert cluster.train_and_die("aabb", 18) == [None] * 4
    assert cluster.resumed_step == 15
    assert cluster.promoted == [Version(5), Version(10), Version(15)]
    assert all(s.verify().ok for s in Run(cluster.run).snapshots())
    cluster.train_and_die("aabb", 21)
    assert cluster.resumed_step == 15
    assert cluster.promoted[-1] == Version(20)


@pytest.mark.parametrize("hosts", ["ab", "ba", "aabbcc", "a"])
def test_another_number_of_ranks_and_hosts_resumes_from_the_disks(cluster, hosts):
    """The ranks read what other hosts hold from there. A host that is gone takes its part along."""
    cluster.capture_only("aabb", 15)
    job = TrainingJob(len(hosts), cluster.run)

    def work(trainer):
        with cluster.make_checkpointer(trainer, hosts, save=EverySteps(20)) as ckpt:
            found = ckpt.resume()
            assert found is not None
            weights = trainer.state["weights"].tensor
            expected = 0.0
            for step in range(1, found.step + 1):
                expected = expected * 1.01 + step
            assert weights == pytest.approx(expected)
            trainer.train_steps(found.step + 1)
            ckpt.wait()
            return found.step, found.url

    with job, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = job.run(work)
    if hosts == "a":  # the disk of b is not there
        assert {step for step, _ in results} == {10}
        assert Run(cluster.run).branch() == 1
    else:
        assert {step for step, _ in results} == {15}
        assert str(cluster.path) in results[0][1]
        assert cluster.promoted[-1] == Version(15)
    assert all(s.verify().ok for s in Run(cluster.run).snapshots())


def test_a_lost_host_means_the_newest_version_of_the_run(cluster):
    cluster.capture_only("aabb", 15)
    cluster.lose("b")
    assert cluster.train_and_die("aabb", 16) == [None] * 4
    assert cluster.resumed_step == 10
    assert "version_15 on the local disk is skipped. No host has version_15" in cluster.warnings[0]
    assert Run(cluster.run).branch() == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".index.json"])
def test_a_flipped_bit_on_one_disk_is_skipped_by_all(cluster, suffix):
    cluster.capture_only("aabb", 15)
    newest = [p for p in cluster.files("b", suffix) if p.parent.name == "version_15"]
    flip_bit(newest[0])
    assert cluster.train_and_die("aabb", 21) == [None] * 4
    assert cluster.resumed_step == 10
    assert any("version_15 on the local disk is skipped" in w for w in cluster.warnings)
    assert cluster.promoted == [Version(5), Version(10), Version(15, 1), Version(20, 1)]
    assert all(s.verify().ok for s in Run(cluster.run).snapshots())


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_of_one_rank_in_the_promotion_reaches_all(cluster, failing):
    def fail(rank, key):
        if rank == failing and key.startswith("version_10/"):
            raise StoreError("No space in the durable store")

    cluster.before_put = fail
    errors = cluster.train_and_die("aabb", 15)
    assert isinstance(errors[failing], StoreError | RankFailed)
    assert all("No space in the durable store" in str(e) for e in errors), errors
    assert Version(10) not in cluster.promoted
    cluster.before_put = lambda rank, key: None
    assert cluster.train_and_die("aabb", 16) == [None] * 4
    assert cluster.resumed_step in (10, 15)
    assert all(s.verify().ok for s in Run(cluster.run).snapshots())


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_save_right_after_a_restart_is_one_on_all_ranks(cluster, hosts):
    """The step of the leftover itself: all ranks know that the run has it by then, or none does."""
    cluster.capture_only(hosts, 15)
    job = TrainingJob(len(hosts), cluster.run)

    def work(trainer):
        with cluster.make_checkpointer(trainer, hosts, save=EverySteps(5)) as ckpt:
            ckpt.resume()
            return ckpt.save({"loss": 1.0}).url, ckpt.wait().url

    with job:
        urls = {url for pair in job.run(work) for url in pair}
    assert urls == {f"{cluster.run.url}/version_15"}
    assert cluster.promoted == [Version(5), Version(10), Version(15)]


def test_a_failure_on_one_disk_leaves_nothing_on_any(cluster):
    job = TrainingJob(4, cluster.run)

    def work(trainer):
        options = {"save": EverySteps(5), "on_error": "warn"}
        with cluster.make_checkpointer(trainer, "aabb", **options) as ckpt:
            trainer.train_steps(1)
            if trainer.rank == 2:

                def full(key, length, head=0):
                    raise StoreError("The disk is full")

                ckpt._tiers.local.store.put = full
            trainer.train_steps(17)

    with job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.run(work)
    assert any("The disk is full" in str(w.message) for w in caught)
    assert cluster.promoted == []
    assert [p for host in "ab" for p in cluster.folder(host).rglob("*") if p.is_file()] == []


def test_a_slow_promotion_delays_no_rank(cluster):
    """While one rank copies to the run, all ranks make steps, and save to the disks."""
    seen, reached = threading.Event(), threading.Event()

    def hold(rank, key):
        if rank == 1 and key.startswith("version_5/"):
            seen.set()
            assert reached.wait(20)

    cluster.before_put = hold
    job_steps: list[int] = []
    job = TrainingJob(2, cluster.run)
    job.set_before_call(1, lambda m, key: hold(1, key) if m == "put" else None)

    def work(trainer):
        with cluster.make_checkpointer(trainer, "ab", save=EverySteps(5)) as ckpt:
            trainer.train_steps(14)  # of the save of step 10, too
            job_steps.append(ckpt.current_step)
            assert seen.wait(20)
            assert ckpt._saver.busy
            if len(job_steps) == 2:
                reached.set()

    with job:
        job.run(work)
    assert cluster.promoted == [Version(5), Version(10)]


def test_a_training_that_dies_before_its_first_save_begins_again(cluster):
    assert cluster.train_and_die("aabb", 3) == [None] * 4
    assert cluster.captured("a") == []
    cluster.train_and_die("aabb", 3)
    assert cluster.resumed == [None] * 4
