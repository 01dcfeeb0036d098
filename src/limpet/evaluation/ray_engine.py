"""Workers on a Ray cluster, each of which is an actor.

Ray starts the actors, places them, and ends them when their owner, the evaluator, ends. They
connect to its queue as any worker does: Ray carries only the address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limpet.errors import LimpetError
from limpet.evaluation.worker import work_for
from limpet.tasks import ray_cluster
from limpet.tasks.remote import RemoteQueue


class RayActor:
    """The actor: a worker in a process that Ray has started."""

    def work(self, address: str, name: str, path: list[str]) -> None:
        ray_cluster.add_path(path)
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
            return ray_cluster.describe(e)
        return "it has left"

    def kill(self) -> None:
        if self._ray.is_initialized():  # otherwise, it has ended with the connection
            self._ray.kill(self._actor)


class RayWorkers:
    """Starts workers on Ray. Raises ``LimpetError`` without Ray or a cluster, and for invalid
    ``options`` of the actors."""

    def __init__(self, options: Mapping[str, Any], device: str | None) -> None:
        ray_cluster.check_options("ray= of Workers", options)
        self._ray = ray_cluster.connect("Workers(ray=...)")
        gpus = {"num_gpus": 1} if str(device).startswith("cuda") else {}
        self._class = ray_cluster.actor_class(self._ray, RayActor, {**gpus, **options})
        self.host = str(self._ray.util.get_node_ip_address())

    def start_actor(self, address: str, name: str) -> RayProcess:
        """Ask Ray for an actor that connects to the address of a queue."""
        actor = self._class.remote()
        return RayProcess(
            self._ray, actor, actor.work.remote(address, name, ray_cluster.own_path())
        )
