"""A rank that saves, loads, or resumes alone is told so on stderr, once, and by the error."""

import re
import time

import pytest
import torch
import torch.distributed as dist

import limpet
from limpet.errors import RankFailed
from limpet.ranks.kv import CALL_ALONE, CALL_ON_ALL, Timeouts
from tests.fakegroup import FakeGroup
from tests.fork_server import FORK_SERVER
from tests.ranks.world import TIMEOUT
from tests.waiting import wait_until


def checkpointer(folder, **options):
    return limpet.Checkpointer(folder / "run", {"n": 1}, preemption=None, **options)


def save_in_a_training(folder):
    checkpointer(folder).save()


def wait_in_a_training(folder):
    checkpointer(folder).wait()


def step(folder):
    checkpointer(folder, save=limpet.EverySteps(1), quiet=True).step()


def write(folder):
    with limpet.Run(folder / "run").writer():
        pass


CALLS = {
    "save": lambda folder: limpet.save(folder / "version_1", {"n": 1}),
    "save_async": lambda folder: limpet.save_async(folder / "version_1", {"n": 1}).wait(),
    "load": lambda folder: limpet.load(folder / "version_0", into={"n": 1}),
    "load address": lambda folder: limpet.load(f"{folder}@latest", into={"n": 1}),
}
IN_A_TRAINING = {
    "the first step": step,
    "the resume of ": lambda folder: checkpointer(folder).resume(),
    "ckpt.wait() of ": wait_in_a_training,
    "the start of a writer of ": write,
}
"""The operation that the line names, and the call."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("limpet.ranks.failure_detector.STRAGGLER_SECONDS", 0.1)
    limpet.save(tmp_path / "version_0", {"n": 1})
    return tmp_path


def lines_of(calls, size, capsys):
    """The errors of ranks that make calls, and what was printed, without lines of trainings."""
    with FakeGroup(size, Timeouts(silent=0.5, stuck=0.5)) as group:
        outcomes = group.outcomes(lambda rank: calls[rank]() if rank in calls else None)
    printed = capsys.readouterr().err.splitlines()
    return outcomes, [line for line in printed if line.startswith("limpet: waited")]


@pytest.mark.parametrize("name", CALLS)
def test_rank_0_alone(folder, capsys, name):
    outcomes, lines = lines_of({0: lambda: CALLS[name](folder)}, 3, capsys)
    assert isinstance(outcomes[0], RankFailed)
    assert CALL_ALONE in str(outcomes[0])
    (line,) = lines
    assert " for ranks 1, 2 in the " in line
    assert line.endswith(CALL_ALONE)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_line_says_how_long_the_call_still_waits(folder, capsys, rank, monkeypatch):
    """Whichever of the limits of the call and of the ranks is first."""
    monkeypatch.setattr("limpet.deadline.CLEANUP_SECONDS", 0.1)
    call = {rank: lambda: limpet.save(folder / "version_1", {"n": 1}, timeout=0.4)}
    with FakeGroup(2, Timeouts(silent=0.5, stuck=600.0)) as group:
        outcomes = group.outcomes(lambda own: call[own]() if own in call else None)
    assert isinstance(outcomes[rank], RankFailed)
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "waited" in text]
    assert re.search(r"for up to [0-9.]+ m?s", line), line


@pytest.mark.parametrize("operation", IN_A_TRAINING)
def test_rank_0_alone_in_a_training(folder, capsys, operation):
    """The line and the error name the call of the user, and no remedy that it does not have."""
    outcomes, lines = lines_of({0: lambda: IN_A_TRAINING[operation](folder)}, 3, capsys)
    assert isinstance(outcomes[0], RankFailed)
    assert f" did not join {operation}" in str(outcomes[0])
    assert "group=" not in str(outcomes[0])
    (line,) = lines
    assert f" for ranks 1, 2 in {operation}" in line
    assert line.endswith(f". {CALL_ON_ALL}")


LATER = {
    "the save after step 2 of ": limpet.Checkpointer.step,
    "ckpt.save() of ": limpet.Checkpointer.save,
}


@pytest.mark.parametrize("operation", LATER)
def test_a_later_call_of_rank_0_alone(folder, operation):
    """It waits for no save: there is none in flight."""

    def train(rank):
        with checkpointer(folder, save=limpet.EverySteps(2), quiet=True) as ckpt:
            ckpt.step()
            if rank == 0:
                LATER[operation](ckpt)
            else:
                wait_until(lambda: "did not join" in str([*group.store.values.values()]))

    with FakeGroup(2, Timeouts(silent=0.5, stuck=0.5)) as group:
        error, _ = group.outcomes(train)
    assert f" did not join {operation}" in str(error)
    assert "group=" not in str(error)


def test_the_line_says_how_long_the_rank_keeps_waiting(folder, capsys):
    """The time that is left, not the limit."""
    began, at = time.monotonic(), []

    def note(name, fields):
        if name == "ranks_awaited":
            at.append((time.monotonic() - began, fields["longest"]))

    with (
        limpet.attach(note),
        FakeGroup(2, Timeouts(silent=0.4, stuck=0.8)) as group,
    ):
        group.outcomes(lambda rank: checkpointer(folder).resume() if rank == 0 else None)
    [(printed, left)] = at
    assert printed + left == pytest.approx(0.8, abs=0.2)
    assert left < 0.75


@pytest.mark.parametrize("ranks", [(1,), (2,), (1, 2)])
def test_ranks_without_rank_0(folder, capsys, ranks):
    calls = dict.fromkeys(ranks, lambda: CALLS["save"](folder))
    outcomes, lines = lines_of(calls, 3, capsys)
    assert [isinstance(outcome, RankFailed) for outcome in outcomes] == [
        r in ranks for r in range(3)
    ]
    assert all(CALL_ALONE in str(outcomes[rank]) for rank in ranks)
    (line,) = lines
    assert " for rank 0 in the save of " in line
    assert line.endswith(CALL_ALONE)


def test_alone_is_possible(folder, capsys):
    call = lambda: limpet.save(folder / "version_1", {"n": 1}, group="alone")  # noqa: E731
    outcomes, lines = lines_of({1: call}, 3, capsys)
    assert outcomes[1] == limpet.open(folder / "version_1") or outcomes[1].step == 1
    assert lines == []


@pytest.mark.parametrize("how", ["quiet", "sink"])
def test_no_line(folder, capsys, monkeypatch, how):
    """LIMPET_QUIET=1, or a sink, which gets the event."""
    events = []
    if how == "quiet":
        monkeypatch.setenv("LIMPET_QUIET", "1")
    else:
        stack = limpet.attach(lambda name, fields: events.append((name, fields)))
    outcomes, lines = lines_of({0: lambda: CALLS["save"](folder)}, 2, capsys)
    assert isinstance(outcomes[0], RankFailed)
    assert lines == []
    if how == "sink":
        stack.close()
        (fields,) = [fields for name, fields in events if name == "ranks_awaited"]
        assert (fields["ranks"], fields["first"], fields["todo"]) == ([1], True, CALL_ALONE)


def test_ranks_that_have_joined_are_not_told_to_join(folder, capsys, monkeypatch):
    """A slow disk of a rank: no advice would help."""
    from limpet.saving import save

    write_shard, waited = save.write_local_shard, []

    def write_slowly(job, base):
        if job.collective.rank == 1 and not waited:
            end = time.monotonic() + 20  # rank 0 may give up on a machine that is busy
            while "waited" not in (text := capsys.readouterr().err) and time.monotonic() < end:
                waited.append(1)
                time.sleep(0.01)
            waited.append(text)
        return write_shard(job, base)

    monkeypatch.setattr(save, "write_local_shard", write_slowly)
    calls = dict.fromkeys((0, 1), lambda: CALLS["save"](folder))
    with FakeGroup(2, Timeouts(silent=10, stuck=60)) as group:
        group.run(lambda rank: calls[rank]())
    assert "for rank 1 in the save of" in waited[-1]
    assert "All ranks must" not in waited[-1]


# -- real processes ------------------------------------------------------------------------------


def save_alone(rank, alone, port, log):
    """Rank ``alone`` saves, and the others go on to a collective operation of the training."""
    import os
    import sys

    with log.open("w") as out:
        os.dup2(out.fileno(), sys.stderr.fileno())
    os.environ |= {"LIMPET_SILENT": "4", "LIMPET_STUCK": "4"}
    from limpet.ranks import failure_detector, kv

    kv.STRAGGLER_SECONDS = failure_detector.STRAGGLER_SECONDS = 0.5
    store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    if rank == alone:
        with pytest.raises(RankFailed, match="All ranks must make this call"):
            limpet.save(log.parent / "version_1", {"n": 1})
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 2])
def test_processes(tmp_path, alone):
    store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    logs = [tmp_path / f"{rank}.log" for rank in range(3)]
    processes = [
        FORK_SERVER.Process(target=save_alone, args=(rank, alone, store.port, log))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    shown = [line for log in logs for line in log.read_text().splitlines() if "waited" in line]
    assert len(shown) == 1, [log.read_text() for log in logs]
    assert shown[0].endswith(CALL_ALONE)
