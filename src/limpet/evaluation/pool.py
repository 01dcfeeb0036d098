"""The workers of an evaluation, and how they evaluate one version together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol

from limpet import events
from limpet.errors import JobFailed, LimpetError
from limpet.evaluation.arguments import check_argument, check_seconds, is_count
from limpet.evaluation.metric_states import State
from limpet.evaluation.process import WorkerError, WorkerLost
from limpet.tasks.job import Job
from limpet.tasks.queue import Queue

_MAX_RESTARTS = 5
"""The number of times in a row that a worker is started again although it completed no task."""

_TASKS = 64
"""About how many tasks the data is cut into. The number does not depend on that of the workers, so
neither do the results."""

_MAX_SECONDS = 2e6
"""The longest time limit: a socket waits for at most 2**31 ms."""

_TASK_POLL = 0.01
"""Seconds between two checks of a thread without a task whether the version is complete: all wait
for the last one."""


class WorkerHandle(Protocol):
    """A worker, wherever it is. Raises ``WorkerError`` and ``WorkerLost``."""

    name: str

    def start(self, timeout: float) -> int: ...
    def call(self, method: str, *arguments: Any, timeout: float) -> Any: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds: for the start of a worker, the load of a version, and a task; and
    ``attempts``, the number of times that a task is tried."""

    start: float = 300.0
    load: float = 600.0
    task: float = 600.0
    attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("start", "load", "task"):
            check_seconds("Limits", name, getattr(self, name), _MAX_SECONDS)
        is_valid = is_count(self.attempts, 1)
        check_argument("Limits", "attempts", self.attempts, is_valid, "a whole number, 1 or more")


class WorkerPool:
    """Workers that live for the whole evaluation.

    ``make(name)`` starts a worker. A worker that ends is started again.
    """

    def __init__(
        self,
        make: Callable[[str], WorkerHandle],
        count: int,
        limits: Limits,
        batch_size: int | None,
    ) -> None:
        self._make, self._limits, self._batch_size = make, limits, batch_size
        self._names = [f"worker-{number}" for number in range(count)]
        self._workers: dict[str, WorkerHandle] = {}
        self._lock = Lock()
        self._closing = Event()
        self.records = 0

    def start(self) -> None:
        """Start all workers at once. Raises the first error, unless it is being closed, and ends
        those that started."""
        try:
            _run_in_threads(self._worker, self._names)
        except LimpetError:
            if not self._closing.is_set():
                self.close()
                raise

    def close(self) -> None:
        """End all workers. Calls that are in progress raise ``WorkerLost``."""
        self._closing.set()
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
        _run_in_threads(lambda worker: worker.close(), workers)

    def kill_all(self) -> None:
        """Kill all workers: whoever waits for one of them gets an error at once."""
        self._closing.set()
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.kill()

    def evaluate(self, url: str, digest: str) -> dict[str, float]:
        """Return the metrics of the version at ``url``, whose manifest has ``digest``.

        Raises ``WorkerError`` if the version has no score, ``WorkerLost`` if no worker stays alive,
        and ``TaskError`` if the workers were ended meanwhile.
        """
        queue = Queue(lease_seconds=None, attempts=self._limits.attempts)
        job = queue.add("evaluation", self.records, task_size=self._task_size(), name=url)
        team = _Team(queue, job, len(self._names), self._limits, url, digest, self._closing)
        _run_in_threads(lambda name: self._drive(team, name), self._names)
        if team.error is not None:
            raise team.error
        try:
            states = job.results()
        except JobFailed as e:
            cause = e.fields["cause"].rstrip(".")
            raise WorkerError(f"{cause} (in {self._limits.attempts} attempts)") from e
        return self._compute(team, states)

    def _task_size(self) -> int:
        batch = self._batch_size or 1
        return max(1, -(-self.records // (_TASKS * batch))) * batch

    def _drive(self, team: _Team, name: str) -> None:
        """Let one worker take part until the version is complete. Runs on a thread of its own."""
        restarts = 0
        while not team.has_ended:
            before = team.job.completed
            try:
                team.work(self._worker(name))
            except WorkerLost as e:
                self._discard(name)
                team.loaded.discard(name)
                events.emit("worker_lost", worker=name, error=e)
                restarts = 0 if team.job.completed > before else restarts + 1
                if restarts > _MAX_RESTARTS:
                    team.give_up(e)
                    return
            except LimpetError as e:
                team.stop(e)

    def _compute(self, team: _Team, states: Sequence[State]) -> dict[str, float]:
        lost: WorkerLost | None = None
        for name in self._names:
            try:
                worker = self._worker(name)
                if worker.name not in team.loaded:
                    worker.call("load", team.url, team.digest, timeout=self._limits.load)
                metrics = worker.call("compute", states, timeout=self._limits.task)
                return {str(key): value for key, value in metrics.items()}
            except WorkerLost as e:
                self._discard(name)
                team.loaded.discard(name)
                lost = e
        raise lost or WorkerLost("There is no worker")

    def _worker(self, name: str) -> WorkerHandle:
        """Return the worker, and start it if it does not run."""
        with self._lock:
            worker = self._workers.get(name)
        if worker is None:
            worker = self._make(name)
            with self._lock:
                self._workers[name] = worker
            try:
                if self._closing.is_set():
                    raise WorkerLost("The evaluation has been stopped")
                self._check_records(worker, worker.start(self._limits.start))
            except BaseException:
                self._discard(name)
                raise
        return worker

    def _check_records(self, worker: WorkerHandle, records: int) -> None:
        """All workers must have the same data: each evaluates some of its ranges."""
        with self._lock:
            self.records = self.records or records
        if records != self.records:
            raise WorkerError(
                f"Worker {worker.name} has other data than those that started before",
                expected=f"{self.records} records",
                found=f"{records}",
                todo="Let data() return the same data each time. If the data has changed, start the"
                " evaluation again",
            )

    def _discard(self, name: str) -> None:
        with self._lock:
            worker = self._workers.pop(name, None)
        if worker is not None:
            worker.kill()
            worker.close()


class _Team:
    """The evaluation of one version by several workers."""

    def __init__(
        self,
        queue: Queue,
        job: Job,
        size: int,
        limits: Limits,
        url: str,
        digest: str,
        closing: Event,
    ) -> None:
        self.job, self._size, self.url, self.digest = job, size, url, digest
        self._closing = closing
        self.loaded: set[str] = set()
        self.error: LimpetError | None = None
        self._queue, self._limits = queue, limits
        self._lock = Lock()

    @property
    def has_ended(self) -> bool:
        return (
            self._closing.is_set()
            or self.error is not None
            or self.job.error is not None
            or self.job.completed == self.job.tasks
        )

    def stop(self, error: LimpetError) -> None:
        """End the evaluation with an error."""
        with self._lock:
            self.error = self.error or error

    def give_up(self, error: LimpetError) -> None:
        """Go on without one of the workers. Without the last one, end the evaluation."""
        with self._lock:
            self._size -= 1
            if self._size == 0:
                self.error = self.error or error

    def work(self, worker: WorkerHandle) -> None:
        """Load the version and evaluate tasks until the job has ended. Raises ``WorkerLost``."""
        self.loaded.discard(worker.name)
        try:
            worker.call("load", self.url, self.digest, timeout=self._limits.load)
        except WorkerError as e:
            self.stop(e)
            return
        self.loaded.add(worker.name)
        while not self.has_ended:
            task = self._queue.evaluation.get(worker.name, timeout=_TASK_POLL)
            if task is None:
                continue
            try:
                start, stop = task.start, task.stop
                task.done(worker.call("evaluate", start, stop, timeout=self._limits.task))
            except WorkerError as e:
                task.fail(f"records {start} to {stop - 1}: {e.what}")
            except BaseException as e:
                task.fail(f"records {start} to {stop - 1}: {e}")
                raise


def _run_in_threads(work: Callable[[Any], object], items: Sequence[Any]) -> None:
    """Call ``work`` on every item, each on a thread of its own. Raises the first error when all
    have ended. An interrupt does not wait for them, unlike in ``in_parallel``: whoever gets it ends
    the workers. With one item, no thread is started."""
    if len(items) == 1:
        work(items[0])
        return
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(item: Any) -> None:
        failure: BaseException | None = None
        try:
            work(item)
        except BaseException as e:  # noqa: BLE001  (the caller raises it)
            failure = e
        ended.put(failure)

    threads = [
        Thread(target=run, args=(item,), name="limpet-evaluation", daemon=True) for item in items
    ]
    for thread in threads:
        thread.start()
    failures = [ended.get() for _ in threads]  # an interrupt ends this wait
    for thread in threads:
        thread.join()
    for failure in failures:
        if failure is not None:
            raise failure
