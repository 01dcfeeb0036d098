"""Members with ranks of their own: they save and restore with a training, and make no steps."""

import os
import signal
from contextlib import ExitStack
from threading import Lock, Thread
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import (
    LimpetError,
    MissingLeaf,
    NoSnapshot,
    RankFailed,
    SaveFailed,
    SkippedVersion,
    Unsupported,
)
from tests.fork_server import FORK_SERVER
from tests.waiting import run_threads

ROWS = 12
HERE = "127.0.0.1:0"

JOINING = Lock()
"""Often, PyTorch takes 5 s if several threads of a process connect to a TCPStore at once."""


def server_state(number, count, value):
    """Return the part of one of ``count`` servers: some rows of a table."""
    first, end = ROWS * number // count, ROWS * (number + 1) // count
    rows = np.full((end - first, 2), value, np.float32) + np.arange(first, end)[:, None]
    return {"table": limpet.Boxed(rows.astype(np.float32), (first, 0), (ROWS, 2))}


def rows_of(states):
    return [row for state in states for row in state["table"].tensor[:, 0].tolist()]


class Servers:
    """The members of one group, each in a thread, beside a training of ``trained_by`` ranks.

    ``found``: the member of each thread, or the error with which it ended.
    """

    def __init__(self, run, address, count, *, value=0.0, name="group"):
        self.states = [server_state(number, count, value) for number in range(count)]
        self.found: list[Any] = [None] * count
        self._join = (run, address, name)
        self._threads = [Thread(target=self._serve, args=(n,), daemon=True) for n in range(count)]

    def start(self, trained_by=1):
        self._trained_by = trained_by
        for thread in self._threads:
            thread.start()
        return self

    def _serve(self, number):
        run, address, name = self._join
        count = len(self.states)
        rank, size = self._trained_by + number, self._trained_by + count
        try:
            with JOINING:
                group = limpet.Group.join(address, rank, size, members=count, name=name)
            with group:
                member = self.found[number] = limpet.Member(run, self.states[number], group=group)
                member.run()
        except BaseException as e:
            self.found[number] = e

    def end(self):
        """Return the members, which have ended, or their errors."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return self.found


def join(count, address=HERE, *, size=1, rank=0, name="group"):
    return limpet.Group.join(address, rank, size + count, members=count, name=name)


def make_versions(run, steps=3, *, members=2, **options):
    """Save the versions 1 to ``steps``. The server's rows and ``w`` are those of the step."""
    state = {"w": torch.zeros(5)}
    with join(members) as group:
        servers = Servers(run, group.address, members).start()
        with limpet.Checkpointer(
            run, state, save=limpet.EverySteps(1), group=group, **options
        ) as ckpt:
            for step in range(1, steps + 1):
                ckpt.wait()
                state["w"][:] = step
                for part in servers.states:
                    part["table"].tensor[:] += 100
                ckpt.step()
    assert [type(member) for member in servers.end()] == [limpet.Member] * members
    assert [member.latest.step for member in servers.end()] == [steps] * members


def on_ranks(size, train):
    """Call ``train`` as each rank of a training, in threads."""
    errors: list[BaseException] = []

    def call(rank):
        try:
            train(rank)
        except BaseException as e:
            errors.append(e)

    run_threads((Thread(target=call, args=(rank,)) for rank in range(size)), 60)
    if errors:
        raise errors[0]


def serve_in_process(run, ranks, kill_at, output):
    """Serve as a member, and send its rows at the end. At the save ``kill_at``, die in it."""
    address, rank, size, members = ranks
    name, saves = "group", []

    def die(event, fields):
        if event == "staged":
            saves.append(fields)
            if len(saves) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    limpet.attach(die)
    os.environ.update(LIMPET_SILENT="3", LIMPET_STUCK="20")
    while True:
        state = server_state(rank - (size - members), members, 0.0) | {"own": limpet.PerRank(rank)}
        with limpet.Group.join(address, rank, size, members=members, name=name) as group:
            member = limpet.Member(run, state, group=group)
            try:
                member.run()
            except RankFailed as e:
                output.send(e.rank)
                size, members, name = size - 1, members - 1, f"{name} without {e.rank}"
                continue
            except LimpetError as e:
                output.send(str(e))
                raise
        assert member.latest is not None
        output.send((member.latest.step, rows_of([state])))
        return


class Processes:
    def __init__(self):
        self.processes: list[Any] = []
        self.outputs: list[Any] = []

    def start(self, target, *arguments):
        reader, writer = FORK_SERVER.Pipe(duplex=False)
        process = FORK_SERVER.Process(target=target, args=(*arguments, writer))
        process.start()
        writer.close()
        self.processes.append(process)
        self.outputs.append(reader)
        return reader

    def serve(self, run, group, kill_at=0):
        """Start the members of a group. The last one dies in its save ``kill_at``."""
        for rank in range(group.size - group.members, group.size):
            ranks = group.address, rank, group.size, group.members
            self.start(serve_in_process, run, ranks, kill_at if rank == group.size - 1 else 0)


@pytest.fixture
def processes():
    processes = Processes()
    yield processes
    for process in processes.processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("trained_by", [1, 2])
def test_a_member_in_two_processes_saves_and_restores_its_parts(tmp_path, processes, trained_by):
    run = tmp_path / "run"
    make_versions(run, 3)

    def train(rank):
        with groups[rank] as group:
            state = {"w": torch.zeros(5), "own": limpet.PerRank(rank)}
            with limpet.Checkpointer(
                run, state, save=limpet.EverySteps(2), keep=limpet.KeepLast(2), group=group
            ) as ckpt:
                resumed = ckpt.resume(missing="keep")
                assert resumed is not None
                assert (resumed.step, state["w"].tolist()) == (3, [3.0] * 5)
                for _ in range(3):
                    state["w"] += 1
                    ckpt.step()
                ckpt.save()

    groups = [join(2, size=trained_by)]
    groups += [join(2, groups[0].address, size=trained_by, rank=r) for r in range(1, trained_by)]
    processes.serve(run, groups[0])
    on_ranks(trained_by, train)
    found = [output.recv() for output in processes.outputs]
    assert [step for step, _ in found] == [6, 6]
    expected = [300.0 + row for row in range(ROWS)]
    assert [row for _, rows in found for row in rows] == expected
    for process in processes.processes:
        process.join()
        assert process.exitcode == 0
    versions = limpet.Run(run).snapshots()
    assert [version.step for version in versions] == [4, 6]
    for version in versions:
        state = limpet.load(version.url)
        assert version.verify().ok
        assert state["w"].tolist() == [version.step] * 5
        assert state["table"][:, 0].tolist() == expected
        assert state["own"] == {str(rank): rank for rank in range(trained_by + 2)}


def test_a_member_that_dies_in_a_save_fails_it_and_the_others_continue(
    tmp_path, processes, monkeypatch
):
    monkeypatch.setenv("LIMPET_SILENT", "3")
    monkeypatch.setenv("LIMPET_STUCK", "20")
    run, state = tmp_path / "run", {"w": torch.zeros(5)}
    with join(2) as group, pytest.raises(RankFailed, match=r"Rank 2.* did not join the save") as e:
        processes.serve(run, group, kill_at=2)
        with limpet.Checkpointer(run, state, save=limpet.EverySteps(1), group=group) as ckpt:
            for _ in range(3):
                state["w"] += 1
                ckpt.step()
                ckpt.wait()
    assert e.value.rank == 2
    assert [version.step for version in limpet.Run(run).snapshots()] == [1]
    assert processes.outputs[0].recv() == 2
    with (
        join(1, group.address, name="group without 2") as group,
        limpet.Checkpointer(run, state, save=limpet.EverySteps(1), group=group) as ckpt,
    ):
        with pytest.warns(limpet.errors.InexactResume, match=r"own .*saved by ranks 1, 2, loaded"):
            resumed = ckpt.resume()
        assert resumed is not None
        assert (resumed.step, state["w"].tolist()) == (1, [1.0] * 5)
        ckpt.step()
    assert processes.outputs[0].recv() == (2, [float(row) for row in range(ROWS)])
    assert [(v.step, v.verify().ok) for v in limpet.Run(run).snapshots()] == [(1, True), (2, True)]


def train_until_stopped(run, address, rank, size, stop, output):
    state = {"w": torch.zeros(5)}
    with join(2, address, size=size, rank=rank) as group:
        output.send(group.address)
        with limpet.Checkpointer(run, state, save=limpet.EverySteps(1000), group=group) as ckpt:
            ckpt.resume()
            while True:
                state["w"] += 1
                if ckpt.current_step == 4 and rank == size - 1:
                    stop()
                ckpt.step()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("trained_by", [1, 2])
def test_the_last_save_after_a_notice_holds_the_parts_of_the_members(
    tmp_path, processes, trained_by
):
    address = HERE
    for rank in range(trained_by):
        arguments = tmp_path / "run", address, rank, trained_by, terminate
        address = processes.start(train_until_stopped, *arguments).recv()
    servers = Servers(tmp_path / "run", address, 2, value=7.0).start(trained_by)
    for process in processes.processes:
        process.join(60)
        assert process.exitcode == 75
    members = servers.end()
    newest = limpet.Run(tmp_path / "run").latest()
    assert newest is not None
    assert [member.latest.step for member in members] == [newest.step] * 2
    state = limpet.load(newest.url)
    assert state["w"].tolist() == [newest.step] * 5
    assert state["table"][:, 0].tolist() == [7.0 + row for row in range(ROWS)]


def test_members_raise_if_the_training_dies(tmp_path, processes):
    arguments = tmp_path / "run", HERE, 0, 1, die
    address = processes.start(train_until_stopped, *arguments).recv()
    for error in Servers(tmp_path / "run", address, 2).start().end():
        assert isinstance(error, RankFailed)
        assert "TCPStore" in str(error)


def damage_shard(folder, rank):
    (shard,) = folder.glob(f"shard-{rank:05}-*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_damaged_part_makes_all_ranks_fall_back_together(tmp_path, rank):
    run, state = tmp_path / "run", {"w": torch.zeros(5)}
    make_versions(run, 3)
    damage_shard(run / "version_3", rank)
    with join(2) as group:
        servers = Servers(run, group.address, 2).start()
        with limpet.Checkpointer(run, state, save=limpet.EverySteps(1), group=group) as ckpt:
            with pytest.warns(SkippedVersion, match="version_3 is skipped"):
                resumed = ckpt.resume()
            assert resumed is not None
            assert (resumed.step, state["w"].tolist()) == (2, [2.0] * 5)
            assert rows_of(servers.states) == [200.0 + row for row in range(ROWS)]
            ckpt.step()
    assert [member.latest.url for member in servers.end()] == [f"{run}/version_3.1"] * 2
    assert limpet.Run(run).latest().verify().ok


@pytest.mark.parametrize(("saved", "restored", "trained_by"), [(2, 1, 1), (1, 3, 1), (2, 3, 2)])
def test_another_number_of_members_restores(tmp_path, saved, restored, trained_by):
    run = tmp_path / "run"
    make_versions(run, 1, members=saved)
    with ExitStack() as stack:
        groups = [stack.enter_context(join(restored, size=trained_by))]
        address = groups[0].address
        for rank in range(1, trained_by):
            other = join(restored, address, size=trained_by, rank=rank)
            groups.append(stack.enter_context(other))
        servers = Servers(run, address, restored).start(trained_by)

        def train(rank):
            state = {"w": torch.zeros(5)}
            with limpet.Checkpointer(
                run, state, save=limpet.EverySteps(1), group=groups[rank]
            ) as ckpt:
                ckpt.resume(check=True)
                assert state["w"].tolist() == [1.0] * 5
                ckpt.step()

        found: list[str] = []
        with limpet.attach(lambda name, fields: found.append(name)):
            on_ranks(trained_by, train)
    assert rows_of(servers.states) == [100.0 + row for row in range(ROWS)]
    assert all(isinstance(member, limpet.Member) for member in servers.end())
    assert "resume_checked" in found
    assert limpet.load(f"{run}@2")["table"][:, 0].tolist() == [100.0 + r for r in range(ROWS)]


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_a_run_begins_with_a_version_of_another_run_or_without_members(tmp_path, is_snapshot):
    first, second = tmp_path / "first", tmp_path / "second"
    state = {"w": torch.ones(5)}
    with limpet.Checkpointer(first, state, save=limpet.AtEnd()) as ckpt:
        ckpt.step()
    with join(1) as group:
        servers = Servers(first, group.address, 1, value=5.0).start()
        with limpet.Checkpointer(first, state, save=limpet.AtEnd(), group=group) as ckpt:
            with pytest.raises(MissingLeaf, match="table"):
                ckpt.resume()
            assert ckpt.resume(missing=["table"]) is not None
            ckpt.step()
    assert servers.end()[0].latest.step == 2
    with join(2) as group:
        servers = Servers(second, group.address, 2).start()
        with limpet.Checkpointer(second, state, save=limpet.AtEnd(), group=group) as ckpt:
            with pytest.raises(LimpetError, match="must be an address"):
                ckpt.resume(start=limpet.open_store(first / "version_2"))
            start = limpet.open(f"{first}@latest") if is_snapshot else f"{first}@latest"
            ckpt.resume(start=start, keys=["table", "w"])
            assert rows_of(servers.states) == [5.0 + row for row in range(ROWS)]
            ckpt.step()
    assert [member.latest.step for member in servers.end()] == [1, 1]


def test_incremental_versions_hold_only_what_a_member_changed(tmp_path):
    run, state = tmp_path / "run", {"w": torch.zeros(5)}
    big = np.arange(1 << 20, dtype=np.float32)

    def serve(address):
        with join(1, address, rank=1) as group:
            limpet.Member(run, {"big": big}, group=group).run()

    with join(1) as group:
        thread = Thread(target=serve, args=(group.address,))
        thread.start()
        with limpet.Checkpointer(
            run,
            state,
            save=limpet.EverySteps(1),
            keep=limpet.KeepLast(2),
            incremental=True,
            overlap=True,
            group=group,
        ) as ckpt:
            for _ in range(4):
                state["w"] += 1
                ckpt.step()
                ckpt.wait()
    thread.join()
    versions = limpet.Run(run).snapshots()
    assert [version.step for version in versions if version.step > 2] == [3, 4]
    assert sum(f.stat().st_size for f in (run / "version_4").iterdir()) < 100_000
    assert (limpet.load(f"{run}@4")["big"] == big).all()


def test_a_save_that_a_member_cannot_make_fails_and_the_next_one_succeeds(tmp_path):
    run, state = tmp_path / "run", {"w": torch.zeros(5)}
    with join(2) as group:
        servers = Servers(run, group.address, 2).start()
        with limpet.Checkpointer(run, state, save=limpet.EverySteps(10), group=group) as ckpt:
            servers.states[1]["bad"] = object()
            ckpt.step()
            with pytest.raises(Unsupported, match="bad"):
                ckpt.save()
            del servers.states[1]["bad"]
            ckpt.step()
            assert ckpt.save().step == 2
    assert [member.latest.step for member in servers.end()] == [2, 2]
    assert [version.step for version in limpet.Run(run).snapshots()] == [2]


def test_a_member_ends_with_the_error_of_the_last_resume(tmp_path):
    make_versions(tmp_path, 1)
    with join(1) as group:
        servers = Servers(tmp_path, group.address, 1).start()
        state = {"w": torch.zeros(5)}
        with limpet.Checkpointer(tmp_path, state, group=group) as ckpt, pytest.raises(NoSnapshot):
            ckpt.resume(at=9)
    (error,) = servers.end()
    assert isinstance(error, NoSnapshot)


def test_a_server_with_a_loop_of_its_own_polls(tmp_path):
    run, state, own = tmp_path / "run", {"w": torch.zeros(5)}, server_state(0, 1, 0.0)
    with join(1) as group, join(1, group.address, rank=1) as other:
        member = limpet.Member(run, own, group=other)
        assert (member.poll(), member.poll(0.01), member.latest) == (None, None, None)

        def train():
            for _ in range(2):  # two trainings, one after the other
                with limpet.Checkpointer(
                    run, state, save=limpet.EverySteps(1), group=group
                ) as ckpt:
                    ckpt.resume()
                    ckpt.step()
            group.close()

        thread = Thread(target=train)
        thread.start()
        found = [member.poll(30) for _ in range(5)]
        thread.join()
        assert found == ["resume", "save", "resume", "save", "end"]
        assert member.poll() == "end"
    assert member.latest is not None
    assert member.latest.step == 2


def test_a_member_that_comes_late_is_awaited(tmp_path, monkeypatch):
    run, state = tmp_path / "run", {"w": torch.zeros(5)}
    monkeypatch.setattr("limpet.ranks.failure_detector.STRAGGLER_SECONDS", 0.2)
    servers: list[Servers] = []

    def start(name, fields):
        if name == "ranks_awaited" and not servers:
            servers.append(Servers(run, group.address, 1).start())

    with (
        join(1) as group,
        limpet.attach(start),
        limpet.Checkpointer(run, state, save=limpet.EverySteps(1), group=group) as ckpt,
    ):
        assert ckpt.resume() is None
        ckpt.step()
    assert servers[0].end()[0].latest.step == 1


def test_a_member_that_never_comes_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMPET_STUCK", "1")
    monkeypatch.setenv("LIMPET_SILENT", "1")
    state = {"w": torch.zeros(5)}
    with join(2) as group, limpet.Checkpointer(tmp_path, state, group=group) as ckpt:
        assert ckpt.resume() is None  # an empty run: there is nothing to do together
        with pytest.raises(RankFailed, match=r"Rank 1 did not join .* \(nor did rank 2") as e:
            ckpt.save()
    assert e.value.rank == 1


def test_a_member_that_misses_saves_takes_part_in_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMPET_STUCK", "1")
    run, state, own = tmp_path / "run", {"w": torch.zeros(5)}, server_state(0, 1, 0.0)
    with join(1) as group, join(1, group.address, rank=1) as other:
        member = limpet.Member(run, own, group=other)
        with (
            pytest.warns(SaveFailed),
            limpet.Checkpointer(
                run, state, save=limpet.EverySteps(1), on_error="warn", group=group
            ) as ckpt,
        ):
            for _ in range(2):
                ckpt.step()
            for _ in range(2):
                with pytest.raises(RankFailed) as e:
                    member.poll(10)
                assert e.value.rank == 1
            thread = Thread(target=member.poll, args=(30,))
            thread.start()
            ckpt.step()
            ckpt.wait()
            thread.join()
    assert member.latest is not None
    assert member.latest.step == 3


def test_what_cannot_work_is_refused_first(tmp_path):
    state = {"w": torch.zeros(5)}
    with join(1) as group, join(1, group.address, rank=1) as other:
        for options, message in (
            ({"tiers": [limpet.MemoryTier(every=limpet.EverySteps(1))]}, "tiers="),
            ({"save": limpet.EverySteps(1) | limpet.OnException()}, "OnException"),
        ):
            with pytest.raises(LimpetError, match=f"{message} cannot be combined with members"):
                limpet.Checkpointer(tmp_path, state, group=group, **options)
        with pytest.raises(LimpetError, match="Rank 1 is a member of the group"):
            limpet.Checkpointer(tmp_path, state, group=other)
        with pytest.raises(LimpetError, match="in which this rank is a member"):
            limpet.Member(tmp_path, state, group=group)
        with pytest.raises(LimpetError, match="state"):
            limpet.Member(tmp_path, [], group=other)
        with pytest.raises(LimpetError, match=r"size must be 2 with members=1.*; found 2"):
            limpet.Group.join(group.address, 1, 2)
    for members in (2, -1, True, "1"):
        with pytest.raises(LimpetError, match="members must be"):
            limpet.Group.join(HERE, 0, 2, members=members)


def test_another_operation_of_the_training_alone_is_an_error_of_both(tmp_path):
    with join(1) as group:
        servers = Servers(tmp_path, group.address, 1).start()
        with pytest.raises(RankFailed, match="different operations"):
            limpet.save(tmp_path / "version_1", {"w": torch.zeros(5)}, group=group)
    (error,) = servers.end()
    assert "different operations" in str(error)
