"""``on_best``: what a training does with each version that becomes the best."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from threading import Thread

from limpet.errors import LimpetError, NotFound
from limpet.format.records import BecameBest
from limpet.loading.snapshot import Snapshot
from limpet.ranks.error_report import describe_cause
from limpet.run.lineage import find_best
from limpet.run.policy import Mode
from limpet.run.retention import VERSIONS_PER_SAVE
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.threads import Latch, no_op, start_thread
from limpet.training.lifecycle import CALLBACK_THREAD


class OnBest:
    """Calls ``function`` with a version that has become the best, on a thread for which no save
    waits. A record about the version says that it has returned. ``errors`` gets its errors."""

    def __init__(
        self,
        function: Callable[[Snapshot], object] | None,
        objectives: Collection[tuple[str, Mode]],
        run: Run,
        errors: list[Exception],
    ) -> None:
        self._function, self._errors = no_op if function is None else function, errors
        self.is_held = function is None
        """True if no call may begin any more: it is left to the next training."""
        self._metric, self._mode = next(iter(objectives), ("", "min"))
        self._run = Run(run.store)  # other threads use the catalog of ``run``
        self._has_returned = Latch()
        self._has_returned.set()
        self._saves = self._interval = 0
        self._saved = "the newest version"

    def after_save(self, saved: str) -> None:
        """Call the function if there is a new best version, after as many saves as retention, and
        unless a call is in progress, or an error is still to be raised. No retention deletes the
        version during the call."""
        self._saves, self._saved = self._saves + 1, saved
        may_call = self._has_returned.is_set() and not (self.is_held or self._errors)
        if may_call and self._saves >= self._interval:
            try:
                with suppress(NotFound):  # deleted meanwhile: the next save finds another one
                    self._look()
            except LimpetError as e:
                self._fail("the search of the best version", saved, e)

    def finish(self) -> None:
        """Call the function for the best version at a normal end, and wait. Raises its error."""
        if not self.is_held:
            self._has_returned.wait()
            self._interval = 0
            self.after_save(self._saved)
            self._has_returned.wait()
            self.is_held = True
            if self._errors:
                raise self._errors.pop(0)

    def _look(self) -> None:
        catalog = self._run.catalog
        best = find_best(catalog, self._metric, self._mode)
        self._saves, self._interval = 0, catalog.version_count // VERSIONS_PER_SAVE
        if best is not None:
            records = catalog.evaluations.read(best.version, best.digest).of(BecameBest)
            if (self._metric, self._mode) not in ((r.metric, r.mode) for r in records):
                protection = ExitStack()
                protection.enter_context(pins.protected(best.location, best.version))
                self._has_returned = Latch()
                args = Snapshot(best), protection
                if not start_thread(Thread(None, self._call, CALLBACK_THREAD, args, daemon=True)):
                    self._call(*args)

    def _call(self, best: Snapshot, protection: ExitStack) -> None:
        try:
            with protection:
                self._function(best)
                about = {"metric": self._metric, "mode": self._mode}
                self._run.put_record(BecameBest, "training", best, **about)
        except BaseException as e:  # noqa: BLE001  (top of a thread: the training raises it)
            self._fail("on_best()", str(best.version), e)
        finally:
            self._has_returned.set()

    def _fail(self, what: str, saved: str, cause: BaseException) -> None:
        advice = f"{saved} was saved. on_best() gets the best version again after the next save"
        where = f"{what} failed for {saved} of {self._run.url}"
        error = LimpetError(where, found=describe_cause(cause), todo=advice, committed=saved)
        error.__cause__ = cause
        self._errors.append(error)
