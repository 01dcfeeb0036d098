"""Notices of Google Compute Engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from limpet.arguments import check_seconds
from limpet.notices.metadata import LINK_LOCAL, Reply, fetch, server_url
from limpet.notices.notice import BoundedSource, Notice
from limpet.notices.planned import BEFORE, PlannedEvent, PlannedEvents, most_urgent

_PREEMPTED_SECONDS = 30.0
_GPU_SECONDS = 3600.0
_OTHER_SECONDS = 60.0


class GcpNotice(BoundedSource):
    """The notices of the metadata server of Compute Engine.

    - ``instance/preempted``: a Spot VM is stopped. It has 30 seconds from then on; how many are
      left is unknown if that was before the first poll.
    - ``instance/maintenance-event``: a live migration does not stop the training. A termination
      comes 60 minutes after it is announced on a machine with a GPU, and 60 seconds after that on
      others. The server sends no time, so these seconds count from when this source first sees it.
      If it was announced before the first poll, see ``PlannedEvents``.

    ``before``: maintenance that is further away, in seconds, does not stop the training yet.
    ``maintenance_seconds``: the time between the announcement of a termination and its begin; by
    default as above, depending on whether this process sees an NVIDIA GPU. ``check`` raises
    ``OSError`` if the server does not answer as documented. In a pod of GKE with Workload Identity,
    the server has none of these keys, and the notice is SIGTERM.

    Source: https://cloud.google.com/compute/docs/, "Spot VMs", "Handle GPU host maintenance
    events", and "Query the metadata server for maintenance event notices".
    """

    def __init__(
        self,
        base_url: str = LINK_LOCAL,
        *,
        before: float = BEFORE,
        maintenance_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``LimpetError`` for an invalid value."""
        super().__init__("the Google Cloud metadata server", 2.0, clock)
        if maintenance_seconds is None:
            has_gpu = os.path.exists("/dev/nvidiactl")
            maintenance_seconds = _GPU_SECONDS if has_gpu else _OTHER_SECONDS
        self._maintenance_seconds = check_seconds("maintenance_seconds=", maintenance_seconds)
        self._url = server_url(base_url)
        self._maintenance = PlannedEvents(before)
        self._preempted_at: float | None = None
        self._terminates_at: float | None = None
        self._was_running = False
        self._was_quiet = False

    def check(self) -> Notice | None:
        return most_urgent([self._check_preempted, self._check_maintenance])

    def _check_preempted(self) -> Notice | None:
        reply = self._get("preempted")
        if reply.text == "FALSE":
            self._was_running = True
            return None
        if reply.text != "TRUE":
            raise reply.unclear("TRUE or FALSE")
        if self._preempted_at is None and self._was_running:
            self._preempted_at = self.clock()
        left = None
        if self._preempted_at is not None:
            left = max(0.0, self._preempted_at + _PREEMPTED_SECONDS - self.clock())
        return Notice("the preemption by Google Cloud", left)

    def _check_maintenance(self) -> Notice | None:
        reply = self._get("maintenance-event")
        events = []
        if reply.text == "MIGRATE_ON_HOST_MAINTENANCE":
            source = "the live migration by Google Cloud"
            left = _OTHER_SECONDS if self._was_quiet else None
            events.append(PlannedEvent("migration", source, left, stops=False))
        elif reply.text == "TERMINATE_ON_HOST_MAINTENANCE":
            if self._was_quiet and self._terminates_at is None:
                self._terminates_at = self.clock() + self._maintenance_seconds
            left = None
            if self._terminates_at is not None:
                left = max(0.0, self._terminates_at - self.clock())
            source = "the termination for host maintenance by Google Cloud"
            events.append(PlannedEvent("termination", source, left))
        elif reply.text != "NONE":
            raise reply.unclear(
                "NONE, MIGRATE_ON_HOST_MAINTENANCE, or TERMINATE_ON_HOST_MAINTENANCE"
            )
        else:
            self._was_quiet = True
            self._terminates_at = None
        return self._maintenance.notice(events)

    def _get(self, key: str) -> Reply:
        """Return the reply to a request. Raises ``OSError`` if another server answers."""
        url = f"{self._url}/computeMetadata/v1/instance/{key}"
        reply = fetch(url, {"Metadata-Flavor": "Google"})
        if reply.headers.get("Metadata-Flavor") != "Google":
            raise reply.unclear("the header 'Metadata-Flavor: Google'")
        return reply
