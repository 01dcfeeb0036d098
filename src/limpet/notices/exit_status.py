"""The exit codes of a training, and the status that a worker leaves for ``limpet run``.

torchrun returns 1 whatever codes its workers returned. Under ``limpet run``, a worker therefore
writes its code to a file of its own in ``LIMPET_STATUS`` and exits with 0. It creates the file when
its training starts. Files of earlier restarts stay. ``final_code.py`` decides what they mean.
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

from limpet.arguments import check_count, require
from limpet.errors import LimpetError
from limpet.machine import after_fork
from limpet.notices.process_tree import read_process
from limpet.ranks.error_report import encode_json
from limpet.settings import LAUNCHED_WORKER_VARIABLE, launched_worker, status_folder
from limpet.text import hide_secrets

DONE = 0
"""The training is complete."""

FAILED = 1
"""The training failed."""

SAVED = 75
"""The training stopped and its state is saved: run it again (``EX_TEMPFAIL`` of ``sysexits.h``)."""

UNSAVED = 76
"""The training stopped without a save: run it again from its last version."""

GIVE_UP = 93
"""The training cannot make progress: do not run it again."""

CODES = (DONE, FAILED, SAVED, UNSAVED, GIVE_UP)

_MAX_WHY = 2000
"""Characters of ``why`` that are stored: a status must fit on a nearly full disk."""

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Status:
    """Why a worker left, and what it left behind. ``code`` is 0, 1, 75, 76, or 93.

    ``step`` is the worker's last complete step, ``saved_step`` that of the newest committed
    version, or None. ``run`` is the URL of the run, ``why`` one line for people, ``time`` in
    seconds since 1970. Raises ``LimpetError`` for another code.
    """

    code: int
    rank: int = 0
    step: int | None = None
    saved_step: int | None = None
    run: str | None = None
    why: str = ""
    time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        require("code of a Status", self.code in CODES, ", ".join(map(str, CODES)), self.code)
        for name in ("step", "saved_step"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(f"{name} of a Status", value, 0))


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A process of the training, and its status once it has left, as its file has them."""

    pid: int
    started: float  # in seconds since the machine started, as ``left``
    launcher: str | None = None  # identifies the torchrun process that started this one
    local_world_size: int = 1
    restart_count: int = 0
    left: float | None = None  # without a status: see ``leave_done_at_exit``
    status: Status | None = None
    requests: tuple[int, ...] = ()  # the signals after which the training saves and goes on


_RECORD = msgspec.json.Decoder(WorkerRecord)


def announce_worker(requests: Iterable[int] = ()) -> None:
    """Tell ``limpet run``, if there is one, that a training starts in this process. Call it on
    every rank: it makes statuses of earlier restarts void, and shows who left without a status.

    ``requests``: the signals after which the training saves and goes on; ``limpet run`` sends them
    to this process. It never raises ``OSError``: a full disk is no reason to refuse a training.
    """
    forget_done()  # of an earlier training in this process
    folder = status_folder()
    if folder is not None:
        with suppress(OSError):  # ``leave_code`` then returns the code itself
            _write_record(folder, None, requests=tuple(requests))


def leave_code(status: Status) -> int:
    """Return the code with which this process must exit now.

    Under ``limpet run``, this writes the status, and returns 0 for every code but ``FAILED``.
    Otherwise, or if the status cannot be written, it returns the code itself.
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
    """Write the status of this process, atomically, but not synced. Raises ``OSError``."""
    why = " ".join(hide_secrets(status.why).split())[:_MAX_WHY]
    run = None if status.run is None else hide_secrets(status.run)[:_MAX_WHY]
    _write_record(folder, replace(status, run=run, why=why))


def read_records(folder: str) -> list[WorkerRecord]:
    """Return the records in a folder, in the order in which the processes started. Ignores other
    files. Raises ``OSError`` if the folder cannot be read."""
    records = []
    for path in Path(folder).iterdir():
        if path.name.endswith(_SUFFIX):
            try:
                with path.open("rb") as file:
                    records.append(_RECORD.decode(file.read(1 << 20)))
            except (msgspec.DecodeError, LimpetError):
                continue
    return sorted(records, key=lambda record: (record.started, record.pid))


def requesting_workers(records: Iterable[WorkerRecord], number: int) -> list[int]:
    """Return the ids of the processes that save after this signal and go on: torchrun would end
    them."""
    found = []
    for record in records:
        with suppress(OSError):  # it has ended
            if number in record.requests and record.left is None:
                found += [record.pid] if read_process(record.pid).started == record.started else []
    return found


def _write_record(
    folder: str, status: Status | None, *, has_ended: bool = False, requests: tuple[int, ...] = ()
) -> None:
    pid = os.getpid()
    worker = launched_worker()
    record = WorkerRecord(
        pid=pid,
        started=read_process(pid).started,
        launcher=None if worker is None else f"{worker.job_id}/{_launcher_pid()}",
        local_world_size=1 if worker is None else worker.local_world_size,
        restart_count=0 if worker is None else worker.restart_count,
        left=time.clock_gettime(time.CLOCK_BOOTTIME) if has_ended or status else None,
        status=status,
        requests=requests,
    )
    # the start time, because another process may get the same id later
    name = f"{pid}-{record.started:.2f}"
    temporary = Path(folder, f"{name}.tmp")
    temporary.write_bytes(encode_json(record).encode())  # the name of a run may not be UTF-8
    temporary.replace(Path(folder, name + _SUFFIX))


def _launcher_pid() -> int:
    """Return the nearest ancestor that torchrun did not start: the torchrun of this process, also
    of one that a shell started (``torchrun --no-python ./start.sh``)."""
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
    """Leave that the training has ended normally when this process exits, unless an exception or a
    signal ends it, or another training in it starts, fails, or leaves a status. ``status``:
    ``DONE`` after a notice, which excuses the 1 that torchrun returns after a signal; else None,
    because what the process does afterward is unknown."""
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
    return any(
        r.pid == pid and r.started == read_process(pid).started and r.status for r in records
    )


def write_error(text: str) -> None:
    """Write a line to standard error, unless that is missing or closed."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"limpet: {text}\n")
        sys.stderr.flush()
