"""The evaluator's side of its workers: a queue of tasks, and the processes that take them."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event
from time import monotonic
from typing import Any

from limpet import events
from limpet.arguments import require
from limpet.errors import JobFailed, LimpetError
from limpet.evaluation.functions import FunctionName
from limpet.evaluation.metric_states import State, compute
from limpet.evaluation.options import Workers
from limpet.evaluation.worker import Work, Worker, describe, resolve, work_for
from limpet.snapshot.location import Url
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Store
from limpet.tasks import ray_cluster
from limpet.tasks.queue import Job, Queue
from limpet.tasks.remote import RemoteQueue, TaskServer, parse_address

_MAX_RESTARTS = 5
"""The number of times in a row that a worker is started again although no task was completed."""

_TEND_SECONDS = 0.5
"""Seconds after which the evaluator looks whether its workers are alive."""

_END_SECONDS = 5.0
"""Seconds that a worker gets to end by itself before it is killed."""


class WorkerError(LimpetError):
    """A function of the user, or the load of a version, failed in a worker."""


class WorkerLost(LimpetError):
    """A worker ended, or did not answer in time and was killed."""


class LocalProcess:
    """A worker process on this machine."""

    def __init__(self, name: str, server: TaskServer) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores the others
        with server.connect(name) as connection:
            fd = connection.fileno()
            command = [sys.executable, "-m", "limpet.evaluation.worker", str(fd), json.dumps(path)]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
        self.pid = self._process.pid

    def end(self) -> str | None:
        """Return how it has ended, or None if it is alive."""
        code = self._process.poll()
        if code is None:
            return None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def wait(self) -> None:
        """Wait until it has ended, and kill it after some seconds."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class RayActor:
    """A worker in a process that Ray starts, places, and ends with its owner, the evaluator. Ray
    carries only the address of the queue, to which the actor connects as any worker does."""

    def work(self, address: str, name: str, path: list[str]) -> None:
        ray_cluster.add_path(path)
        with RemoteQueue.connect(address, name) as queue:
            work_for(queue)


class RayProcess:
    """A worker that is an actor, as the evaluator sees it."""

    def __init__(self, ray: Any, actor_class: Any, address: str, name: str) -> None:
        self._ray, self._actor = ray, actor_class.remote()
        self._work = self._actor.work.remote(address, name, ray_cluster.own_path())

    def end(self) -> str | None:
        ray = self._ray
        if not ray.is_initialized():  # a call would start a cluster
            return "no connection to Ray"
        try:
            if not ray.wait([self._work], timeout=0)[0]:
                return None
            ray.get(self._work)
        except (ray.exceptions.RayError, ConnectionError, LimpetError) as e:
            return ray_cluster.describe(e)
        return "it has left"

    def kill(self) -> None:
        if self._ray.is_initialized():  # otherwise, it has ended with the connection
            self._ray.kill(self._actor)


WorkerProcess = LocalProcess | RayProcess


@dataclass(slots=True)
class _Place:
    """The place of a worker, which gets another process if it is lost, ``restarts`` times in a row
    since ``completed`` tasks were complete."""

    name: str
    process: WorkerProcess
    began: float
    starts: int = 1
    restarts: int = 0
    completed: int = 0
    is_given_up: bool = False
    has_asked: bool = False


def encode_store(run: Url, store: Store, workers: Workers) -> str:
    """Return the store of ``run`` for worker processes: pickled, as base64, or empty if they open
    its URL. Raises ``LimpetError`` if they cannot use it."""
    is_shared = not isinstance(store, MemoryStore)
    require("workers=", is_shared, f"0, because {store.url} is in memory", workers.count)
    if isinstance(run, str | os.PathLike) or type(store) is LocalStore:
        return ""
    is_alone = workers.listen is None and workers.ray is None
    expected = "a URL, which workers on other machines open with credentials of their own"
    require("run", is_alone, expected, store)
    try:
        pickled = pickle.dumps(store)
    except Exception as e:
        raise LimpetError(
            f"Worker processes cannot get the store {store.url}, which cannot be pickled"
            f" ({type(e).__name__}: {e}): pass its URL (register_store), or use workers=0"
        ) from e
    expected = "a store whose class is in a module, not in the script, so that workers import it"
    require("run", b"__main__" not in pickled, expected, store)
    return base64.b64encode(pickled).decode()


class WorkerPool:
    """Workers that live for the whole evaluation, and the queue from which they take tasks.
    ``functions``: ``setup``, ``evaluate``, ``data``, and ``collate`` (or None), or their names.
    Raises ``LimpetError`` if no other process can import one, or without the cluster."""

    def __init__(
        self,
        run: Url,
        store: Store,
        workers: Workers,
        functions: dict[str, Any],
        batch_size: int | None,
        keys: Sequence[str],
        device: str | None,
    ) -> None:
        self._workers, self._functions = workers, functions
        # the evaluator does the work itself
        self._is_inline = inline = not workers.count and workers.listen is None
        names = {
            label: None if function is None else FunctionName.of(function, label)
            for label, function in functions.items()
            if not inline
        }
        self._work = Work("count", names, batch_size, keys=[*keys], device=device)
        self._store = store
        if not inline:
            self._work = replace(
                self._work,
                store=encode_store(run, store, workers),
                start=workers.start,
                load=workers.load,
                task=workers.task,
            )
        self._ray, self._actor_class = None, None
        if workers.ray is not None:
            ray_cluster.check_options("ray= of Workers", workers.ray)
            self._ray = ray_cluster.connect("Workers(ray=...)")
            gpus = {"num_gpus": 1} if str(device).startswith("cuda") else {}
            options = {**gpus, **workers.ray}
            self._actor_class = ray_cluster.actor_class(self._ray, RayActor, options)
        if workers.listen is not None:
            parse_address(workers.listen)
        self.queue = Queue(
            lease_seconds=None if inline else workers.task, attempts=workers.attempts
        )
        self._overdue: set[str] = set()  # the names of workers whose leases have ended
        self.queue.on_overdue = lambda worker: self._overdue.add(worker.partition(" ")[0])
        self._server = TaskServer(self.queue, self._describe_end)
        self._inline = Worker()
        self._places: list[_Place] = []
        self._processes: dict[str, WorkerProcess] = {}
        self._ray_address = ""
        self._closing = Event()

    def start(self) -> None:
        """Start all workers, and find out how many records the data has. Raises ``LimpetError`` if
        that fails, unless the pool is closed meanwhile."""
        try:
            if self._is_inline:
                self._inline = Worker(resolve(self._functions), self._store)
            if self._workers.listen is not None:
                own = parse_address(self._server.listen(*parse_address(self._workers.listen)))
                events.emit("evaluation_listens", address=f"{own[0]}:{own[1]}")
            if self._ray is not None:
                host = str(self._ray.util.get_node_ip_address())
                self._ray_address = self._server.listen(host)
            for number in range(self._workers.count):
                name = f"worker-{number}"
                self._places.append(_Place(name, self._make(name), monotonic()))
            (result,) = self._run(self._work, "the records of the data", 1, 1)
            self._work = replace(self._work, kind="evaluate", records=result["records"])
        except LimpetError:
            if not self._closing.is_set():
                raise

    def evaluate(self, url: str, digest: str) -> dict[str, float]:
        """Return the metrics of a version. Raises ``WorkerError`` if it has no score,
        ``WorkerLost`` if no worker stays alive, and ``LimpetError`` if a worker has other data."""
        work = replace(self._work, url=url, digest=digest)
        results = self._run(work, url, work.records, work.task_size)
        other = {result["records"] for result in results} - {work.records}
        if other:
            raise LimpetError(
                "A worker has other data than the one that counted the records: data() must return"
                " the same data each time",
                expected=f"{work.records} records",
                found=", ".join(map(str, other)),
            )
        states: tuple[State, ...] = tuple(result["state"] for result in results)
        if any(state["states"] for state in states):  # a worker has the metrics that merge them
            merge = replace(work, kind="merge", states=states)
            (result,) = self._run(merge, f"the metrics of {url}", 1, 1)
            return {str(key): value for key, value in result["metrics"].items()}
        try:
            return compute(states, {})
        except LimpetError as e:
            raise WorkerError(describe(e)) from e

    def close(self) -> None:
        self._closing.set()
        if self._is_inline:
            return
        self._server.close()
        for place in self._places:
            if isinstance(place.process, LocalProcess):
                place.process.wait()
            else:
                place.process.kill()

    def kill_all(self) -> None:
        """Kill all workers. Any thread may call this; a call in progress then raises."""
        self._closing.set()
        for place in list(self._places):
            place.process.kill()

    # -- implementation --------------------------------------------------------------------------

    def _run(self, work: Work, name: str, records: int, task_size: int) -> list[Any]:
        """Let the workers do a job, and return the results of its tasks."""
        data = {work.encode(): records}
        job = self.queue.add("evaluation", data, task_size=task_size, name=name)
        for place in self._places:
            place.restarts = place.completed = 0
            place.is_given_up = False
        try:
            while not job.has_ended(0.0 if self._is_inline else _TEND_SECONDS):
                if self._closing.is_set():
                    raise WorkerLost("The evaluation has been stopped")
                if not self._is_inline:
                    self._tend(job, is_starting=work.kind == "count")
                elif (task := self.queue.evaluation.get()) is not None:
                    self._inline.do(task)
            return job.results()
        except JobFailed as e:
            cause, attempts = e.fields["cause"].rstrip("."), self._workers.attempts
            if work.kind == "evaluate" and e.fields["attempts"] >= attempts:
                records_of_task = f"records {e.fields['start']} to {e.fields['stop'] - 1}"
                cause = f"{records_of_task}: {cause} (in {attempts} attempts)"
            raise WorkerError(cause) from e
        finally:
            job.cancel()

    def _tend(self, job: Job, is_starting: bool) -> None:
        """Replace the workers that have ended, or do not answer in time. Raises ``WorkerLost`` if
        one is lost before the evaluation has started, or if none is left."""
        connected = {worker.partition(" ")[0] for worker in set(self._server.workers)}
        for number, place in enumerate(self._places):
            place.has_asked |= place.name in connected
            lost = None if place.is_given_up else self._find_loss(place)
            if lost is None:
                continue
            place.process.kill()
            if self._closing.is_set() or is_starting:
                raise lost
            events.emit("worker_lost", worker=place.name, error=lost)
            place.restarts = 0 if job.completed > place.completed else place.restarts + 1
            place.completed = job.completed
            place.is_given_up = place.restarts > _MAX_RESTARTS
            if place.is_given_up:
                if self._workers.listen is None and all(p.is_given_up for p in self._places):
                    raise lost
                continue
            place.name = f"worker-{number}.{place.starts}"
            place.starts, place.has_asked = place.starts + 1, False
            place.process, place.began = self._make(place.name), monotonic()
            if self._closing.is_set():
                place.process.kill()

    def _find_loss(self, place: _Place) -> WorkerLost | None:
        end = place.process.end()
        if end is not None:
            return WorkerLost(f"Worker {place.name} ended", found=end)
        is_late = not place.has_asked and monotonic() > place.began + self._workers.start
        if not is_late and place.name not in self._overdue:
            return None
        self._overdue.discard(place.name)
        seconds = f"{self._workers.start:g} s" if is_late else "the time of its task"
        ray = "; Ray may lack what a worker asks for: see `ray status`" if self._ray else ""
        return WorkerLost(
            f"Worker {place.name} was killed",
            expected=f"an answer within {seconds}",
            found="none",
            todo=f"If it takes that long, raise the time limits of Workers{ray if is_late else ''}",
        )

    def _make(self, name: str) -> WorkerProcess:
        process: WorkerProcess
        if self._ray is None:
            process = LocalProcess(name, self._server)
        else:
            process = RayProcess(self._ray, self._actor_class, self._ray_address, name)
        self._processes[name] = process
        return process

    def _describe_end(self, worker: str) -> str:
        """Return how a worker has ended whose connection has. A thread of the server asks this."""
        process, until = self._processes.get(worker.partition(" ")[0]), monotonic() + _END_SECONDS
        while process is not None and monotonic() < until and not self._closing.wait(0.01):
            if (end := process.end()) is not None:
                return end
        return "its connection has ended"
