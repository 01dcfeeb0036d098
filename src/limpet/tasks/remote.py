"""A queue for workers in other processes: the owner's side, the workers' side, and their messages.

The messages travel as ``ranks.wire`` says. A result is JSON text within a message.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf
from threading import Lock
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from limpet.arguments import check_seconds, check_whole, require
from limpet.deadline import Deadline
from limpet.errors import Denied, LimpetError, StoreError, TaskError, Unavailable
from limpet.ranks import wire
from limpet.ranks.error_report import ErrorReport
from limpet.tasks.queue import Queue
from limpet.tasks.spec import Kind, check_kind
from limpet.tasks.task import (
    EvaluationSide,
    PredictionSide,
    Report,
    Task,
    TrainingSide,
    decode_result,
    encode_result,
    make_task,
)
from limpet.text import without_surrogates
from limpet.types import MIB

MAX_RESULT = 1 << 30
"""The most bytes of a result, which may contain the states of metrics."""

_MAX_NAME = 200
"""The most characters of the name of a worker, which is part of errors."""

_LONGEST_WAIT = 0.5
"""Seconds for which a request waits for a task. So long, nobody notices that a worker has left."""

_REPLY_SECONDS = 60.0
"""How long a request of a worker may take."""

_HANDSHAKES = wire.HandshakeLimits(connections=256)
"""More than for peers: hundreds of workers may connect at once, and none may displace another."""

_IDLE = Deadline("the next request", inf)
"""A worker may be at work on a task for any time. Its leases end, not its connection."""

_OWNER = "the owner of the task queue"

_ADDRESS = re.compile(
    r"tcp://(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:/@\s]+)):(\d{1,5})/([\w.~+/=-]{16,256})", re.ASCII
)


# -- messages ------------------------------------------------------------------------------------


class Hello(wire.Message, frozen=True):
    """The first message of a worker that has connected to an address: its name. Later, it has no
    effect: the leases of a worker are those of one name."""

    worker: Annotated[str, Meta(max_length=_MAX_NAME)]


class Get(wire.Message, frozen=True):
    """Lease a task, and wait for at most so many seconds for a change of the queue if there is
    none. Without a task, the answer is a ``Reply``. Otherwise, it is a ``Leased``."""

    kind: str
    lease_seconds: float | None
    wait: Annotated[float, Meta(ge=0, le=10)] = 0.0


class Finished(wire.Message, frozen=True):
    """Ask ``Queue.finished``."""

    kind: str


class Consumed(wire.Message, frozen=True):
    """Records were consumed, by one step."""

    reports: list[Report]


class Done(wire.Message, frozen=True):
    report: Report
    result: str


class Failed(wire.Message, frozen=True):
    """An attempt failed, and others would, too, if it is final."""

    report: Report
    cause: str
    is_final: bool


class Released(wire.Message, frozen=True):
    report: Report


class Renew(wire.Message, frozen=True):
    """Start the time of a lease anew."""

    report: Report
    seconds: float | None


class Call(wire.Message, frozen=True):
    """Call the function ``on_call`` of the owner."""

    payload: bytes


class Leased(wire.Message, frozen=True):
    kind: str
    id: int
    attempt: int
    job: str
    data: str
    start: int
    stop: int | None
    epoch: int
    position: int


class Reply(wire.Message, frozen=True, omit_defaults=True):
    """The answer to a request: yes or no, or what ``on_call`` returns."""

    value: bool
    payload: bytes = b""


Request = Hello | Get | Finished | Consumed | Done | Failed | Released | Renew | Call
MESSAGES = wire.Messages(
    msgspec.msgpack.Decoder(Request | Leased | Reply | wire.Refused), max_bytes=MAX_RESULT + MIB
)

_TASK = "id", "attempt", "job", "data", "start", "stop", "epoch", "position"
"""The fields of a task that are sent."""


def format_address(host: str, port: int, secret: str) -> str:
    """Return the address of a queue. Raises ``LimpetError`` unless ``secret`` can be part of it."""
    address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}/{secret}"
    parse_address(address)
    return address


def parse_address(address: object) -> tuple[str, int, str]:
    """Return the host, the port, and the secret of an address of a queue. Raises ``LimpetError``
    without the text, which may have the secret."""
    parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if parts is None:
        raise LimpetError(
            "Invalid address of a task queue: it must be tcp://HOST:PORT/SECRET, with 16 to 256"
            " letters, digits, and characters of ._~+/=- as the secret"
        )
    return parts[1] or parts[2], int(parts[3]), parts[4]


# -- the owner's side ----------------------------------------------------------------------------


class TaskServer(AbstractContextManager["TaskServer", None]):
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
    after about 30 s. ``describe_end`` gets the name of a worker whose connection has ended, and
    returns how the worker has ended, for the errors of jobs. ``on_call`` gets the name of a worker
    and the bytes of its ``RemoteQueue.call``, and returns the answer within half a minute.
    """

    def __init__(
        self,
        queue: Queue,
        describe_end: Callable[[str], str] | None = None,
        on_call: Callable[[str, bytes], bytes] | None = None,
    ) -> None:
        require("queue", isinstance(queue, Queue), "a Queue", queue)
        self._queue, self._describe_end, self._on_call = queue, describe_end, on_call
        self._connections = wire.Connections("limpet-task")
        self.workers: set[str] = set()
        """The names of the workers that are connected, and have made a request."""

        self._lock = Lock()
        self._listeners: list[wire.Listener] = []
        self._count = 0

    def connect(self, worker: str) -> socket.socket:
        """Return the worker's end of a new connection, and serve the other one in a thread.

        Pass it to one process, and close it here: as long as any process has it open, the end of
        the worker is not noticed. ``worker`` is for errors; two connections are two workers, even
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
            cause = "is closed" if self._connections.is_closed else "cannot start one more thread"
            raise TaskError(f"Cannot connect worker {worker!r}: the TaskServer {cause}")
        return other

    def listen(self, host: str = "127.0.0.1", port: int = 0, secret: str | None = None) -> str:
        """Accept workers over TCP. Return the address for ``RemoteQueue.connect``.

        ``host``: an IP address of this host that the workers can reach. ``port``: 0 for a free one.
        The address contains the secret (by default, a new one), as a password does: whoever has it
        can take tasks and return results. Messages are authenticated, not encrypted. Any number of
        workers may connect, also again and again, such as an actor that Ray restarts. Raises
        ``TaskError`` if this host does not have the address.
        """
        port = check_whole("port=", port, "a whole number, 0 to 65535", most=65535)
        secret = wire.make_secret() if secret is None else secret
        format_address("host", 0, secret)
        try:
            listener = wire.Listener(host, secret, "serve tasks", self._accept, _HANDSHAKES, port)
        except StoreError as e:
            raise TaskError(e.what, expected=e.expected, found=e.found, todo=e.todo) from e
        with self._lock:
            self._listeners.append(listener)
        if self._connections.is_closed:
            listener.close()
            raise TaskError("Cannot accept workers", expected="an open TaskServer", found="closed")
        return format_address(listener.address, listener.port, secret)

    def close(self) -> None:
        """End all connections, and accept no more: the tasks of the workers return to the queue."""
        self._connections.is_closed = True
        with self._lock:
            listeners = [*self._listeners]
        for listener in listeners:
            listener.close()
        self._queue.wake()
        self._connections.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- implementation --------------------------------------------------------------------------

    def _accept(self, sock: socket.socket, session: wire.Session) -> None:
        """Serve a worker that has connected to an address."""
        try:
            host, port = sock.getpeername()[:2]
        except OSError:  # the worker has gone meanwhile
            sock.close()
            return
        self._start(sock, f"{host}:{port}", session)

    def _start(self, sock: socket.socket, worker: str, session: wire.Session | None = None) -> bool:
        with self._lock:
            self._count += 1
            name = f"{worker} (connection {self._count})"
        # a worker may take 30 s to read a reply
        channel = wire.Channel(sock, name, MESSAGES, _IDLE, session, part_seconds=30.0)
        return self._connections.start(channel, self._serve)

    def _serve(self, channel: wire.Channel) -> None:
        """Answer the requests of a worker until its connection ends, and recover its tasks. One
        that sends something else, or does not read its replies, is lost."""
        worker, cause, is_first = channel.peer, "its connection has ended", True
        try:
            while True:
                channel.deadline = _IDLE
                request: Request = channel.receive(*Request.__args__)
                channel.renew()
                if isinstance(request, Hello) and is_first:
                    channel.peer = worker = f"{request.worker} at {worker}"
                is_first = False
                self.workers.add(worker)
                channel.send(self._answer(request, worker))
        except Unavailable:
            if self._describe_end is not None:
                cause = self._describe_end(worker)
            raise
        except LimpetError as e:
            cause = f"{type(e).__name__}: {e}"
            raise
        finally:
            self.workers.discard(worker)
            self._queue.recover(worker, cause)

    def _answer(self, request: Request, worker: str) -> wire.Message:
        try:
            return self._do(request, worker)
        except LimpetError as e:
            return wire.Refused(ErrorReport.of(e))

    def _do(self, request: Request, worker: str) -> wire.Message:
        queue, value = self._queue, True
        match request:
            case Hello():
                pass
            case Get(kind, lease_seconds, wait):
                task = queue.get_soon(check_kind(kind), worker, wait, lease_seconds)
                if task is not None:
                    return Leased(kind, **{name: getattr(task, name) for name in _TASK})
                value = False
            case Finished(kind):
                value = queue.finished(check_kind(kind))
            case Consumed(reports):
                queue.report_consumed(reports)
            case Done(report, result):
                value = queue.report_done(report, decode_result(result))
            case Failed(report, cause, is_final):
                value = queue.report_failed(report, cause, is_final)
            case Released(report):
                value = queue.report_released(report)
            case Renew(report, seconds):
                queue.renew(report, seconds)
            case Call(payload):
                if self._on_call is None:
                    raise TaskError("The owner of this task queue answers no calls")
                return Reply(True, self._on_call(worker, payload))
        return Reply(value)


# -- the workers' side ---------------------------------------------------------------------------


class RemoteQueue(AbstractContextManager["RemoteQueue", None]):
    """The queue of another process, over a socket that ``TaskServer.connect`` has returned there.

    All methods may be called from any thread, one request at a time. Each raises ``TaskError`` if
    the owner has ended or does not reply within 60 s. Then the connection is over, and the owner
    gives the tasks to other workers. A process that is forked has no access to it.
    """

    def __init__(self, connection: socket.socket | wire.Channel) -> None:
        if isinstance(connection, socket.socket):
            connection.set_inheritable(False)  # no program that this process starts keeps it alive
            request = Deadline("a request to a task queue", inf)
            connection = wire.Channel(
                connection, _OWNER, MESSAGES, request, part_seconds=_REPLY_SECONDS
            )
        self._channel = connection
        self._process = os.getpid()
        self._lock = Lock()
        self.is_closed = False
        """True once the connection has ended, for whatever reason."""

        self.training = TrainingSide(self)
        self.evaluation = EvaluationSide(self)
        self.prediction = PredictionSide(self)

    @classmethod
    def connect(cls, address: str, worker: str | None = None) -> RemoteQueue:
        """Connect to an address that ``TaskServer.listen`` has returned, on any host.

        ``worker``: the name of this worker in errors (by default, its process and host). Each
        connection is a worker of its own. Raises ``TaskError`` if the queue cannot be reached
        within 10 s, and ``Denied`` if another program has the address now.
        """
        name = f"process {os.getpid()} on {socket.gethostname()}" if worker is None else worker
        host, port, secret = parse_address(address)
        try:
            channel = wire.connect(
                (host, port),
                secret,
                f"{_OWNER} at {host}:{port}",
                MESSAGES,
                "the connection to a task queue",
                _REPLY_SECONDS,
            )
        except Unavailable as e:
            raise TaskError(e.what, todo=e.todo) from e
        queue = cls(channel)
        try:
            queue._ask(Hello(without_surrogates(name)[:_MAX_NAME]))
        except BaseException:
            queue.close()
            raise
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
        timeout = check_seconds("timeout=", timeout, may_be_zero=True)
        if lease_seconds is not None:
            lease_seconds = check_seconds("lease_seconds=", lease_seconds)
        name = "worker= (a RemoteQueue is the queue of one worker)"
        require(name, worker is None, "None", worker)
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            answer = self._request(Get(kind, lease_seconds, min(left, _LONGEST_WAIT)))
            if isinstance(answer, Leased):
                fields = {name: getattr(answer, name) for name in _TASK}
                return make_task(check_kind(answer.kind), owner=self, **fields)
            if not left:
                return None

    def finished(self, kind: Kind) -> bool:
        """Return ``Queue.finished``."""
        return self._ask(Finished(check_kind(kind)))

    # -- reports, see ``Task`` -------------------------------------------------------------------

    def report_consumed(self, reports: Sequence[Report]) -> None:
        self._ask(Consumed(list(reports)))

    def report_done(self, report: Report, result: Any) -> bool:
        return self._ask(Done(report, _encode_result(result)))

    def report_failed(self, report: Report, cause: str, is_final: bool = False) -> bool:
        return self._ask(Failed(report, cause[:10_000], is_final))

    def report_released(self, report: Report) -> bool:
        return self._ask(Released(report))

    def renew(self, report: Report, seconds: float | None = None) -> None:
        if seconds is not None:
            seconds = check_seconds("seconds=", seconds)
        self._ask(Renew(report, seconds))

    def call(self, payload: bytes) -> bytes:
        """Return what ``on_call`` of the ``TaskServer`` returns for these bytes."""
        answer = self._request(Call(payload))
        return answer.payload if isinstance(answer, Reply) else b""

    def close(self) -> None:
        """End the connection, and a request in progress. Tasks return to the queue."""
        self.is_closed = True
        self._channel.interrupt()
        self._channel.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- implementation --------------------------------------------------------------------------

    def _ask(self, request: Request) -> bool:
        answer = self._request(request)
        return isinstance(answer, Reply) and answer.value

    def _request(self, request: Request) -> Leased | Reply:
        """Send a request, and return its answer, or raise the owner's error. Without an answer, the
        connection ends: half a message may be under way."""
        if os.getpid() != self._process:  # another thread may have had the lock at the fork
            raise self._lost("this process was forked from the one that has connected")
        with self._lock:
            if self.is_closed:
                raise self._lost("it was closed")
            try:
                self._channel.renew()
                self._channel.send(request)
                answer = self._channel.receive(Leased, Reply, wire.Refused)
            except BaseException as e:
                self.close()
                if isinstance(e, LimpetError) and not isinstance(e, Denied):
                    raise self._lost(str(e).rstrip(".")) from e
                raise
        if isinstance(answer, wire.Refused):
            raise answer.error.to_peer_error()
        return answer  # type: ignore[no-any-return]

    def _lost(self, cause: str) -> TaskError:
        return TaskError(
            "The connection to the owner of the task queue is over",
            expected=f"a reply within {_REPLY_SECONDS:g} s",
            found=cause,
            todo="End this worker: the owner gives its tasks to other workers",
        )


def _encode_result(result: Any) -> str:
    text = encode_result(result)
    if len(text) > MAX_RESULT:
        raise TaskError(
            f"The result of a task is too long: {len(text)} bytes, over {MAX_RESULT}; return sums"
            " and counts instead of one value per record"
        )
    return text
