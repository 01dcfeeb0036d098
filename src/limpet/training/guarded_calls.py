"""Calls of the training that make several steps, and blocks in which it must not leave."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from limpet.errors import Preempted
from limpet.ranks.agreement import Agreement, LocalAgreement
from limpet.training.goodput import Goodput
from limpet.training.preemption import LEAVE
from limpet.training.response import PreemptionResponse

_NOTHING: frozenset[str] = frozenset()


class GuardedCalls:
    """Decides when a training acts on what its ranks have agreed on.

    Usually that is in each step. During a call of ``PreemptionGuard.run``, it is at the end of the
    call, which counts once in the agreement, however many steps it makes. Saves wait for it too, so
    that a version never holds a part of a call. In a block of ``watch_scope``, the training only
    notes that it must leave, until the block ends.
    """

    def __init__(self, response: PreemptionResponse, goodput: Goodput) -> None:
        self._response = response
        self._goodput = goodput
        self._depth = self._scopes = 0
        self._noted = _NOTHING
        self._save_arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        self.steps = 0
        """The number of steps, in calls and outside of them."""

        self.must_leave = False
        """True if the training must leave at the end of the block of ``watch_scope``."""

    @property
    def has_save_function(self) -> bool:
        """True if ``Preemption.save_fn`` replaces the last save."""
        return self._response.has_save_function

    @property
    def is_leaving(self) -> bool:
        """True if the process leaves although the training has not ended."""
        return self.must_leave or self._response.has_left

    @property
    def is_running(self) -> bool:
        """True during a call of ``PreemptionGuard.run``."""
        return self._depth > 0

    @property
    def run_calls(self) -> int:
        """The number of complete calls of ``PreemptionGuard.run``."""
        return self._goodput.run_calls

    @contextmanager
    def call(self) -> Iterator[None]:
        """Act on nothing in this block, which is one call. Count it if it raises nothing."""
        began = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self._goodput.add_call(time.monotonic() - began)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Do not leave in this block, unless there is no time left."""
        self._scopes += 1
        try:
            yield
        finally:
            self._scopes -= 1

    @contextmanager
    def saving_with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Call ``Preemption.save_fn`` with these arguments in this block."""
        self._save_arguments = args, kwargs
        try:
            yield
        finally:
            self._save_arguments = (), {}

    # -- for the Checkpointer --------------------------------------------------------------------

    def agree(self, agreement: Agreement | LocalAgreement) -> frozenset[str]:
        """Return the actions that all ranks perform now, after a step or an epoch.

        In a call, there are none, but the error of another rank is raised.
        """
        if not self.is_running:
            return agreement.step()
        agreement.check()
        return _NOTHING

    def respond(self, agreed: frozenset[str]) -> None:
        """Leave if the ranks have agreed on that, or cannot agree, and nothing forbids it now."""
        is_last_call = LEAVE in agreed and self.must_leave  # the time of the block is over
        if self._scopes and not is_last_call:
            if not self.must_leave and (LEAVE in agreed or self._response.is_urgent):
                self.must_leave, self._noted = True, agreed
                self._response.postpone_exit()
            return
        if self._scopes == 0:
            agreed, self._noted, self.must_leave = agreed | self._noted, _NOTHING, False
        args, kwargs = self._save_arguments
        self._response.respond(agreed, *args, **kwargs)

    # -- errors ----------------------------------------------------------------------------------

    def publish_error(self, error: BaseException) -> None:
        """Make the other ranks raise ``error``, with which the training of this one ends.

        Raises the error of the rank that raised first, from ``error``, if that is its consequence.
        """
        agreement = self._response.agreement
        is_exit = isinstance(error, SystemExit) and not error.code
        if isinstance(error, Preempted) or is_exit or isinstance(agreement, LocalAgreement):
            return
        first = agreement.publish_error(error)
        if first is not None:
            raise first from error
