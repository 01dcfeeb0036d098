"""``Member``: processes that save and restore their part of a training's state, but make no steps.

They are the last ranks of a group, whose other ranks train, and are called (``MemberCall``) before
each save and resume, which then is the usual one of all ranks. Everything else, such as the
agreement on a step, is an operation of the ranks that train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from math import inf
from typing import Any, Literal

import msgspec
from msgspec import structs

from limpet import events
from limpet.buffers import BufferPool, shared_pool
from limpet.deadline import Deadline
from limpet.errors import LimpetError
from limpet.format.names import Version
from limpet.loading.snapshot import Snapshot, snapshot_of
from limpet.ranks.group import LEAVING, Group
from limpet.run.policy import KeepPolicy
from limpet.run.run import Run
from limpet.run.writer import VersionWriter
from limpet.saving.commit import VersionMetadata
from limpet.snapshot.location import Url
from limpet.snapshot.reader import SnapshotReader
from limpet.state.streamed import find_streamed
from limpet.tiers.ladder import Ladder
from limpet.tiers.tiers import Tiers
from limpet.training.options import Options, check_state
from limpet.training.resume import Resume, ResumeOptions
from limpet.training.resume_check import check_whole_state


class MemberCall(msgspec.Struct, frozen=True):
    """What the members and the training do next: the save of ``version``, or else a resume."""

    version: Version | None = None
    options: ResumeOptions = ResumeOptions()


def call_members(
    group: Group, call: MemberCall | None, deadline: Deadline | None = None
) -> MemberCall:
    """Tell the members which operation the training begins next: rank 0 passes the ``call``. It
    waits for no other rank; the operation that follows does."""
    operation = "the call of the members"
    with closing(group.collective(operation, deadline=deadline)) as collective, collective:
        return collective.broadcast(call, MemberCall)


class Member:
    """A part of the state of a training, in a process that makes no steps, such as a table server.

    The last ranks of a group are its members, and each of them creates a ``Member``. The other
    ranks train, with a ``Checkpointer`` of the same run and group. Each version then holds the
    state of the training and the states of the members, or does not exist::

        with limpet.Group.join(address, rank, size=3, members=2) as group:
            limpet.Member("runs/a", {"rows": rows}, group=group).run()

    ``run``: the URL or store of the run. ``state``: as for ``limpet.save``. The keys of all ranks
    form one tree, so a key that several ranks have must have equal values, or be a ``Boxed`` part
    or a ``PerRank`` value on each. Saves read the state, and resumes write it, within ``poll`` or
    ``run``; nothing else may change it meanwhile, except a ``Streamed`` member and what it lets
    change. If a version is damaged for one rank, all ranks
    fall back to an older one.

    Raises ``LimpetError`` for an invalid argument.
    """

    def __init__(self, run: Url, state: Mapping[str, Any], *, group: Group) -> None:
        self._run, self.state = Run(run), check_state(state)
        if not (isinstance(group, Group) and group.members and group.training is None):
            raise LimpetError("group= must be a limpet.Group in which this rank is a member")
        self._group, self._has_ended = group, False
        # of the training's versions, it refers to the same one as the training, if to any
        self._writer = VersionWriter(self._run.catalog, group, KeepPolicy(), incremental=True)
        # a streamed member changes once the others are staged, and so may they
        self._stages = bool(find_streamed(self.state))
        self._pool = BufferPool(1 << 50) if self._stages else shared_pool()

    def __repr__(self) -> str:
        return f"<Member {self._group.rank} of {self._run.url}>"

    @property
    def latest(self) -> Snapshot | None:
        """The version that this member has saved or resumed from last, or None."""
        return snapshot_of(self._writer.newest)

    def run(self) -> None:
        """Do all saves and resumes of the training, until it leaves the group.

        A save or resume that fails does not end this: the training decides whether it goes on.
        Raises the error of the last one, if that failed, and at once if another rank is lost.
        """
        failure = None
        while True:
            try:
                if self.poll(inf) == "end":
                    break
                failure = None
            except LimpetError as e:
                if e.fields.get("lost") and e.fields.get("rank") != self._group.rank:
                    raise
                failure = e
        if failure is not None:
            raise failure

    def poll(self, timeout: float = 0.0) -> Literal["save", "resume", "end"] | None:
        """Wait at most ``timeout`` seconds until the training begins a save or a resume, and do
        it with the training. Return which of them it was, ``"end"`` if the training has left the
        group, or None if there was nothing to do.

        A save returns when the version is committed. The training waits for this call at most as
        long as for any rank. Raises the errors of a save and of ``Checkpointer.resume``, and
        ``RankFailed`` if rank 0 has died.
        """
        operation = LEAVING if self._has_ended else self._group.await_operation(timeout)
        if operation is None:
            return None
        if operation == LEAVING:
            if not self._has_ended:
                self._group.end_training()
            self._has_ended = True
            return "end"
        call = call_members(self._group, None)
        if call.version is None:
            self._resume(call.options)
            return "resume"
        self._save(call.version)
        return "save"

    def _save(self, version: Version) -> None:
        writer, metadata = self._writer, VersionMetadata(version.step, version.branch)
        location = writer.locate(version)
        try:
            job = writer.begin(location, self.state, metadata, self._pool, stage_now=self._stages)
            if not isinstance(job, SnapshotReader):
                writer.newest = writer.commit(job)
        except BaseException as e:
            events.emit("save_failed", run=writer.url, step=version.step, error=e)
            raise

    def _resume(self, options: ResumeOptions) -> None:
        group = self._group
        resume = Resume(
            run=self._run,
            state=self.state,
            group=group,
            tiers=Tiers((), group),
            ladder=Ladder(self._run, group, saves=False),
            options=options,
        )
        point = resume.load()
        if point is not None and point.from_own_run:
            self._writer.continue_from(point.durable)
        if point is not None and point.is_exact and options.check:
            check_whole_state(self._run.url, point.snapshot, self.state, group)


# -- the training's side -------------------------------------------------------------------------


def check_members(group: Group, options: Options) -> None:
    """Raise ``LimpetError`` if this rank is a member, or if an option would make states that lack
    the parts of the members."""
    if group.training is None:
        raise LimpetError(f"Rank {group.rank} is a member of the group; it uses a limpet.Member")
    if options.tiers:
        raise LimpetError("tiers= cannot be combined with members, whose parts no tier would have")
    if options.save.on_exception:
        raise LimpetError("OnException cannot be combined with members, whose parts it would lack")


def call_to_resume(group: Group, options: ResumeOptions) -> None:
    """Call the members to a resume with these options."""
    # rank 0 says which manifest they all load
    start = options.start.url if isinstance(options.start, Snapshot) else options.start
    if not isinstance(start, str | os.PathLike | None):
        raise LimpetError("With members, start= must be an address or a Snapshot, not a Store")
    address = None if start is None else os.fspath(start)
    call_members(group, MemberCall(None, structs.replace(options, start=address)))
