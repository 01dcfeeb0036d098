"""A worker in the evaluator's own process, for notebooks and functions that cannot be imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from limpet.evaluation.process import WorkerError, answer
from limpet.evaluation.worker import Worker


class InlineWorker:
    """A ``Worker`` that runs on the thread that calls it. Its calls have no time limit."""

    def __init__(self, name: str, make: Callable[[], Worker]) -> None:
        self.name = name
        self._make = make
        self._worker: Worker | None = None

    def start(self, timeout: float) -> int:
        self._worker = self._make()
        return self._worker.records

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the ``Worker``. Raises ``WorkerError``."""
        reply = answer(lambda: getattr(self._worker, method)(*arguments))
        if reply.kind:
            raise WorkerError(reply.text, kind=reply.kind)
        return reply.result

    def close(self) -> None:
        self._worker = None

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""
