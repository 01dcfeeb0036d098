"""What a trainer holds: resume, step, and the run's state is safe.

::

    with holdfast.Checkpointer("runs/a", state, save=holdfast.EverySteps(100)) as ckpt:
        ckpt.resume()
        while progress.step < steps:
            loss = train_step()
            ckpt.step({"loss": loss})
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any, Self

from holdfast import events
from holdfast.engine.draft import Draft, Label
from holdfast.engine.load import load_snapshot
from holdfast.engine.location import Url
from holdfast.engine.save import begin, finish, in_background
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.worker import Pending
from holdfast.errors import AlreadyExists, HoldfastError, SkippedVersion
from holdfast.format.manifest import Parent
from holdfast.format.names import Version
from holdfast.policy import EverySeconds, KeepPolicy, Moment, SavePolicy
from holdfast.progress import Progress
from holdfast.run import Run
from holdfast.storage.direct import Pool


class Checkpointer:
    """Saves a state beside the training when a policy says so, and resumes it.

    ``run``: where the versions go. ``state``: as for ``holdfast.save``; it is read at every save,
    and written by ``resume``. ``save``: when (every ten minutes if not given); ``keep``: what to
    keep (everything if not given). A ``Progress`` in the state counts the steps; without one
    the Checkpointer counts itself.

    One save is in flight at a time: the next that is due waits for it. A save that fails in the
    background raises at the next ``step``, ``save``, ``wait`` or ``close``.
    """

    def __init__(
        self,
        run: Url,
        state: dict[str, Any],
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
    ) -> None:
        self.run = Run(run)
        self.state = state
        self._save_policy = EverySeconds(600) if save is None else save
        self._keep_policy = KeepPolicy() if keep is None else keep
        self._progress = _find_progress(state)
        self._step = 0 if self._progress is None else self._progress.step
        self._pool = Pool(1 << 50)
        self._branch = 0
        self._ready = False
        self._closed = False
        self._process = os.getpid()
        self._attempt = ""
        self._newest: Snapshot | None = None
        self._pending: Pending | None = None
        self._late: HoldfastError | None = None
        self._last = (self._step, time.monotonic())
        self._counts = {"saves": 0, "bytes": 0}
        self._seconds = {"blocked": 0.0, "last_blocked": 0.0, "background": 0.0}

    def __repr__(self) -> str:
        return f"<Checkpointer {self.run.url} at step {self.current_step}>"

    @property
    def current_step(self) -> int:
        """Steps done, the resumed ones included."""
        return self._step if self._progress is None else self._progress.step

    def resume(self, at: int | None = None) -> Snapshot | None:
        """Load the newest intact version into the state and return it; None if the run is empty.

        ``at``: the version of that step instead. Going on from anything but the newest version,
        because newer ones are damaged (each is told in a ``SkippedVersion`` warning) or because
        ``at`` says so, starts a branch, durably, before this returns.

        Raises ``NoSnapshot`` if there are versions but none that can be used, and ``PlanError``
        if the newest does not fit the state.
        """
        self._refuse_fork()
        self._raise_failure()
        snapshot, skipped = self.run.newest(lambda s: load_snapshot(s, self.state), at)
        self._ready = True
        for version, error in skipped:
            told = f"{version} is skipped. {error.what.rstrip('.')}."
            if error.expected is not None:
                told += f" Expected {error.expected}, found {error.found}."
            warnings.warn(told, SkippedVersion, stacklevel=2)
        if snapshot is None:
            return None
        version = snapshot.version
        if version == self.run.line()[-1]:
            self._branch = self.run.branch()
        else:
            reason = f"{len(skipped)} newer damaged" if skipped else "on request"
            self._branch = self.run.leave_from(snapshot, version, reason)
        self._newest = snapshot
        self._step = version.step
        if self._progress is not None:
            self._progress.step = version.step
        self._last = (version.step, time.monotonic())
        events.emit("resumed", url=snapshot.url, step=version.step, branch=self._branch)
        return snapshot

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Call after every optimizer step: counts it, and saves when a save is due.

        ``metrics``: numbers by name, kept with the version that this step may become. Returns
        when the state may be changed again. Raises what made an earlier save fail; the step is
        counted all the same, since the optimizer has made it.
        """
        self._refuse_closed()
        if self._progress is None:
            self._step += 1
        else:
            self._progress.step += 1
        self._raise_failure()
        self._refuse_blind_start()
        moment = Moment(self.current_step, time.monotonic(), *self._last)
        if self._save_policy.due(moment):
            self._start("cadence", metrics or {})

    def save(self, metrics: Mapping[str, Any] | None = None) -> Snapshot:
        """Save now, and return the snapshot once it is committed. If this step is saved already
        on this branch, that snapshot is returned."""
        self._refuse_closed()
        self._raise_failure()
        self._refuse_blind_start()
        self.wait()
        if self._newest is None or self._newest.step != self.current_step:
            self._start("request", metrics or {})
        snapshot = self.wait()
        if snapshot is None:
            raise HoldfastError("The save ended without a snapshot")
        return snapshot

    def wait(self) -> Snapshot | None:
        """Wait until the save in flight is committed, and return the newest version that this
        Checkpointer saved or resumed; None if there is none. Raises what made the save fail."""
        self._refuse_fork()
        self._harvest()
        self._raise_failure()
        return self._newest

    def close(self) -> None:
        """Wait for the save in flight and give the memory back. Raises what made it fail."""
        self._closed = True
        if self._process != os.getpid():
            return  # saves and buffers are those of the process that this one was forked from
        try:
            self.wait()
        finally:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except HoldfastError as e:
            error.add_note(f"Besides, the last save failed: {e}")

    def statistics(self) -> dict[str, float]:
        """Since this Checkpointer was made: saves, bytes, and seconds that ``step`` blocked
        (altogether and the last time) and that saves took in the background."""
        seconds = {f"{name}_seconds": s for name, s in self._seconds.items()}
        return {**self._counts, **seconds}

    # -- how it is done ------------------------------------------------------------------------

    def _start(self, reason: str, metrics: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        self.wait()
        version = Version(self.current_step, self._branch)
        parent = self._newest
        label = Label(
            step=version.step,
            branch=version.branch,
            parent=None if parent is None else Parent(parent.place.folder, parent.digest),
            reason=reason,
            metrics={name: _number(value) for name, value in metrics.items()},
        )
        try:
            draft = begin(self.run.place(version), self.state, label, self._pool, ahead=True)
        except AlreadyExists:
            there = self.run.open(version)
            if there.manifest.attempt != self._attempt:
                raise  # of another job, or of an attempt that ended late
            self._newest = there  # our own: an error had left it unknown whether it was committed
            self._last = (version.step, time.monotonic())
            return
        self._attempt = draft.attempt
        self._pending = in_background(draft, self._finish)
        self._last = (version.step, time.monotonic())
        blocked = time.perf_counter() - began
        self._seconds["last_blocked"] = blocked
        self._seconds["blocked"] += blocked

    def _finish(self, draft: Draft) -> Snapshot:
        """The background half: commit, then delete what is not to be kept."""
        began = time.perf_counter()
        snapshot = finish(draft)
        try:
            self.run.retain(self._keep_policy.keep)
        except HoldfastError as e:
            self._late = e  # the save itself is committed; this is raised at the next call
        self._counts["saves"] += 1
        self._counts["bytes"] += snapshot.nbytes
        self._seconds["background"] += time.perf_counter() - began
        return snapshot

    def _harvest(self) -> None:
        """Take the result of the save in flight, waiting for it."""
        pending = self._pending
        if pending is not None:
            try:
                self._newest = pending.wait()
            finally:  # whoever is interrupted here has still to wait for it
                if pending.done:
                    self._pending = None

    def _raise_failure(self) -> None:
        if self._pending is not None and self._pending.done:
            self._harvest()
        if self._late is not None:
            error, self._late = self._late, None
            raise error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise HoldfastError("The Checkpointer is closed", todo="Make a new one")
        self._refuse_fork()

    def _refuse_fork(self) -> None:
        if self._process != os.getpid():
            raise HoldfastError(
                "This Checkpointer belongs to the process that this one was forked from",
                todo="Save in the process that trains",
            )

    def _refuse_blind_start(self) -> None:
        """Training afresh into a run that has versions would mix two trainings."""
        if not self._ready:
            versions = self.run.listing().versions
            if versions:
                raise HoldfastError(
                    f"{self.run.url} holds versions of an earlier training",
                    expected="an empty run, or a call of resume() before the first step",
                    found=f"{len(versions)} versions, the newest {versions[-1]}",
                    todo="Call ckpt.resume() to go on from it, or save to another folder",
                )
            self._ready = True


def _find_progress(value: Any, depth: int = 0) -> Progress | None:
    if isinstance(value, Progress):
        return value
    if isinstance(value, dict) and depth < 5:
        for member in value.values():
            found = _find_progress(member, depth + 1)
            if found is not None:
                return found
    return None


def _number(value: Any) -> Any:
    """A metric as a plain number; tensors and arrays of one element are read."""
    return value.item() if hasattr(value, "item") else value
