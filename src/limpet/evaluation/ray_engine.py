"""Workers on a Ray cluster, each of which is an actor. Only this module imports ray.

Ray starts the actors, places them, and ends them when their owner, the evaluator, ends. They
connect to its queue as any worker does: Ray carries only the address.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from limpet.arguments import require
from limpet.errors import LimpetError
from limpet.evaluation.worker import work_for
from limpet.settings import ray_address
from limpet.tasks.remote import RemoteQueue
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


class RayActor:
    """The actor: a worker in a process that Ray has started."""

    def work(self, address: str, name: str, path: list[str]) -> None:
        # at the end: what Ray has prepared, such as a runtime_env, has priority
        sys.path.extend(entry for entry in path if entry not in sys.path)
        with RemoteQueue.connect(address, name) as queue:
            work_for(queue)


class RayProcess:
    """A worker that is an actor, as the evaluator sees it."""

    def __init__(self, ray: Any, actor: Any, work: Any) -> None:
        self._ray, self._actor, self._work = ray, actor, work

    def end(self) -> str | None:
        """Return how it has ended, or None if it is alive."""
        ray = self._ray
        if not ray.is_initialized():  # a call would start a cluster
            return "no connection to Ray"
        try:
            if not ray.wait([self._work], timeout=0)[0]:
                return None
            ray.get(self._work)
        except (ray.exceptions.RayError, ConnectionError, LimpetError) as e:
            return _describe(e)
        return "it has left"

    def kill(self) -> None:
        if self._ray.is_initialized():  # otherwise, it has ended with the connection
            self._ray.kill(self._actor)


class RayCluster:
    """The Ray cluster that the program is connected to, or the one that Ray finds. Raises
    ``LimpetError`` without Ray or a cluster, and for invalid ``options`` of the actors."""

    def __init__(self, options: Mapping[str, Any], device: str | None) -> None:
        unknown = sorted(map(str, options.keys() - set(_OPTIONS)))
        require("ray= of Workers", not unknown, f"some of {', '.join(_OPTIONS)}", unknown)
        self._ray = ray = _connect()
        gpus = {"num_gpus": 1} if str(device).startswith("cuda") else {}
        # Not restarted by Ray: the evaluator starts another one.
        own = {"max_restarts": 0, "max_task_retries": 0}
        try:
            self._class = ray.remote(**{"num_cpus": 1, **gpus, **options, **own})(RayActor)
        except (TypeError, ValueError) as e:
            raise LimpetError(
                f"Ray refuses ray={to_repr(dict(options))[:200]}", found=_describe(e)
            ) from e

    def own_host(self) -> str:
        """Return the IP address of this machine in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    def start_actor(self, address: str, name: str) -> RayProcess:
        """Ask Ray for an actor that connects to the address of a queue."""
        actor = self._class.remote()
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        return RayProcess(self._ray, actor, actor.work.remote(address, name, path))


def _connect() -> Any:
    """Import ray, connect to a cluster that exists unless the program has, and return ray."""
    try:
        import ray
    except ImportError as e:
        raise LimpetError("Workers(ray=...) needs the package ray: pip install ray") from e
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
