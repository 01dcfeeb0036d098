"""The share of one rank of an evaluation: every k-th batch of the data for k ranks.

All ranks take equally many batches, so that models whose forward pass is a collective can be
evaluated. A rank without a batch of its own evaluates one again, and drops the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from limpet.errors import LimpetError
from limpet.evaluation.metric_states import MetricStates, State, compute
from limpet.evaluation.worker import describe, read_batches
from limpet.generators import isolated_rng
from limpet.lazy_torch import torch_or_none


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """What is evaluated. ``records``: the number of records in ``data``.

    The other fields are as for ``TrainingEvaluation``.
    """

    model: Any
    evaluate: Callable[[Any, Any], Any]
    data: Any
    records: int
    batch_size: int | None
    collate: Callable[[list[Any]], Any] | None

    @property
    def batches(self) -> int:
        return -(-self.records // (self.batch_size or 1))

    def range_of(self, batch: int) -> tuple[int, int]:
        """Return the first record of a batch, and the end."""
        size = self.batch_size or 1
        return batch * size, min((batch + 1) * size, self.records)


class ShareResult(msgspec.Struct, frozen=True):
    """What a rank sends: its merged state, or why it has none.

    ``error``: of the user's function. ``is_complete``: False if the rank stopped before the end.
    """

    state: State
    error: str
    is_complete: bool


class Share:
    """The batches ``rank``, ``rank + ranks``, and so on, which one rank evaluates one by one."""

    def __init__(self, spec: EvaluationSpec, rank: int, ranks: int, first_step: int) -> None:
        self._spec, self._rank, self._ranks = spec, rank, ranks
        self.first_step = self.last_step = first_step
        self.rounds = -(-spec.batches // ranks)
        self.rounds_done = 0
        self.error: Exception | None = None
        self._error_text = ""
        self.templates: dict[str, Any] = {}
        self._states = MetricStates(self.templates)

    @property
    def is_complete(self) -> bool:
        return self.rounds_done == self.rounds

    def evaluate_next(self, step: int) -> None:
        """Evaluate the next batch with the parameters after ``step``.

        An ``Exception`` is kept in ``error``: the other ranks must learn of it. After that, a call
        evaluates nothing.
        """
        batch = self.rounds_done * self._ranks + self._rank
        is_own = batch < self._spec.batches
        start, stop = self._spec.range_of(batch if is_own else batch % self._spec.batches)
        if self.error is None:
            name = getattr(self._spec.evaluate, "__name__", "evaluate")
            states = self._states if is_own else MetricStates({})
            try:
                with evaluating(self._spec.model), isolated_rng():
                    states.add(self._evaluate(start, stop), f"{name}()")
            except Exception as e:  # noqa: BLE001  (raised on all ranks, when they are told)
                self.error = e
                self._error_text = f"records {start} to {stop - 1} at step {step}: {describe(e)}"
        self.last_step = step
        self.rounds_done += 1

    def _evaluate(self, start: int, stop: int) -> Any:
        spec = self._spec
        (batch,) = read_batches(spec.data, start, stop, spec.batch_size, spec.collate)
        return spec.evaluate(spec.model, batch)

    def result(self) -> ShareResult:
        is_whole = self.error is None and self.is_complete
        state = self._states.to_plain() if is_whole else {}
        return ShareResult(state, self._error_text, self.is_complete)


class Merged(msgspec.Struct, frozen=True):
    """The result of all ranks: the metrics, or an ``error``, or None if the evaluation was
    abandoned."""

    metrics: dict[str, float] | None
    error: str


def merge_shares(results: Sequence[ShareResult], templates: dict[str, Any]) -> Merged:
    """Merge the results of all ranks, as the first one does. ``templates``: its own."""
    for rank, result in enumerate(results):
        if result.error:
            on_rank = f"on rank {rank}, " if len(results) > 1 else ""
            return Merged(None, f"{on_rank}{result.error}")
    if not all(result.is_complete for result in results):
        return Merged(None, "")
    states = [result.state for result in results]
    unknown = {name for state in states for name in state["states"]} - templates.keys()
    if unknown:
        what = f"no batch of rank 0 has the metric {', '.join(sorted(unknown))}"
        return Merged(None, f"{what}; evaluate() must return the same metrics for every batch")
    try:
        return Merged(compute(states, templates), "")
    except LimpetError as e:
        return Merged(None, describe(e))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Compute without gradients, with all modules of ``model`` in evaluation mode, and restore the
    mode of each of them."""
    torch = torch_or_none()
    if torch is None:
        yield
        return
    is_module = isinstance(model, torch.nn.Module)
    modes = [(module, module.training) for module in model.modules()] if is_module else []
    try:
        if is_module:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
