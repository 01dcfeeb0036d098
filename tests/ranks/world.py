"""Processes that form worlds of torch.distributed of one to four ranks, one after the other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
TIMEOUT = timedelta(seconds=60)


def run_scenarios(
    module: str,
    folder: Path,
    exit_codes: Sequence[int] = (0,) * SIZE,
    *,
    silent_seconds: int = 30,
    timeout: float = 300,
) -> list[dict[str, Any]]:
    """Run all scenarios of a module of this package. Return the result of each one, by rank.

    The scenarios share one start of the processes, which must end with the ``exit_codes``.
    ``silent_seconds``: HOLDFAST_SILENT of the processes. ``timeout``: the limit for each process,
    in seconds.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    root = Path(__file__).parents[2]
    environ = os.environ | {"HOLDFAST_SILENT": str(silent_seconds), "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(len(exit_codes))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", f"tests.ranks.{module}", str(rank), str(port), folder]
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=root)
                )
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == list(exit_codes), "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(exit_codes))]


class RankPool:
    """All processes. Each call forms a world of the first ``size`` of them."""

    def __init__(self, rank: int, port: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, TIMEOUT)
        self.scenario = ""
        self.world_count = 0

    def begin(self, scenario: str) -> None:
        self.scenario, self.world_count = scenario, 0

    def __call__(self, size: int, work) -> None:
        """Run ``work()`` on the ranks below ``size``, in a world of that size."""
        self.world_count += 1
        name = f"{self.scenario}{self.world_count}"
        try:
            if self.rank < size:
                self._run_in_world(size, name, work)
        finally:
            self.barrier(name)

    def _run_in_world(self, size: int, prefix: str, work) -> None:
        if size == 1:
            work()
            return
        store = dist.PrefixStore(prefix, self.store)
        dist.init_process_group("gloo", None, TIMEOUT, size, self.rank, store)
        try:
            work()
        finally:
            dist.destroy_process_group()

    def barrier(self, name: str) -> None:
        self.store.add(f"{name}/arrived", 1)
        end = time.monotonic() + TIMEOUT.total_seconds()
        while self.store.add(f"{name}/arrived", 0) < SIZE and time.monotonic() < end:
            time.sleep(0.005)

    def url(self, name: str) -> str:
        return str(self.folder / f"{name}" / "version_1")


def run_as_rank(scenarios) -> None:
    """Run the scenarios as rank ``sys.argv[1]``, and write their results to ``FOLDER/RANK.json``.

    A result is "passed" or a traceback.
    """
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
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
