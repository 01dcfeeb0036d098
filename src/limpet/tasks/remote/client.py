"""A queue in another process, as a worker process sees it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Any, Self

from limpet.connections.auth import Session
from limpet.connections.sockets import close_when_forked
from limpet.errors import LimpetError, TaskError
from limpet.tasks.remote.address import connect_to
from limpet.tasks.remote.messages import (
    MAX_NAME,
    Answer,
    Connection,
    Consumed,
    Done,
    Failed,
    Finished,
    Get,
    Hello,
    Leased,
    Refused,
    Released,
    Renew,
    Reply,
    Request,
    encode,
)
from limpet.tasks.result import encode_result
from limpet.tasks.sides import EvaluationSide, TrainingSide
from limpet.tasks.spec import Kind, check_kind, check_seconds
from limpet.tasks.task import EvaluationTask, Report, Task, TrainingTask
from limpet.text import without_surrogates

_CONNECT_SECONDS = 10.0

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5
"""Seconds between two requests of a worker that waits for a task."""


class RemoteQueue:
    """The queue of another process, over a socket that ``TaskServer.connect`` has returned there.

    ``reply_seconds``: how long a reply may take. All methods may be called from any thread, one
    request at a time. Each raises ``TaskError`` if the owner has ended or does not reply in time.
    Then the connection is over, and the owner gives the tasks to other workers. A process that is
    forked has no access to it.
    """

    def __init__(
        self, sock: socket.socket, reply_seconds: float = 60.0, session: Session | None = None
    ) -> None:
        check_seconds("reply_seconds", reply_seconds)
        self._socket, self._reply_seconds = sock, reply_seconds
        self._connection = Connection(sock, "the owner of the task queue", session)
        close_when_forked(sock)
        sock.set_inheritable(False)  # no program that this process starts keeps it alive
        self._process = os.getpid()
        self._lock = Lock()
        self._number = 0
        self._is_closed = False
        self.training = TrainingSide(self)
        self.evaluation = EvaluationSide(self)

    @classmethod
    def connect(
        cls, address: str, worker: str | None = None, reply_seconds: float = 60.0
    ) -> RemoteQueue:
        """Connect to an address that ``TaskServer.listen`` has returned, on any host.

        ``worker``: the name of this worker in messages (by default, its process and host). Each
        connection is a worker of its own. Raises ``TaskError`` if the queue cannot be reached
        within 10 s, and ``Denied`` if another program has the address now.
        """
        check_seconds("reply_seconds", reply_seconds)
        name = f"process {os.getpid()} on {socket.gethostname()}" if worker is None else worker
        sock, session = connect_to(address, min(reply_seconds, _CONNECT_SECONDS))
        queue = cls(sock, reply_seconds, session)
        queue._ask(Hello(queue._next_number(), without_surrogates(name)[:MAX_NAME]))
        return queue

    def get(
        self,
        kind: Kind,
        worker: str | None = None,
        timeout: float = 0.0,
        lease_seconds: float | None = None,
    ) -> Task | None:
        """Lease a task, as ``Queue.get``. Every connection is one worker: ``worker`` must be None.
        ``lease_seconds`` must be finite: this process may be lost."""
        check_kind(kind)
        check_seconds("timeout", timeout, may_be_zero=True)
        if lease_seconds is not None:
            check_seconds("lease_seconds", lease_seconds)
        if worker is not None:
            what = "A RemoteQueue is the queue of one worker"
            raise LimpetError(what, expected="worker=None", found=repr(worker)[:200])
        end, pause = time.monotonic() + timeout, _SHORTEST_PAUSE
        while True:
            answer = self._request(Get(self._next_number(), kind, lease_seconds))
            if isinstance(answer, Leased):
                return self._make_task(answer)
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def finished(self, kind: Kind) -> bool:
        """Return ``Queue.finished``."""
        return self._ask(Finished(self._next_number(), check_kind(kind)))

    # -- reports, see ``Task`` -------------------------------------------------------------------

    def report_consumed(self, reports: Sequence[Report]) -> None:
        self._ask(Consumed(self._next_number(), list(reports)))

    def report_done(self, report: Report, result: Any) -> bool:
        return self._ask(Done(self._next_number(), report, encode_result(result)))

    def report_failed(self, report: Report, cause: str) -> bool:
        return self._ask(Failed(self._next_number(), report, cause))

    def report_released(self, report: Report) -> bool:
        return self._ask(Released(self._next_number(), report))

    def renew(self, report: Report) -> None:
        self._ask(Renew(self._next_number(), report))

    def close(self) -> None:
        """End the connection, and a request of another thread. Tasks that this worker holds return
        to the queue."""
        self._is_closed = True
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- implementation --------------------------------------------------------------------------

    def _next_number(self) -> int:
        if os.getpid() != self._process:  # another thread may have had the lock at the fork
            raise self._lost("this process was forked from the one that has connected")
        with self._lock:
            self._number += 1
            return self._number

    def _ask(self, request: Request) -> bool:
        answer = self._request(request)
        return isinstance(answer, Reply) and answer.value

    def _request(self, request: Request) -> Leased | Reply:
        """Send a request, and return its answer. Raises the error that the owner has answered.

        If this does not end with an answer, the connection does: half a message may be under way.
        """
        line = encode(request)
        with self._lock:
            if self._is_closed:
                raise self._lost("it was closed")
            try:
                self._connection.send(line, self._reply_seconds)
                answer = self._receive(request.number)
            except BaseException as e:
                self.close()
                if not isinstance(e, OSError):
                    raise
                raise self._lost(f"{type(e).__name__}: {e}") from e
        if isinstance(answer, Refused):
            raise answer.error.to_error()
        return answer

    def _receive(self, number: int) -> Answer:
        while True:
            answer = self._connection.receive_answer(self._reply_seconds)
            if answer is None:
                raise ConnectionError("the owner has ended the connection")
            if answer.number == number:  # and not that of a request that was interrupted
                return answer

    def _lost(self, cause: str) -> TaskError:
        return TaskError(
            "The connection to the owner of the task queue is over",
            expected=f"a reply within {self._reply_seconds} s",
            found=cause,
            todo="End this worker: the owner gives its tasks to other workers",
        )

    def _make_task(self, x: Leased) -> Task:
        fields = x.id, x.attempt, x.job, x.data, x.start
        if x.kind == "training":
            return TrainingTask(*fields, x.stop, x.epoch, x.position, self)
        return EvaluationTask(*fields, int(x.stop or 0), x.epoch, x.position, self)
