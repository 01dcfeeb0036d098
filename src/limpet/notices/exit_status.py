"""The exit codes of a training, and the status that a worker leaves for ``limpet run``.

torchrun treats every exit code but 0 as a failure: it stops the other workers, restarts all of
them, and in the end returns 1, whatever their codes were. Under ``limpet run``, a worker
therefore writes its code to a file and exits with 0. ``final_code.py`` decides what the files mean.

The files are in the folder ``LIMPET_STATUS``, one per process. A worker creates its file when
its training starts, and replaces it when it leaves. Files of earlier restarts stay in the folder.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from limpet.errors import LimpetError
from limpet.machine import after_fork
from limpet.notices.process_tree import read_process, started_at
from limpet.ranks.error_report import encode_json
from limpet.settings import LAUNCHED_WORKER_VARIABLE, launched_worker, status_folder
from limpet.text import hide_secrets

DONE = 0
"""The training is complete."""

FAILED = 1
"""The training failed."""

SAVED = 75
"""The training stopped and its state is saved: run it again. Do not count this as a failure.

75 is ``EX_TEMPFAIL`` of BSD's ``sysexits.h``: a temporary failure, try again later.
"""

UNSAVED = 76
"""The training stopped without a save: run it again from its last version."""

GIVE_UP = 93
"""The training cannot make progress: do not run it again."""

CODES = (DONE, FAILED, SAVED, UNSAVED, GIVE_UP)

_MAX_WHY = 2000
"""Characters of ``why`` that are stored. A status is small, so that it fits on a nearly full
disk."""

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Status:
    """Why a worker left, and what it left behind.

    ``code`` is 0, 1, 75, 76, or 93. ``step`` is the worker's last complete step, and ``saved_step``
    the step of the newest version that is committed, or None. ``run`` is the URL of the run.
    ``why`` is one line for people. ``time`` is in seconds since 1970.

    Raises ``LimpetError`` for another code.
    """

    code: int
    rank: int = 0
    step: int | None = None
    saved_step: int | None = None
    run: str | None = None
    why: str = ""
    time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise LimpetError(
                "Invalid exit code of a training",
                expected=", ".join(map(str, CODES)),
                found=repr(self.code),
            )


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The contents of a file: a process of the training, and its status once it has left.

    ``started`` and ``left`` are in seconds since the machine started. ``launcher`` identifies the
    torchrun process that started this one, or is None. ``left`` without a status: the training has
    ended normally, without a notice (see ``leave_done_at_exit``). ``requests``: the signals after
    which the training saves and goes on.
    """

    pid: int
    started: float
    launcher: str | None = None
    local_world_size: int = 1
    restart_count: int = 0
    left: float | None = None
    status: Status | None = None
    requests: tuple[int, ...] = ()


_RECORD = msgspec.json.Decoder(WorkerRecord)


def announce_worker(requests: Iterable[int] = ()) -> None:
    """Tell ``limpet run`` that a training starts in this process.

    This makes statuses of earlier restarts void, and shows which processes have left without a
    status. Outside ``limpet run`` it does nothing. Call it on every rank. It never raises
    ``OSError``: a full disk of the launcher is no reason to refuse a training. ``requests``: the
    signals after which the training saves and goes on; ``limpet run`` sends them to this process.
    """
    forget_done()  # of an earlier training in this process
    folder = status_folder()
    if folder is not None:
        with suppress(OSError):  # ``leave_code`` then returns the code itself
            _write_record(folder, None, requests=tuple(requests))


def leave_code(status: Status) -> int:
    """Return the code with which this process must exit now.

    Under ``limpet run``, this writes the status, and returns 0 for every code but ``FAILED``.
    Otherwise, or if the status cannot be written, it returns the code itself: ``limpet run`` then
    learns of it, unless torchrun hides it. It never raises ``OSError``: nothing may keep the
    process from leaving in time.
    """
    folder = status_folder()
    if folder is None:
        return status.code
    try:
        write_status(folder, status)
    except OSError:
        # 0 without a status would mean that the training is complete
        return status.code
    return FAILED if status.code == FAILED else DONE


def write_status(folder: str, status: Status) -> None:
    """Write the status of this process, replacing an earlier one, atomically.

    The file is not synced: ``limpet run`` reads it on the same machine, or never.
    Raises ``OSError`` if the file cannot be written.
    """
    _write_record(folder, status)


def read_records(folder: str) -> list[WorkerRecord]:
    """Return the records in a folder, in the order in which the processes started.

    Files that are not records are ignored: a worker that is killed leaves a temporary file.
    Raises ``OSError`` if the folder cannot be read.
    """
    records = []
    for path in Path(folder).iterdir():
        if path.name.endswith(_SUFFIX):
            try:
                records.append(_RECORD.decode(path.read_bytes()))
            except (msgspec.DecodeError, LimpetError):
                continue
    return sorted(records, key=lambda record: (record.started, record.pid))


def requesting_workers(folder: str, number: int) -> list[int]:
    """Return the process ids of the trainings that save after a signal, and go on.

    torchrun would stop them: it ends at each signal that it handles, and at each other one too.
    Raises ``OSError`` if the folder cannot be read.
    """
    found = []
    for record in read_records(folder):
        with suppress(OSError):  # it has ended
            if number in record.requests and record.left is None:
                found += [record.pid] if started_at(record.pid) == record.started else []
    return found


def _write_record(
    folder: str,
    status: Status | None,
    *,
    has_ended: bool = False,
    requests: tuple[int, ...] = (),
) -> None:
    pid = os.getpid()
    worker = launched_worker()
    record = WorkerRecord(
        pid=pid,
        started=started_at(pid),
        launcher=None if worker is None else f"{worker.job_id}/{_launcher_pid()}",
        local_world_size=1 if worker is None else worker.local_world_size,
        restart_count=0 if worker is None else worker.restart_count,
        left=time.clock_gettime(time.CLOCK_BOOTTIME) if has_ended or status else None,
        status=None if status is None else _for_file(status),
        requests=requests,
    )
    # the start time, because another process may get the same id later
    name = f"{pid}-{record.started:.2f}"
    temporary = Path(folder, f"{name}.tmp")
    temporary.write_bytes(encode_json(record).encode())  # the name of a run may not be UTF-8
    temporary.replace(Path(folder, name + _SUFFIX))


def _for_file(status: Status) -> Status:
    why = " ".join(hide_secrets(status.why).split())[:_MAX_WHY]
    run = None if status.run is None else hide_secrets(status.run)[:_MAX_WHY]
    return replace(status, run=run, why=why)


def _launcher_pid() -> int:
    """Return the process id of the torchrun that started this process, directly or through others.

    It is the nearest ancestor that torchrun itself did not start. A worker may have an own parent,
    such as a shell: ``torchrun --no-python ./start.sh``.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = read_process(pid).parent
        except OSError:
            break
        if not any(v.startswith(f"{LAUNCHED_WORKER_VARIABLE}=".encode()) for v in variables):
            break
        pid = parent
    return pid


def leave_done_at_exit(status: Status | None) -> None:
    """Leave that the training has ended normally when this process exits.

    ``status`` is ``DONE`` if a notice came before the end. It excuses the 1 that torchrun returns
    after a signal. Without a notice, ``status`` is None, and the record says only that the process
    has left: the training of this process is no reason to run the command again. No more than that,
    because nothing is known of what the process does afterward. The code with which it exits says
    it, but torchrun hides that code, and what it then does to the other workers looks like a
    notice to them.

    Nothing is left if the process ends otherwise, by an exception or a signal, or if another
    training starts in it or fails (``forget_done``), or leaves a status.
    """
    forget_done()
    atexit.register(leave_done, status)


def forget_done() -> None:
    """Do not leave what ``leave_done_at_exit`` was called for, because it is not the end."""
    atexit.unregister(leave_done)


after_fork(forget_done)


def leave_done(status: Status | None) -> None:
    """Leave ``status``, or the time if it is None, unless an exception ends the process, or the
    process has left another status."""
    if hasattr(sys, "last_value") or _has_left():
        return
    folder = status_folder()
    if status is not None:
        leave_code(status)
    elif folder is not None:
        with suppress(OSError):  # as without the record: the process has not said how it ended
            _write_record(folder, None, has_ended=True)


def _has_left() -> bool:
    """Return True if this process has left a status since its training started."""
    folder, pid = status_folder(), os.getpid()
    records: list[WorkerRecord] = []
    with suppress(OSError):
        records += () if folder is None else read_records(folder)
    return any(r.pid == pid and r.started == started_at(pid) and r.status for r in records)


def describe_exit(
    code: int, step: int, saved_step: int, cause: str, problem: BaseException | None
) -> str:
    """Return one line for people: at which step the training has stopped, and why."""
    if code == SAVED and step <= saved_step:
        return f"stopped after step {step}, which is saved, because of {cause}"
    text = (
        f"stopped after step {step} because of {cause}; the newest version is of step {saved_step}"
    )
    return text if problem is None else f"{text}. {problem}"


def write_error(text: str) -> None:
    """Write a line to standard error, unless that is closed."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"limpet: {text}\n")
        sys.stderr.flush()
