"""Notices of Google Compute Engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from limpet.arguments import check_seconds
from limpet.notices.metadata import LINK_LOCAL, Reply, fetch, server_url
from limpet.notices.notice import BoundedSource, Notice
from limpet.notices.planned import BEFORE, PlannedEvent, PlannedEvents, most_urgent

_PREEMPTED_SECONDS = 30.0
_GPU_SECONDS = 3600.0
_OTHER_SECONDS = 60.0
_OBJECT = msgspec.json.Decoder(dict[str, Any])


class GcpNotice(BoundedSource):
    """The notices of the metadata server of Compute Engine.

    - ``instance/preempted``: a Spot VM is stopped. It has 30 seconds from then on; how many are
      left is unknown if that was before the first poll.
    - ``instance/maintenance-event``: a live migration does not stop the training. A termination
      comes 60 minutes after it is announced on a machine with a GPU, and 60 seconds after that on
      others. The server sends no time, so these seconds count from when this source first sees it.
      If it was announced before the first poll, see ``PlannedEvents``.
    - ``instance/upcoming-maintenance``: the maintenance of machines that cannot migrate, announced
      up to weeks ahead. It stops the training if the machine's ``scheduling/on-host-maintenance``
      is ``TERMINATE``.

    ``before``: maintenance that is further away, in seconds, does not stop the training yet.
    ``maintenance_seconds``: the time between the announcement of a termination and its begin; by
    default as above, depending on whether this process sees an NVIDIA GPU. ``check`` raises
    ``OSError`` if the server does not answer as documented. In a pod of GKE with Workload Identity,
    the server has none of these keys, and the notice is SIGTERM.

    Source: https://cloud.google.com/compute/docs/, "Spot VMs", "Handle GPU host maintenance
    events", "Query the metadata server for maintenance event notices", and "Monitor and plan for a
    host maintenance event".
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
        self._upcoming = PlannedEvents(before)
        self._upcoming_from = clock()
        self._preempted_at: float | None = None
        self._terminates_at: float | None = None
        self._was_running = False
        self._was_quiet = False

    def check(self) -> Notice | None:
        return most_urgent([self._check_preempted, self._check_maintenance, self._check_upcoming])

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

    def _check_upcoming(self) -> Notice | None:
        if self.clock() < self._upcoming_from:
            return None
        # 404: this machine type has no such key; 503: nothing has been announced yet
        reply = self._get("upcoming-maintenance?alt=json", allow=(200, 404, 503))
        event = self._read_upcoming(reply) if reply.status == 200 else None
        self._upcoming_from = self.clock() + 60.0  # it is announced days ahead
        return self._upcoming.notice([] if event is None else [event])

    def _read_upcoming(self, reply: Reply) -> PlannedEvent | None:
        """Return the upcoming maintenance in a reply. The server says that there is none by ``{}``,
        the word NONE, or an object with an ``error``."""
        if reply.text in ("NONE", '"NONE"', ""):
            return None
        found = reply.decode(_OBJECT)
        if not found or "error" in found:
            return None
        start = found.get("window_start_time", found.get("windowStartTime"))
        if not isinstance(start, str):
            raise reply.unclear("an object with window_start_time")
        seconds = reply.seconds_until(start)
        if found.get("maintenance_status") == "ONGOING":
            seconds = 0.0
        policy = self._get("scheduling/on-host-maintenance").text
        return PlannedEvent(
            start, "the host maintenance of Google Cloud", seconds, stops=policy == "TERMINATE"
        )

    def _get(self, key: str, allow: tuple[int, ...] = (200,)) -> Reply:
        """Return the reply to a request. Raises ``OSError`` if another server answers."""
        url = f"{self._url}/computeMetadata/v1/instance/{key}"
        reply = fetch(url, {"Metadata-Flavor": "Google"}, allow=allow)
        if reply.headers.get("Metadata-Flavor") != "Google":
            raise reply.unclear("the header 'Metadata-Flavor: Google'")
        return reply
