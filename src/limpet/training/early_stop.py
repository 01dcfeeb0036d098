"""Early stopping of a training, as its ``StopWhen`` policy decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Annotated, Any

import msgspec

from limpet import events
from limpet.errors import LimpetError
from limpet.format.names import MAX_STEP, Version
from limpet.format.records import InexactEvaluation
from limpet.ranks.agreement import AnyAgreement
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run.catalog import VersionRecord, read_training_metadata
from limpet.run.lineage import find_end, lineage_of
from limpet.run.metrics import to_number
from limpet.run.policy import StopState, StopWhen
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.threads import look_up_each

STOP_PROPOSAL = "stop"
"""The proposal to stop on which the ranks agree."""


MAX_VERSIONS = 100
"""The newest versions whose records are read after each save, and by polls in turn."""


@dataclass(slots=True)
class _Lineage:
    """The newest versions of a lineage, oldest first, each with the digest of its manifest, the
    scores that were found. Threads read and write it without a lock, one operation at a time."""

    digests: dict[Version, str]
    scores: dict[Version, float] = field(default_factory=dict)
    has_changed: bool = False


class EarlyStop:
    """Observes scores, of steps or recorded about their versions, for a ``StopWhen``, if there is
    one. Only rank 0 does; all ranks stop at a step on which they agree. Other threads read the
    records, for which the training never waits. After a resume, what they find is lost."""

    def __init__(self, stop: StopWhen | None, run: Run, group: Group) -> None:
        self._stop = stop
        self._run = run
        self._group = group
        self._lineage = _Lineage({})
        self._polled = 0
        self._is_decided = False
        self.stopped = False
        """True once training should stop. A better score later does not change that."""

        if stop is not None:
            self._history = self._stored = ScoreHistory(stop)

    @property
    def awaited_metric(self) -> str | None:
        """The name of the metric until there is a score, then None."""
        if self._stop is None or self._history.state != StopState():
            return None
        return self._stop.metric

    # -- the training thread -------------------------------------------------------------------

    def observe(
        self, metrics: Mapping[str, Any], step: int, agreement: AnyAgreement, agreed: bool = False
    ) -> None:
        """Observe the metrics of a step (the first value counts), and the scores recorded since the
        last call. ``agreed``: the ranks have agreed to stop at this step."""
        if self._stop is not None and self._group.rank == 0 and not self._is_decided:
            self._update(self._stop, metrics, step)
        if agreed or (self._group.size == 1 and self._is_decided):
            self.stopped = True
        elif self._is_decided and not self.stopped:
            agreement.propose(STOP_PROPOSAL)

    def _update(self, stop: StopWhen, metrics: Mapping[str, Any], step: int) -> None:
        if self._lineage.has_changed:
            self._lineage.has_changed = False  # before the copy: what comes meanwhile comes again
            for version, score in sorted(self._lineage.scores.copy().items()):
                self._history.record(version.step, score)
        if stop.metric in metrics:
            self._history.give(step, to_number(metrics[stop.metric]))
        state = self._history.state
        self._is_decided = state.stopped
        if state.stopped:
            run = self._run.url
            events.emit("stopped", run=run, step=step, metric=stop.metric, best=state.best)

    def to_metadata(self) -> dict[str, Any]:
        """Return what a version stores, so that a resumed training continues from these scores."""
        return {} if self._stop is None else {"stop": self._history.to_plain()}

    def resume_from(self, training_metadata: Mapping[str, Any], step: int) -> None:
        """Continue, on all ranks, from what the version of ``step`` stores, and all records."""
        if self._stop is not None:
            stored = training_metadata.get("stop")
            self._history = ScoreHistory.from_plain(self._stop, stored)
            self._stored = ScoreHistory.from_plain(self._stop, stored)
            self._is_decided = self._history.state.stopped
        elif self._group.size == 1:
            return
        operation = f"reading the scores in {self._run.url}"
        self.stopped = broadcast_from_first(
            self._group, operation, lambda: self._read_all(step), bool
        )

    def _read_all(self, step: int) -> bool:
        if self._stop is not None:
            for last_step, score in self._read_lineage(self._stop.metric):
                self._history.record(last_step, score)
            if not self._is_decided:
                self._update(self._stop, {}, step)
            self._is_decided |= find_end(self._run.catalog) == self._stop_reason
        return self._is_decided

    @property
    def _stop_reason(self) -> str:
        return f"stopped by {self._stop}"

    @property
    def end_reason(self) -> str:
        """Why the training ends, if it ends now and normally."""
        return self._stop_reason if self.stopped and self._stop is not None else "finished"

    def _read_lineage(self, metric: str) -> list[tuple[int, float]]:
        """Begin with the current lineage of the run, and read the records of all its versions.
        Return the inexact scores that count and that no version stores, each with its last step:
        those about the newest version whose evaluation began before it. A resumed training repeats
        the evaluations that began after it, and the newest version stores the scores before."""
        catalog, listing = self._run.catalog, self._run.listing()
        known = catalog.read_versions(listing) if listing.folders else {}
        versions = [v for v in lineage_of(catalog, listing) if v in known and known[v].digest]
        digests = {v: known[v].digest for v in versions}
        self._lineage = _Lineage({v: digests[v] for v in versions[-MAX_VERSIONS:]})
        self._read(self._lineage, digests, metric)
        return [
            (r.last_step, r.decoded_metrics()[metric])
            for v in versions[-1:]
            for r in catalog.evaluations.read(v, digests[v]).of(InexactEvaluation)
            if r.counts and r.first_step <= v.step and metric in r.metrics
        ]

    # -- background threads of rank 0 ----------------------------------------------------------

    def after_save(self, snapshot: SnapshotReader) -> None:
        """Read the records of the newest versions, after the commit of ``snapshot``."""
        if self._stop is None or self._is_decided:
            return
        stored, new, lineage = read_training_metadata(snapshot), snapshot.version, self._lineage
        self._stored = ScoreHistory.from_plain(self._stop, stored.get("stop"))
        digests = {**lineage.digests, new: snapshot.digest}
        lineage.digests = dict([*digests.items()][-MAX_VERSIONS:])
        for version in [*lineage.scores][: -2 * MAX_VERSIONS]:
            del lineage.scores[version]
        try:
            self._read(lineage, lineage.digests, self._stop.metric)
        except LimpetError as e:
            advice = f"{new} was saved, but the scores of evaluations could not be read"
            advice += ". Until they are, they do not stop the training"
            raise e.with_advice(advice, committed=str(new)) from e

    def poll(self) -> None:
        """Read the records of some of the newest versions, in turn. Raises ``StoreError``."""
        if self._stop is None or self._is_decided:
            return
        lineage = self._lineage
        digests = lineage.digests
        versions = [*reversed(digests)]
        if self._polled >= len(versions):
            self._polled = 0
        begin, self._polled = self._polled, self._polled + 8  # each costs a request to the store
        some = {v: digests[v] for v in versions[begin : self._polled]}
        self._read(lineage, some, self._stop.metric)

    def before_deletion(
        self, versions: Collection[Version], known: Mapping[Version, VersionRecord]
    ) -> Collection[Version]:
        """Read the records of versions to delete (``BeforeDeletion``). One is kept until another
        stores its score, which would be lost if the process died before the next save."""
        if self._stop is None or self._is_decided:
            return ()
        lineage = self._lineage
        lineage.digests = {v: d for v, d in lineage.digests.items() if v in known}
        digests = {v: known[v].digest for v in versions}
        scores = self._read(lineage, digests, self._stop.metric)
        return {v for v, score in scores.items() if not self._stored.covers(v.step, score)}

    def _read(
        self, lineage: _Lineage, digests: Mapping[Version, str], metric: str
    ) -> dict[Version, float]:
        found: dict[Version, float] = {}

        def look(version: Version) -> None:
            records = self._run.catalog.evaluations.read(version, digests[version])
            score = records.metrics(only_exact=True).get(metric)
            if score is None:
                return
            found[version] = score
            if lineage.scores.get(version) != score:
                lineage.scores[version] = score
                lineage.has_changed = True

        look_up_each([*digests], look)
        return found


# -- the history of scores -----------------------------------------------------------------------


MAX_SCORES = 100
"""The scores that are kept by step. A score that arrives for a step before these cannot count any
more. Every version stores them, in about 20 bytes each."""


class ScoreHistory:
    """Follows a ``StopWhen`` over the scores of steps. The newest ``MAX_SCORES`` are kept, the
    others folded into one ``StopState``: a late score is inserted at its step."""

    def __init__(self, stop: StopWhen) -> None:
        self._stop = stop
        self._folded, self._folded_step = StopState(), -1
        self._scores: dict[int, float] = {}
        self.state = StopState()
        """The result of all scores. Once it is ``stopped``, scores of later steps do not count."""

    def give(self, step: int, score: float) -> None:
        """Add the score that the training gives at a step, unless the step has one already."""
        if step not in self._scores:
            self.record(step, score)

    def record(self, step: int, score: float) -> None:
        """Set the score of a step. It overrides the one that the step has."""
        if self.covers(step, score):
            return
        is_last = not self._scores or step > next(reversed(self._scores))
        self._scores[step] = score
        if is_last:
            self.state = self._observe(self.state, score)
        else:
            self._scores = dict(sorted(self._scores.items()))
            self._scan()
        while len(self._scores) > MAX_SCORES:
            self._folded_step = next(iter(self._scores))
            oldest = self._scores.pop(self._folded_step)
            self._folded = self._observe(self._folded, oldest)

    def covers(self, step: int, score: float) -> bool:
        """Return True if the score is part of the result, or is too old to become a part of it."""
        known = self._scores.get(step)
        if known is None:
            return step <= self._folded_step
        return known == score or (isnan(known) and isnan(score))

    def _scan(self) -> None:
        self.state = self._folded
        for score in self._scores.values():
            self.state = self._observe(self.state, score)

    def _observe(self, state: StopState, score: float) -> StopState:
        return state if state.stopped else self._stop.observe(state, score)

    # -- what a version stores -----------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        scores = [[step, score] for step, score in self._scores.items()]
        stop = self._stop
        plain: dict[str, Any] = {"metric": stop.metric, "mode": stop.mode, "scores": scores}
        if self._folded_step >= 0:
            folded = {"best": self._folded.best, "misses": self._folded.misses}
            plain |= {"folded_step": self._folded_step, **folded}
        return plain

    @classmethod
    def from_plain(cls, stop: StopWhen, plain: object) -> ScoreHistory:
        """Return the history that a version stores, judged by the policy ``stop``. It is empty if
        the version stores none of this metric and mode."""
        history = cls(stop)
        try:
            stored = _STORED.decode(msgspec.msgpack.encode(plain))
        except (msgspec.ValidationError, OverflowError):
            return history
        if (stored.metric, stored.mode) == (stop.metric, stop.mode):
            history._folded_step = stored.folded_step
            history._folded = StopState(stored.best, stored.misses, stored.misses >= stop.patience)
            history._scores = dict(sorted(stored.scores))
            history._scan()
        return history


class _Stored(msgspec.Struct):
    """What a version stores: the newest scores by step, and the result of those before them."""

    metric: str
    mode: str
    scores: list[tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)], float]]
    folded_step: Annotated[int, msgspec.Meta(ge=-1, le=MAX_STEP)] = -1
    best: float | None = None
    misses: int = 0


_STORED = msgspec.msgpack.Decoder(_Stored)
