"""``TrainingEvaluation``: evaluation inside the training, by the ranks or the workers that train.

Rank r of k evaluates the batches r, r + k, and so on. Ranks make the same steps, so that is as even
as a queue, without a message per batch. All evaluate equally many, because ``forward()`` may be a
collective. Workers that have a queue take tasks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import msgspec

from limpet import events
from limpet.arguments import require, whole
from limpet.errors import LimpetError, NotFound
from limpet.evaluation.metric_states import MetricStates, State, compute
from limpet.evaluation.worker import Work, count_records, describe, read_batches
from limpet.format.names import MAX_STEP, Version, random_id
from limpet.format.records import Evaluation, InexactEvaluation
from limpet.generators import kept_generators
from limpet.lazy_torch import torch_or_none
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.ranks.agreement import AnyAgreement, LocalAgreement, make_agreement
from limpet.ranks.group import Group, all_reduce, broadcast_from_first
from limpet.run.catalog import read_training_metadata
from limpet.run.policy import Never, OnPreemption, SavePolicy
from limpet.run.records import check_job_name
from limpet.snapshot import pins
from limpet.tasks.queue import Queue
from limpet.training.cadence import Cadence
from limpet.training.checkpointer import Checkpointer
from limpet.training.saver import version_of

_FIELD, _BEGUN = "evaluated", "evaluation_begun"
"""The fields of the training metadata of a version: by name, the numbers of steps and of epochs at
which the last completed evaluation began, and the last one of the version of its step."""

Steps = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Score:
    """The result of an evaluation, with whose ``version`` it is recorded. ``is_exact``: the metrics
    are those of the version, not of parameters after different steps."""

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
    newest version. They decide which version is the best, and when to stop, only with
    ``counts=True``; for ``StopWhen``, they are those of the last of these steps. With
    ``keep=True``, the state after that step is saved for the record.

    ``every``: a save policy other than ``Never``, ``OnPreemption``, and ``OnException``. It also
    evaluates the last step. An evaluation that is due while another one runs follows it; several
    become one. ``name`` names the records. A resumed training does not repeat an evaluation whose
    metrics are recorded, and begins one again that was interrupted.

    Use it as a context manager, inside that of the Checkpointer: its normal end completes the
    evaluation in progress, and evaluates the last step. After an exception,
    such as ``Preempted``, nothing is recorded. The event ``training_evaluated`` reports each end.

    With ``queue=``, workers evaluate, which have ``model`` and ``evaluate`` (here None): those of
    ``Servers.train(..., evaluation=...)``, or any with a ``limpet.evaluation.TaskEvaluator``.
    ``data`` may be a number of records, and ``step`` does not wait. Of ``Servers``, ``on="cut"``
    evaluates the rows and dense values of a step while the training goes on, and ``"paused"`` while
    it waits; both save the step, and are exact. Without them, there is only ``"current"``, and
    ``finish`` completes what is in progress.

    Raises ``LimpetError`` for an invalid argument.
    """

    def __init__(  # noqa: PLR0913  (public interface: the user decides each of them)
        self,
        ckpt: Checkpointer,
        model: Any = None,
        evaluate: Callable[[Any, Any], Any] | None = None,
        *,
        data: Any,
        every: SavePolicy,
        on: Literal["current", "paused", "cut"] = "paused",
        keep: bool = False,
        counts: bool = False,
        batch_size: int | None = 32,
        collate: Callable[[list[Any]], Any] | None = None,
        name: str = "validation",
        queue: Queue | None = None,
    ) -> None:
        require("ckpt", isinstance(ckpt, Checkpointer), "a Checkpointer", ckpt)
        is_policy = isinstance(every, SavePolicy) and not isinstance(every, Never | OnPreemption)
        is_policy = is_policy and not every.on_exception
        require("every=", is_policy, "a policy such as limpet.EverySteps(500)", every)
        require("on=", on in ("current", "paused", "cut"), '"current", "paused", or "cut"', on)
        is_possible = on != "cut" or queue is not None
        require("on=", is_possible, '"current" or "paused" without queue=', on)
        is_batch_size = whole(batch_size, 1) is not None or (batch_size is None and queue is None)
        require("batch_size=", is_batch_size, "1 or more, or None", batch_size)
        require("keep=", not keep or on == "current", 'False, except with on="current"', keep)
        expected = 'False, except with on="current": exact metrics always count'
        require("counts=", not counts or on == "current", expected, counts)
        records = None
        if queue is None:
            require("evaluate=", callable(evaluate), "a function", evaluate)
        else:
            is_valid = isinstance(queue, Queue) and ckpt._group.size == 1
            require("queue=", is_valid, "a Queue, in a training with one rank", queue)
            found = (model, evaluate, collate)
            what = "model, evaluate, and collate with queue="
            require(what, found == (None, None, None), "None: the workers have them", found)
            records = whole(data, 1)
        records = records or count_records(data)
        self.name = check_job_name(name)
        self.newest: Score | None = None
        """The result of the newest evaluation, or None."""

        self.queue = queue
        self.servers: Any = None
        """What can ``hold`` a cut and ``release`` it: set by ``Servers.train``."""

        self._ckpt, self._every, self.on, self._keep = ckpt, every, on, keep
        self._is_exact, self._counts = on != "current", bool(counts)
        self._spec = EvaluationSpec(model, evaluate, data, records, whole(batch_size), collate)
        self._group = ckpt._group
        self._agreement: AnyAgreement = LocalAgreement()
        self._agreed: frozenset[str] = frozenset()
        self._cadence: Cadence | None = None
        self._share: Share | QueueShare | None = None
        self._held = ExitStack()  # what an evaluation by workers needs until it ends
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
                f"The evaluation {self.name} is used outside of its `with` block, whose end"
                " completes what is in progress"
            )
        self._ckpt._lifecycle.check_open()
        cadence = self._start()
        step = self._ckpt._step_counter.progress.step
        is_new = step != self._seen_step
        self._agreed |= self._agreement.step()
        self._seen_step = step
        is_free, agreed = self._share is None and is_new, self._agreed
        if is_free and cadence.save_reason(False, agreed, self._agreement) is not None:
            self._begin(step)
        if self._share is not None:
            self._advance(self._share, step, may_end=is_new)

    @property
    def is_running(self) -> bool:
        """True while an evaluation is in progress; the training waits for it if ``on="paused"``."""
        return self._share is not None

    def _start(self) -> Cadence:
        """Read which evaluation was the last one, at the first step, or after another resume."""
        ckpt = self._ckpt
        if self._cadence is not None and ckpt._step_counter.progress.step >= self._seen_step:
            return self._cadence
        if self._cadence is None:
            self._cadence = Cadence(self._every, self._group, ckpt._step_counter)
            self._agreement = make_agreement(self._group, f"evaluation {self.name}")
        else:
            self.abandon("the training has resumed from an earlier version")
        for job in () if self.queue is None else self.queue.jobs():  # of an earlier process
            if job.kind == "evaluation" and job.name.startswith(f"{self.name} at step "):
                job.cancel()
        spec, how = self._spec, (self._every, self.on, self._counts)
        arguments = f"{spec.records} records in batches of {spec.batch_size}, {how}"
        self._began = self._read_last(arguments)
        self._cadence.restart(self._began)
        self._agreed, self._seen_step = frozenset(), self._began[0]
        return self._cadence

    def _begin(self, step: int) -> None:
        if self._cadence is not None:
            self._cadence.restart()
        self._number, self._agreed = self._number + 1, frozenset()
        self._began = step, self._ckpt._step_counter.progress.epoch
        if self.queue is None:
            self._share = Share(self._spec, self._group.rank, self._group.size, step)
            return
        cut = self._hold(step) if self._is_exact else ""
        self._share = QueueShare(self._spec, self.queue, self.name, step, cut, self._held)

    def _hold(self, step: int) -> str:
        """Save this step unless it is, and return the cut that the servers hold: no commit comes in
        between. Later versions say that this evaluation began."""
        ckpt, saver = self._ckpt, self._ckpt._saver
        if self.servers is None:
            what = f'The evaluation {self.name} with queue= and on="{self.on}" needs Servers'
            raise LimpetError(f'{what}: give it to their train(), or use on="current"')
        is_saved, newest = saver.saved_step == step, saver.writer.newest
        version = version_of(newest) if newest and is_saved else Version(step, ckpt._branch)
        self._held.enter_context(pins.hold_pin(ckpt.run.location(version), random_id(), version))
        if saver.begun_step != step:
            saver.wait_before_save(step)
            ckpt._start_save("request")
        cut: str = self.servers.hold()
        self._held.callback(self.servers.release, cut)
        self._complete(self._began, _BEGUN)
        return cut

    def _advance(self, share: Share | QueueShare, step: int, may_end: bool) -> None:
        """Evaluate one batch, or all if the training is paused; or look what workers have done.
        ``may_end`` is False between the mini-batches of a step, where the state belongs to none."""
        is_paused = self.on == "paused" and self.queue is None
        may_end = may_end or self.servers is not None
        abandon = f"abandon {self._number}"
        while not share.is_complete and abandon not in self._agreed:
            share.evaluate_next(step)
            must_leave = is_paused and self._ckpt._preemption.is_pending
            if share.error is not None or must_leave:
                # all ranks stop after the same batch: the model may communicate in each
                if self._group.size == 1:
                    self._agreed |= {abandon}
                else:
                    self._agreement.propose(abandon)
            if not is_paused:
                break
            self._agreed |= self._agreement.step()
        if may_end and (share.is_complete or abandon in self._agreed):
            self._share = None
            with self._held:
                self._end(share)

    def _end(self, share: Share | QueueShare) -> None:
        last_step = share.first_step if self._is_exact else share.last_step
        steps = share.first_step, last_step
        merged = share.merge(self._group, f"the evaluation {self.name} of step {share.first_step}")
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
        if self._is_exact:
            version = self._record_exact(merged.metrics)
        else:
            version = self._record_inexact(merged.metrics, steps)
        saver, cause = self._ckpt._saver, ""
        if self._is_exact or self._counts:
            saver.evaluated_metrics.update(merged.metrics)
        else:
            saver.inexact_metrics.update(merged.metrics)
            if saver.objectives.keys() & merged.metrics.keys():
                cause = f"measured over steps {steps[0]} to {steps[1]}, so it decides neither which"
                cause += " version is the best nor when to stop; with counts=True, it does"
        self.newest = Score(
            version=version,
            is_exact=self._is_exact,
            first_step=share.first_step,
            last_step=last_step,
            metrics=merged.metrics,
        )
        self._report("DONE" if self._is_exact else "INEXACT", steps, merged.metrics, cause)

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
            raise LimpetError(f"The evaluation {self.name} was used before: create a new one")
        self._state, self._seen_step = "entered", self._ckpt._step_counter.progress.step
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._state = "closed"
        try:
            while error is None and self.queue is None and not self.finish():
                pass
        except BaseException as e:
            error = e
            raise
        finally:
            self.abandon(f"the training ended with {type(error).__name__}")
            self._agreement.close()

    def finish(self) -> bool:
        """With ``queue=``: complete what is in progress, and evaluate the last step if it is due,
        while workers do the tasks. Returns whether that is done; call it again until then. Raises
        as ``step``. Without ``queue=``, the end of the ``with`` block does it."""
        if self._ckpt._preemption.is_leaving and self.queue is not None:
            self.abandon("the process will be stopped")
            return True
        # there may have been no step: after a resume from the last version
        step, cadence = self._ckpt.current_step, self._start()
        if self._share is not None:
            self._agreed |= self._agreement.step()
            self._advance(self._share, step, may_end=True)
        is_over = step == self._began[0] or self._ckpt._preemption.is_leaving
        if self._share is not None or is_over:
            return self._share is None
        # no step follows on which the ranks could agree
        operation, is_due = f"the end of the evaluation {self.name}", cadence.is_due
        if self._every.at_end or broadcast_from_first(self._group, operation, is_due, bool):
            if self._is_exact and self.queue is None:
                self._ckpt.save()  # it is saved in any case, so also if the evaluation fails
            self._begin(step)
        return self._share is None

    def abandon(self, cause: str) -> None:
        """End the evaluation in progress, if there is one, without a record. It begins again at the
        next step, or after a resume."""
        self._held.close()
        self._seen_step = MAX_STEP
        if (share := self._share) is not None:
            self._share = None
            self._report("ABANDONED", (share.first_step, share.last_step), cause=cause)

    # -- what is recorded ----------------------------------------------------------------------

    def _read_last(self, arguments: str) -> Steps:
        """Return the steps and epochs at which the last complete evaluation began. All ranks call
        this; ``LimpetError`` if their ``arguments`` differ."""

        def combine(found: list[str]) -> list[int]:
            if len({*found}) > 1:
                raise LimpetError(
                    f"The ranks have different arguments for the evaluation {self.name}",
                    expected=found[0],
                    found=next(f for f in found if f != found[0]),
                    todo="Give all ranks the same data, batch_size, every, on, and counts",
                )
            return list(self._find_last())

        operation = f"the begin of the evaluation {self.name}"
        steps, epochs = all_reduce(self._group, operation, lambda: arguments, str, combine, list)
        self._complete((steps, epochs))
        return steps, epochs

    def _find_last(self) -> Steps:
        ckpt, newest = self._ckpt, self._ckpt._saver.writer.newest
        if newest is None:
            return 0, 0
        version, metadata = version_of(newest), read_training_metadata(newest)
        last, begun = self._steps(metadata, _FIELD), self._steps(metadata, _BEGUN)
        if begun[0] > last[0]:
            with suppress(NotFound):  # deleted since
                found = ckpt.run.evaluations(begun[0]).get(self.name)
                last = begun if found is not None and found.state == "DONE" else last
        # records about this version may be newer than it: the training ended before the next one
        evaluations = ckpt.run.catalog.evaluations.read(version, newest.digest)
        recorded = [version.step for r in evaluations.of(Evaluation) if r.name == self.name]
        inexact = evaluations.of(InexactEvaluation)
        recorded += [r.first_step for r in inexact if r.name == self.name]
        newer = max((step for step in recorded if step <= version.step), default=0)
        return (newer, ckpt._step_counter.progress.epoch) if newer > last[0] else last

    def _steps(self, metadata: Mapping[str, Any], key: str) -> Steps:
        stored = metadata.get(key)
        last = stored.get(self.name) if isinstance(stored, dict) else None
        if not isinstance(last, list) or len(last) != 2 or not all(type(n) is int for n in last):
            return 0, 0
        return last[0], last[1]

    def _record_exact(self, metrics: Mapping[str, float]) -> str:
        """Record the metrics of a step with its version, which is saved first if there is none.
        Early stopping sees them at once. Return the version. All ranks call this."""
        ckpt, step = self._ckpt, self._began[0]
        if self.queue is None:
            snapshot = reader_of(ckpt.save())
        else:
            if ckpt._saver.saved_step < step:
                ckpt._saver.wait_on_all_ranks("the record of an evaluation")
            snapshot = reader_of(ckpt.run.open(ckpt.run.find(step)))
        ckpt._saver.add_metrics(snapshot, metrics, self.name)
        ckpt._early_stop.observe(metrics, step, ckpt._agreement)
        self._complete(self._began)
        return str(version_of(snapshot))

    def _record_inexact(self, metrics: Mapping[str, float], steps: Steps) -> str:
        """Record the metrics about the newest version, and return it. The current step is saved
        first with ``keep``, and if there is no version. If they count, early stopping sees them at
        once, as those of the last step: several evaluations may be about one version. All ranks
        call this."""
        ckpt, operation = self._ckpt, f"the record of the evaluation {self.name}"
        before = ckpt._saver.evaluated
        self._complete(self._began)  # the version that is saved now says so, too
        snapshot: Snapshot | None = None

        def has_version() -> bool:  # the first one may be in flight
            return (ckpt.run.latest() or ckpt._saver.wait()) is not None

        def record() -> str:
            about = snapshot or ckpt.run.latest()
            if about is None:
                raise LimpetError(f"The versions of {ckpt.run.url} were deleted meanwhile")
            content = {"metrics": dict(metrics), "first_step": steps[0], "last_step": steps[1]}
            content["counts"] = self._counts
            ckpt.run.put_record(InexactEvaluation, self.name, about, **content)
            return str(version_of(reader_of(about)))

        try:
            where = f"{operation}: its version"
            if self._keep or not broadcast_from_first(self._group, where, has_version, bool):
                snapshot = ckpt.save()
            version = broadcast_from_first(self._group, operation, record, str)
        except BaseException:
            ckpt._saver.evaluated = before
            raise
        if self._counts:
            ckpt._early_stop.observe(metrics, steps[1], ckpt._agreement)
        return version

    def _complete(self, began: Steps, key: str = _FIELD) -> None:
        """Let the versions that are saved from now on say that this evaluation is complete."""
        saver = self._ckpt._saver
        earlier = saver.evaluated.get(key, {})
        saver.evaluated = {**saver.evaluated, key: {**earlier, self.name: [*began]}}


# -- the share of one rank -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """What is evaluated, as in ``TrainingEvaluation``. ``records``: their number in ``data``."""

    model: Any
    evaluate: Any
    data: Any
    records: int
    batch_size: int | None
    collate: Callable[[list[Any]], Any] | None


class ShareResult(msgspec.Struct, frozen=True):
    """What a rank sends: its merged state, or the ``error`` of the user's function.
    ``is_complete``: False if the rank stopped before the end."""

    state: State
    error: str
    is_complete: bool


class Share:
    """The batches ``rank``, ``rank + ranks``, and so on, which one rank evaluates one by one."""

    def __init__(self, spec: EvaluationSpec, rank: int, ranks: int, first_step: int) -> None:
        self._spec, self._rank, self._ranks = spec, rank, ranks
        self.first_step = self.last_step = first_step
        self._batches = -(-spec.records // (spec.batch_size or 1))
        self._round, self._rounds = 0, -(-self._batches // ranks)
        self.error: Exception | None = None
        self._error_text = ""
        self._templates: dict[str, Any] = {}
        self._states = MetricStates(self._templates)

    @property
    def is_complete(self) -> bool:
        return self._round == self._rounds

    def evaluate_next(self, step: int) -> None:
        """Evaluate the next batch after ``step``. Its ``Exception`` is kept: other ranks must learn
        of it. Later calls evaluate nothing."""
        spec, number = self._spec, self._round * self._ranks + self._rank
        size, is_own = spec.batch_size or 1, number < self._batches
        start = number % self._batches * size
        stop = min(start + size, spec.records)
        if self.error is None:
            name = getattr(spec.evaluate, "__name__", "evaluate")
            states = self._states if is_own else MetricStates({})
            try:
                with evaluating(spec.model), kept_generators():
                    (batch,) = read_batches(spec.data, start, stop, spec.batch_size, spec.collate)
                    states.add(spec.evaluate(spec.model, batch), f"{name}()")
            except Exception as e:  # noqa: BLE001  (raised on all ranks, when they are told)
                self.error = e
                self._error_text = f"records {start} to {stop - 1} at step {step}: {describe(e)}"
        self.last_step = step
        self._round += 1

    def _result(self) -> ShareResult:
        is_whole = self.error is None and self.is_complete
        state = self._states.to_plain() if is_whole else {}
        return ShareResult(state, self._error_text, self.is_complete)

    def merge(self, group: Group, operation: str) -> Merged:
        """Return the result of all ranks, which all call this."""
        return all_reduce(group, operation, self._result, ShareResult, self._combine, Merged)

    def _combine(self, results: list[ShareResult]) -> Merged:
        """Merge the results of all ranks, on the first one."""
        for rank, result in enumerate(results):
            if result.error:
                on_rank = f"on rank {rank}, " if len(results) > 1 else ""
                return Merged(None, f"{on_rank}{result.error}")
        if not all(result.is_complete for result in results):
            return Merged(None, "")
        states = [result.state for result in results]
        unknown = {name for state in states for name in state["states"]} - self._templates.keys()
        if unknown:
            what = f"no batch of rank 0 has the metric {', '.join(sorted(unknown))}"
            return Merged(None, f"{what}; evaluate() must return the same metrics for every batch")
        try:
            return Merged(compute(states, self._templates), "")
        except LimpetError as e:
            return Merged(None, describe(e))


class QueueShare:
    """An evaluation by workers, as tasks of a queue. Its jobs are canceled when ``held`` ends."""

    def __init__(
        self, spec: EvaluationSpec, queue: Queue, name: str, step: int, cut: str, held: ExitStack
    ) -> None:
        self.first_step = self.last_step = step
        self.error: Exception | None = None
        self._queue, self._held, self._merged = queue, held, Merged(None, "")
        self._name = f"{name} at step {step}"
        self._work = Work("evaluate", {}, spec.batch_size, url=cut, records=spec.records)
        self._add(self._work, spec.records)

    def _add(self, work: Work, records: int) -> None:
        name = f"{self._name}: {work.kind}"
        size, data = work.task_size, {work.encode(): records}
        self._job = self._queue.add("evaluation", data, task_size=size, name=name)
        self._held.callback(self._job.cancel)

    @property
    def is_complete(self) -> bool:
        return self._merged.metrics is not None or self.error is not None

    def evaluate_next(self, step: int) -> None:
        """Look whether the workers have done all tasks. One that has the metrics merges them."""
        self.last_step = step
        if not self._job.has_ended():
            return
        try:
            results = self._job.results()
            states = [result["state"] for result in results if "state" in result]
            if any(state["states"] for state in states):
                self._add(replace(self._work, kind="merge", states=states), 1)
            else:
                metrics = compute(states, {}) if states else results[0]["metrics"]
                self._merged = Merged(metrics, "")
        except (LimpetError, LookupError, TypeError) as e:  # or not of a TaskEvaluator
            self.error = e
            self._merged = Merged(None, getattr(e, "fields", {}).get("cause") or describe(e))

    def merge(self, group: Group, operation: str) -> Merged:
        return self._merged


class Merged(msgspec.Struct, frozen=True):
    """The result of all ranks: metrics, or an ``error``, or None for an abandoned evaluation."""

    metrics: dict[str, float] | None
    error: str


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Compute without gradients, ``model`` in evaluation mode; restore each module's mode."""
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
