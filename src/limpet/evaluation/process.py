"""Worker processes: the evaluator's side, and the main function of the process.

Both sides exchange JSON messages over a socket pair: a request with the name of a method of
``Worker`` and its arguments, and a reply with its result or its error. A worker whose socket ends
exits at once, even in the middle of a batch, so no worker outlives its evaluator.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import traceback
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import msgspec

from limpet.errors import LimpetError, Unavailable
from limpet.evaluation.worker import Worker, WorkerSpec

_LENGTH = struct.Struct(">Q")
_MAX_MESSAGE = 1 << 34
_END_SECONDS = 5.0
"""Seconds that a worker gets to end by itself before it is killed."""


class WorkerLost(LimpetError):
    """A worker ended, or did not answer in time and was killed."""


class WorkerError(LimpetError):
    """A function of the user, or the load of a version, failed in a worker.

    ``kind``: ``unavailable`` if the store did not answer, otherwise ``failed``.
    """


class Reply(NamedTuple):
    """The answer of a worker: the result, or the kind and the text of the error."""

    result: Any
    kind: str
    text: str


class ProcessWorker:
    """A worker in a process of its own. One thread at a time may call it."""

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "limpet.evaluation.process", str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
            except BaseException:
                ours.close()
                raise
        self._socket = ours
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores the others
        self._hello = {"path": path, "spec": msgspec.json.encode(spec).decode()}

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, timeout: float) -> int:
        """Import the functions, and return the number of records of the data.

        Raises ``WorkerError`` or ``WorkerLost``.
        """
        return int(self._exchange(self._hello, timeout))

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the ``Worker``. After ``timeout`` seconds, the process is killed.

        Raises ``WorkerError`` or ``WorkerLost``.
        """
        return self._exchange({"method": method, "arguments": arguments}, timeout)

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process. Any thread may call this; a call in progress then raises."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def _exchange(self, message: dict[str, Any], timeout: float) -> Any:
        self._socket.settimeout(timeout)
        try:
            _send(self._socket, message)
            reply = Reply(*_receive(self._socket))
        except TimeoutError:
            self.kill()
            raise WorkerLost(
                f"Worker {self.name} was killed",
                expected=f"an answer within {timeout:g} s",
                found="none",
                todo="If a task takes that long, raise the time limit of a task",
            ) from None
        except (OSError, EOFError) as e:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            raise WorkerLost(
                f"Worker {self.name} ended", found=_describe_end(self._process.poll())
            ) from e
        if reply.kind:
            raise WorkerError(reply.text, kind=reply.kind)
        return reply.result


def _describe_end(code: int | None) -> str:
    if code is None:
        return "it closed its connection"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _send(connection: socket.socket, message: Any) -> None:
    raw = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(raw)) + raw)


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_receive_bytes(connection, _LENGTH.size))
    if length > _MAX_MESSAGE:
        raise EOFError("not a message")
    return json.loads(_receive_bytes(connection, length))


def _receive_bytes(connection: socket.socket, length: int) -> bytearray:
    raw = bytearray(length)
    view = memoryview(raw)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other side ended")
        view = view[count:]
    return raw


# -- the process ---------------------------------------------------------------------------------


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the evaluator ends its workers
    os.dup2(2, 1)  # what the functions print does not belong to the result of the command
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    Thread(target=_read, args=(connection, requests), daemon=True).start()
    hello = requests.get()
    sys.path[:] = hello["path"]
    _send(connection, answer(lambda: _start(hello["spec"])))
    worker = _started[0] if _started else None
    process = os.getpid()
    while worker is not None:
        request = requests.get()
        reply = answer(partial(getattr(worker, request["method"]), *request["arguments"]))
        if os.getpid() != process:  # a copy that a function of the user has created with os.fork()
            os._exit(1)
        _send(connection, reply)


_started: list[Worker] = []


_SPEC = msgspec.json.Decoder(WorkerSpec)


def _start(spec_text: str) -> int:
    import torch

    torch.set_num_threads(1)  # workers share the cores, and their threads would compete
    worker = Worker.of(_SPEC.decode(spec_text))
    _started.append(worker)
    return worker.records


def _read(connection: socket.socket, requests: queue.SimpleQueue[Any]) -> None:
    """Read requests. At the end of the connection, end the process, whatever it is doing."""
    try:
        while True:
            requests.put(_receive(connection))
    except (OSError, EOFError):
        os._exit(1)


def answer(call: Any) -> Reply:
    """Return what a call returns or raises, as a reply."""
    try:
        return Reply(call(), "", "")
    except Exception as e:  # noqa: BLE001  (sent to the evaluator)
        kind = "unavailable" if isinstance(e, Unavailable) else "failed"
        return Reply(None, kind, describe(e))


_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(__file__)),
    "<frozen ",
)


def describe(error: BaseException) -> str:
    """Return the type, the message, and where the error was raised, on one line: the last line of
    the user's code, and the line that raised it."""
    if isinstance(error, LimpetError):
        return " ".join(str(error).split())[:4000]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    places = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in (*own[-1:], *frames[-1:])]
    where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:4000] + where


if __name__ == "__main__":
    main()
