"""What a worker does: load one version, evaluate ranges of the data, and merge the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from limpet.errors import LimpetError, NotFound
from limpet.evaluation.functions import FunctionName
from limpet.evaluation.metric_states import MetricStates, State, compute
from limpet.lazy_torch import torch_or_none
from limpet.loading.load import load_snapshot
from limpet.snapshot.reader import open_snapshot
from limpet.snapshot.snapshot import Snapshot


class WorkerSpec(msgspec.Struct, frozen=True):
    """What all workers of an evaluation do.

    ``batch_size``: the number of records in a batch; None: each record of the data is a batch.
    ``keys``: patterns of the leaves to load; then ``setup`` gets them as a dict, else the snapshot.
    ``collate``: merges the records of a batch; None: as ``torch.utils.data.DataLoader`` does.
    """

    setup: FunctionName
    evaluate: FunctionName
    data: FunctionName
    batch_size: int | None
    keys: tuple[str, ...]
    device: str | None
    collate: FunctionName | None = None


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of the user."""

    setup: Callable[[Any], Any]
    evaluate: Callable[[Any, Any], Any]
    data: Callable[[], Any]
    collate: Callable[[list[Any]], Any] | None = None

    @classmethod
    def resolve(cls, spec: WorkerSpec) -> Functions:
        """Import the functions. Raises ``LimpetError``."""
        collate = None if spec.collate is None else spec.collate.resolve()
        return cls(spec.setup.resolve(), spec.evaluate.resolve(), spec.data.resolve(), collate)


class Worker:
    """Evaluates parts of the data on one version at a time.

    Every method may raise what the functions of the user raise.
    """

    def __init__(
        self,
        functions: Functions,
        batch_size: int | None,
        keys: Sequence[str] = (),
        device: str | None = None,
    ) -> None:
        self._functions = functions
        self._batch_size, self._keys, self._device = batch_size, list(keys), device
        self._model: Any = None
        self._templates: dict[str, Any] = {}
        self._data = functions.data()
        self.records = count_records(self._data)

    @classmethod
    def of(cls, spec: WorkerSpec) -> Worker:
        """Import the functions, and return the worker. Raises ``LimpetError``, too."""
        return cls(Functions.resolve(spec), spec.batch_size, spec.keys, spec.device)

    def load(self, url: str, digest: str) -> None:
        """Load the version at ``url``, whose manifest must have ``digest``."""
        self._model = None  # not two models at once
        snapshot = open_snapshot(url)
        if snapshot.digest != digest:
            raise NotFound(f"{url} was replaced by another snapshot", key=url)
        with snapshot.not_found_if_deleted():
            source: Any = Snapshot(snapshot)
            if self._keys:
                source = load_snapshot(snapshot, keys=self._keys, device=self._device)
            self._model = self._functions.setup(source)
        torch = torch_or_none()
        if torch is not None and isinstance(self._model, torch.nn.Module):
            self._model.eval()

    def evaluate(self, start: int, stop: int) -> State:
        """Return the merged state of the metrics of the records ``start`` up to ``stop``."""
        states = MetricStates(self._templates)
        name = getattr(self._functions.evaluate, "__name__", "evaluate")
        with _no_grad():
            collate = self._functions.collate
            for batch in read_batches(self._data, start, stop, self._batch_size, collate):
                states.add(self._functions.evaluate(self._model, batch), f"{name}()")
        return states.to_plain()

    def compute(self, states: Sequence[State]) -> dict[str, float]:
        """Return the metrics, from the states of all tasks."""
        needed = {name for state in states for name in state["states"]}
        if not needed <= self._templates.keys():  # this worker has evaluated nothing so far
            step = self._batch_size or 1
            for start in range(0, self.records, step):
                self.evaluate(start, min(start + step, self.records))
                if needed <= self._templates.keys():
                    break
        return compute(states, self._templates)


def count_records(data: Any) -> int:
    """Return the number of records. Raises ``LimpetError`` if it is not a map-style dataset."""
    try:
        records = len(data)
        _ = data.__getitem__
    except (TypeError, AttributeError) as e:
        raise LimpetError(
            "The data of an evaluation is not a map-style dataset",
            expected="an object with len() and [index], such as a torch Dataset or a list",
            found=f"a {type(data).__name__}",
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
    processes does; to create one for each task would take longer. See ``WorkerSpec``."""
    from torch.utils.data import default_collate, default_convert

    if batch_size is None:
        convert = collate or default_convert
        for number in range(start, stop):
            yield convert(data[number])
        return
    read_many = getattr(data, "__getitems__", None)
    for first in range(start, stop, batch_size):
        numbers = [*range(first, min(first + batch_size, stop))]
        records = read_many(numbers) if read_many else [data[number] for number in numbers]
        yield (collate or default_collate)(records)


def _no_grad() -> AbstractContextManager[object]:
    torch = torch_or_none()
    return nullcontext() if torch is None else torch.no_grad()
