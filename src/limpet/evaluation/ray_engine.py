"""Workers on a Ray cluster, each of which is an actor.

Ray starts the actors, places them, and ends them when their owner, the evaluator, ends. Messages
are JSON text, as those of worker processes: neither side unpickles an object of the user. This is
the only module that imports ray, and only if an evaluation uses it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from limpet.errors import LimpetError
from limpet.evaluation.process import Reply, WorkerError, WorkerLost, answer
from limpet.evaluation.worker import Worker, WorkerSpec
from limpet.settings import ray_address
from limpet.text import to_repr

_OPTIONS = (
    "num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector",
    "scheduling_strategy", "runtime_env",
)  # fmt: skip
"""The options of an actor that a user may give: what it needs, and where it runs. The evaluation
decides the others, such as its lifetime."""

_MAX_CAUSE = 500
"""The number of characters of an error of Ray, which can be long, in a message."""

_CONNECT_SECONDS = 10.0

_SPEC = msgspec.json.Decoder(WorkerSpec)


class RayActor:
    """The actor: a ``Worker`` in a process that Ray has started."""

    _worker: Worker

    def start(self, hello: str) -> str:
        return json.dumps(answer(partial(self._start, **json.loads(hello))))

    def call(self, request: str) -> str:
        method, arguments = json.loads(request)
        return json.dumps(answer(lambda: getattr(self._worker, method)(*arguments)))

    def _start(self, path: list[str], spec: str) -> int:
        os.dup2(2, 1)  # what the functions print does not belong to the result of the command
        # at the end: what Ray has prepared, such as a runtime_env, has priority
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._worker = Worker.of(_SPEC.decode(spec))
        return self._worker.records


class RayWorker:
    """A worker that is an actor. One thread at a time may call it."""

    def __init__(self, name: str, ray: Any, actor: Any, hello: str) -> None:
        self.name = name
        self._ray, self._actor, self._hello = ray, actor, hello

    def start(self, timeout: float) -> int:
        """Wait until Ray has started the actor, import the functions there, and return the number
        of records of the data.

        Raises ``WorkerError`` or ``WorkerLost``.
        """
        advice = "Ray may lack what a worker asks for: see `ray status`, or use fewer workers"
        return int(self._exchange("start", self._hello, timeout, advice))

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the ``Worker``. After ``timeout`` seconds, the actor is killed.

        Raises ``WorkerError`` or ``WorkerLost``.
        """
        advice = "If a task takes that long, raise the time limit of a task"
        return self._exchange("call", json.dumps([method, arguments]), timeout, advice)

    def close(self) -> None:
        """End the actor."""
        self.kill()

    def kill(self) -> None:
        """Kill the actor. Any thread may call this; a call in progress then raises."""
        if self._ray.is_initialized():  # otherwise, it has ended with the connection
            self._ray.kill(self._actor)

    def _exchange(self, method: str, message: str, timeout: float, advice: str) -> Any:
        ray = self._ray
        if not ray.is_initialized():  # a call would start a cluster
            raise WorkerLost(f"Worker {self.name} ended", found="no connection to Ray")
        try:
            text = ray.get(getattr(self._actor, method).remote(message), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            self.kill()
            raise WorkerLost(
                f"Worker {self.name} was killed",
                expected=f"an answer within {timeout:g} s",
                found="none",
                todo=advice,
            ) from None
        except (ray.exceptions.RayError, ConnectionError) as e:
            raise WorkerLost(f"Worker {self.name} ended", found=_describe(e)) from e
        reply = Reply(*json.loads(text))
        if reply.kind:
            raise WorkerError(reply.text, kind=reply.kind)
        return reply.result


def ray_workers(spec: WorkerSpec, options: Mapping[str, Any]) -> Callable[[str], RayWorker]:
    """Connect to Ray, and return the function that starts a worker.

    ``options``: those of the actors, such as ``num_cpus``. Raises ``LimpetError`` if Ray is not
    installed, if there is no cluster, or if an option is invalid.
    """
    unknown = sorted(map(str, options.keys() - set(_OPTIONS)))
    if unknown:
        raise LimpetError(
            f"Invalid ray_options= of Evaluation: {', '.join(unknown)}",
            expected=f"some of {', '.join(_OPTIONS)}",
        )
    ray = _connect()
    gpus = {"num_gpus": 1} if str(spec.device).startswith("cuda") else {}
    # Not restarted by Ray: a new process would have neither the functions nor the version.
    own = {"max_restarts": 0, "max_task_retries": 0}
    try:
        actor_class = ray.remote(**{"num_cpus": 1, **gpus, **options, **own})(RayActor)
    except (TypeError, ValueError) as e:
        raise LimpetError(
            f"Ray refuses ray_options={to_repr(dict(options))[:200]}", found=_describe(e)
        ) from e
    path = [os.path.abspath(entry) for entry in sys.path]
    hello = json.dumps({"path": path, "spec": msgspec.json.encode(spec).decode()})
    return lambda name: RayWorker(name, ray, actor_class.remote(), hello)


def _connect() -> Any:
    """Import ray, connect to a cluster that exists unless the program has, and return ray."""
    try:
        import ray
    except ImportError as e:
        raise LimpetError(
            'engine="ray" needs the package ray', todo='Install it: pip install "limpet[ray]"'
        ) from e
    if not ray.is_initialized():
        _require_listener(ray_address())
        try:
            with _same_sigterm_handler():
                ray.init(address="auto")
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
            raise LimpetError(
                "There is no Ray cluster to evaluate on",
                found=_describe(e),
                todo="Start one (ray start --head), set RAY_ADDRESS, or call ray.init() before",
            ) from e
    return ray


def _require_listener(address: str | None) -> None:
    """Raise ``LimpetError`` unless something listens at an address: Ray would try for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not (colon and port.isdigit()):  # such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise LimpetError(
            "There is no Ray cluster to evaluate on",
            expected=f"one that listens at {address}, the RAY_ADDRESS",
            found=_describe(e),
            todo="Start it (ray start --head), correct RAY_ADDRESS, or unset it",
        ) from e


@contextmanager
def _same_sigterm_handler() -> Iterator[None]:
    """Undo that ``ray.init`` replaces the handler of SIGTERM: a training may need it to save."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray does not replace it there
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # it was not installed by Python
            signal.signal(signal.SIGTERM, before)


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_CAUSE]
