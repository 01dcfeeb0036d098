"""After a notice, the live ranks save what they have although another rank is dead or stopped."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from threading import Lock

import pytest

import limpet
from limpet.run.run import Run
from tests.ranks.survivors import SIZE, Scenario, kill, logs, start, wait_for
from tests.waiting import check_at_once, wait_until

pytestmark = pytest.mark.slow


EXIT_SECONDS = 1.0
"""What the exit of a process may take on a loaded machine."""


def results(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def finish(processes, ranks=range(SIZE)):
    """Wait for the ends of ranks, then kill the others. Return the exit codes, and the time."""
    try:
        return wait_for([processes[rank] for rank in ranks], 60), time.time()
    finally:
        kill(processes)


def newest_version(folder):
    newest = Run(str(folder / "run")).latest()
    assert newest is not None
    return newest


def complete(folder, last_step=12):
    """Train to the end without a fault, and return what each rank found."""
    _store, processes = start(folder, Scenario(last_step))
    codes, _ = finish(processes)
    assert codes == [0] * SIZE, logs(folder)
    return results(folder)


def committed_at(folder, step):
    return (folder / "run" / f"version_{step}" / "manifest.json").stat().st_mtime


class Undisturbed:
    """The weights of trainings that nothing disturbed, except that they were restarted after a
    step: DDP sums the gradients of its first step in another order."""

    def __init__(self, folder):
        self._folder = folder
        self._weights: dict[int, list[str]] = {}
        self._lock = Lock()

    def weights(self, restarted_at):
        with self._lock:
            if restarted_at not in self._weights:
                folder = self._folder / f"undisturbed-{restarted_at}"
                complete(folder, restarted_at)
                self._weights[restarted_at] = [r["weights"] for r in complete(folder)]
            return self._weights[restarted_at]


def check_complete_state(folder, memory, undisturbed, fault, victim):
    """C3: the newest complete state in memory is saved, with the parts of the dead rank, and the
    live ranks leave in time."""
    scenario = Scenario(victim=victim, fault=fault, noticed=2, memory=memory)
    if fault == signal.SIGKILL:  # the others must know of the notice before the connection is lost
        scenario = replace(scenario, slow_step=3.0)
    _store, processes = start(folder, scenario)
    codes, ended = finish(processes, {*range(SIZE)} - {victim})
    newest = newest_version(folder)
    assert newest.metadata["reason"] == "memory"
    if fault == signal.SIGKILL:  # the error that ended the training may have another cause
        assert "RuntimeError: " in logs(folder)
    else:  # no call to a stopped rank returns, so they end themselves early
        check_time(folder, scenario, newest, ended)
    check_codes(folder, codes, newest)
    check_resume(folder, newest, undisturbed)


def check_codes(folder, codes, newest):
    """Check the codes of ranks that have saved the captured state of the last or the step before: a
    capture may be skipped, because the one before is not complete."""
    assert newest.step in (6, 7), logs(folder)
    assert newest.verify().ok
    # 75 if the rank learned in time that its last step is saved
    assert set(codes) <= {76, 75 if newest.step == 7 else 76}, logs(folder)


def check_time(folder, scenario, newest, ended):
    saved, before = committed_at(folder, newest.step), committed_at(folder, 5)
    assert ended - saved < 0.75 * (scenario.seconds - (saved - before - 1.0)) + EXIT_SECONDS


def check_resume(folder, newest, undisturbed):
    resumed = complete(folder)
    assert [r["resumed"] for r in resumed] == [newest.step] * SIZE
    assert [r["weights"] for r in resumed] == undisturbed.weights(newest.step)
    assert [r["mine"] for r in resumed] == [{"rank": r, "steps": 12} for r in range(SIZE)]


def check_nothing_committed(folder, memory, undisturbed):
    """Without a tier, a state of which the dead rank has a part cannot be saved."""
    scenario = Scenario(victim=1, fault=signal.SIGSTOP, noticed=2, is_sharded=True)
    _store, processes = start(folder, scenario)
    codes, _ = finish(processes, [0, 2])
    assert codes == [76, 76], logs(folder)
    assert [s.step for s in Run(str(folder / "run")).snapshots()] == [5]


def check_part_of_the_dead_rank(folder, memory, undisturbed, **options):
    scenario = Scenario(victim=1, fault=signal.SIGSTOP, noticed=2, memory=memory, **options)
    _store, processes = start(folder, scenario)
    codes, ended = finish(processes, [0, 2])
    newest = newest_version(folder)
    check_time(folder, scenario, newest, ended)
    check_codes(folder, codes, newest)
    assert limpet.load(newest.url)["mine"]["1"]["steps"] == newest.step


def check_without_savepoints(folder, memory, undisturbed):
    """The training threads of the live ranks never return from a long step."""
    scenario = Scenario(noticed=2, slow_step=60.0, memory=memory, has_savepoints=False)
    _store, processes = start(folder, scenario)
    codes, _ = finish(processes)
    newest = newest_version(folder)
    assert newest.metadata["reason"] == "memory"
    check_codes(folder, codes, newest)


def check_rank_that_continues(folder, memory, undisturbed):
    """A stopped rank that continues damages nothing."""
    scenario = Scenario(victim=1, fault=signal.SIGSTOP, noticed=2, memory=memory)
    _store, processes = start(folder, scenario)
    try:
        manifest = folder / "run" / "version_5" / "manifest.json"
        wait_until(manifest.exists, 30, lambda: logs(folder))
        time.sleep(6.5)
        os.kill(processes[1].pid, signal.SIGCONT)
        codes = wait_for(processes, 60)
        assert {*codes} <= {75, 76, 1}, (codes, logs(folder))
    finally:
        kill(processes)
    newest = newest_version(folder)
    assert (newest.step or 0) >= 6, (codes, logs(folder))
    assert newest.verify().ok
    check_resume(folder, newest, undisturbed)


def check_long_step(folder, memory, undisturbed):
    """All ranks are alive, in a step longer than the grace period, and save the step before."""
    _store, processes = start(folder, Scenario(noticed=1, slow_step=30.0, seconds=8.0))
    codes, _ = finish(processes)
    assert codes == [75] * SIZE, logs(folder)
    newest = newest_version(folder)
    assert newest.step == 7
    assert limpet.load(newest.url)["mine"]["2"]["steps"] == 7


CHECKS = (
    partial(check_complete_state, fault=signal.SIGSTOP, victim=1),
    partial(check_complete_state, fault=signal.SIGKILL, victim=0),
    partial(check_part_of_the_dead_rank, is_sharded=True),
    partial(check_part_of_the_dead_rank, is_pipeline=True),
    check_without_savepoints,
    check_rank_that_continues,
    check_nothing_committed,
    check_long_step,
)


def test_the_live_ranks_save_what_they_have(tmp_path, memory):
    undisturbed = Undisturbed(tmp_path)

    def check(number):
        CHECKS[number](tmp_path / f"{number}", f"{memory}/{number}", undisturbed)

    check_at_once(check, [(number,) for number in range(len(CHECKS))], threads=8)
