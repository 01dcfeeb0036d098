"""Lets one event happen to running ranks."""

import signal
import time
from pathlib import Path

from tests.chaos.clouds import AWS, AZURE, CLOUDS, GCP, POD
from tests.chaos.cluster import HOSTS
from tests.chaos.ranks import wait_until
from tests.chaos.schedule import Kind

STEP_SECONDS, LEAVE_SECONDS = 60.0, 35.0
"""Limits: until the step of an event, and from a request to stop on."""

HANG_SECONDS = 2.0
"""Seconds without a step after which the supervisor counts a job as hanging."""

SLACK_SECONDS = 1.0
"""What a loaded machine may add: a rank ends itself 5 % of the time of a notice before its end."""

CLOUD_OF = {
    Kind.NOTICE_AWS: AWS,
    Kind.NOTICE_GCP: GCP,
    Kind.NOTICE_AZURE: AZURE,
    Kind.NOTICE_POD: POD,
}


class Disturbance:
    """Lets one event happen to running ranks. ``row`` says afterward what it hit."""

    def __init__(self, cluster, ranks, row, evaluator):
        self.cluster, self.ranks, self.row, self.evaluator = cluster, ranks, row, evaluator

    def happen(self, rank):
        kind = self.row.event.kind
        hosts = HOSTS[self.ranks.start.size]
        if kind == Kind.SIGTERM:
            self.ranks.send(rank, signal.SIGTERM)
        elif kind in (Kind.SIGKILL, Kind.EARLY_KILL):
            self.ranks.send(rank, signal.SIGKILL)
        elif kind == Kind.PAUSE:
            self._pause(rank)
        elif kind == Kind.EVALUATOR:
            self.row.restarted = False
            self.row.target = self.evaluator.disturb(self.row.event.draw)
        elif kind == Kind.HANG:
            self._stop(rank)
            self.ranks.send(rank, signal.SIGKILL)
        elif kind == Kind.HANG_AND_NOTICE:
            self._hang_and_notice(rank)
        elif kind in CLOUD_OF:
            host = hosts[rank]
            self.row.target = f"host {host}"
            self.cluster.clouds[host].announce(CLOUD_OF[kind])
        elif kind == Kind.LOSE_HOST:
            self._lose(hosts[rank])
        elif kind == Kind.FULL_MEMORY:
            self._fill(f"the memory of host {hosts[rank]}", self.cluster.memory[hosts[rank]])
        elif kind == Kind.FULL_DISK:
            self.evaluator.can_fail = True
            self._fill("the disk of the run", str(self.cluster.folder / "disk"))
        else:  # a bit flips in what is left of a training that was killed
            for victim in self.ranks.alive:
                self.ranks.send(victim, signal.SIGKILL)
            if kind == Kind.REBOOT:
                wait_until(lambda: not self.ranks.alive, 10.0, "the end of killed ranks")
                self.row.target = "all hosts"
                for host in "ab":
                    self.cluster.reboot(host)

    def _stop(self, rank):
        """Stop a rank, and wait until the job makes no steps anymore."""
        self.ranks.send(rank, signal.SIGSTOP)
        count, since = self.ranks.step_count, time.monotonic()

        def is_hanging():
            nonlocal count, since
            if self.ranks.step_count != count:
                count, since = self.ranks.step_count, time.monotonic()
            return time.monotonic() - since >= HANG_SECONDS

        wait_until(is_hanging, 30.0, "a stopped rank holds up the others")

    def _pause(self, rank):
        self.row.restarted = False
        self._stop(rank)
        count = self.ranks.step_count
        self.ranks.send(rank, signal.SIGCONT)
        wait_until(lambda: self.ranks.step_count > count + 2, 30.0, "steps after SIGCONT")

    def _hang_and_notice(self, rank):
        """The ranks that are left must leave before the end that the notice names."""
        hosts = HOSTS[self.ranks.start.size]
        self._stop(rank)
        watching = [r for r in range(len(hosts)) if hosts.index(hosts[r]) == r and r != rank]
        host = hosts[watching[0]]
        cloud = CLOUDS[self.row.event.draw // 7 % len(CLOUDS)]
        self.row.target += f"; host {host}, {cloud}"
        seconds = self.cluster.clouds[host].announce(cloud)
        others = {r for r in self.ranks.alive if r != rank}
        wait_until(
            lambda: not others & {*self.ranks.alive},
            seconds + SLACK_SECONDS,
            f"the exit before the end of a notice, with rank {rank} stopped",
        )
        self.ranks.send(rank, signal.SIGKILL)

    def _lose(self, host):
        self.row.target = f"host {host}"
        for victim, name in enumerate(HOSTS[self.ranks.start.size]):
            if name == host:
                self.ranks.send(victim, signal.SIGKILL)
        wait_until(lambda: self.ranks.has_failed, 10.0, "the end of killed ranks")
        self.cluster.lose(host)

    def _fill(self, what, folder):
        """Fill a file system. The next save or capture there must raise on all ranks."""
        self.row.target = what
        with self.cluster.full(Path(folder)):
            wait_until(lambda: self.ranks.has_failed, STEP_SECONDS, f"an error of {what}")
            wait_until(lambda: not self.ranks.alive, LEAVE_SECONDS, f"the end, with {what} full")
