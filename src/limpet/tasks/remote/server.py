"""The owner's side of the connections to worker processes: one thread per worker."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Lock, Thread, current_thread
from types import TracebackType
from typing import Self

from limpet.connections.auth import Session, make_secret
from limpet.connections.error_parts import ErrorParts
from limpet.connections.listener import HandshakeLimits, Listener
from limpet.connections.sockets import close_when_forked, keep_alive
from limpet.errors import Denied, LimpetError, StoreError, TaskError
from limpet.tasks.queue import Queue
from limpet.tasks.remote.address import format_address
from limpet.tasks.remote.messages import (
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
from limpet.tasks.result import decode_result
from limpet.tasks.spec import check_kind
from limpet.tasks.task import Task
from limpet.threads import start_thread

_SEND_SECONDS = 30.0
"""How long a worker may take to read a reply before its connection is ended."""

_CLOSE_SECONDS = 5.0

_LIMITS = HandshakeLimits(connections=256)
"""More than for peers: hundreds of workers may connect at once, and none may displace another."""


class TaskServer:
    """Gives worker processes access to a queue of this process, on this host or on others.

    ::

        with TaskServer(queue) as server:
            with server.connect("worker 0") as end:
                process = subprocess.Popen([...], pass_fds=[end.fileno()])
            address = server.listen("10.0.0.5")  # for RemoteQueue.connect(address) on any host
            job.wait(timeout=600)

    In the worker, ``RemoteQueue(socket.socket(fileno=...))`` is the queue. When a connection ends,
    because the worker died or closed it, its tasks return to the queue at once. A worker that hangs
    keeps its connection: its leases end after their time. If its host is gone, the connection ends
    after about 30 s.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._lock = Lock()
        self._connections: dict[Thread, socket.socket] = {}
        self._listeners: list[Listener] = []
        self._count = 0
        self._is_closed = False

    def connect(self, worker: str) -> socket.socket:
        """Return the worker's end of a new connection, and serve the other one in a thread.

        Pass it to one process, and close it here: as long as any process has it open, the end of
        the worker is not noticed. ``worker`` is for messages; two connections are two workers, even
        with one name. Raises ``TaskError`` if the server is closed or no thread can be started.
        """
        own, other = socket.socketpair()
        try:
            is_started = self._start(own, worker)
        except BaseException:  # Ctrl-C: the end of the connection ends the thread
            other.close()
            raise
        if not is_started:
            other.close()
            raise TaskError(
                f"Cannot connect worker {worker!r}",
                expected="an open TaskServer, and a limit of threads that allows one more",
                found="a closed one" if self._is_closed else "no more threads",
            )
        return other

    def listen(self, host: str = "127.0.0.1") -> str:
        """Accept workers over TCP. Return the address for ``RemoteQueue.connect``.

        ``host``: an IP address of this host that the workers can reach. The address contains a new
        secret, as a password does: whoever has it can take tasks and return results. Messages are
        authenticated, not encrypted. Any number of workers may connect, also again and again, such
        as an actor that Ray restarts. Raises ``TaskError`` if this host does not have the address.
        """
        secret = make_secret()
        try:
            listener = Listener(host, secret, "serve tasks", self._accept, lambda: _LIMITS)
        except StoreError as e:
            raise TaskError(e.what, expected=e.expected, found=e.found, todo=e.todo) from e
        with self._lock:
            is_closed = self._is_closed
            self._listeners.append(listener)
        if is_closed:
            listener.close()
            raise TaskError("Cannot accept workers", expected="an open TaskServer", found="closed")
        return format_address(listener.address, listener.port, secret)

    def close(self) -> None:
        """End all connections, and accept no more: the tasks of the workers return to the queue."""
        with self._lock:
            self._is_closed = True
        for listener in self._listeners:
            listener.close()
        with self._lock:
            connections = list(self._connections.items())
        for _, sock in connections:
            with suppress(OSError):  # the thread has closed it meanwhile
                sock.shutdown(socket.SHUT_RDWR)
        for thread, _ in connections:
            with suppress(RuntimeError):  # Ctrl-C came before it was started
                thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- implementation --------------------------------------------------------------------------

    def _accept(self, sock: socket.socket, session: Session) -> None:
        """Serve a worker that has connected to an address."""
        try:
            host, port = sock.getpeername()[:2]
            keep_alive(sock)
        except OSError:  # the worker has gone meanwhile
            sock.close()
            return
        self._start(sock, f"{host}:{port}", session)

    def _start(self, sock: socket.socket, worker: str, session: Session | None = None) -> bool:
        """Serve a connection in a thread of its own. Returns False, and closes it, if that is not
        possible."""
        close_when_forked(sock)
        with self._lock:
            self._count += 1
            name = f"{worker} (connection {self._count})"
            arguments = sock, name, session
            thread = Thread(target=self._serve, args=arguments, daemon=True, name="limpet-task")
            is_open = not self._is_closed
            if is_open:
                self._connections[thread] = sock
        if is_open and start_thread(thread):
            return True
        self._forget(thread)
        sock.close()
        return False

    def _serve(self, sock: socket.socket, worker: str, session: Session | None) -> None:
        """Answer the requests of a worker until its connection ends, and recover its tasks.

        A worker that sends something else, or does not read its replies, is treated as lost.
        """
        connection = Connection(sock, worker, session)
        last: tuple[int | None, bytes] = (None, b"")
        cause = "its connection has ended"
        try:
            while (request := connection.receive_request()) is not None:
                if isinstance(request, Hello) and last[0] is None:
                    worker = f"{request.worker} at {worker}"
                if request.number != last[0]:
                    last = request.number, encode(self._answer(request, worker))
                connection.send(last[1], _SEND_SECONDS)
        except (OSError, TaskError, Denied) as e:
            cause = f"{type(e).__name__}: {e}"
        finally:
            sock.close()
            self._queue.recover(worker, cause)
            self._forget(current_thread())

    def _forget(self, thread: Thread) -> None:
        with self._lock:
            self._connections.pop(thread, None)

    def _answer(self, request: Request, worker: str) -> Answer:
        try:
            return self._do(request, worker)
        except LimpetError as e:
            return Refused(request.number, ErrorParts.of(e))

    def _do(self, request: Request, worker: str) -> Answer:
        queue, number, value = self._queue, request.number, True
        match request:
            case Hello():
                pass
            case Get(_, kind, lease_seconds):
                task = queue.get(check_kind(kind), worker, 0.0, lease_seconds)
                if task is not None:
                    return _to_answer(number, kind, task)
                value = False
            case Finished(_, kind):
                value = queue.finished(check_kind(kind))
            case Consumed(_, reports):
                queue.report_consumed(reports)
            case Done(_, report, result):
                value = queue.report_done(report, decode_result(result))
            case Failed(_, report, cause):
                value = queue.report_failed(report, cause)
            case Released(_, report):
                value = queue.report_released(report)
            case Renew(_, report):
                queue.renew(report)
        return Reply(number, value)


def _to_answer(number: int, kind: str, task: Task) -> Leased:
    ids = number, kind, task.id, task.attempt, task.job, task.data
    return Leased(*ids, task.start, task.stop, task.epoch, task.position)
