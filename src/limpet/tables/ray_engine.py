"""The engine on a Ray cluster: servers and workers are actors.

A worker calls the servers as actors, and asks the coordinator through the task server of the
driver. The servers save and restore as members of the driver's group. Ray repeats no call, and
restarts no actor: after a loss, the driver starts another one.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from limpet.arguments import require
from limpet.errors import LimpetError
from limpet.loading.differences import Leniency
from limpet.loading.load import load_snapshot
from limpet.ranks.group import Group
from limpet.run.run import Run
from limpet.settings import read_settings
from limpet.snapshot.location import locate
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Store
from limpet.tables.client import ServersLost, call_all
from limpet.tables.dense import DensePart, distribute, keep_part
from limpet.tables.driver import Ended, Work
from limpet.tables.ids import Ids
from limpet.tables.member import TableMember
from limpet.tables.messages import Answer, Commit, Mark, NextBatch
from limpet.tables.segments import equal_ranges
from limpet.tables.server import StaleMessage, TableServer
from limpet.tables.table import Table
from limpet.tables.worker import Worker, WorkerStopped
from limpet.tasks import ray_cluster
from limpet.tasks.remote import RemoteQueue, TaskServer
from limpet.training.member import Member

_REQUEST = msgspec.msgpack.Decoder(Commit | NextBatch)
_ANSWER = msgspec.msgpack.Decoder(Answer)

_ANSWER_SECONDS = 20.0
"""How long a request waits for the driver, which may be at a save. Then the worker asks on."""

_STARTS = 5
"""How many times in a row the servers of a view are started for one call."""

_CALLS = 64
"""The calls that a server executes at once, besides ``serve``."""


class _Message:
    """A value for another process, which gets the value. Its arrays are not copied there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        buffers, file = list[pickle.PickleBuffer](), io.BytesIO()
        pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
        own: dict[Any, Any] = {torch.Tensor: _send, np.ndarray: _send_ids}
        pickler.dispatch_table = {**copyreg.dispatch_table, **own}
        pickler.dump(self._value)
        return partial(pickle.loads, file.getvalue(), buffers=buffers), ()


def _send(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().reshape(-1).contiguous()
    raw: Any = flat.view(torch.uint8).numpy() if len(flat) else b""
    return _receive, (pickle.PickleBuffer(raw), tensor.dtype, tensor.shape)


def _send_ids(ids: Ids) -> tuple[Any, ...]:
    return torch.Tensor.numpy, (torch.from_numpy(ids),)


def _receive(buffer: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    # in the memory that Ray has received, which can be written: nobody else has it
    if not len(raw := np.frombuffer(buffer, np.uint8)):
        return torch.empty(shape, dtype=dtype, device="cpu")
    interface = raw.__array_interface__
    interface["data"] = interface["data"][0], False
    owner = SimpleNamespace(raw=raw, __array_interface__=interface)
    return torch.from_numpy(np.asarray(owner)).view(dtype).reshape(shape)


def call_servers(
    ray: Any, actors: Sequence[Any], method: str, arguments: Mapping[int, tuple[Any, ...]]
) -> dict[int, Any]:
    """A ``Call``."""
    calls = {n: actors[n].call.remote(method, _Message(each)) for n, each in arguments.items()}
    found, lost = {}, dict[int, str]()
    for number, call in calls.items():
        try:
            found[number] = ray.get(call)
        except ray.exceptions.RayActorError as e:
            lost[number] = ray_cluster.describe(e)
        except ray.exceptions.RayTaskError as e:
            if isinstance(e.cause, LimpetError | StaleMessage):
                raise e.cause from e
            raise
    if lost:
        raise ServersLost(f"Servers of the tables are lost: {lost}", servers=tuple(lost))
    return found


def check_shared(name: str, store: Store) -> None:
    is_shared = not isinstance(store, MemoryStore)
    require(name, is_shared, "the URL of a store that other processes can open", store)


def await_start(ray: Any, actors: Sequence[Any]) -> None:
    seconds, ready = read_settings().stuck, [actor.__ray_ready__.remote() for actor in actors]
    waiting = ray.wait(ready, num_returns=len(ready), timeout=seconds)[1]
    if waiting:
        raise LimpetError(
            f"Ray has not started {len(waiting)} of {len(ready)} servers of the tables",
            expected=f"a process for each within {seconds:g} s (LIMPET_STUCK)",
            found="none: the cluster may lack what they ask for",
            todo="Look at `ray status`, and add machines, or ask for less with ray=",
        )


class LimpetTableServer(TableServer):
    """A server in a process of its own, and its part of the training's state. One that ``replaces``
    a lost one is not valid until it restores a version."""

    def __init__(self, path: list[str], setup: bytes, number: int, *, replaces: bool) -> None:
        ray_cluster.add_path(path)
        tables, self._count, dense = pickle.loads(setup)
        self._number, self._state, part = number, dense, None
        if dense:
            keep_part(**dense, names=distribute(dense["model"], self._count)[number])
            part = DensePart(**dense)
        super().__init__(tables, equal_ranges(self._count)[number], part)
        if replaces:
            self.replace(self.buckets, None)
        self._tables = TableMember(tables, [self], first=number, count=self._count)
        self._group: Group | None = None
        self._serving = Lock()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return _Message(getattr(self, method)(*arguments))

    def join(self, address: str, name: str, run: str, key: str) -> None:
        """Join the group of the driver, in place of an earlier one."""
        if self._group is not None:
            self._group.close()
        with self._serving:  # what the earlier group did has ended
            rank, count = self._number + 1, self._count
            self._group = Group.join(address, rank, count + 1, members=count, name=name)
            self._member = Member(run, {**self._state, key: self._tables}, group=self._group)

    def recover(self, mark: Mark, url: str, digest: str) -> range | None:
        """Apply the ledger of a mark, and return None. A new server reads its part of a version
        instead, and returns its buckets."""
        if self.generation:
            self.mark(mark)
            return None
        version = SnapshotReader(locate(url), None, digest)
        load_snapshot(version, self._member.state, leniency=Leniency(unexpected="ignore"))
        return self.buckets  # its new Member has no base for the next save, which so is full

    def serve(self) -> None:
        """Take part in saves and resumes until the driver leaves the group, or a rank is lost."""
        with self._serving:
            self._member.run()


class LimpetTableWorker:
    """A worker in a process of its own."""

    def work(
        self, path: list[str], pickled: bytes, create: partial[Worker], address: str, name: str
    ) -> str:
        """Call the function of the user. Return why it has stopped early, or ""."""
        ray_cluster.add_path(path)
        train = pickle.loads(pickled)
        with RemoteQueue.connect(address, name) as queue:

            def ask(request: Commit | NextBatch) -> Answer:
                payload = msgspec.msgpack.encode(request)
                while not (answer := queue.call(payload)):
                    payload = b""
                found: Answer = _ANSWER.decode(answer)
                return found

            try:
                train(create(ask=ask, queue=queue))
            except WorkerStopped as e:
                return f"it was stopped. {e}"
            except LimpetError as e:
                if not queue.is_closed:
                    raise
                return ray_cluster.describe(e)
        return ""


class RayEngine:
    """Runs servers and workers as actors, which end with this process."""

    def __init__(
        self, tables: Sequence[Table], count: int, dense: Any, options: Mapping[str, Any]
    ) -> None:
        ray_cluster.check_options("ray=", options)
        self._ray = ray = ray_cluster.connect('engine="ray"')
        own = {"max_concurrency": _CALLS}
        self._class = ray_cluster.actor_class(ray, LimpetTableServer, options, **own)
        self._host = str(ray.util.get_node_ip_address())
        self._setup = ray.put(ray.cloudpickle.dumps(([*tables], count, dense)))
        self.servers, self.lost = count, set[int]()
        self._actors = [self._start_server(number) for number in range(count)]
        self._workers: dict[str, Any] = {}
        self._waiting: dict[str, Future[Answer]] = {}
        self._group: Group | None = None
        self._joined = 0

    def _start_server(self, number: int, *, replaces: bool = False) -> Any:
        return self._class.remote(ray_cluster.own_path(), self._setup, number, replaces=replaces)

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        try:
            return call_servers(self._ray, self._actors, method, arguments)
        except ServersLost as e:
            self.lost.update(e.fields["servers"])
            raise

    def join_group(self, key: str, run: Run) -> Group:
        """Join the servers in a group that saves and resumes ``run``, in whose state they have a
        ``key``; first, replace those that are lost."""
        check_shared("run", run.store)
        address = f"{self._host}:0"
        if self._group is not None:
            address = self._group.address
            self._group.close()
        for number in sorted(self.lost):
            old = self._actors[number]
            self._actors[number] = self._start_server(number, replaces=True)
            self._ray.kill(old)
            self.lost.discard(number)  # last: `_end_server` may have noted the old one until now
        await_start(self._ray, self._actors)
        self._joined += 1
        count, name = self.servers, f"tables {self._joined}"
        self._group = group = Group.join(address, 0, count + 1, members=count, name=name)
        call_all(self, "join", group.address, name, run.url, key)
        for number, actor in enumerate(self._actors):
            ended = partial(self._end_server, number, actor, group)
            actor.serve.remote().future().add_done_callback(ended)
        return group

    def _end_server(self, number: int, actor: Any, group: Group, future: Future[Any]) -> None:
        """Note a lost server. The driver knows of any other end, such as of the training."""
        is_lost = isinstance(future.exception(), self._ray.exceptions.RayActorError)
        if is_lost and self._actors[number] is actor:
            self.lost.add(number)
            group.declare_ended(number + 1)

    def prepare(self, work: Work) -> None:
        ray_cluster.check_options("ray=", work.options)
        self._class_of_workers = ray_cluster.actor_class(self._ray, LimpetTableWorker, work.options)
        self._work, self._tasks = work, TaskServer(work.queue, on_call=self._answer)
        self._address = self._tasks.listen(self._host)
        self._train = self._ray.put(self._ray.cloudpickle.dumps(work.train))

    def _answer(self, worker: str, payload: bytes) -> bytes:
        """Return the answer of the driver to a request, or b"": then the worker asks on."""
        future = self._waiting.pop(worker, None)
        if payload or future is None:
            future = self._work.ask(_REQUEST.decode(payload))
        try:
            return msgspec.msgpack.encode(future.result(_ANSWER_SECONDS))
        except TimeoutError:
            self._waiting[worker] = future
            return b""

    def start_worker(self, name: str, generation: int) -> None:
        actor = self._workers[name] = self._class_of_workers.remote()
        call = partial(call_servers, self._ray, self._actors)
        create, path = self._work.worker(name, generation, call), ray_cluster.own_path()
        work = actor.work.remote(path, self._train, create, self._address, name)
        work.future().add_done_callback(partial(self._end_worker, name))

    def _end_worker(self, name: str, future: Future[str]) -> None:
        error: Any = future.exception()
        if isinstance(error, self._ray.exceptions.RayTaskError):
            is_error = isinstance(error.cause, BaseException)  # or a text, if it has no pickle
            ended = Ended(name, error=error.cause if is_error else error)
        else:
            ended = Ended(name, lost=ray_cluster.describe(error) if error else future.result())
        self._work.items.put(ended)

    def stop_worker(self, name: str) -> None:
        """End a worker. The records that it has leased go to others."""
        self._ray.kill(self._workers.pop(name))

    def join(self) -> None:
        self._tasks.close()

    def close(self) -> None:
        """End the servers."""
        if self._group is not None:
            self._group.close()
        for actor in self._actors if self._ray.is_initialized() else ():
            self._ray.kill(actor)


# -- views -----------------------------------------------------------------------------------------


class LimpetViewServer:
    """A server of a view. Its first call reads the rows, so that an error reaches the caller."""

    def __init__(self, path: list[str], read: Callable[[], TableServer]) -> None:
        ray_cluster.add_path(path)
        self._read, self._reading = read, Lock()
        self._server: TableServer | None = None

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        with self._reading:
            self._server = self._server or self._read()
        return _Message(getattr(self._server, method)(*arguments))


class ViewEngine:
    """Read-only servers. They have names: who needs one first starts it, also after its end. Ray
    ends it when this object of that process is garbage. ``reads``: by name, what reads its rows."""

    def __init__(
        self, reads: Mapping[str, Callable[[], TableServer]], options: Mapping[str, Any]
    ) -> None:
        self._ray, own = ray_cluster.connect("servers="), {"max_concurrency": _CALLS}
        self._class = ray_cluster.actor_class(self._ray, LimpetViewServer, options, **own)
        self._reads, self.servers = reads, len(reads)
        self._starting, self._actors = Lock(), self._start([None] * self.servers)

    def _start(self, actors: Sequence[Any]) -> list[Any]:
        """Return the actors, with others in place of None, which may be new."""
        found = [*actors]
        for n, (name, read) in enumerate(self._reads.items()):
            if found[n] is None:
                options = {"name": name, "namespace": "limpet", "get_if_exists": True}
                found[n] = self._class.options(**options).remote(ray_cluster.own_path(), read)
        await_start(self._ray, found)
        return found

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """A ``Call``, which is repeated with other servers if some are lost."""
        left = _STARTS
        while True:
            used, left = self._actors, left - 1
            try:
                return call_servers(self._ray, used, method, arguments)
            except ServersLost as e:
                if not left:
                    raise e.with_advice("See `ray logs`: they may need more memory (ray=)") from e
                lost = e.fields["servers"]
            with self._starting:
                if self._actors is used:  # no other thread has replaced some
                    for n in lost:
                        self._ray.kill(used[n])  # of one that crashed, Ray keeps the name
                    left_over = [None if n in lost else actor for n, actor in enumerate(used)]
                    self._actors = self._start(left_over)
