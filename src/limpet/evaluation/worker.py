"""A worker: it takes tasks from the queue of the evaluator, evaluates, and returns the results.

It is a thread of the evaluator, a process, an actor of Ray, or ``limpet evaluate --connect``, and
knows nothing beforehand: each task says which functions to call on which version, as JSON.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from threading import Thread
from typing import Any, Literal

from limpet.errors import LeaseLost, LimpetError, NotFound, TaskError, Unavailable
from limpet.evaluation.functions import FunctionName
from limpet.evaluation.metric_states import MetricStates, State, compute
from limpet.generators import kept_generators
from limpet.lazy_torch import torch_or_none
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import Snapshot
from limpet.loading.targets import device_chooser
from limpet.snapshot.location import Location, locate
from limpet.snapshot.reader import open_location
from limpet.storage.store import Store
from limpet.tasks.remote import RemoteQueue, parse_address
from limpet.tasks.task import EvaluationTask

POLL_SECONDS = 2.0
"""Seconds before a store that did not answer, or a run that is followed, is looked at again."""

MAX_UNAVAILABLE = 10
"""How many times in a row something is tried of which the store does not answer."""

_CONNECT_SECONDS, _RETRY_SECONDS = 60.0, 0.5
"""For how long a worker tries to connect to an evaluator, and how often."""

_TASKS = 64
"""About how many tasks the data is cut into, whatever the workers: so are the results."""

_WAIT_SECONDS = 60.0
"""Seconds for which a worker waits for a task before it asks again."""


@dataclass(frozen=True)
class Work:
    """What a task is about: the name of its data set, as JSON."""

    kind: Literal["count", "evaluate", "merge"]
    functions: Mapping[str, FunctionName | None]  # empty if the worker has them
    batch_size: int | None  # None: each record is a batch
    keys: Sequence[str] = ()  # patterns of the leaves that ``setup`` gets instead of the snapshot
    device: str | None = None
    store: str = ""  # of the run, pickled, as base64; empty: workers open the URL
    url: str = ""
    digest: str = ""
    records: int = 0  # that the worker must have
    states: Sequence[State] = ()  # of all tasks, to be merged
    start: float | None = None  # the time limits in seconds; None: there is no lease
    load: float | None = None
    task: float | None = None

    def encode(self) -> str:
        """Return the text for the worker. JSON of the standard library keeps NaN and surrogates."""
        return json.dumps(asdict(self))

    @property
    def task_size(self) -> int:
        """The number of records in each task."""
        batch = self.batch_size or 1
        return max(1, -(-self.records // (_TASKS * batch))) * batch

    @classmethod
    def decode(cls, text: str) -> Work:
        fields = json.loads(text)
        named = fields.pop("functions").items()
        return cls(functions={k: v and FunctionName(**v) for k, v in named}, **fields)


@dataclass(eq=False, repr=False)
class Worker:
    """Does the tasks of an evaluation, one after the other, with these ``functions`` and ``store``
    if the tasks do not name them. ``collate`` may be None, as for ``DataLoader`` of PyTorch.
    ``is_child``: of the evaluator, so that it may unpickle the store that a task names."""

    functions: Mapping[str, Any] = field(default_factory=dict)
    store: Store | None = None
    is_child: bool = False
    _data: Any = None
    _records: int = 0  # 0: it has not started
    _model: Any = None
    _loaded: tuple[str, str] = ("", "")
    _templates: dict[str, Any] = field(default_factory=dict)

    def do(self, task: EvaluationTask) -> None:
        """Do a task, and report its result, or why it has none. Raises ``TaskError`` without the
        evaluator, and ``LimpetError`` if only this worker lacks the functions or the data."""
        work = Work.decode(task.data)
        try:
            if not self._records:
                self._start(task, work)
        except LeaseLost:
            return
        except Exception as e:
            if work.kind == "count":
                task.fail(describe(e), final=True)
                return
            task.release()
            raise LimpetError(f"This worker cannot take part: {describe(e)}") from e
        is_loaded, size = False, work.batch_size
        try:
            result: Any = {"records": self._records}
            if work.kind != "count" and self._records == work.records:
                self._load(task, work)
                is_loaded = True
                if work.kind == "evaluate":
                    result["state"] = self._evaluate(size, task.start, task.stop)
                else:
                    result["metrics"] = self._merge(size, work.states)
            task.done(result)
        except Exception as e:  # noqa: BLE001  (the evaluator reports it)
            task.fail(describe(e), final=not is_loaded)

    def _start(self, task: EvaluationTask, work: Work) -> None:
        """Import the functions, create the data, and check the device."""
        _renew(task, work.start)
        device_chooser(work.device)
        if work.functions:
            self.functions = resolve(work.functions)
        self._data = self.functions["data"]()
        records = count_records(self._data)
        _renew(task, work.task)
        self._records = records

    def _load(self, task: EvaluationTask, work: Work) -> None:
        if self._loaded == (work.url, work.digest):
            return
        self._loaded, self._model = ("", ""), None  # not two models at once
        for left in reversed(range(MAX_UNAVAILABLE)):
            _renew(task, work.load)
            try:
                self._model = self._set_up(work)
                break
            except Unavailable:
                if not left:
                    raise
                time.sleep(POLL_SECONDS)
        torch = torch_or_none()
        if torch is not None and isinstance(self._model, torch.nn.Module):
            self._model.eval()
        self._loaded = (work.url, work.digest)
        _renew(task, work.task)

    def _set_up(self, work: Work) -> Any:
        if work.store and self.store is None and self.is_child:
            self.store = pickle.loads(base64.b64decode(work.store))
        folder = work.url.rpartition("/")[2]
        location = locate(work.url) if self.store is None else Location(self.store, folder)
        snapshot = open_location(location)
        if snapshot.digest != work.digest:
            raise NotFound(f"{work.url} was replaced by another snapshot", key=work.url)
        with snapshot.not_found_if_deleted():
            source: Any = Snapshot(snapshot)
            if work.keys:
                source = load_snapshot(snapshot, keys=[*work.keys], device=work.device)
            return self.functions["setup"](source)

    def _evaluate(self, batch_size: int | None, start: int, stop: int) -> State:
        """Return the merged state of the metrics of the records ``start`` up to ``stop``."""
        evaluate, collate = self.functions["evaluate"], self.functions["collate"]
        states, name = MetricStates(self._templates), getattr(evaluate, "__name__", "evaluate")
        torch = torch_or_none()
        with nullcontext() if torch is None else torch.no_grad():
            for batch in read_batches(self._data, start, stop, batch_size, collate):
                states.add(evaluate(self._model, batch), f"{name}()")
        return states.to_plain()

    def _merge(self, batch_size: int | None, states: Sequence[State]) -> dict[str, float]:
        """Return the metrics, from the states of all tasks."""
        needed = {name for state in states for name in state["states"]}
        step = batch_size or 1
        for start in range(0, self._records, step):
            if needed <= self._templates.keys():  # else, this worker has not evaluated enough yet
                break
            self._evaluate(batch_size, start, min(start + step, self._records))
        return compute(states, self._templates)


class TaskEvaluator(Worker):
    """Does the tasks of a ``TrainingEvaluation`` with ``queue=`` in a worker of the training: pass
    it to ``queue.evaluation.evaluate_one`` before each mini-batch.

    ``evaluate(records)`` gets the numbers of the records of a batch, and returns a dict of metrics,
    as for ``limpet.Evaluation``. The random numbers of the training do not change.
    """

    def __init__(self, evaluate: Callable[[list[int]], Any]) -> None:
        super().__init__({"evaluate": self._call, "collate": list})
        self.evaluate = evaluate

    def __call__(self, task: EvaluationTask) -> dict[str, Any]:
        """Return the result of a task. Raises ``LimpetError`` with the records if that fails."""
        work = Work.decode(task.data)
        self._records, self._data = work.records, range(work.records)
        try:
            with kept_generators():
                if work.kind == "merge":
                    return {"metrics": self._merge(work.batch_size, work.states)}
                return {"state": self._evaluate(work.batch_size, task.start, task.stop)}
        except Exception as e:
            raise LimpetError(f"records {task.start} to {task.stop - 1}: {describe(e)}") from e

    def _call(self, model: object, records: list[int]) -> Any:
        return self.evaluate(records)


def _renew(task: EvaluationTask, seconds: float | None) -> None:
    if seconds is not None:
        task.renew(seconds)


def resolve(functions: Mapping[str, Any]) -> dict[str, Any]:
    """Import the functions that are given by name. Raises ``LimpetError``."""
    found = dict(functions)
    for label, function in functions.items():
        named = FunctionName.of(function, label) if isinstance(function, str) else function
        found[label] = named.resolve() if isinstance(named, FunctionName) else named
    return found


def count_records(data: Any) -> int:
    """Return the number of records. Raises ``LimpetError`` if it is not a map-style dataset."""
    try:
        records = len(data)
        _ = data.__getitem__
    except (TypeError, AttributeError) as e:
        raise LimpetError(
            "The data of an evaluation is not a map-style dataset, with len() and [index], but a"
            f" {type(data).__name__}"
        ) from e
    if not records:
        raise LimpetError("The data of an evaluation is empty", expected="one record or more")
    return records


def read_batches(
    data: Any,
    start: int,
    stop: int,
    batch_size: int | None,
    collate: Callable[[list[Any]], Any] | None,
) -> Iterator[Any]:
    """Yield the batches of the records ``start`` up to ``stop``, as a ``DataLoader`` without worker
    processes does; to create one for each task would take longer. See ``Work``."""
    if collate is None:
        from torch.utils.data import default_collate, default_convert

        collate = default_convert if batch_size is None else default_collate
    if batch_size is None:
        for number in range(start, stop):
            yield collate(data[number])
        return
    read_many = getattr(data, "__getitems__", None)
    for first in range(start, stop, batch_size):
        numbers = [*range(first, min(first + batch_size, stop))]
        records = read_many(numbers) if read_many else [data[number] for number in numbers]
        yield collate(records)


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


# -- other processes -----------------------------------------------------------------------------


def work_for(queue: RemoteQueue, *, is_child: bool = False) -> None:
    """Do the tasks of an evaluator until it ends the connection."""
    os.dup2(2, 1)  # what the functions print does not belong to the result of a command
    worker, process = Worker(is_child=is_child), os.getpid()
    while True:
        try:
            task = queue.evaluation.get(timeout=_WAIT_SECONDS)
            if task is not None:
                worker.do(task)
        except TaskError:
            if os.getpid() != process:  # a copy that a function of the user made with os.fork()
                os._exit(1)
            return


def work_at(address: str, say: Callable[[str], object]) -> None:
    """Do the tasks of the evaluator that listens at an address, within a minute, until it ends.
    Raises ``TaskError`` if nothing listens there, and ``Denied`` if it has another secret."""
    host, port, _ = parse_address(address)
    end = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            queue = RemoteQueue.connect(address)
            break
        except TaskError:
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY_SECONDS)
    with queue:
        say(f"working for the evaluation at {host}:{port}")
        work_for(queue)
    say("the evaluation has ended")


def main() -> None:
    """Work in a process that an evaluator has started. Its arguments: the file descriptor of the
    connection, and the path of Python, as JSON."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the evaluator ends its workers
    Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    import torch

    torch.set_num_threads(1)  # workers share the cores, and their threads would compete
    try:
        work_for(RemoteQueue(connection), is_child=True)
    except LimpetError as e:
        sys.exit(f"limpet: {e}")


def _end_with(connection: int) -> None:
    """End the process when the evaluator has ended the connection, whatever this one is doing."""
    ended = select.poll()
    ended.register(connection, 0)  # only POLLHUP and POLLERR
    ended.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
