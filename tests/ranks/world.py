"""Processes that form worlds of torch.distributed of one to four ranks, one after the other."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tests.fork_server import FORK_SERVER

SIZE = 4
TIMEOUT = timedelta(seconds=60)


def run_ranks(run_rank, folder, exit_codes=(0,) * SIZE, *, silent_seconds=30, timeout=300):
    """Call ``run_rank`` on each rank, in a process. Return the results of each rank.

    Args:
        run_rank: Receives the rank, the port of the store, and ``folder``. Writes the results to
            ``FOLDER/RANK.json``.
        folder: The folder of the results, the logs, and the runs.
        exit_codes: The exit code with which each process must end.
        silent_seconds: LIMPET_SILENT of the processes.
        timeout: The limit for each process, in seconds.
    """
    # this process hosts the store, so that no rank ends before another has read its last key
    store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    logs = [folder / f"{rank}.log" for rank in range(len(exit_codes))]
    processes = []
    try:
        for rank, log in enumerate(logs):
            args = (run_rank, rank, store.port, folder, log, silent_seconds)
            process = FORK_SERVER.Process(target=_run_logged, args=args)
            process.start()
            processes.append(process)
        for process in processes:
            process.join(timeout)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert codes == list(exit_codes), "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(exit_codes))]


def _run_logged(run_rank, rank, port, folder, log, silent_seconds):
    with log.open("w") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    os.environ["LIMPET_SILENT"] = str(silent_seconds)
    torch.set_num_threads(1)
    run_rank(rank, port, folder)


class RankPool:
    """All processes. Each call forms a world of the first ``size`` of them."""

    def __init__(self, rank, port, folder):
        self.rank = rank
        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", port, SIZE, False, TIMEOUT)
        self.scenario = ""
        self.world_count = 0

    def begin(self, scenario):
        self.scenario, self.world_count = scenario, 0

    def __call__(self, size, work):
        """Run ``work()`` on the ranks below ``size``, in a world of that size."""
        self.world_count += 1
        name = f"{self.scenario}{self.world_count}"
        try:
            if self.rank < size:
                self._run_in_world(size, name, work)
        finally:
            self.barrier(name)

    def _run_in_world(self, size, prefix, work):
        if size == 1:
            work()
            return
        store = dist.PrefixStore(prefix, self.store)
        dist.init_process_group("gloo", None, TIMEOUT, size, self.rank, store)
        try:
            work()
        finally:
            dist.destroy_process_group()

    def barrier(self, name):
        self.store.add(f"{name}/arrived", 1)
        end = time.monotonic() + TIMEOUT.total_seconds()
        while self.store.add(f"{name}/arrived", 0) < SIZE and time.monotonic() < end:
            time.sleep(0.005)

    def url(self, name):
        return str(self.folder / f"{name}" / "version_1")


Scenario = Callable[[RankPool], None]


def run_scenarios(scenarios, folder):
    """Run the scenarios, which share one start of the processes. Assert that all of them pass."""
    results = run_ranks(partial(_run_each, scenarios), folder)
    failed = [
        f"{name} on rank {rank}: {outcomes[name]}"
        for name in [scenario.__name__ for scenario in scenarios]
        for rank, outcomes in enumerate(results)
        if outcomes[name] != "passed"
    ]
    assert not failed, "\n".join(failed)


def _run_each(scenarios, rank, port, folder):
    """Run the scenarios as one rank, and write their results to ``FOLDER/RANK.json``.

    A result is "passed" or a traceback.
    """
    ranks, outcomes = RankPool(rank, port, folder), {}
    for scenario in scenarios:
        ranks.begin(scenario.__name__)
        try:
            scenario(ranks)
            outcomes[scenario.__name__] = "passed"
        except BaseException:
            outcomes[scenario.__name__] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    ranks.barrier("end")
