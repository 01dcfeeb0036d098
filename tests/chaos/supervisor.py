"""Starts the training, disturbs it, and starts it again, as a scheduler and a cluster would."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from limpet.deadline import Deadline
from limpet.errors import DeadlinePassed, LimpetError
from limpet.notices.exit_status import SAVED
from limpet.run.run import Run
from limpet.tiers.flush import MemoryRecord, flush_states
from tests.chaos.cluster import HOSTS, flip_bit
from tests.chaos.disturbance import LEAVE_SECONDS, STEP_SECONDS, Disturbance
from tests.chaos.evaluator import Evaluator
from tests.chaos.ranks import Hang, Ranks, wait_until
from tests.chaos.row import INTERRUPTED, Row
from tests.chaos.schedule import DIES, EXPECTED_CODES, Kind
from tests.chaos.training import CAPTURE_EVERY, SAVE_EVERY, Start

RESTORE_SECONDS = 10.0
"""The longest time from the moment at which the last rank has joined until all have the state."""

START_SECONDS = 60.0
"""The longest time until the state is back."""

MOST_LOST = 4 * CAPTURE_EVERY
"""The most steps that an event may cost while one host still has its memory: two captures in
memory, of which one may be damaged, one that was not complete, and one that was skipped."""

MOST_LOST_ON_DISKS = 3 * SAVE_EVERY
"""The same if the memory of all hosts is lost, but not their disks."""

PAUSE = 0.01

LONG_PAUSE, LONG_SAVE_EVERY = 0.22, 20
"""With events at given times: steps of about 250 ms, as in the benchmark of the memory tier, and a
save every 5 seconds. Otherwise, the effective training time would mostly be that of steps of 15 ms,
of which every fifth copies the state."""


class Supervisor:
    """Runs one training to its end. ``rows``, ``starts``, and ``failures`` are the result.

    ``every``: the seconds from one event to the next; 0: after some steps.
    """

    def __init__(self, cluster, dropout, every=0.0):
        self.cluster = cluster
        self.every = every
        self.dropout = dropout
        self.rows: list[Row] = []
        self.starts: list[Ranks] = []
        self.failures: list[str] = []
        self.flipped: set[str] = set()
        self.began = time.monotonic()
        self._has_launcher_store = False
        self.evaluator = Evaluator(cluster.run, cluster.folder / "evaluator.output")
        cluster.closing.callback(self.evaluator.kill)

    def train(self, events, seconds, least_events, last_steps):
        """Train under events for so many seconds, and at least so many events. Then make
        ``last_steps`` undisturbed steps, and return the last step. A failure ends it at once.
        """
        size = 4
        ranks = None
        try:
            while not self.failures and (
                time.monotonic() - self.began < seconds or len(self.rows) < least_events
            ):
                event = next(events)
                if ranks is None:
                    ranks = self._begin(size, 1 << 40)
                    if event.kind != Kind.EARLY_KILL:
                        self._await_restored(ranks)
                ranks, size = self._disturb(ranks, event, size)
            if self.failures:
                return 0
            return self._finish(ranks, size, last_steps)
        except Hang as e:
            self.failures.append(f"hang: {e}\n{self.starts[-1].describe() if self.starts else ''}")
            return 0
        finally:
            for started in self.starts:
                started.kill()

    def _finish(self, ranks, size, last_steps):
        if ranks is not None:
            ranks.end(LEAVE_SECONDS)
            self._check_codes(ranks, {SAVED}, "SIGTERM to all ranks")
        last_step = last_steps + max(int(s.last_step) for s in self.starts)
        ranks = self._begin(size, last_step)
        self._await_restored(ranks)
        wait_until(lambda: not ranks.alive or ranks.has_failed, STEP_SECONDS * 2, "the last steps")
        self._check_codes(ranks, {0}, "the end of the training")
        return last_step

    # -- starting ----------------------------------------------------------------------------------

    def _begin(self, size, last_step):
        folder = self.cluster.folder / f"start-{len(self.starts):03}"
        folder.mkdir()
        hosts = HOSTS[size]
        start = Start(
            str(folder), self.cluster.run, size, last_step, self.dropout,
            memory=[self.cluster.memory[h] for h in hosts],
            disks=[self.cluster.disks[h] for h in hosts],
            metadata=[self.cluster.clouds[h].urls for h in hosts],
            pause=LONG_PAUSE if self.every else PAUSE,
            save_every=LONG_SAVE_EVERY if self.every else SAVE_EVERY,
            has_launcher_store=self._has_launcher_store,
        )  # fmt: skip
        self.evaluator.keep_running()
        ranks = Ranks(start)
        self.starts.append(ranks)
        return ranks

    def _await_restored(self, ranks):
        """Wait until all ranks have the state, and complete the row of the event before."""

        def is_over():
            return ranks.all_at("restored") is not None or ranks.has_failed

        wait_until(is_over, START_SECONDS, f"the restore of {ranks.start.folder}")
        restored = ranks.all_at("restored")
        if restored is None:
            raise Hang("a start failed")
        began, joined = ranks.all_at("started") or 0.0, ranks.all_at("joined") or 0.0
        found = [e for e in ranks.entries("restored") if e is not None]
        steps, urls = {e["step"] for e in found}, {e["url"] for e in found}
        if len(steps) != 1:
            self.failures.append(f"ranks resumed from {steps}\n{ranks.describe()}")
        if restored - joined > RESTORE_SECONDS:
            message = f"the state was back {restored - joined:.1f} s after all ranks had joined"
            self.failures.append(f"{message}\n{ranks.describe()}")
        waiting = [row for row in self.rows if not row.tier]
        for row in waiting[:-1]:
            row.tier = INTERRUPTED
        for row in waiting[-1:]:
            row.start, row.rendezvous = began - ranks.began, joined - began
            row.restore = restored - (ranks.all_at("resuming") or 0.0)
            row.resumed_step, row.tier = steps.pop(), _tier_of(urls)
            kinds = {r.event.kind for r in waiting}
            most = MOST_LOST_ON_DISKS if Kind.REBOOT in kinds else MOST_LOST
            are_tiers_lost = not kinds.isdisjoint((Kind.FLIP_DURABLE, Kind.FLIP_LOCAL))
            if row.lost > most and not are_tiers_lost:
                self.failures.append(f"{row.lost} steps were lost, from {row.tier}")

    # -- disturbing --------------------------------------------------------------------------------

    def _disturb(self, ranks, event, size):
        """Let an event happen. Return the ranks that go on, or None, and their next number."""
        if event.kind == Kind.EARLY_KILL:
            if ranks.all_at("restored") is not None:  # a training that went on after a pause
                ranks.end(LEAVE_SECONDS)
                self._check_codes(ranks, {SAVED}, "SIGTERM to all ranks")
                ranks = self._begin(size, 1 << 40)
            wait_until(
                lambda: any(ranks.entries("joined")) or ranks.has_failed, START_SECONDS, "join"
            )
        else:
            count = ranks.step_count + event.steps
            due_at = self.began + (len(self.rows) + 1) * self.every
            wait_until(
                lambda: (
                    (ranks.step_count >= count and time.monotonic() >= due_at)
                    or len(ranks.alive) < ranks.start.size
                ),
                STEP_SECONDS + self.every,
                f"step {count} of {ranks.start.folder}",
            )
            if len(ranks.alive) < ranks.start.size:
                self.failures.append(f"a rank ended without an event\n{ranks.describe()}")
                return None, size
        self._has_launcher_store = event.has_launcher_store
        rank = event.draw % size
        has_store = rank == 0 and not ranks.start.has_launcher_store
        if event.kind == Kind.HANG_AND_NOTICE and has_store:
            rank = 1  # through the store, the others hear of the notice
        # a start that is killed during its restore has no step of its own
        trained = [s for s in self.starts if s.step_count]
        last_step = trained[-1].last_step if trained else 0
        row = Row(
            time.monotonic() - self.began, event, f"rank {rank}, {ranks.pid(rank)}", last_step
        )
        self.rows.append(row)
        at = time.monotonic()
        Disturbance(self.cluster, ranks, row, self.evaluator).happen(rank)
        if not row.restarted:
            row.tier, row.detection = "not restarted", time.monotonic() - at
            return ranks, size
        self._end(ranks, event)
        row.detection, row.codes = time.monotonic() - at, ranks.codes
        self._check_codes(ranks, EXPECTED_CODES.get(event.kind, DIES), event.kind)
        self._flip(event, row)
        if event.flush:
            row.flushed = self._flush(event)
        for host in "ab":
            if self.cluster.clouds[host].is_announced:
                self.cluster.renew_clouds(host)
        return None, event.size

    def _end(self, ranks, event):
        """Wait until the job has ended, as a launcher does: if a rank fails, ask the others."""
        wait_until(
            lambda: not ranks.alive or ranks.has_failed,
            LEAVE_SECONDS,
            f"the end after {event.kind} in {ranks.start.folder}",
        )
        late = ranks.end(LEAVE_SECONDS)
        if late:
            self.failures.append(f"ranks {late} did not leave\n{ranks.describe()}")

    def _check_codes(self, ranks, expected, what):
        """Check how the ranks ended, and what those that saved have saved."""
        codes = ranks.codes
        killed = {r for r, code in enumerate(codes) if code == -signal.SIGKILL}
        early = {-signal.SIGTERM} if ranks.all_at("restored") is None else set()
        wrong = [c for c in codes if c not in {*expected, *early, -signal.SIGKILL}]
        if wrong or (SAVED in expected and len(expected) == 1 and killed):
            self.failures.append(f"codes {codes} after {what}, not {expected}\n{ranks.describe()}")
        left = [e for e in ranks.entries("left") if e is not None and e["code"] == SAVED]
        newest = Run(self.cluster.run).latest()
        for entry in left:
            if newest is None or newest.step != entry["step"] or entry["saved"] != entry["step"]:
                self.failures.append(
                    f"exit code 75, but {newest} is not {entry}\n{ranks.describe()}"
                )

    def _flush(self, event):
        """Save the newest state in memory to the run, as the ``limpet run`` of each host does."""

        def flush(host):
            found = []
            run = Run(self.cluster.run)
            tiers = ((self.cluster.memory[host], False), (self.cluster.disks[host], True))
            records = [
                MemoryRecord(str(folder), run.url, saves_all)
                for tier, saves_all in tiers
                for folder in [*Path(tier).glob("limpet-*/*")][:1]
            ]
            deadline = Deadline.after(10.0, "the save of the newest state in memory")
            try:
                results = [*flush_states(records, run, deadline)]
            except LimpetError as e:
                results = [e]
            for result in results:
                is_error = isinstance(result, Exception)
                found.append(type(result).__name__ if is_error else f"{result.step}")
                # a host was lost with files that had no copy yet, or the event has damaged them
                is_expected = isinstance(result, DeadlinePassed) or event.kind in (
                    Kind.FLIP_MEMORY,
                    Kind.FLIP_LOCAL,
                )
                if is_error and not is_expected:
                    self.failures.append(f"a snapshot in a tier was not saved: {result!r}")
            return ",".join(found)

        with ThreadPoolExecutor() as pool:
            return " ".join(sorted({*pool.map(flush, "ab")} - {""}))

    def _flip(self, event, row):
        """Flip a bit of the newest state in the memory or on the disk of a host, or of the newest
        version."""
        rng = random.Random(event.draw)
        if event.kind == Kind.FLIP_MEMORY:
            shards = self.cluster.shards(self.cluster.memory[rng.choice("ab")])
        elif event.kind == Kind.FLIP_DURABLE:
            shards = self.cluster.shards(self.cluster.run)
            intact = {str(v) for v in Run(self.cluster.run).line()} - self.flipped
            if len(intact) > 1:  # otherwise, nothing would be left but the memory
                for host in "ab":
                    self.cluster.lose(host)
        elif event.kind == Kind.FLIP_LOCAL:
            for host in "ab":
                self.cluster.reboot(host)
            shards = self.cluster.shards(self.cluster.disks[rng.choice("ab")])
        else:
            return
        if not shards:
            row.target = "no shard"
            return
        newest = [p for p in shards if p.parent == shards[0].parent]
        path = rng.choice(newest)
        flip_bit(path, rng)
        row.target = f"{path.parent.name}/{path.name[:11]}"
        if event.kind != Kind.FLIP_LOCAL:  # it is never promoted
            self.flipped.add(path.parent.name)


def _tier_of(urls):
    def tier(url):
        where = {"/dev/shm/": "memory", "/nvme-": "local"}
        return next((name for part, name in where.items() if part in str(url)), "durable")

    return " and ".join(sorted({"nothing" if url is None else tier(url) for url in urls}))
