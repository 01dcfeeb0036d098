"""The status of a worker: what it contains, that it is atomic, and what happens without space."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from limpet.errors import LimpetError
from limpet.notices import exit_status
from limpet.notices.exit_status import (
    CODES,
    DONE,
    FAILED,
    SAVED,
    UNSAVED,
    Status,
    announce_worker,
    leave_code,
    read_records,
    write_status,
)
from limpet.notices.process_tree import descendants, read_process
from limpet.settings import command_environment, read_settings, run_grace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder as ``limpet run`` makes it, in the environment."""
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))
    return str(tmp_path)


@pytest.mark.parametrize("code", CODES)
def test_without_limpet_run_the_process_exits_with_the_code_itself(code, monkeypatch):
    monkeypatch.delenv("LIMPET_STATUS", raising=False)
    announce_worker()
    assert leave_code(Status(code)) == code


@pytest.mark.parametrize("code", CODES)
def test_under_limpet_run_only_a_failure_is_an_exit_code(folder, code):
    assert leave_code(Status(code)) == (FAILED if code == FAILED else DONE)
    (record,) = read_records(folder)
    assert record.status is not None
    assert record.status.code == code


def test_a_status_replaces_the_announcement_and_an_announcement_the_status(folder):
    """A process may catch ``SystemExit``, and start another training."""
    announce_worker()
    assert [r.status for r in read_records(folder)] == [None]
    leave_code(Status(UNSAVED))
    leave_code(Status(SAVED, step=1))
    assert [r.status and r.status.code for r in read_records(folder)] == [SAVED]
    announce_worker()
    assert [r.status for r in read_records(folder)] == [None]
    assert len(os.listdir(folder)) == 1


def test_secrets_and_line_breaks_are_not_stored(folder):
    secret = "az://acct/c/run?sig=S3CRET"
    write_status(folder, Status(SAVED, run=secret, why=f"cannot\nreach {secret}" + "x" * 10_000))
    (file,) = Path(folder).iterdir()
    assert "S3CRET" not in file.read_text()
    assert file.stat().st_size < 4096
    (record,) = read_records(folder)
    assert record.status is not None
    assert record.status.why.startswith("cannot reach az://acct")


def test_names_that_are_not_utf_8_are_escaped(folder):
    run = os.fsdecode(b"/runs/\xff")
    assert leave_code(Status(SAVED, run=run, why=f"stopped in {run}")) == DONE
    (record,) = read_records(folder)
    assert record.status is not None
    assert record.status.run == "/runs/\\udcff"
    assert record.status.why == "stopped in /runs/\\udcff"


@pytest.mark.parametrize("code", [2, -15, 143, 255])
def test_other_codes_are_refused(code):
    with pytest.raises(LimpetError, match=r"code of a Status must be 0, 1, 75, 76, 93, not"):
        Status(code)


@pytest.mark.parametrize("operation", ["write_bytes", "replace"])
def test_a_status_that_cannot_be_written_does_not_keep_the_process_from_leaving(
    folder, operation, monkeypatch
):
    """It must not exit with 0: that would mean that the training is complete."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exit_status.Path, operation, fail)
    announce_worker()
    assert leave_code(Status(SAVED)) == SAVED
    with pytest.raises(OSError, match="No space"):
        write_status(folder, Status(SAVED))
    assert read_records(folder) == []


def test_a_folder_that_does_not_exist_is_not_created(tmp_path, monkeypatch):
    """In a container, a folder of that name would never be read."""
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path / "none"))
    announce_worker()
    assert leave_code(Status(UNSAVED)) == UNSAVED
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read_records(str(tmp_path / "none"))


def test_files_that_are_not_records_are_ignored(folder):
    write_status(folder, Status(SAVED))
    (record,) = Path(folder).iterdir()
    Path(folder, "5-1.00.tmp").write_bytes(record.read_bytes()[:10])
    Path(folder, "6-1.00.json").write_bytes(b"{}")
    Path(folder, "7-1.00.json").write_bytes(record.read_bytes()[:-10])
    Path(folder, "8-1.00.json").write_bytes(record.read_bytes().replace(b":75", b":3"))
    assert len(read_records(folder)) == 1


def test_a_reader_never_sees_a_part_of_a_status(folder):
    code = (
        "import time\n"
        "from limpet.notices.exit_status import *\n"
        "end = time.monotonic() + 0.5\n"
        "while time.monotonic() < end: leave_code(Status(75, why='x' * 1000))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as writer:
        looks = 0
        while writer.poll() is None:
            for path in Path(folder).glob("*.json"):
                looks += 1
                assert json.loads(path.read_bytes())["status"]["code"] == SAVED
        assert writer.returncode == 0
        assert looks > 10


LAUNCHED = {
    "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "2"
}  # fmt: skip


def test_a_worker_of_torchrun_is_attributed_to_the_torchrun_that_started_it(folder):
    """Also if a shell is in between, which has the variables too."""
    worker = (
        "import os\n"
        "from limpet.notices.exit_status import *\n"
        "leave_code(Status(75, int(os.environ['RANK'])))\n"
    )
    direct = [sys.executable, "-c", worker]
    for rank, command in enumerate((direct, ["sh", "-c", '"$@"; true', "sh", *direct])):
        environment = {**os.environ, **LAUNCHED, "RANK": str(rank)}
        subprocess.run(command, env=environment, check=True)
    records = read_records(folder)
    assert [r.launcher for r in records] == [f"job/{os.getpid()}"] * 2
    assert [r.local_world_size for r in records] == [8, 8]
    assert [r.restart_count for r in records] == [2, 2]


def test_the_environment_of_the_command_keeps_what_the_user_has_set():
    made = command_environment("/x", 9.2, {"A": "1", "PET_SIGNALS_TO_HANDLE": "SIGTERM"})
    assert made == {
        "A": "1", "LIMPET_STATUS": "/x", "LIMPET_GRACE": "9.2", "PET_SHUTDOWN_TIMEOUT": "10",
        "PET_SIGNALS_TO_HANDLE": "SIGTERM",
    }  # fmt: skip
    assert command_environment("/x", 1, {})["PET_SIGNALS_TO_HANDLE"].endswith(",SIGUSR1,SIGUSR2")


def test_a_nested_run_tells_its_own_grace():
    outer = command_environment("/x", 90, {})
    assert run_grace(outer) == 90
    assert run_grace(command_environment("/y", 30.5, outer)) == 30.5
    assert run_grace({}) is None
    read_settings(outer)
    with pytest.raises(LimpetError, match="Invalid value for LIMPET_GRACE"):
        read_settings({"LIMPET_GRACE": "long"})


def test_a_process_name_may_contain_anything(tmp_path):
    odd = tmp_path / "a) R 1 ("
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as process:
        try:
            assert read_process(process.pid).parent == os.getpid()
            assert read_process(process.pid).started >= read_process(os.getpid()).started
            assert process.pid in descendants().all
            assert process.pid in descendants().children
            others = descendants(frozenset({process.pid}))
            assert process.pid not in others.all | others.children
        finally:
            process.kill()
    with pytest.raises(OSError, match="No such"):
        read_process(process.pid)


# What a process does after a training that has ended normally. Usage: NOTICED THEN
ENDING = """
import os, sys
from limpet.notices.exit_status import *
from limpet.notices.exit_status import leave_done_at_exit

announce_worker()
noticed, then = sys.argv[1:]
leave_done_at_exit(Status(0) if noticed == "noticed" else None)
if then == "raise":
    raise ValueError
if then == "announce":
    announce_worker()
if then == "save":
    leave_code(Status(75))
if then == "exit-3":
    sys.exit(3)
if then == "fork" and os.fork() == 0:
    sys.exit(0)
"""


@pytest.mark.parametrize("noticed", ["noticed", "unnoticed"])
@pytest.mark.parametrize("then", ["end", "raise", "announce", "save", "exit-3", "fork"])
def test_a_normal_end_is_left_when_the_process_exits(noticed, then, folder):
    """``exit-3``: the code is not known at the exit, so ``limpet run`` must not trust in it."""
    command = [sys.executable, "-c", ENDING, noticed, then]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    (record,) = read_records(folder)
    code = None if record.status is None else record.status.code
    if then in ("raise", "announce"):
        assert (code, record.left) == (None, None)
    else:
        assert record.left is not None
        assert code == (SAVED if then == "save" else DONE if noticed == "noticed" else None)
