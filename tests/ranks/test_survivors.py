"""After a notice, the live ranks save what they have although another rank is dead or stopped."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import cache

import pytest

import limpet
from limpet.run.run import Run
from tests.ranks.survivors import SIZE, Scenario, kill, logs, start, wait_for
from tests.waiting import wait_until

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


@pytest.fixture(scope="module")
def stopped_at(tmp_path_factory):
    """Return the weights of a training that nothing disturbed, except that it was restarted after a
    step: DDP sums the gradients of its first step in another order."""

    @cache
    def train(step):
        folder = tmp_path_factory.mktemp("undisturbed")
        complete(folder, step)
        return [r["weights"] for r in complete(folder)]

    return train


@pytest.mark.parametrize(("fault", "victim"), [(signal.SIGSTOP, 1), (signal.SIGKILL, 0)])
def test_the_newest_complete_state_in_memory_is_saved_and_the_live_ranks_leave_in_time(
    tmp_path, fault, victim, memory, stopped_at
):
    """C3: with the parts of the dead rank."""
    scenario = Scenario(victim=victim, fault=fault, noticed=2, memory=memory)
    if fault == signal.SIGKILL:  # the others must know of the notice before the connection is lost
        scenario = replace(scenario, slow_step=3.0)
    _store, processes = start(tmp_path, scenario)
    codes, ended = finish(processes, {*range(SIZE)} - {victim})
    newest = newest_version(tmp_path)
    assert newest.step in (6, 7), logs(tmp_path)  # a capture may be skipped
    assert newest.metadata["reason"] == "memory"
    assert set(codes) <= {76, 75 if newest.step == 7 else 76}, logs(tmp_path)
    if fault == signal.SIGKILL:  # the error that ended the training may have another cause
        assert "RuntimeError: " in logs(tmp_path)
    else:  # no call to a stopped rank returns, so they end themselves early
        saved, before = committed_at(tmp_path, newest.step), committed_at(tmp_path, 5)
        left = scenario.seconds - (saved - before - 1.0)
        assert ended - saved < 0.75 * left + EXIT_SECONDS
    resumed = complete(tmp_path)
    assert [r["resumed"] for r in resumed] == [newest.step] * SIZE
    assert [r["weights"] for r in resumed] == stopped_at(newest.step)
    assert [r["mine"] for r in resumed] == [{"rank": r, "steps": 12} for r in range(SIZE)]


def test_nothing_is_committed_without_a_tier(tmp_path):
    scenario = Scenario(victim=1, fault=signal.SIGSTOP, noticed=2, is_sharded=True)
    _store, processes = start(tmp_path, scenario)
    codes, _ = finish(processes, [0, 2])
    assert codes == [76, 76], logs(tmp_path)
    assert [s.step for s in Run(str(tmp_path / "run")).snapshots()] == [5]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_newest_captured_state_is_saved_if_the_dead_rank_has_a_part_of_the_state(
    tmp_path, is_sharded, memory
):
    scenario = Scenario(
        victim=1,
        fault=signal.SIGSTOP,
        noticed=2,
        is_sharded=is_sharded,
        is_pipeline=not is_sharded,
        memory=memory,
    )
    _store, processes = start(tmp_path, scenario)
    codes, ended = finish(processes, [0, 2])
    newest = newest_version(tmp_path)
    saved, before = committed_at(tmp_path, newest.step), committed_at(tmp_path, 5)
    assert ended - saved < 0.75 * (scenario.seconds - (saved - before - 1.0)) + EXIT_SECONDS
    # 75 if the rank learned in time that its last step is saved
    assert set(codes) <= {76, 75 if newest.step == 7 else 76}, logs(tmp_path)
    assert newest.step in (6, 7)  # a capture may be skipped, because the one before is not complete
    assert newest.verify().ok
    assert limpet.load(newest.url)["mine"]["1"]["steps"] == newest.step


def test_the_newest_captured_state_is_saved_if_the_live_ranks_have_no_savepoint(tmp_path, memory):
    """Their training threads never return from a long step."""
    scenario = Scenario(noticed=2, slow_step=60.0, memory=memory, has_savepoints=False)
    _store, processes = start(tmp_path, scenario)
    codes, _ = finish(processes)
    newest = newest_version(tmp_path)
    assert newest.step in (6, 7), logs(tmp_path)  # a capture may be skipped
    assert newest.metadata["reason"] == "memory"
    assert newest.verify().ok
    assert set(codes) <= {76, 75 if newest.step == 7 else 76}, logs(tmp_path)


def test_a_stopped_rank_that_continues_damages_nothing(tmp_path, memory, stopped_at):
    scenario = Scenario(victim=1, fault=signal.SIGSTOP, noticed=2, memory=memory)
    _store, processes = start(tmp_path, scenario)
    try:
        manifest = tmp_path / "run" / "version_5" / "manifest.json"
        wait_until(manifest.exists, 30, lambda: logs(tmp_path))
        time.sleep(6.5)
        os.kill(processes[1].pid, signal.SIGCONT)
        codes = wait_for(processes, 60)
        assert {*codes} <= {75, 76, 1}, (codes, logs(tmp_path))
    finally:
        kill(processes)
    newest = newest_version(tmp_path)
    assert newest.step is not None
    assert newest.step >= 6, (codes, logs(tmp_path))
    assert newest.verify()
    resumed = complete(tmp_path)
    assert [r["weights"] for r in resumed] == stopped_at(newest.step)


def test_ranks_in_a_step_longer_than_the_grace_period_save_the_step_before(tmp_path):
    """All ranks are alive."""
    _store, processes = start(tmp_path, Scenario(noticed=1, slow_step=30.0, seconds=8.0))
    codes, _ = finish(processes)
    assert codes == [75] * SIZE, logs(tmp_path)
    newest = newest_version(tmp_path)
    assert newest.step == 7
    assert limpet.load(newest.url)["mine"]["2"]["steps"] == 7
