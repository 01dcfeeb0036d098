"""Everything that Holdfast raises on purpose.

::

    HoldfastError
      FormatError      the bytes lie: ManifestInvalid, FormatTooNew, DigestMismatch
      StoreError       the place for bytes failed: NotFound, AlreadyExists, Denied, NoSpace,
                       Unavailable (the only one that is worth trying again)
      PlanError        state and snapshot do not fit: MissingLeaf, UnexpectedLeaf, ShapeMismatch,
                       DTypeMismatch, Unsupported
      CommitError      nothing was committed: RankFailed, DeadlinePassed
      NoSnapshot       a run has no version that can be used

A message has three parts: what happened to what; what was expected and what was found; what to
do. What a program may want to act on is kept as attributes as well (``error.fields``).
"""

from __future__ import annotations

from functools import partial
from typing import Any


class HoldfastError(Exception):
    """Base of all errors that Holdfast raises on purpose.

    ``what`` says what happened to what, ``expected`` and ``found`` are the two sides of a
    comparison that failed, ``todo`` is the advice; every further keyword becomes an attribute.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        todo: str | None = None,
        **fields: Any,
    ) -> None:
        self.what = what
        self.expected = expected
        self.found = found
        self.todo = todo
        self.fields = fields
        parts = [what.rstrip(".") + "."]
        if expected is not None and found is not None:
            parts.append(f"Expected {expected}, found {found}.")
        elif expected is not None or found is not None:
            parts.append(f"Expected {expected}." if found is None else f"Found {found}.")
        if todo is not None:
            parts.append(todo.rstrip(".") + ".")
        super().__init__(" ".join(parts))

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def with_advice(self, advice: str = "", **fields: Any) -> HoldfastError:
        """The same error, its advice longer by ``more`` and with further fields, for a layer
        that knows more than the one which raised it. The caller chains the original."""
        todo = f"{self.todo.rstrip('.')}. {advice}" if self.todo and advice else advice or self.todo
        return type(self)(
            self.what,
            expected=self.expected,
            found=self.found,
            todo=todo,
            **{**self.fields, **fields},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes, so keyword fields must survive pickling."""
        make = partial(
            type(self),
            self.what,
            expected=self.expected,
            found=self.found,
            todo=self.todo,
            **self.fields,
        )
        return (make, ())


class FormatError(HoldfastError):
    """Bytes are not what they claim to be (fields: ``file``, ``offset``, ``leaf``)."""


class ManifestInvalid(FormatError):
    """A manifest, an index or a shard's header breaks a rule of ``docs/format.md``."""


class FormatTooNew(FormatError):
    """The snapshot was written by a later Holdfast with a format number unknown here."""


class DigestMismatch(FormatError):
    """Bytes were read that are not those that were written."""


class StoreError(HoldfastError):
    """A store could not do what it was asked (fields: ``key``, ``store``)."""


class NotFound(StoreError):
    """There is no object under that key."""


class AlreadyExists(StoreError):
    """Another object has the key already; nothing was changed."""


class Denied(StoreError):
    """The store refused: permissions, a read-only file system, wrong credentials."""


class NoSpace(StoreError):
    """Disk, quota or size limit reached."""


class Unavailable(StoreError):
    """The store does not answer for now. The only error that is worth trying again."""


class PlanError(HoldfastError):
    """State and snapshot do not fit together, or a state cannot be kept faithfully."""


class MissingLeaf(PlanError):
    """The live state has leaves that the snapshot lacks."""


class UnexpectedLeaf(PlanError):
    """The snapshot has leaves that the live state lacks."""


class ShapeMismatch(PlanError):
    """A leaf has another shape in the snapshot than in the live state."""


class DTypeMismatch(PlanError):
    """A leaf has another dtype, or is another kind of thing, in the snapshot."""


class Unsupported(PlanError):
    """A value cannot be kept faithfully, so it is refused by name."""


class CommitError(HoldfastError):
    """The save did not happen: nothing was committed."""


class RankFailed(CommitError):
    """A rank failed or did not answer (fields: ``rank``)."""


class DeadlinePassed(CommitError):
    """The time that was given to the save ran out."""


class NoSnapshot(HoldfastError):
    """A run holds no version that can be used (fields: ``skipped``)."""


class SkippedVersion(UserWarning):
    """``resume`` passed over a damaged version; the message says which, and what is wrong."""


class SaveFailed(UserWarning):
    """A save failed or was left out, and nothing else tells: training goes on, since
    ``on_error="warn"`` was chosen, or has ended."""


class MetricMissing(UserWarning):
    """A policy waits for a metric that no version has; the message says which there are."""


class SinkFailed(UserWarning):
    """A sink of events raised an error and is detached; the message says which, and why."""


class RanksChanged(UserWarning):
    """What each rank keeps of its own was saved by other ranks than load it; the message says
    which keep what they have, and whose is passed over."""


class UncountedBatches(UserWarning):
    """An ``ElasticSampler`` gave out batches that no step has counted, more than one step takes."""


class UncountedEpochs(UserWarning):
    """The epochs of an ``ElasticSampler`` go on, and ``progress.epoch`` is never counted."""
