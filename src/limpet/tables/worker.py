"""A worker: it pulls, computes gradients, pushes them to all servers, and commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from limpet.errors import LeaseLost, LimpetError
from limpet.evaluation.worker import TaskEvaluator, Work
from limpet.generators import STEP, seed_generators
from limpet.tables.client import Call, ServersLost, TableClient
from limpet.tables.dense import named_tensors
from limpet.tables.messages import Answer, Batch, Commit, Entry, NextBatch, Push, Sender
from limpet.tables.server import StaleMessage
from limpet.tables.table import Table
from limpet.tasks.batches import Key, TaskBatches
from limpet.tasks.task import EvaluationTask, Report, TrainingSide
from limpet.training.training_evaluation import evaluating

Ask = Callable[[Commit | NextBatch], Answer]
"""Asks the coordinator."""

Keys = list[Key]

_LEASE_SECONDS = 600.0

_WAIT_SECONDS, _MOST_WAIT_SECONDS = 0.005, 0.1
"""How long a worker waits, if it must, before it asks again: each time a quarter longer, so that
many workers do not ask all the time, and none waits much longer than it must."""

_RENEW_SECONDS = 10.0
"""How often a worker renews leases while it waits."""


class WorkerStopped(BaseException):
    """The coordinator continues without what this worker does: another generation has begun, or the
    worker counts as lost. It ends the function of the user, who must not catch it."""


class _StaleCommit(Exception):
    """A commit was refused, and the worker still has its records."""


class Worker:
    """What the function of a worker gets: its tables, its records, and ``step``.

    ``tables``: for ``EmbeddingBag``. ``name``: unique in the training. Each worker runs at its own
    pace; what it computes counts when ``step`` returns True.
    """

    def __init__(  # noqa: PLR0913  (the engines pass each of them)
        self,
        name: str,
        tables: Sequence[Table],
        first_buckets: Sequence[int],
        *,
        call: Call,
        ask: Ask,
        queue: Any,
        generation: int,
        seed: int | None,
        leased_by: str | None = None,
    ) -> None:
        def call_servers(method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
            try:
                return call(method, arguments)
            except (StaleMessage, ServersLost) as e:
                raise WorkerStopped(str(e)) from e

        self.name, self._call = name, call_servers
        self.tables = TableClient()
        self.tables.connect(tables, first_buckets, call_servers)
        self._ask, self._queue = ask, queue
        self._generation, self._seed, self._leased_by = generation, seed, leased_by
        self._number = 0
        self._model: torch.nn.Module | None = None
        self._versions = [0] * len(first_buckets)
        self._owner: dict[str, int] = {}
        self._pulled: dict[str, torch.Tensor] = {}
        self._batches: TaskBatches | None = None
        self._batch_size = 0
        self._reader: Iterator[Any] = iter(())
        self._keys: Keys | None = None
        self._batch = -1
        self._metrics: dict[str, float] = {}
        self._evaluator: Any = None
        self._renewed, self._wait = 0.0, _WAIT_SECONDS
        self._confirm(None)

    def __repr__(self) -> str:
        return f"<Worker {self.name}>"

    def dense(self, model: torch.nn.Module) -> None:
        """Train the parameters and buffers of ``model``, which get the values of the servers now,
        and at each ``next``. Raises ``LimpetError`` if it is not like the model of ``dense=``."""
        self._model, self._versions = None, [0] * len(self._versions)
        self._owner.clear()
        self._pull_dense()
        own = {(name, *tensor.shape) for name, tensor in named_tensors(model).items()}
        theirs = {(name, *self._pulled[name].shape) for name in self._owner}
        if own != theirs:
            raise LimpetError(
                "worker.dense() got another model than dense= of the Servers",
                expected=f"the parameters and buffers {sorted(theirs - own)}",
                found=f"{sorted(own - theirs)}",
                todo="Create both with one function",
            )
        self._model = model
        self._pull_dense()

    def next(
        self, batch_size: int, *, evaluate: Callable[[list[int]], Any] | None = None
    ) -> Keys | None:
        """Return the numbers of the next ``batch_size`` records, or None once all are consumed.

        Of a data set with a name, each is a pair with the name. A batch may be smaller. After a
        step that was refused, the same records come again.

        ``evaluate(records)`` returns a dict of metrics for a list of records of ``evaluation=`` of
        ``train``, as for ``limpet.Evaluation``. Meanwhile, rows and the model of ``dense`` are
        those of the step that is evaluated. It is called before the mini-batch, and when this
        worker would wait.
        """
        self._wait = _WAIT_SECONDS
        self.tables.take()  # what no step has pushed
        if self._model is not None:
            self._model.zero_grad()
        if evaluate is not None:
            self._evaluator = self._evaluator or TaskEvaluator(evaluate)
            self._evaluator.evaluate = evaluate
        self._evaluate_one()
        keys = self._next_leased(batch_size) if self._seed is None else None
        if keys is None and (self._seed is not None or self._evaluator is not None):
            keys = self._next_of_round(batch_size)  # none without rounds: others train, or evaluate
        if keys is None or self._model is not None:
            self._pull_dense()  # also lets the servers apply the last push
        return keys

    def _next_leased(self, batch_size: int) -> Keys | None:
        if self._keys is not None:
            return self._keys
        if self._batches is None or batch_size != self._batch_size:
            self.close()
            side = TrainingSide(self._queue, report=self._commit)
            self._batches = TaskBatches(
                side, batch_size, worker=self._leased_by, lease_seconds=_LEASE_SECONDS
            )
            self._reader, self._batch_size = iter(()), batch_size
        while (keys := next(self._reader, None)) is None:
            if self._queue.finished("training"):
                return None
            self._evaluate_one()
            self._reader = iter(self._batches)  # waits for a moment if there is no task
        self._keys = keys
        return self._keys

    def _next_of_round(self, batch_size: int) -> Keys | None:
        request = NextBatch(self.name, batch_size, self._evaluator is not None)
        while (answer := self._request(request)) != "finished":
            if isinstance(answer, Batch):
                self._batch = answer.number
                seed_generators(self._seed or 0, STEP, answer.number)
                return answer.keys
            self._evaluate_or_wait()
        return None

    def _evaluate_or_wait(self) -> None:
        """Do something else for a moment, which may last for long: keep the leases."""
        if self._batches is not None and time.monotonic() - self._renewed > _RENEW_SECONDS:
            self._renewed = time.monotonic()
            with suppress(LeaseLost):  # the next commit is told
                self._batches.renew()
        if self._evaluate_one():
            self._wait = _WAIT_SECONDS
        else:
            time.sleep(self._wait)
            self._wait = min(1.25 * self._wait, _MOST_WAIT_SECONDS)

    def _evaluate_one(self) -> bool:
        """Do an evaluation task if there is one; return whether there was."""
        side, worker = self._queue.evaluation, self._leased_by
        return self._evaluator is not None and side.evaluate_one(self._evaluate, worker)

    def _evaluate(self, task: EvaluationTask) -> Any:
        """Do a task with the rows and the dense values of its cut, or current ones."""
        self.tables.cut = Work.decode(task.data).url
        try:
            self._pull_dense()
            with evaluating(self._model):
                return self._evaluator(task)
        finally:
            self.tables.cut = ""
            self._pull_dense()

    def step(self, metrics: Mapping[str, float] | None = None) -> bool:
        """Push the gradients of the rows and of the dense parameters, and commit them together with
        the records: all of it counts exactly once, or nothing.

        ``metrics``: numbers for ``ckpt.step``. Returns False if the commit was refused, because
        others have committed too much meanwhile (``staleness=``), or have the records now.
        """
        self._wait = _WAIT_SECONDS
        self._number += 1
        self._metrics = {name: float(value) for name, value in (metrics or {}).items()}
        pushes = self._take_push()
        left = {n: (self.tables.sender, self._number, push) for n, push in enumerate(pushes)}
        while left:
            held = self._call("push", left)
            left = {n: arguments for n, arguments in left.items() if not held[n]}
            if left:
                self._evaluate_or_wait()
        try:
            if self._batches is not None:
                self._batches.consumed()
            else:
                self._commit([])
        except LeaseLost:
            self._keys, self._reader = None, iter(())
            return False
        except _StaleCommit:
            return False
        self._keys = None
        return True

    def close(self) -> None:
        """Return the tasks of records that no step has consumed to the queue."""
        if self._batches is not None:
            self._batches.close()

    def _take_push(self) -> list[Push]:
        """Return the part of each server, and clear the gradients."""
        rows = self.tables.split(self.tables.take())
        pushes = [Push(part, {}, {}) for part in rows]
        for name, tensor in named_tensors(self._model).items() if self._model is not None else ():
            push = pushes[self._owner[name]]
            if not isinstance(tensor, torch.nn.Parameter):
                push.buffers[name] = tensor.detach().cpu().clone()
            elif tensor.grad is not None:
                push.dense[name] = tensor.grad.detach().cpu()
                tensor.grad = None
        return pushes

    def _commit(self, reports: Sequence[Report]) -> None:
        request = Commit(
            self.name,
            self._number,
            list(reports),
            batch=self._batch,
            metrics=self._metrics,
            evaluates=self._evaluator is not None,
        )
        while (answer := self._request(request)) == "wait":
            self._evaluate_or_wait()
        if answer == "taken":
            raise LeaseLost("Others have the records")
        if answer == "stale":
            raise _StaleCommit
        if isinstance(answer, Entry):
            self._confirm(answer)

    def _confirm(self, entry: Entry | None) -> None:
        """Let the next messages to servers carry a commit; in a round, the driver applies it."""
        committed = 0 if entry is None else entry.number
        entry = entry if self._seed is None else None
        self.tables.sender = Sender(self._generation, self.name, committed, entry)

    def _request(self, request: Commit | NextBatch) -> Answer:
        answer = self._ask(request)
        if answer == "stopped":
            raise WorkerStopped
        return answer

    def _pull_dense(self) -> None:
        sender = self.tables.sender
        cut = self.tables.cut  # which has version 0: a later call gets what is current
        arguments = {n: (sender, version, cut) for n, version in enumerate(self._versions)}
        own = {} if self._model is None else named_tensors(self._model)
        for number, (version, values) in self._call("pull_dense", arguments).items():
            self._versions[number] = version
            self._owner.update(dict.fromkeys(values, number))
            self._pulled.update(values)
        with torch.no_grad():  # all of them: the forward pass has changed buffers since
            for name, value in self._pulled.items():
                if name in own:
                    own[name].copy_(value)
