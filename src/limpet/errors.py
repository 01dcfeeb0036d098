"""The errors and warnings that Limpet raises on purpose.

::

    LimpetError
      FormatError      bytes do not match the format: ManifestInvalid, FormatTooNew, DigestMismatch
      StoreError       a storage operation failed: NotFound, AlreadyExists, Denied, NoSpace,
                       Unavailable (the only one that is worth retrying)
      BrokenLink       a FormatError and a StoreError: a symbolic link leads to nothing
      PlanError        state and snapshot do not match: MissingLeaf, UnexpectedLeaf, ShapeMismatch,
                       DTypeMismatch, Unsupported
      CommitError      a save failed: RankFailed, DeadlinePassed
      MemberFailed     the code of an object in the state raised an exception
      NoSnapshot       a run has no usable version
      TaskError        a task queue cannot do what was asked: LeaseLost, JobFailed

A message has three parts: what happened to what; what was expected and what was found; what to do.
Values that a program may want to act on are also attributes (``error.fields``).
``Preempted`` and ``NoProgress`` are not errors: they are ``SystemExit``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from limpet.text import for_people, hide_in_urls


class LimpetError(Exception):
    """The base class of all errors that Limpet raises on purpose.

    ``what`` says what happened to what. ``expected`` and ``found`` are the two sides of a failed
    comparison. ``todo`` is the advice to the user. Every other keyword becomes an attribute.
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
        what, todo = for_people(what), todo and for_people(todo)
        self.what = what
        self.expected = expected if expected is None else for_people(str(expected))
        self.found = found if found is None else for_people(str(found))
        self.todo = todo
        self.fields: dict[str, Any] = {
            name: hide_in_urls(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        parts = [what.rstrip(".") + "."]
        if expected is not None and found is not None:
            parts.append(f"Expected {self.expected}, found {self.found}.")
        elif expected is not None or found is not None:
            parts.append(f"Expected {self.expected}." if found is None else f"Found {self.found}.")
        if todo is not None:
            parts.append(todo.rstrip(".") + ".")
        super().__init__(" ".join(parts))

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def brief(self) -> str:
        """The message without the advice: what happened, what was expected, and what was found."""
        return str(LimpetError(self.what, expected=self.expected, found=self.found))

    @property
    def is_outcome_unknown(self) -> bool:
        """True if it is not known whether the operation had its effect (``outcome``)."""
        return self.fields.get("outcome") == "unknown"

    @property
    def is_state_invalid(self) -> bool:
        """True if live tensors may have been overwritten in part (``live_state``)."""
        return "live_state" in self.fields

    def with_advice(self, advice: str = "", **fields: Any) -> LimpetError:
        """Return a copy with ``advice`` appended to ``todo``, and with more fields: for a layer
        that knows more. The caller chains the original error."""
        todo = f"{self.todo.rstrip('.')}. {advice}" if self.todo and advice else advice or self.todo
        make, _ = self.__reduce__()
        return make(todo=todo, **fields)

    def __reduce__(self) -> tuple[partial[LimpetError], tuple[()]]:
        """Support pickling, including the keyword fields: errors are sent between processes."""
        make = partial(
            type(self),
            self.what,
            expected=self.expected,
            found=self.found,
            todo=self.todo,
            **self.fields,
        )
        return (make, ())


class FormatError(LimpetError):
    """Stored bytes do not match the format (fields: ``file``, ``offset``, ``leaf``)."""


class ManifestInvalid(FormatError):
    """A manifest, an index, or the header of a shard violates a rule of ``docs/format.md``."""


class FormatTooNew(FormatError):
    """The snapshot is in a format that this version does not read: a newer Limpet wrote it, or the
    package wrote it before its first release."""


class DigestMismatch(FormatError):
    """The bytes that were read differ from the bytes that were written."""


class StoreError(LimpetError):
    """A storage operation failed (fields: ``key``, ``store``)."""


class NotFound(StoreError):
    """The store has no object under this key."""


class AlreadyExists(StoreError):
    """Another object already exists under the key; nothing was changed."""


class Denied(StoreError):
    """The store denied access: permissions, a read-only file system, or wrong credentials."""


class NoSpace(StoreError):
    """The disk is full, or a quota or a file size limit is reached."""


class Unavailable(StoreError):
    """The store is temporarily unavailable. This is the only error that is worth retrying."""


class BrokenLink(StoreError, FormatError):
    """A symbolic link leads to nothing (field: ``link``). What should be there counts as damaged.

    Nothing is known about the object, not even whether it was deleted.
    """


class PlanError(LimpetError):
    """State and snapshot do not match, or Limpet cannot save a state faithfully."""


class MissingLeaf(PlanError):
    """The live state has leaves that the snapshot does not contain."""


class UnexpectedLeaf(PlanError):
    """The snapshot contains leaves that the live state does not have."""


class ShapeMismatch(PlanError):
    """A leaf has different shapes in the snapshot and in the live state."""


class DTypeMismatch(PlanError):
    """A leaf has a different dtype or a different kind in the snapshot and in the live state."""


class Unsupported(PlanError):
    """Limpet cannot save a value faithfully and rejects it; the error names the value."""


class CommitError(LimpetError):
    """The save failed. Nothing was committed, unless the field ``outcome`` is ``"unknown"``."""


class RankFailed(CommitError):
    """A rank failed or did not respond, in a save or in a load (fields: ``rank``)."""


class DeadlinePassed(CommitError):
    """A requested save was not confirmed before the deadline."""


class MemberFailed(LimpetError):
    """An object in the state raised in its own code, such as ``state_dict()``.

    ``__cause__`` is its exception (fields: ``member``, the key of the object; ``live_state`` if the
    live state may be partly overwritten).
    """


class NoSnapshot(LimpetError):
    """A run has no usable version (fields: ``skipped``)."""


class TaskError(LimpetError):
    """A task queue cannot do what was asked of it (fields: ``job``)."""


class LeaseLost(TaskError):
    """The lease of a task is over: another worker has it, or will get it (fields: ``task``)."""


class JobFailed(TaskError):
    """A task of a job has no attempt left (fields: ``task``, ``attempts``, ``cause``)."""


class Preempted(SystemExit):
    """The training has left because its process will be stopped. It ends the process.

    ``code`` is 75 if the last step is saved, or the one before a step that took too long, and 76
    otherwise. (Under ``limpet run``, ``code`` is 0, and the command returns 75 or 76.) ``step``
    is the last step, ``saved_step`` that of the newest committed version, or None if there is
    none, and ``reason`` says why.
    """

    def __init__(self, code: int, step: int, saved_step: int | None, reason: str) -> None:
        super().__init__(code)
        self.step = step
        self.saved_step = saved_step
        self.reason = reason

    def __reduce__(self) -> tuple[type[Preempted], tuple[Any, ...]]:
        """Pickle it, as Ray does: an exception is created again by its ``args``, the code."""
        return type(self), (self.code, self.step, self.saved_step, self.reason)


class NoProgress(SystemExit):
    """The training has left because its restarts make no progress. It ends the process.

    ``code`` is 93: do not run it again. (Under ``limpet run``, ``code`` is 0, and the command
    returns 93.) ``reason`` says what was tried, and what to do.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __reduce__(self) -> tuple[type[NoProgress], tuple[Any, ...]]:
        """As that of ``Preempted``."""
        return type(self), (self.code, self.reason)


class SkippedVersion(UserWarning):
    """``resume`` skipped a newer version, or a newer state in a tier.

    Exactly if it is damaged, or if three restarts under ``limpet run`` made no progress from it.
    The message names it and why. Unfinished saves, and what a person skips by ``at=``, cause none.
    """


class SaveFailed(UserWarning):
    """A save, or the retention after it, failed, and no error reports it.

    Exactly if a store failure meets ``on_error="warn"``, if a failure follows the exception that
    has ended the training, or if the last save of a replaced Checkpointer failed.
    """


class UnsavedSteps(UserWarning):
    """A training has ended, and its last steps are in no version; the message lists them.

    Exactly if the newest version does not have the last step, the policy is not ``Never()`` or
    ``OnPreemption()``, and the training ended with exit code 0 in the block, or without ``close``,
    or was replaced by a newer Checkpointer. Another exception reports itself, unless ``close`` is
    called while it is handled. With ``at_end=False``, ``close`` is not missed.
    """


class InexactResume(UserWarning):
    """A resume is not exact, or would not be. The message lists why, and what to add.

    Exactly if, after the first two steps of a training, an optimizer changes parameters that the
    state lacks; or if a dataset gives two different samples for one index, although its generators
    are seeded; or if a load keeps or ignores ``PerRank`` values, because other ranks have saved
    them; or if a module's code does not load what was saved by the same version of it; or if
    ``requires_grad`` of parameters in ``DistributedDataParallel`` is not that of the version.
    """


class SinkFailed(UserWarning):
    """An event sink was detached, exactly if it has raised an ``Exception``. The message names the
    sink and the cause. If warnings are errors, it goes to ``threading.excepthook``."""
