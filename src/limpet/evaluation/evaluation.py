"""``Evaluation``: evaluates the versions of a run, once or for as long as the training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from threading import Event
from typing import Any, Literal

from limpet import events
from limpet.arguments import check_seconds, require, whole
from limpet.errors import FormatError, LimpetError, NotFound, PlanError, TaskError, Unavailable
from limpet.evaluation.follower import Follower
from limpet.evaluation.options import Selection, Workers
from limpet.evaluation.pool import WorkerError, WorkerLost, WorkerPool
from limpet.evaluation.worker import MAX_UNAVAILABLE, POLL_SECONDS, resolve
from limpet.format.names import Version
from limpet.format.records import MAX_LEASE_SECONDS, MAX_TEXT, FailedEvaluation
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.run.lease import LEASE_SECONDS, LeaseHolder
from limpet.run.records import check_job_name, make_objective, record_objective
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.snapshot.location import Url
from limpet.text import format_list
from limpet.threads import no_op

_MAX_WAITING = 10_000
"""The number of waiting versions that the lease protects. With ``MAX_RECORD``, more could make it
longer than a reader accepts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the evaluation of one version, after so many ``seconds``: ``DONE`` with
    ``metrics``; ``FAILED`` with a ``cause``, which is recorded unless the manifest of the version
    is damaged; or ``SKIPPED`` with a ``cause``: the version was deleted meanwhile."""

    version: Version
    state: Literal["DONE", "FAILED", "SKIPPED"]
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    cause: str = ""


class Evaluation:
    """Evaluates versions of ``run`` with several workers, and records the metrics.

    ``setup(snapshot)`` returns the model of a version. It is called once per version and worker.
    With ``keys`` (patterns), it gets a dict of these leaves, loaded onto ``device``, instead of the
    ``Snapshot``. ``evaluate(model, batch)`` returns a dict of metrics for one batch, each a
    ``(sum, count)`` pair or a torchmetrics ``Metric``. ``data()`` returns a map-style dataset,
    which the workers divide. ``batch_size=None``: each of its items is a batch. ``collate`` merges
    the items of a batch. These functions, or their names (``"package.module:function"``), must be
    importable by other processes.

    ``workers``: a number of processes on this machine, or ``Workers``, for a Ray cluster, workers
    on other machines, and time limits. With ``workers=0``, this process does the work.

    ``name`` names the evaluation: its records, and its lease. Two evaluations of a run at the same
    time need different names. The lease ends ``lease_seconds`` after the evaluator has died.
    ``objective``, such as ``("val/loss", "min")``, says by which metric versions are compared:
    ``RUN@best`` uses it.

    Without ``follow``, the newest version is evaluated, unless it has been. With ``follow``, so is
    each newer one as it comes, until the training has ended. ``select``: which versions (see
    ``Selection``): all of them, those that failed, only some steps, or one in a time.

    Raises ``LimpetError`` for an invalid argument, or if the workers cannot be used.
    """

    def __init__(  # noqa: PLR0913  (public interface: the user decides each of them)
        self,
        run: Url,
        setup: Callable[[Any], Any] | str,
        evaluate: Callable[[Any, Any], Any] | str,
        *,
        data: Callable[[], Any] | str,
        name: str = "evaluation",
        objective: tuple[str, str] | None = None,
        workers: int | Workers = 4,
        batch_size: int | None = 32,
        collate: Callable[[list[Any]], Any] | str | None = None,
        keys: str | Sequence[str] = (),
        device: str | None = None,
        follow: bool = False,
        select: Selection = Selection(),  # noqa: B008  (frozen)
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        is_valid = batch_size is None or whole(batch_size, 1) is not None
        require("batch_size=", is_valid, "a whole number, 1 or more, or None", batch_size)
        is_valid = whole(workers) is not None or isinstance(workers, Workers)
        require("workers=", is_valid, "a whole number, 0 or more, or Workers(...)", workers)
        require("select=", isinstance(select, Selection), "Selection(...)", select)
        lease_seconds = check_seconds("lease_seconds=", lease_seconds, most=MAX_LEASE_SECONDS)
        batch_size = whole(batch_size)
        functions = {"setup": setup, "evaluate": evaluate, "data": data, "collate": collate}
        for label, function in functions.items():
            is_valid = callable(function) or isinstance(function, str)
            is_valid = is_valid or (function is None and label == "collate")
            require(f"{label}=", is_valid, "a function: dataset, not dataset()", function)
        keys = (keys,) if isinstance(keys, str) else keys
        is_valid = isinstance(keys, Sequence) and all(isinstance(key, str) for key in keys)
        require("keys=", is_valid, "a pattern, or a list of patterns", keys)
        self.name, self._follow, self._functions = check_job_name(name), follow, functions
        self._workers = workers if isinstance(workers, Workers) else Workers(workers)
        self._objective = None if objective is None else make_objective(objective)
        self._run = Run(run)
        self._select = select
        self._follower = Follower(self._run, name, select)
        self._pool = WorkerPool(
            run, self._run.store, self._workers, functions, batch_size, keys, device
        )
        self._lease = LeaseHolder(self._run.store, name, lease_seconds, lambda e: self.stop())
        self._stopping = Event()
        self._started_at = self._ended_at = -inf
        self._was_run = self._has_recorded_objective = self._has_waited = False

    def __repr__(self) -> str:
        return f"<Evaluation {self.name} of {self._run.url}>"

    @property
    def url(self) -> str:
        return self._run.url

    @property
    def failed(self) -> list[Version]:
        """The versions that have failed under this name, as far as ``run`` has looked them up.
        Only ``retry`` evaluates them again."""
        return self._follower.in_state("failed")

    def stop(self) -> None:
        """Let ``run`` return at once, from any thread, without a record of what is in progress."""
        self._stopping.set()
        self._pool.kill_all()

    def run(self, on_outcome: Callable[[Outcome], object] = no_op) -> list[Outcome]:
        """Evaluate, and return the outcome of each version. ``on_outcome`` gets each as it comes.

        It can be called once. Raises ``NotFound`` if there is no run (with ``follow``, it waits for
        one), ``LimpetError`` if a function cannot be imported, or another process has the name or
        takes it over, and ``StoreError``.
        """
        if self._was_run:
            raise LimpetError(f"{self!r} has been run", todo="Create another Evaluation")
        self._was_run = True
        outcomes: list[Outcome] = []

        def add(outcome: Outcome) -> None:
            outcomes.append(outcome)
            on_outcome(outcome)

        self._follower.on_damaged = lambda v, e: add(Outcome(v, "FAILED", 0.0, cause=str(e)))
        if not self._run.listing().has_version() and not self._follow:
            raise NotFound(
                f"{self._run.url} is not a run with versions",
                todo="To wait until a training saves one, follow the run",
                store=self._run.url,
            )
        if not self._follow and self._follower.next() is None:
            if self._workers.ray is None:  # with Ray, the workers alone may have the modules
                resolve(self._functions)
            self._record_objective(self._follower.metrics)
            return outcomes  # the start of workers takes seconds
        try:
            self._pool.start()
            self._lease.acquire()
            self._lease.start()
            while (found := self._wait_for_version()) is not None:
                if (outcome := self._evaluate(found)) is not None:
                    add(outcome)
            self._lease.check()
        finally:
            self._pool.close()
            self._lease.release()
        return outcomes

    def _wait_for_version(self) -> Snapshot | None:
        """Return the next version, protected by the lease; None if the evaluation has ended."""
        is_later = self._ended_at > -inf
        if is_later and not (self._follow or self._select.skip_none or self._select.retry):
            return None
        failures = 0
        while not self._stopping.is_set():
            start = max(
                self._started_at + self._select.every_seconds,
                self._ended_at + self._select.throttle,
            )
            if self._stopping.wait(max(0.0, min(start - time.monotonic(), threading.TIMEOUT_MAX))):
                return None
            try:
                # asked first: the training may save its last version, and end, in between
                is_last = not self._follow or self._run.ended() is not None
                snapshot = self._find_version()
                self._record_objective(self._follower.metrics)
                if snapshot is not None or is_last:
                    return snapshot
                if not is_later and not self._has_waited:
                    events.emit("evaluation_waits", run=self._run.url)
                self._has_waited, failures = True, 0
                self._stopping.wait(POLL_SECONDS)
            except Unavailable as e:
                failures = self._wait_for_store(e, failures)
        return None

    def _wait_for_store(self, error: Unavailable, failures: int) -> int:
        """Wait before the store is asked again. Returns the number of failures in a row, of which
        there were ``failures`` before. Raises the error if these are too many."""
        if failures >= MAX_UNAVAILABLE:
            raise error
        self._stopping.wait(POLL_SECONDS)
        return failures + 1

    def _find_version(self) -> Snapshot | None:
        while (found := self._follower.next()) is not None:
            snapshot, waiting = found
            protected = waiting[:_MAX_WAITING] if self._select.skip_none else ()
            version = snapshot.version
            try:
                with pins.protected(self._run.location(version), version):
                    self._lease.protect([version, *protected])
                return snapshot
            except NotFound as e:  # deleted, or being deleted, before the lease protected it
                self._follower.pass_over(version, e)
        if self._lease.protects:  # what was evaluated need not wait for the next version
            self._lease.protect(())
        return None

    def _evaluate(self, snapshot: Snapshot) -> Outcome | None:
        """Evaluate one version and record the result. Returns None if it was stopped."""
        version, began = snapshot.version, time.monotonic()
        self._started_at = began
        events.emit("evaluation_started", url=snapshot.url, evaluation=self.name)
        metrics: dict[str, float] = {}
        state: Literal["DONE", "FAILED", "SKIPPED"] = "DONE"
        cause = ""
        try:
            metrics = self._pool.evaluate(snapshot.url, reader_of(snapshot).digest)
            self._record(snapshot, metrics)
        except (WorkerError, TaskError, WorkerLost, NotFound, FormatError, PlanError) as e:
            if self._stopping.is_set():
                return None
            cause, state = str(e), "SKIPPED"
            # a worker that does not find the version may be on a machine without its folder
            if not isinstance(e, NotFound):
                put = partial(self._run.put_record, FailedEvaluation, self.name, snapshot)
                with suppress(NotFound, FormatError):
                    self._write(partial(put, cause=cause[:MAX_TEXT]))
                    state = "FAILED"
        self._ended_at = time.monotonic()
        self._follower.finish(version)
        outcome = Outcome(version, state, self._ended_at - began, metrics, cause)
        events.emit(
            "evaluation_ended",
            url=snapshot.url,
            evaluation=self.name,
            state=state,
            seconds=outcome.seconds,
            metrics=metrics,
            cause=cause,
        )
        return outcome

    def _record(self, snapshot: Snapshot, metrics: Mapping[str, float]) -> None:
        objective = self._objective
        if objective is not None and objective.metric not in metrics:
            # never returned: an error of the arguments, which holds for each version
            error = WorkerError if self._has_recorded_objective else LimpetError
            raise error(
                f"The evaluation returns no metric {objective.metric}, by which versions are"
                f" compared; it returns {format_list(sorted(metrics), 20)}"
            )
        # first: a version that has metrics is not evaluated again
        self._record_objective(metrics)
        self._write(partial(self._run.add_metrics, snapshot, metrics, self.name))

    def _record_objective(self, metrics: Collection[str]) -> None:
        """Record the objective, once, as soon as there is a result with its metric."""
        objective = self._objective
        if objective is None or self._has_recorded_objective or objective.metric not in metrics:
            return
        self._write(partial(record_objective, self._run.store, objective))
        self._has_recorded_objective = True

    def _write(self, record: Callable[[], object]) -> None:
        """Write a record as the holder of the lease, and again if the store does not answer: what
        was evaluated would be lost. A second record of one result changes nothing."""
        failures = 0
        while True:
            self._lease.check()
            try:
                record()
                return
            except Unavailable as e:
                failures = self._wait_for_store(e, failures)
