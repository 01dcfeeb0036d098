"""A key-value client for the TCPStore of the job, by which ranks exchange small values.

One thread owns the connection, and waiters poll: if the host of the store hangs, callers time out.
It also sends heartbeats (1 s for up to 2000 ranks). A rank that is killed sends no last one, but
the ranks next to it, usually on its host, know at once, and report it (``Neighbors``).

**Sessions.** torchrun keeps its TCPStore when it restarts the ranks, and gives them no value that
all ranks share and that differs between starts. So each rank sends a random token, and rank 0
replies with the session, a prefix of all other keys: keys of an earlier start, or of its leftover
processes, are never read. Until all have joined, each rank repeats its greeting with the time of
day, so that one that dies early is detected. One from before this process's start is ignored.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import RLock, Thread, current_thread
from typing import Any, NamedTuple, Protocol, TypeVar

from limpet import machine
from limpet.errors import RankFailed
from limpet.events import emit
from limpet.threads import Latch
from limpet.types import MIB

T = TypeVar("T")

MAX_VALUE_BYTES = 4 * MIB
"""The maximum size of one value in bytes. A TCPStore closes the connection above 8 MiB."""

CLOSED_HEARTBEAT = b"closed"
"""The last heartbeat of a process that has ended regularly."""

NO_VALUE = "-"
"""A value that no key ever has."""

MAX_BATCH_KEYS = 64
"""The maximum number of values that the thread reads for one request."""

STRAGGLER_SECONDS = 10.0
"""Seconds without progress after which waiting ranks report a rank as a straggler."""

CALL_ON_ALL = "All ranks must make this call: remove an `if rank == 0`"
"""What to do if a rank has not joined an operation of a training."""

CALL_ALONE = (
    f"{CALL_ON_ALL}, or pass group='alone' to limpet.save or limpet.load, which then save or load"
    " in this process only"
)
"""The same, for a save or a load, or if it is not known which operation it is."""

_POLL_SECONDS = 0.01

_BEFORE_JOINING = b"0 0 "
"""The heartbeat that rank 0 sets for a rank that has greeted but not joined."""

_CLIENT = re.compile(r"SocketImpl\(fd=(\d+), .*?remote=.*?:(\d+)\)")

WaitPosition = tuple[int, ...]
"""The numbers of a collective, of an operation within it, and of a wait within that operation."""

_last_closed_at = 0.0
"""The time of day at which this process last closed a client: an earlier initialization ended."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long ranks wait for one another, in seconds. ``silent``: without a heartbeat, then a rank
    is dead; ``stuck``: a live rank neither joins nor makes progress."""

    silent: float = 60.0
    stuck: float = 600.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat of a rank. ``count``: of heartbeats so far; ``progress``: increases with
    its progress; ``waiting_at``: the earliest position at which it waits for others."""

    count: int
    progress: int
    host: str
    waiting_at: WaitPosition | None = None

    @classmethod
    def decode(cls, raw: bytes) -> Heartbeat:
        if raw == CLOSED_HEARTBEAT:
            return cls(-1, 0, "")
        count, progress, host, *position = raw.decode().split(" ")
        return cls(int(count), int(progress), host, tuple(map(int, position)) or None)


class Greeting(NamedTuple):
    """What a rank writes until all have joined. ``token``: or ""; ``sent_at``: the time of day."""

    token: str = ""
    sent_at: float = 0.0
    is_closed: bool = False

    @classmethod
    def decode(cls, text: str) -> Greeting:
        token, _, rest = text.partition(" ")
        try:
            sent_at, _, closed = rest.partition(" ")
            return cls(token, float(sent_at), bool(closed))
        except ValueError:
            return cls(token)


class KeyValueStore(Protocol):
    """The methods of ``torch.distributed.Store`` in use, called so that none waits for a key."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_set(self, keys: list[str], values: list[bytes]) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def add(self, key: str, number: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


class KVClient:
    """A client of one rank for the store, for any thread; ``RankFailed`` if the store does not
    respond within ``timeouts.silent`` seconds. ``with_prefix``: returns a view with a prefix, if
    the store outlives this start of the job; the first request then waits for the session."""

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
        with_prefix: Callable[[str], KeyValueStore] | None = None,
    ) -> None:
        self.interrupt: Callable[[], bool] = lambda: False  # see ``interrupter_of``
        self.rank = rank
        self.timeouts = timeouts
        self.clock = clock
        self._store = store
        self.store_host = str(getattr(innermost(store), "host", "127.0.0.1"))
        """The host that serves a TCPStore, or this host for a store of another kind."""

        self._normal_interval = min(timeouts.silent / 5, max(1.0, size / 2000))
        self.progress = 0
        """A counter that increases when this rank makes progress."""

        self._heartbeat_count = 0
        self._waiting_at: list[WaitPosition] = []
        self._ranks_seen: set[int] = set()
        self._host = socket.gethostname()
        self._neighbors = Neighbors(rank, size)
        self._requests: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        self._thread: Thread | None = None
        # The garbage collector may call ``close`` in the thread that starts the client.
        self._start_lock = RLock()
        self._pid = os.getpid()
        self._closed = False
        self.peer_error: BaseException | None = None
        """The error that has ended the training of another rank, until this rank raises it."""

        self.give_up_at = inf
        """The time on ``clock`` at which waits for other ranks end, unless they have a deadline."""

        self._error: BaseException | None = None
        """Without its traceback, which would keep this client and its connection alive."""

        self._root_store = store
        self._with_prefix = with_prefix
        self._token = secrets.token_hex(8)
        is_replying = rank == 0 and with_prefix is not None
        self._unjoined_ranks = dict.fromkeys(range(1, size) if is_replying else (), "")
        self._joined = Latch()
        self._stragglers_reported = False
        self._started_at = max(machine.process_started_at(), _last_closed_at)
        self._coordinator = Greeting()
        self._unsent: dict[str, str] = {}
        self._heartbeat_interval = self._normal_interval if with_prefix is None else _POLL_SECONDS
        if with_prefix is None or rank == 0:
            self._join(self._token)

    def raise_peer_error(self) -> None:
        """Raise ``peer_error``, once, in the training thread: saves in the background go on."""
        if (error := self.peer_error) and not current_thread().name.startswith("limpet-"):
            self.peer_error = None
            raise error

    # -- values ----------------------------------------------------------------------------------

    def put_all(self, values: Mapping[str, bytes]) -> list[str]:
        """Set values of any length of new keys in few requests; return the keys to delete."""
        extra_keys: list[str] = []
        batch: dict[str, bytes] = {}
        for key, value in values.items():
            extra_parts = range(MAX_VALUE_BYTES, len(value), MAX_VALUE_BYTES)
            for i, start in enumerate(extra_parts):
                extra_keys.append(f"{key}/{i}")
                self._set({extra_keys[-1]: b" " + value[start : start + MAX_VALUE_BYTES]})
            if (
                sum(map(len, batch.values())) + len(value) > MAX_VALUE_BYTES
                or len(batch) >= 4 * MAX_BATCH_KEYS
            ):
                self._set(batch)
                batch = {}
            # The first part is written last, because it completes the value.
            batch[key] = f"{len(extra_parts)} ".encode() + value[:MAX_VALUE_BYTES]
        self._set(batch)
        return [*values, *extra_keys]

    def _set(self, batch: dict[str, bytes]) -> None:
        if len(batch) == 1:
            self._call(lambda: self._store.set(*next(iter(batch.items()))))
        elif batch:
            self._call(lambda: self._store.multi_set(list(batch), list(batch.values())))

    def try_get(self, key: str, *, delete: bool = False) -> bytes | None:
        """Return the value of a key, or None; with ``delete``, also delete the key."""

        def read() -> bytes | None:
            value, keys = self._read_value(key)
            for name in keys if delete else ():
                self._store.delete_key(name)
            return value

        return self._call(read)

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, up to the first key without a value or a limit per request."""

        def read() -> list[bytes]:
            values: list[bytes] = []
            nbytes = 0
            for key in keys[:MAX_BATCH_KEYS]:
                value = None if nbytes > MAX_VALUE_BYTES else self._read_value(key)[0]
                if value is None:
                    break
                values.append(value)
                nbytes += len(value)
            return values

        return self._call(read)

    def _read_value(self, key: str) -> tuple[bytes | None, list[str]]:
        """Return a value and all keys that it uses."""
        first = self._get_or_none(key)
        if first is None:
            return None, []
        count, _, value = first.partition(b" ")
        extra_keys = [f"{key}/{i}" for i in range(int(count))]
        extra_parts = [self._get_or_none(name) for name in extra_keys]
        if None in extra_parts:
            return None, []  # another rank is deleting it
        return b"".join([value, *(part[1:] for part in extra_parts if part)]), [key, *extra_keys]

    def _get_or_none(self, key: str, store: KeyValueStore | None = None) -> bytes | None:
        """Return the value of a key, or None, by a ``compare_set`` that changes nothing: ``get``
        would wait for a key that has just been deleted."""
        value = bytes((store or self._store).compare_set(key, NO_VALUE, NO_VALUE))
        return None if value == NO_VALUE.encode() else value

    def has_all(self, keys: list[str]) -> bool:
        """Return True if every key has a value."""
        return bool(self._call(lambda: self._store.check(keys)))

    def compare_and_set(self, key: str, value: str, expected: str = "") -> str:
        """Set a short value if the current one is ``expected`` ("": none), and return the value
        after that: ``expected`` if there is none but one was expected."""
        return bytes(self._call(lambda: self._store.compare_set(key, expected, value))).decode()

    def get_text(self, key: str) -> str | None:
        """Return the value that ``compare_and_set`` has set, or None."""
        value = self._call(lambda: self._get_or_none(key) if self._store.check([key]) else None)
        return None if value is None else value.decode()

    def increment(self, key: str) -> int:
        """Increment the counter of a key and return its new value."""
        return int(self._call(lambda: self._store.add(key, 1)))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys that ``put_all``, ``compare_and_set``, or ``increment`` has set."""

        def delete(batch: Sequence[str]) -> None:
            for key in batch:
                if self._store.check([key]):
                    self._store.delete_key(key)

        for at in range(0, len(keys), MAX_BATCH_KEYS):
            self._call(partial(delete, keys[at : at + MAX_BATCH_KEYS]))

    # -- heartbeats ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Record that this rank has made progress."""
        self.progress += 1

    @contextmanager
    def waiting(self, position: WaitPosition) -> Iterator[None]:
        """Record within the context that this rank waits for others."""
        self._waiting_at.append(position)
        try:
            yield
        finally:
            self._waiting_at.remove(position)

    def heartbeats(self, ranks: Sequence[int]) -> list[Heartbeat | None]:
        """Return the last heartbeats of ranks; None: not yet; a ``count`` of -1: it has ended."""
        heartbeats: dict[int, Heartbeat] = {}

        def read(batch: Sequence[int]) -> None:
            # The keys of seen ranks are never deleted, so ``multi_get`` does not wait.
            seen = [r for r in batch if r in self._ranks_seen]
            raws = self._store.multi_get([f"heartbeat/{r}" for r in seen]) if seen else []
            heartbeats.update(
                (r, Heartbeat.decode(bytes(raw))) for r, raw in zip(seen, raws, strict=True)
            )
            for r in batch:
                if r not in heartbeats and (raw := self._get_or_none(f"heartbeat/{r}")) is not None:
                    self._ranks_seen.add(r)
                    heartbeats[r] = Heartbeat.decode(raw)

        for at in range(0, len(ranks), 4 * MAX_BATCH_KEYS):
            self._call(partial(read, ranks[at : at + 4 * MAX_BATCH_KEYS]))
        return [heartbeats.get(r) for r in ranks]

    def declare_ended(self, rank: int) -> None:
        """Let no rank wait for one whose process has surely ended."""
        self._call(lambda: self._store.set(f"heartbeat/{rank}", CLOSED_HEARTBEAT))

    def _send_heartbeat(self) -> None:
        if self._unjoined_ranks:
            self._answer_joins()
        elif not self._joined.is_set():
            self._request_session()
        is_joining = self._unjoined_ranks or not self._joined.is_set()
        faster = min(self._normal_interval, self._heartbeat_interval * 1.2)
        self._heartbeat_interval = faster if is_joining else self._normal_interval
        if not self._joined.is_set():
            return
        self._heartbeat_count += 1
        waiting_at = min(self._waiting_at.copy(), default=())
        fields = [self._heartbeat_count, self.progress, self._host, *waiting_at]
        self._store.set(f"heartbeat/{self.rank}", " ".join(map(str, fields)).encode())
        self._neighbors.report(self._store, CLOSED_HEARTBEAT)

    def _send_closed(self) -> None:
        if self._unjoined_ranks or not self._joined.is_set():
            self._greet(" closed")
        if self._joined.is_set():
            self._store.set(f"heartbeat/{self.rank}", CLOSED_HEARTBEAT)

    # -- the session -----------------------------------------------------------------------------

    def _join(self, session: str) -> None:
        if self._with_prefix is not None:
            self._store = self._with_prefix(session)
        for key, value in list(self._unsent.items()):
            self._store.compare_set(key, "", value)
        self._joined.set()

    def set_when_joined(self, key: str, value: str) -> None:
        """Set the value of a key without one, now or when rank 0 replies."""
        self._unsent[key] = value
        if self._joined.is_set():
            self.compare_and_set(key, value)

    def _greet(self, end: str = "") -> None:
        greeting = f"{self._token} {time.time():.3f}{end}".encode()
        self._root_store.set(f"hello/{self.rank}", greeting)

    def _answer_joins(self) -> None:
        """Reply to ranks that request the session, until each has sent a heartbeat in it."""
        self._greet()
        for rank, answered_token in list(self._unjoined_ranks.items()):
            greeting, key = self._read_greeting(rank), f"heartbeat/{rank}"
            heartbeat = self._get_or_none(key)
            is_current = greeting.sent_at >= self._started_at
            if heartbeat not in (None, _BEFORE_JOINING, CLOSED_HEARTBEAT):
                del self._unjoined_ranks[rank]
                self._root_store.delete_key(f"hello/{rank}")
                self._heartbeat_interval = _POLL_SECONDS
            elif greeting.is_closed:
                for earlier in ("", _BEFORE_JOINING.decode()) if is_current else ():
                    self._store.compare_set(key, earlier, CLOSED_HEARTBEAT.decode())
            elif greeting.token not in ("", answered_token):
                self._root_store.set(f"welcome/{rank}", f"{greeting.token} {self._token}".encode())
                self._unjoined_ranks[rank] = greeting.token
                if is_current:
                    self._store.compare_set(key, "", _BEFORE_JOINING.decode())
        if not self._unjoined_ranks:
            self._root_store.delete_key("hello/0")

    def _request_session(self) -> None:
        welcome = f"welcome/{self.rank}"
        self._heartbeat_count = 1
        self._greet()
        reply = self._get_or_none(welcome, self._root_store) or b""
        token, _, session = reply.decode().partition(" ")
        if token == self._token:
            self._root_store.delete_key(welcome)
            self._join(session)
        else:
            self._coordinator = self._read_greeting(0)

    def _read_greeting(self, rank: int) -> Greeting:
        text = self._get_or_none(f"hello/{rank}", self._root_store) or b""
        return Greeting.decode(text.decode())

    def await_session(self, exceeded: Callable[[float], str] = lambda waited: "") -> None:
        """Wait for rank 0's reply. ``RankFailed``: it has ended, died, or is late. ``exceeded``:
        returns the limit that a wait of so many seconds exceeds, or ""."""
        if self._pid != os.getpid() or self._joined.is_set():
            return
        self.start()
        silent, stuck = self.timeouts.silent, self.timeouts.stuck
        waited = silent_for = 0.0
        now, last_greeting = self.clock(), self._coordinator
        while not self._joined.wait(_POLL_SECONDS):
            if self._closed or self._error is not None:
                raise self._unresponsive_error() from self._error
            # in parts: a process that was suspended has lost only one part
            passed = min(self.clock() - now, silent / 8)
            now, greeting = self.clock(), self._coordinator
            waited += passed
            silent_for = 0.0 if greeting != last_greeting else silent_for + passed
            last_greeting = greeting
            if waited > STRAGGLER_SECONDS and not self._stragglers_reported:
                self._stragglers_reported = True
                what, first = "the first call of all ranks", self._request(self._is_first_to_wait)
                emit_stragglers([0], what, waited, stuck - waited, first, CALL_ALONE)
            is_current = greeting.sent_at >= self._started_at
            # rank 0 would replace the last greeting of an earlier start in the meantime
            if is_current and greeting.is_closed and silent_for > 2 * self._normal_interval:
                expected = "its process to run until all ranks have made their first call"
                raise self._no_reply_error(expected, "that the process has ended")
            if is_current and silent_for > silent:
                expected = f"a heartbeat within {silent:g} s"
                raise self._no_reply_error(expected, "none: the process has died or hangs")
            limit = f"it to join within {stuck:g} s" if waited > stuck else exceeded(waited)
            if limit:
                found = "no response from rank 0 since this process started"
                raise self._no_reply_error(limit, found)

    def _is_first_to_wait(self) -> bool:
        """Return True unless one of the next lower ranks has also greeted, and reports the wait."""
        others = map(self._read_greeting, range(1, min(self.rank, MAX_BATCH_KEYS)))
        return all(other.sent_at < self._started_at for other in others)

    def _no_reply_error(self, expected: str, found: str) -> RankFailed:
        return RankFailed(
            "Rank 0 did not join the first call of all ranks",
            expected=expected,
            found=found,
            todo=f"Check the log of rank 0. {CALL_ALONE}. LIMPET_SILENT and LIMPET_STUCK set the"
            " time limits in seconds",
            rank=0,
            lost=True,
        )

    # -- the thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that sends heartbeats if it is not running."""
        with self._start_lock:
            if self._thread is None and not self._closed:
                self._thread = Thread(target=self._run, name="limpet-ranks", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _call(self, operation: Callable[[], T]) -> T:
        if self._pid != os.getpid():
            raise RankFailed(
                "A forked process cannot act for the rank that it was forked from",
                todo="Save and load in the training process",
            )
        self.await_session()
        return self._request(operation)

    def _request(self, operation: Callable[[], T]) -> T:
        self.start()
        if self._closed or self._error is not None:
            raise self._unresponsive_error() from self._error
        answer: SimpleQueue[tuple[T, Exception | None]] = SimpleQueue()
        self._requests.put((operation, answer))
        for _ in range(8):  # in parts: a process that was suspended has lost only one part
            with suppress(Empty):
                value, error = answer.get(timeout=self.timeouts.silent / 8)
                break
        else:
            self._error = TimeoutError(f"no response within {self.timeouts.silent:g} s")
            raise self._unresponsive_error() from self._error
        if error is not None:
            raise self._unresponsive_error() from error
        return value

    def _unresponsive_error(self) -> RankFailed:
        if self._error is None:
            return RankFailed(
                "This rank has left the group of ranks",
                expected="a call before destroy_process_group, Group.close, or the process's end",
                found="that the client is closed",
                todo="Initialize or join a group again, and create a new Checkpointer",
                rank=self.rank,
                lost=True,
            )
        return RankFailed(
            "The TCPStore that the ranks use to communicate does not respond",
            expected=f"a response within {self.timeouts.silent:g} s",
            found=str(self._error).partition("\n")[0][:200],
            todo="The process that hosts the store has died or hangs, or the network is down."
            " Committed versions are safe; restart the job",
            rank=None,
            lost=True,
        )

    def _run(self) -> None:
        next_heartbeat_at = 0.0
        while True:
            try:
                if (now := self.clock()) >= next_heartbeat_at:
                    next_heartbeat_at = now + self._heartbeat_interval
                    # After an error, no heartbeat: the others then stop waiting for this rank.
                    if self._error is None:
                        self._send_heartbeat()
                request = self._requests.get(timeout=max(0.01, next_heartbeat_at - self.clock()))
            except Empty:
                continue
            except Exception as e:  # noqa: BLE001  (top of a thread: raised in the next caller)
                self._error = e.with_traceback(None)
                while (request := self._requests.get()) is not None:
                    request[1].put((None, e))
                return
            if request is None:
                with suppress(Exception):
                    self._send_closed()
                return
            operation, answer = request
            try:
                answer.put((operation(), None))
            except Exception as e:  # noqa: BLE001  (raised in the caller)
                self._error = e.with_traceback(None)
                answer.put((None, e))

    def close(self) -> None:
        """Send a last heartbeat, end the thread, and close the connection: by interruption after 2
        s. A store without one gets ``timeouts.silent``, because of ``interrupter_of``."""
        with self._start_lock:
            self._closed, thread, self._thread = True, self._thread, None
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        is_current = thread is current_thread()  # the garbage collector may call this anywhere
        if thread is not None and not is_current:
            self._requests.put(None)
            thread.join(2)
        is_interrupted = self.interrupt()
        if thread is not None and not is_current:
            thread.join(2 if is_interrupted else self.timeouts.silent)
        global _last_closed_at
        _last_closed_at = time.time()


class Neighbors:
    """The ranks before and after this one, if on this host, for the thread of the connection."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._unknown = [r for r in (rank - 1, rank + 1) if 0 <= r < size]
        self._processes: dict[int, tuple[int, str]] = {}
        self._host = ""

    def report(self, store: KeyValueStore, closed: bytes) -> None:
        """Make the last heartbeat of a neighbor whose process has ended say so, after each one of
        this rank. ``closed``: of a process that has ended regularly, which stays."""
        if not self._host:
            self._announce(store)
        for rank in list(self._unknown):
            if store.check([f"heartbeat/{rank}/process"]):
                self._unknown.remove(rank)
                host, _, process = store.get(f"heartbeat/{rank}/process").decode().rpartition("\n")
                if host == self._host:
                    self._processes[rank] = int(process.partition(":")[0]), process
        for rank, (pid, process) in self._processes.items():
            if pid != os.getpid() and machine.pid_and_start_time(pid) != process:
                key = f"heartbeat/{rank}"
                last = bytes(store.get(key))
                # a message that is still on its way may replace this one, which is then repeated
                if last != closed and not last.startswith(b"-1 "):
                    name = last.decode().split(" ")[2]
                    store.set(key, f"-1 0 {name}".encode())

    def _announce(self, store: KeyValueStore) -> None:
        """Tell the neighbors which process this is."""
        host, boot, process = machine.process_identity()
        self._host = f"{host}\n{boot}"
        if not process.endswith(":gone"):  # the system does not tell
            store.set(f"heartbeat/{self._rank}/process", f"{self._host}\n{process}".encode())


def emit_stragglers(
    ranks: Sequence[int], operation: str, waited: float, left: float, first: bool, todo: str
) -> None:
    """Emit which ranks this one awaits. ``left``: seconds without progress until it gives up;
    ``first``: no other rank has reported this wait; ``todo``: what to do, or ""."""
    emit(
        "ranks_awaited",
        what=operation,
        ranks=list(ranks[:8]),
        count=len(ranks),
        seconds=waited,
        longest=left,
        first=first,
        todo=todo,
    )


def interrupter_of(description: str) -> Callable[[], bool]:
    """Return a function that makes calls of a TCPStore fail, now and later; False without a
    connection. A call that returns while the interpreter ends, because the host of the store was
    stopped, makes PyTorch end the process with "terminate called" (exit code -6). PyTorch has no
    method for that, but the descriptor is in the store's ``repr``, ``description``."""
    match = _CLIENT.search(description)
    fds: list[int] = []
    if match is not None:
        with suppress(OSError):  # no descriptor is left
            fds.append(os.dup(int(match[1])))

    def interrupt() -> bool:
        if match is None or not fds:
            return False
        # A socket object for the whole lifetime could change the blocking mode of the connection.
        with socket.socket(fileno=fds.pop()) as connection:
            try:
                if connection.getpeername()[1] != int(match[2]):
                    return False
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the store has closed the connection, so no call waits for it
                return True
            return True

    return interrupt


def innermost(store: Any) -> Any:
    """Return a store without the prefixes around it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
