"""Signals to real processes of a training over gloo. For the numbers, see ``test_preemption.py``.

| behavior | test |
|---|---|
| 1, 2, 6, 7, 15, 24, 25 | ``test_sigterm_to_one_rank_stops_all_and_no_step_is_lost`` |
| 24 | ``test_each_worker_is_restarted_while_the_others_live`` |
| 16 | ``test_an_error_of_one_rank_is_raised_on_all`` |
| 20, D: second notice, during a save | ``test_signals_to_all_ranks_during_saves`` |
| 36 | ``test_no_thread_keeps_a_process_from_its_end`` |
| D: data-loader workers | ``test_a_signal_to_the_whole_process_group`` |
| D: a stopped rank | ``test_a_stopped_rank_is_left_behind_in_time`` |
"""

import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

import limpet
from limpet.preemption import Notice
from limpet.run.run import Run
from tests.ranks.preempted_ranks import TIMEOUT, World
from tests.ranks.world import run_ranks

pytestmark = pytest.mark.slow
TERM = signal.SIGTERM


def steps(folder):
    return [s.step for s in Run(folder / "run").snapshots()]


def test_sigterm_to_one_rank_stops_all_and_no_step_is_lost(tmp_path):
    """1, 2, 6, 7, 15, 24, 25: 4 ranks, a random one at a random step, restarted one by one."""
    draw, step = random.Random(3), 0
    for number in range(2):
        with World(4, tmp_path, apart=0.05 * number) as world:
            world.wait_for_step(step + draw.randint(1, 20))
            began = time.monotonic()
            world.send(draw.randrange(4), TERM)
            assert world.codes() == [75] * 4
            assert time.monotonic() - began < 15
        assert {r["resumed"] for r in world.results()} == {step}
        step = steps(tmp_path)[-1]
        assert len(steps(tmp_path)) == number + 1
    last_step = step + 10
    with World(4, tmp_path, last_step=last_step, apart=0.05) as world:
        assert world.codes() == [0] * 4, world.logs()
    assert [(r["resumed"], r["calls"], r["is_equal"]) for r in world.results()] == [
        (step, last_step, True)
    ] * 4


def test_each_worker_is_restarted_while_the_others_live(tmp_path):
    """24: the others join a process group with the new process, in the process that they have, and
    all resume from the version that they have saved. (After SIGKILL, gloo would not let all of them
    go: torchrun restarts them.)"""
    size = 3
    with World(size, tmp_path, lives=size + 1, last_steps=10) as world:
        for victim in range(size):
            world.wait_for_step(1, life=victim)
            world.wait_for_step(world.newest_step(victim - 1) + 2, life=victim)
            world.send(victim, TERM)
            assert world.codes([victim]) == [75]
            assert all(world.processes[r].exitcode is None for r in range(size) if r != victim)
            world.restart(victim, life=victim + 1)
        assert world.codes() == [0] * size, world.logs()
    results = world.results()
    resumed = results[0]["lives"]  # the last process of rank 0 was there in all lives but the first
    assert [*resumed] == ["1", "2", "3"]
    *left, last = steps(tmp_path)
    assert [*resumed.values()] == left
    assert last == left[-1] + 10
    assert results[1]["lives"] == {n: resumed[n] for n in "23"}
    assert results[2]["lives"] == {n: resumed[n] for n in "3"}
    assert all(r["is_equal"] for r in results)


def test_signals_to_all_ranks_during_saves(tmp_path):
    """20, D: each step is saved, so signals arrive during saves; one rank gets two."""
    with World(4, tmp_path, every=1) as world:
        world.wait_for_step(3)
        for rank in (2, 0, 3, 1, 2):
            world.send(rank, TERM)
        assert world.codes() == [75] * 4
    saved = steps(tmp_path)
    assert saved == list(range(1, len(saved) + 1))
    assert all(s.verify().ok for s in Run(tmp_path / "run").snapshots()[-2:])


def test_a_signal_to_the_whole_process_group(tmp_path):
    """D: Slurm sends SIGTERM to the data-loader workers too."""
    with World(2, tmp_path, workers=2) as world:
        world.wait_for_step(5)
        for rank in range(2):
            world.send(rank, TERM, group=True)
        assert world.codes() == [75] * 2, world.logs()
    assert len(steps(tmp_path)) == 1
    assert {r["error"][0] for r in world.results()} == {"Preempted"}


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    """16: the others are in an all-reduce, which raises because the connection is lost."""
    with World(3, tmp_path, fail_at=(2, 5)) as world:
        assert world.codes() == [1] * 3
    assert [r["error"] for r in world.results()] == [["ValueError", "bad batch on rank 2"]] * 3


def never_close(rank, port, folder):
    store = dist.TCPStore("127.0.0.1", port, 2, False, TIMEOUT)
    dist.init_process_group("gloo", None, TIMEOUT, 2, rank, store)
    state = {"progress": limpet.Progress(), "x": torch.zeros(3)}
    ckpt = limpet.Checkpointer(folder / "run", state, save=limpet.EverySteps(10))
    never_closed.append(ckpt)
    for _ in range(3):
        ckpt.step()
    ckpt._preemption.on_notice(Notice("a test", 120.0))  # more threads begin to wait
    (folder / f"{rank}.json").write_text("{}")


never_closed: list[limpet.Checkpointer] = []


def test_no_thread_keeps_a_process_from_its_end(tmp_path):
    """36: the training has neither been closed nor left."""
    run_ranks(never_close, tmp_path, (0, 0), timeout=45)


def test_a_stopped_rank_is_left_behind_in_time(tmp_path):
    """D: the others hang in an all-reduce, so their timers end them before the deadline. If the
    steps are so slow that the state could be captured, their threads save the last one before."""
    with World(3, tmp_path, seconds=5.0) as world:
        world.wait_for_step(5)
        world.send(2, signal.SIGSTOP)
        began = time.monotonic()
        world.send(0, TERM)
        codes = world.codes([0, 1], timeout=7)
        assert time.monotonic() - began < 5
        assert codes in ([76] * 2, [75] * 2)
        assert len(steps(tmp_path)) == codes.count(75) // 2
        assert "this process ends now, before it is killed" in (tmp_path / "1.log").read_text()
