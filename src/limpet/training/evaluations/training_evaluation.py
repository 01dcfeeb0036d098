"""``TrainingEvaluation``: evaluation inside the training loop, by the ranks that train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

from limpet import events
from limpet.arguments import whole
from limpet.errors import LimpetError
from limpet.evaluation.options import check_argument
from limpet.evaluation.worker import count_records
from limpet.ranks.agreement import Agreement, LocalAgreement, make_agreement
from limpet.ranks.group import all_reduce, broadcast_from_first
from limpet.run.policy import Never, SavePolicy
from limpet.run.records import check_job_name
from limpet.text import warn_user
from limpet.training.cadence import Cadence
from limpet.training.checkpointer import Checkpointer
from limpet.training.evaluations.recording import read_last, record_exact, record_inexact
from limpet.training.evaluations.share import (
    EvaluationSpec,
    Merged,
    Share,
    ShareResult,
    merge_shares,
)

_check = partial(check_argument, "TrainingEvaluation")


@dataclass(frozen=True, slots=True)
class Score:
    """The result of an evaluation inside the training.

    ``version``: the one with whose folder it is recorded. ``first_step`` and ``last_step``: those
    whose parameters were evaluated. ``is_exact``: the metrics are those of the version.
    """

    version: str
    is_exact: bool
    first_step: int
    last_step: int
    metrics: dict[str, float] = field(default_factory=dict)


class TrainingEvaluation:
    """Evaluates the ``model`` that is being trained, when the policy ``every`` says so::

        with (
            limpet.Checkpointer("runs/a", state) as ckpt,
            limpet.TrainingEvaluation(
                ckpt, model, evaluate, data=dataset, every=limpet.EverySteps(500)
            ) as evaluation,
        ):
            ckpt.resume()
            for batch in loader:
                evaluation.step()
                train_step(batch)
                ckpt.step()

    ``evaluate(model, batch)`` returns a dict of metrics for one batch, as for ``Evaluation``; the
    model is in evaluation mode, and no gradients are computed. ``data``: a map-style dataset, the
    same on all ranks, which divide its batches among them. ``batch_size=None``: each of its items
    is a batch. ``collate``: merges the records of a batch. The random numbers of the training do
    not change.

    ``on="paused"``: the training waits until all of the data is evaluated. The metrics are exact,
    and are recorded with the version of that step, which is saved if it is not.

    ``on="current"``: each call of ``step`` evaluates one batch, with the parameters as they are
    then. The metrics are recorded as inexact, with the first and the last of these steps, about the
    newest version. They never decide which version is the best, nor when to stop. With
    ``keep=True``, the state after the last of these steps is saved for that.

    ``every``: a save policy; ``EverySteps``, ``EverySeconds``, ``EveryEpoch``, and ``AtEnd``
    combine with ``|``. An evaluation that is due while another one runs follows it; several become
    one. ``name`` names the records. A resumed training does not repeat an evaluation whose metrics
    are recorded, and begins one again that was interrupted.

    Use it as a context manager, inside that of the Checkpointer: its normal end completes the
    evaluation in progress, and makes the one that is due at the last step. After an exception,
    such as ``Preempted``, nothing is recorded. The event ``training_evaluated`` reports each end.

    Raises ``LimpetError`` for an invalid argument.
    """

    def __init__(  # noqa: PLR0913  (public interface: the user decides each of them)
        self,
        ckpt: Checkpointer,
        model: Any,
        evaluate: Callable[[Any, Any], Any],
        *,
        data: Any,
        every: SavePolicy,
        on: Literal["current", "paused"] = "paused",
        keep: bool = False,
        batch_size: int | None = 32,
        collate: Callable[[list[Any]], Any] | None = None,
        name: str = "validation",
    ) -> None:
        is_policy = isinstance(every, SavePolicy) and not isinstance(every, Never)
        is_policy = is_policy and not every.on_exception
        _check("every", every, is_policy, "a policy such as limpet.EverySteps(500)")
        _check("on", on, on in ("current", "paused"), '"current" or "paused"')
        is_batch_size = whole(batch_size, 1) is not None
        _check("batch_size", batch_size, batch_size is None or is_batch_size, "1 or more, or None")
        _check("keep", keep, not keep or on == "current", 'False, except with on="current"')
        _check("evaluate", evaluate, callable(evaluate), "a function")
        records = count_records(data)
        self.name = check_job_name(name)
        self.newest: Score | None = None
        """The result of the newest evaluation, or None."""

        self._ckpt, self._every, self._is_paused, self._keep = ckpt, every, on == "paused", keep
        self._spec = EvaluationSpec(model, evaluate, data, records, whole(batch_size), collate)
        self._group = ckpt._group
        self._agreement: Agreement | LocalAgreement = LocalAgreement()
        self._agreed: frozenset[str] = frozenset()
        self._cadence: Cadence | None = None
        self._share: Share | None = None
        self._number, self._seen_step, self._state = 0, 0, "new"
        self._began = (0, 0)

    def __repr__(self) -> str:
        return f"<TrainingEvaluation {self.name} of {self._ckpt.run.url}>"

    def step(self) -> None:
        """Evaluate what is due. Call it before each mini-batch, equally often on all ranks.

        Raises ``LimpetError`` on all ranks if ``evaluate`` raised on one of them: the error names
        the records and the step. Nothing is recorded then; the training may go on. Raises
        ``RankFailed`` within a bounded time if a rank is dead or hangs, and ``StoreError`` or
        ``CommitError`` if the metrics cannot be recorded.
        """
        if self._state != "entered":
            raise LimpetError(
                f"The evaluation {self.name} is used outside of its `with` block",
                todo="Write `with limpet.TrainingEvaluation(...) as evaluation:` around the"
                " training loop, so that its end completes what is in progress",
            )
        self._ckpt._lifecycle.check_open()
        cadence = self._start()
        step = self._ckpt._step_counter.step
        is_new = step != self._seen_step
        self._agreed |= self._agreement.step()
        self._seen_step = step
        if self._share is None and is_new and self._is_due(cadence):
            self._begin(step)
        if self._share is not None:
            self._advance(self._share, step, may_end=is_new)

    def _start(self) -> Cadence:
        """Read which evaluation was the last one, at the first step, or after another resume."""
        ckpt = self._ckpt
        if self._cadence is not None and ckpt._step_counter.step >= self._seen_step:
            return self._cadence
        if self._cadence is None:
            self._cadence = Cadence(self._every, "wait", self._group, ckpt._step_counter)
            self._agreement = make_agreement(self._group, f"evaluation {self.name}")
        else:
            self._abandon("the training has resumed from an earlier version")
        arguments = f"{self._spec.records} records in batches of {self._spec.batch_size}"
        self._began = read_last(ckpt, self.name, f"{arguments}, {self._every}, {self._is_paused}")
        self._cadence.restart(self._began)
        self._agreed, self._seen_step = frozenset(), self._began[0]
        return self._cadence

    def _is_due(self, cadence: Cadence) -> bool:
        return cadence.save_reason(False, self._agreed, self._agreement, False) is not None

    def _begin(self, step: int) -> None:
        if self._cadence is not None:
            self._cadence.restart()
        self._number, self._agreed = self._number + 1, frozenset()
        self._began = step, self._ckpt._step_counter.epoch
        self._share = Share(self._spec, self._group.rank, self._group.size, step)

    def _advance(self, share: Share, step: int, may_end: bool) -> None:
        """Evaluate one batch, or all of them if the training is paused, and end the evaluation if
        this was the last one. ``may_end`` is False between the mini-batches of a step, where the
        state belongs to no step."""
        abandon = f"abandon {self._number}"
        while not share.is_complete and abandon not in self._agreed:
            share.evaluate_next(step)
            must_leave = self._is_paused and self._ckpt._preemption.is_pending
            if share.error is not None or must_leave:
                self._propose(abandon)
            if not self._is_paused:
                break
            self._agreed |= self._agreement.step()
        if may_end and (share.is_complete or abandon in self._agreed):
            self._end(share)

    def _propose(self, abandon: str) -> None:
        """Let all ranks stop after the same batch: the model may communicate in each."""
        if self._group.size == 1:
            self._agreed |= {abandon}
        else:
            self._agreement.propose(abandon)

    def _end(self, share: Share) -> None:
        self._share, steps = None, (share.first_step, share.last_step)
        merged = all_reduce(
            self._group,
            f"the evaluation {self.name} of step {share.first_step}",
            share.result,
            ShareResult,
            lambda results: merge_shares(results, share.templates),
            Merged,
        )
        if merged.error:
            self._report("FAILED", steps, cause=merged.error)
            raise LimpetError(
                f"The evaluation {self.name} at step {share.first_step} failed",
                expected="metrics for all of the data",
                found=merged.error.rstrip("."),
                todo="Nothing was recorded, and the state has not changed: correct evaluate(), or"
                " catch the error and go on",
            ) from share.error
        if merged.metrics is None:
            self._report("ABANDONED", steps, cause="the process will be stopped")
            return
        found = self._ckpt, self.name, merged.metrics
        if self._is_paused:
            version = record_exact(*found, self._began)
        else:
            version = record_inexact(*found, steps, self._began, self._keep)
        self._ckpt._saver.checks.evaluated.update(merged.metrics)
        self.newest = Score(version, self._is_paused, *steps, merged.metrics)
        self._report("DONE" if self._is_paused else "INEXACT", steps, merged.metrics)

    def _report(
        self,
        state: Literal["DONE", "INEXACT", "FAILED", "ABANDONED"],
        steps: tuple[int, int],
        metrics: dict[str, float] | None = None,
        cause: str = "",
    ) -> None:
        events.emit(
            "training_evaluated",
            run=self._ckpt.run.url,
            evaluation=self.name,
            state=state,
            first_step=steps[0],
            last_step=steps[1],
            metrics=metrics or {},
            cause=cause,
        )

    # -- the end -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._state != "new":
            raise LimpetError(f"The evaluation {self.name} was used before", todo="Create one")
        self._state, self._seen_step = "entered", self._ckpt._step_counter.step
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._state = "closed"
        try:
            if error is None:
                self._finish()
        except BaseException as e:
            error = e
            raise
        finally:
            self._abandon(f"the training ended with {type(error).__name__}")
            self._agreement.close()

    def _finish(self) -> None:
        """Complete what is in progress, and evaluate the last step if that is due."""
        step = self._ckpt._step_counter.step
        if (
            self._cadence is None
            and self._ckpt._step_counter.has_counted
            and step != self._seen_step
        ):
            warn_user(
                f"{self!r} has evaluated nothing before the end of the training, because"
                " evaluation.step() was never called: call it before each mini-batch, on all ranks",
                UserWarning,
            )
        # there may have been no step: after a resume from the last version
        cadence = self._start()
        self._drain(step)
        if step == self._began[0]:
            return
        operation, is_due = f"the end of the evaluation {self.name}", cadence.is_due_on_this_rank
        # no step follows on which the ranks could agree
        if self._every.at_end or broadcast_from_first(self._group, operation, is_due, bool):
            self._begin(step)
            self._drain(step)

    def _drain(self, step: int) -> None:
        while (share := self._share) is not None:
            self._agreed |= self._agreement.step()
            self._advance(share, step, may_end=True)

    def _abandon(self, cause: str) -> None:
        if (share := self._share) is not None:
            self._share = None
            self._report("ABANDONED", (share.first_step, share.last_step), cause=cause)
