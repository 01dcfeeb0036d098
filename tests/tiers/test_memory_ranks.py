"""The memory tier of several ranks: in threads, on hosts that are folders in memory."""

import shutil
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import CommitError, Unavailable
from limpet.format.names import MANIFEST, Version
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.saving import commit
from limpet.snapshot.reader import SnapshotReader
from limpet.tiers import host_tier, memory_snapshots
from limpet.tiers.flush import MemoryRecord, flush_states
from limpet.tiers.peers.client import PeerConnection
from limpet.tiers.settings import MemoryTier
from limpet.training import response
from tests.ranks.trainings import SHORT_TIMEOUTS, TrainingJob, matches_uninterrupted
from tests.tiers.hosts import Hosts, end_as_killed
from tests.waiting import wait_until, wait_until_no_thread

pytestmark = pytest.mark.slow


class Cluster(Hosts):
    """Hosts with memory. Each job is killed, as if by SIGKILL."""

    def __init__(self, closing):
        super().__init__()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._closing = closing
        closing.enter_context(limpet.attach(lambda n, f: self.events.append((n, f))))

    def make_folder(self, host):
        path = tempfile.mkdtemp(prefix="limpet-test-", dir="/dev/shm")
        self._closing.callback(shutil.rmtree, path, ignore_errors=True)
        return Path(path)

    def train_and_die(self, hosts, last_step, copies=2, save=20):
        """Resume, check the resumed state, train, and die. ``hosts``: the host of each rank."""
        job = TrainingJob(len(hosts), self.run)
        folders = {host: self.folder(host) for host in hosts}  # not in the threads of the ranks

        def work(trainer):
            folder = folders[hosts[trainer.rank]]
            tier = MemoryTier(every=EverySteps(5), copies=copies, path=folder)
            ckpt = trainer.make_checkpointer(save=EverySteps(save), tiers=[tier])
            try:
                trainer.resumed = ckpt.resume()
                step = 0 if trainer.resumed is None else trainer.resumed.step
                assert matches_uninterrupted(trainer.state, trainer.rank, job.size, step)
                while ckpt.current_step < last_step:
                    trainer.train_steps(ckpt.current_step + 1)
                    ckpt._tiers.memory.wait()  # otherwise, the next capture would be skipped
                ckpt._saver.wait()
            finally:
                end_as_killed(ckpt, trainer.rank)

        self.work_on_ranks(job, work)
        return job

    def events_of(self, name):
        return [fields for n, fields in self.events if n == name]


@pytest.fixture
def cluster():
    with ExitStack() as closing:
        yield Cluster(closing)
    wait_until_no_thread("limpet-peer", seconds=10)


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_ranks_of_one_host_resume_from_its_memory(cluster):
    cluster.train_and_die("aaa", 33)
    assert cluster.captured("a") == ["version_25", "version_30"]
    cluster.train_and_die("aaa", 48)
    assert cluster.resumed_step == 30
    assert str(cluster.folders["a"]) in cluster.resumed[0].url
    cluster.train_and_die("aaa", 49)
    assert cluster.resumed_step == 45
    assert Run(cluster.run).line() == [Version(20), Version(40)]
    assert not cluster.events_of("copy_failed")


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_shards_of_a_lost_host_come_from_its_peer(cluster, lost):
    cluster.train_and_die("aabb", 33)
    assert {len(cluster.files(h, ".safetensors")) for h in "ab"} == {8}  # 2 states of 4 ranks
    cluster.lose(lost)
    cluster.train_and_die("aabb", 48)
    assert cluster.resumed_step == 30
    assert not cluster.warnings
    assert cluster.captured(lost) == ["version_40", "version_45"]
    cluster.train_and_die("aabb", 49)
    assert cluster.resumed_step == 45


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_state_whose_manifest_a_host_lacks_is_not_loaded(cluster, host):
    """The training was killed while the hosts stored the manifest. No other host has the files."""
    cluster.train_and_die("aabb", 33, copies=1)
    (manifest,) = (p for p in cluster.files(host, MANIFEST) if p.parent.name == "version_30")
    manifest.unlink()
    cluster.train_and_die("aabb", 34, copies=1)
    assert cluster.resumed_step == 25


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_peer_saves_the_copies_of_a_lost_host_to_the_run(cluster, lost):
    """BEHAVIOURS.md, C3: nobody else has the shards of the lost host's ranks. ``limpet run`` does
    this on each host that is left, and a training whose other ranks are dead."""
    cluster.train_and_die("aabb", 33)
    cluster.lose(lost)
    ((left, folder),) = cluster.folders.items()
    shards = {p.name for p in cluster.files(left, ".safetensors") if "version_30" in str(p)}
    (own,) = Path(folder).glob("*/*")
    limit = Deadline.after(20, "the flush of a test")
    records = [MemoryRecord(str(own), cluster.run.url)]
    (flushed,) = flush_states(records, Run(cluster.run), limit)
    assert isinstance(flushed, SnapshotReader)
    assert {shard.name for shard in flushed.manifest.shards} == shards
    assert len(shards) == 4
    assert flushed.verify().ok
    assert Run(cluster.run).line() == [Version(20), Version(30)]
    cluster.lose(left)  # what follows resumes from the run, and checks the state of each rank
    cluster.train_and_die("cccc", 31)
    assert cluster.resumed_step == 30


def test_without_copies_a_lost_host_means_the_durable_version_on_a_new_branch(cluster):
    cluster.train_and_die("aabb", 33, copies=1)
    assert {len(cluster.files(h, ".safetensors")) for h in "ab"} == {4}
    cluster.lose("b")
    cluster.train_and_die("aabb", 34, copies=1)
    assert cluster.resumed_step == 20
    assert len(cluster.warnings) == 2
    assert "No host has version_30/shard-0000" in cluster.warnings[0]
    assert Run(cluster.run).branch() == 1
    assert cluster.captured("a") == cluster.captured("b") == ["version_25.1", "version_30.1"]


def test_both_hosts_lost_means_the_durable_version_on_the_same_branch(cluster):
    """Nobody knows of newer states, so nothing is known to be lost."""
    cluster.train_and_die("aabb", 33)
    cluster.lose("a")
    cluster.lose("b")
    cluster.train_and_die("aabb", 34)
    assert cluster.resumed_step == 20
    assert Run(cluster.run).branch() == 0


@pytest.mark.parametrize("suffix", [".safetensors", ".index.json"])
def test_a_flipped_bit_on_one_host_is_found_and_the_older_state_is_loaded_by_all(cluster, suffix):
    cluster.train_and_die("aabb", 33)
    newest = [p for p in cluster.files("a", suffix) if p.parent.name == "version_30"]
    flip_bit(newest[0])
    cluster.train_and_die("aabb", 34)
    assert cluster.resumed_step == 25
    (message,) = cluster.warnings
    assert message.startswith("version_30 in memory is skipped.")


@pytest.mark.parametrize("hosts", ["ab", "aabbcc", "a", "ba", "abcd"])
def test_another_number_of_ranks_and_hosts_resumes_from_memory(cluster, hosts):
    """The weights are sharded, and the ranks need parts of shards that other hosts hold."""
    cluster.train_and_die("aabb", 33)
    job = TrainingJob(len(hosts), cluster.run)
    for host in hosts:
        cluster.folder(host)

    def work(trainer):
        tier = MemoryTier(every=EverySteps(5), path=cluster.folder(hosts[trainer.rank]))
        with trainer.make_checkpointer(save=EverySteps(20), tiers=[tier]) as ckpt:
            found = ckpt.resume()
            assert found is not None
            assert str(cluster.folder(hosts[trainer.rank])) in found.url
            weights, box = trainer.state["weights"].tensor, trainer.state["weights"]
            expected = 0.0
            for step in range(1, 31):
                expected = expected * 1.01 + step
            assert weights.shape[0] == 120 // job.size
            assert box.tensor == pytest.approx(expected)
            return found.step

    with job, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(job.run(work)) == {30}


class CountedRanges:
    """The ranges of files that ranks fetch from peers: the rank, the key, and the range of each."""

    def __init__(self, monkeypatch):
        self.found: list[tuple[int, str, int, int]] = []
        connect, fetch_range = PeerConnection.__init__, PeerConnection.fetch_range
        ranks = dict[int, int]()

        def note(peer, address, secret, rank, *rest):
            ranks[id(peer)] = rank
            connect(peer, address, secret, rank, *rest)

        def count(peer, key, total, at, into):
            self.found.append((ranks[id(peer)], key, at, len(into)))
            time.sleep(0.05)  # so that the other ranks want it, too
            fetch_range(peer, key, total, at, into)

        monkeypatch.setattr(PeerConnection, "__init__", note)
        monkeypatch.setattr(PeerConnection, "fetch_range", count)

    def shards(self, rank):
        """The numbers of the shards of which a rank has fetched bytes."""
        keys = {key.rpartition("/")[2] for r, key, _, _ in self.found if r == rank}
        return {int(key[6:11]) for key in keys if key.endswith(".safetensors")}


def test_a_resume_fetches_only_what_a_host_reads_and_stores_nothing(cluster, monkeypatch):
    """The state of a large job does not fit into the memory of one host."""

    def shards():
        found = {h: cluster.files(h, ".safetensors") for h in "abcd"}
        return {
            host: {int(p.name[6:11]) for p in paths if p.parent.name == "version_30"}
            for host, paths in found.items()
        }

    cluster.train_and_die("abcd", 33)
    stored = {"a": {0, 1}, "b": {0, 1}, "c": {2, 3}, "d": {2, 3}}
    assert shards() == stored
    ranges = CountedRanges(monkeypatch)
    cluster.train_and_die("abcd", 30)
    assert cluster.resumed_step == 30
    # every rank reads the replicated array, which is in the shard of rank 0
    assert [ranges.shards(rank) for rank in range(4)] == [set(), set(), {0}, {0}]
    assert shards() == stored
    assert not cluster.events_of("copy_failed")


@pytest.mark.parametrize("refused", [(), (0,), (1, 2)])
def test_all_ranks_of_a_host_serve_its_states(cluster, monkeypatch, refused):
    """The first rank is not the only one, and any of them may be stopped."""
    cluster.train_and_die("aaabbb", 33)
    cluster.lose("b")
    connect, asked = PeerConnection.__init__, set[int]()

    def choose(peer, address, *rest):
        if address.rank in refused:
            raise Unavailable("Cannot connect to the peer")
        asked.add(address.rank)
        connect(peer, address, *rest)

    monkeypatch.setattr(PeerConnection, "__init__", choose)
    cluster.train_and_die("aaabbb", 30)
    assert cluster.resumed_step == 30
    assert asked == {0, 1, 2} - {*refused}


def refuse_connections(monkeypatch):
    """Let every connection to a peer fail."""

    class Refusing:
        def __init__(self, *_):
            raise Unavailable("Cannot connect to the peer")

    monkeypatch.setattr(host_tier, "PeerConnection", Refusing)


@pytest.mark.parametrize("refused", [{10, 15}, {15}, {10}])
def test_the_newest_state_of_which_all_copies_exist_stays(cluster, monkeypatch, refused):
    """States without copies must not replace those that survive the loss of a host. ``refused``:
    the captures during which the copies of one rank fail."""
    copy = memory_snapshots.MemorySnapshots._copy

    def fail(tier, version, *rest):
        if version.step in refused and tier.group.rank == 0:
            refuse_connections(monkeypatch)
        copy(tier, version, *rest)
        monkeypatch.setattr(host_tier, "PeerConnection", PeerConnection)

    monkeypatch.setattr(memory_snapshots.MemorySnapshots, "_copy", fail)
    cluster.train_and_die("ab", 17)
    copied = max({5, 10} - refused)
    assert cluster.captured("a") == cluster.captured("b") == [f"version_{copied}", "version_15"]
    cluster.lose("a")
    cluster.train_and_die("ab", 33)
    assert cluster.resumed_step == (15 if 15 not in refused else copied)
    assert cluster.captured("a") == cluster.captured("b")
    assert len(cluster.captured("a")) == 2


def test_a_peer_that_does_not_answer_costs_no_capture(cluster, monkeypatch):
    refuse_connections(monkeypatch)
    cluster.train_and_die("ab", 12)
    assert cluster.events_of("copy_failed")
    assert cluster.captured("a") == cluster.captured("b") == ["version_5", "version_10"]
    monkeypatch.undo()
    cluster.train_and_die("ab", 13)
    assert cluster.resumed_step == 10


@pytest.mark.parametrize("how", ["close", "notice", "exit"])
def test_a_copy_to_a_slow_peer_does_not_hold_a_training_that_ends(cluster, monkeypatch, how):
    """The peer takes the parts of a large file one after the other, for hours."""
    monkeypatch.setattr(memory_snapshots, "COPY_SECONDS", 0.5 if how == "close" else 60.0)
    monkeypatch.setattr(host_tier, "COPY_SECONDS", 0.5 if how == "exit" else 60.0)
    began = time.monotonic()

    def send_slowly(peer, store, key, advance):
        while time.monotonic() < began + 20:
            peer._channel.renew()
            peer._channel.check_time()
            advance()
            time.sleep(0.01)

    monkeypatch.setattr(PeerConnection, "send_file", send_slowly)
    folders = [cluster.folder(host) for host in "ab"]

    def work(trainer):
        tier = MemoryTier(every=EverySteps(5), path=folders[trainer.rank])
        with trainer.make_checkpointer(save=EverySteps(100), tiers=[tier]) as ckpt:
            trainer.train_steps(6)
            if how == "notice":
                kv: Any = ckpt._tiers.group.kv
                kv.give_up_at = kv.clock() + 2.5
                ckpt._tiers.memory.wait()
                assert kv.clock() < kv.give_up_at
                kv.give_up_at = float("inf")
            if how == "exit":
                ended: Any = SimpleNamespace(is_alive=lambda: False)
                monkeypatch.setattr(host_tier, "main_thread", lambda: ended)
                ckpt._tiers.memory.wait()

    with TrainingJob(2, cluster.run) as job, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.run(work)
    assert time.monotonic() - began < 15
    assert {e["rank"] for e in cluster.events_of("copy_failed")} == {0, 1}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_capture_that_fails_on_one_rank_raises_on_all_at_the_same_step(
    cluster, monkeypatch, on_error
):
    """Rank 0 has committed, but the other host cannot store the manifest. The other ranks must not
    wait for this rank in the next capture."""
    put = commit._put_same_manifest

    def fail_once(location, raw):
        if location.folder == "version_5":
            raise CommitError("The manifest cannot be stored")
        put(location, raw)

    monkeypatch.setattr(commit, "_put_same_manifest", fail_once)
    folders = [cluster.folder(host) for host in "aab"]

    def work(trainer):
        tier = MemoryTier(every=EverySteps(5), path=folders[trainer.rank])
        options: Any = {"save": EverySteps(100), "on_error": on_error}
        ckpt = trainer.make_checkpointer(tiers=[tier], **options)
        try:
            while ckpt.current_step < 16:
                trainer.train_steps(ckpt.current_step + 1)
                if (pending := ckpt._tiers.memory._pending) is not None:
                    pending.wait_ended()
        finally:
            end_as_killed(ckpt, trainer.rank)

    began = time.monotonic()
    with TrainingJob(3, cluster.run) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = job.outcomes(work)
    errors = [str(error) for error in outcomes if isinstance(error, BaseException)]
    reported = errors if on_error == "raise" else [str(w.message) for w in caught]
    assert sum("The manifest cannot be stored" in message for message in reported) == 3
    last_step = 10 if on_error == "raise" else 16
    assert [trainer.ckpt.current_step for trainer in job.ranks] == [last_step] * 3
    assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
    if on_error == "warn":
        assert errors == []
        assert cluster.captured("b") == ["version_15"]


def test_a_rank_that_is_ended_because_another_one_has_failed_saves_the_newest_capture(
    cluster, monkeypatch
):
    """BEHAVIOURS.md, C3: it is in a call that does not return. Its host has all copies."""
    ends: list[int] = []
    monkeypatch.setattr(response, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append(code))
    folders = [cluster.folder(host) for host in "ab"]

    def work(trainer):
        tier = MemoryTier(every=EverySteps(5), path=folders[trainer.rank])
        with trainer.make_checkpointer(save=EverySteps(100), tiers=[tier]) as ckpt:
            ckpt.resume()
            trainer.train_steps(5)
            ckpt._tiers.memory.wait()
            trainer.train_steps(7)
            if trainer.rank == 1:
                raise ValueError("bad batch")
            wait_until(lambda: ends)
            assert Run(cluster.run).line() == [Version(5)]
            trainer.train_steps(8)

    with TrainingJob(2, cluster.run, lockstep=False) as job:
        outcomes = job.outcomes(work)
    assert [repr(o) for o in outcomes] == ["ValueError('bad batch')"] * 2
    assert ends == [1]
    (flushed,) = Run(cluster.run).snapshots()
    assert flushed.verify().ok
    assert flushed.metadata["reason"] == "memory"


def test_fewer_hosts_than_copies_are_reported_once(cluster):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = TrainingJob(4, cluster.run)
        cluster.folder("a"), cluster.folder("b")

        def work(trainer):
            host = "aabb"[trainer.rank]
            tier = MemoryTier(every=EverySteps(5), copies=3, path=cluster.folder(host))
            with trainer.make_checkpointer(save=EverySteps(3), tiers=[tier]):
                trainer.train_steps(3)

        with job:
            job.run(work)
            assert job.leftover_keys() == []
    assert cluster.events_of("fewer_copies") == [{"copies": 3, "hosts": 2}]


def test_the_end_of_the_rank_that_hosts_the_job_store_is_no_error_of_the_others(
    cluster, monkeypatch
):
    """The others would exit with 1 although their last step is saved, or the training complete."""
    from limpet.errors import RankFailed
    from limpet.ranks.kv import KVClient

    delete, refused = KVClient.delete, []

    def refuse(kv, keys):
        if any("/peer/" in key for key in keys):
            refused.append(kv.rank)
            raise RankFailed("The TCPStore that the ranks use to communicate does not respond")
        delete(kv, keys)

    monkeypatch.setattr(KVClient, "delete", refuse)
    cluster.train_and_die("ab", 12)
    assert sorted(refused) == [0, 1]
    assert cluster.captured("a") == cluster.captured("b") == ["version_5", "version_10"]
