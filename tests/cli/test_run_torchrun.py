"""``limpet run -- torchrun ...`` with real processes, and what torchrun does without it."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.cli.supervised import WORKER, finish, is_alive, read_pid, run_to_end, started

pytestmark = pytest.mark.slow

TERM = signal.SIGTERM
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def torchrun(folder, *actions, restarts=0):
    return [
        *TORCHRUN, "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}",
        WORKER, folder, *actions,
    ]  # fmt: skip


def pids(folder, *names):
    return [read_pid(folder / name) for name in names]


@pytest.mark.parametrize(
    ("name", "actions", "expected"),
    [("TERM", ["75", "93"], 93), ("USR1", ["0"], 0)],
)
def test_the_statuses_decide_although_torchrun_returns_1(name, actions, expected, tmp_path):
    with started("--json", "--", *torchrun(tmp_path, *actions, restarts=3)) as process:
        workers = pids(tmp_path, "0.0", "1.0")
        process.send_signal(signal.Signals[f"SIG{name}"])
        result = finish(process)
    assert result.code == expected
    assert result.json["command"] == {"exit_code": 1, "killed_by": None}
    assert sorted(s["rank"] for s in result.json["statuses"]) == [0, 1]
    assert not any(is_alive(pid) for pid in workers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.0", "1.0"], "there was no restart"


def test_workers_that_leave_by_themselves(tmp_path):
    """As after the notice of a cloud. All exit with 0, so torchrun returns 0."""
    result = run_to_end("--json", "--", *torchrun(tmp_path, "now-75", restarts=3))
    assert result.code == 75
    assert result.json["command"]["exit_code"] == 0


def test_a_status_of_an_earlier_restart_is_not_the_last_word(tmp_path):
    """Rank 1 fails. torchrun sends SIGTERM to rank 0, which takes that for a preemption."""
    result = run_to_end("--json", "--", *torchrun(tmp_path, "76/end", "fail/end", restarts=1))
    assert result.code == 0
    assert result.json["statuses"] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.0", "0.1", "1.0", "1.1"]


def test_the_status_of_the_last_restart_counts(tmp_path):
    with started("--", *torchrun(tmp_path, "76/75", "fail/75", restarts=1)) as process:
        pids(tmp_path, "0.1", "1.1")
        process.send_signal(TERM)
        assert finish(process).code == 75


def test_a_worker_that_fails_is_a_failure(tmp_path):
    result = run_to_end("--", *torchrun(tmp_path, "75", "fail"))
    assert result.code == 1
    assert "exit code 1: the command exited with 1" in result.err


def test_torchrun_has_the_grace_to_stop_its_workers(tmp_path):
    """``--shutdown-timeout`` is 30 s without it. A worker that ignores SIGTERM is killed."""
    with started("--grace", "1", "--json", "--", *torchrun(tmp_path, "75", "ignore")) as process:
        workers = pids(tmp_path, "0.0", "1.0")
        process.send_signal(TERM)
        result = finish(process)
    assert result.code == 76
    assert [s["code"] for s in result.json["statuses"]] == [75]
    assert not any(is_alive(pid) for pid in workers)


def torchrun_pid(wrapper):
    children = Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()
    (pid,) = map(int, children)
    return pid


def test_the_workers_of_a_killed_torchrun_stop_and_save(tmp_path):
    """They are in sessions of their own, so nobody else would end them."""
    with started("--json", "--", *torchrun(tmp_path, "75")) as process:
        workers = pids(tmp_path, "0.0", "1.0")
        os.kill(torchrun_pid(process.pid), signal.SIGKILL)
        result = finish(process)
    assert result.code == 1
    assert [s["code"] for s in result.json["statuses"]] == [75, 75]
    assert not any(is_alive(pid) for pid in workers)


def test_torchrun_that_slurm_signals_directly_too(tmp_path):
    """A signal to the whole job step reaches torchrun twice, and the workers more often."""
    with started("--", *torchrun(tmp_path, "75")) as process:
        workers = pids(tmp_path, "0.0", "1.0")
        for pid in (process.pid, torchrun_pid(process.pid), *workers):
            os.kill(pid, TERM)
        assert finish(process).code == 75


def test_two_launchers_under_one_wrapper(tmp_path):
    """Two agents of one job on one host, as in tests of several hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = (
        'trap "kill -TERM \\$a \\$b" TERM;'
        ' "$@" 75 & a=$!; "$@" 75 & b=$!; wait; wait $a; x=$?; wait $b; exit $x'
    )
    agent = [
        *TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two",
        f"--rdzv-endpoint=127.0.0.1:{port}", WORKER, tmp_path,
    ]  # fmt: skip
    with started("--json", "--", "bash", "-c", script, "bash", *agent) as process:
        pids(tmp_path, "0.0", "1.0")
        process.send_signal(TERM)
        result = finish(process)
    assert result.code == 75
    assert sorted(s["rank"] for s in result.json["statuses"]) == [0, 1]
