"""Notices of Microsoft Azure."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from limpet.notices.metadata import LINK_LOCAL, Reply, fetch, server_url
from limpet.notices.notice import BoundedSource, Notice
from limpet.notices.planned import BEFORE, PlannedEvent, PlannedEvents

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_STOPPING_TYPES = {"Preempt", "Terminate", "Reboot", "Redeploy"}
_FINAL_TYPES = {"Preempt", "Terminate"}


class _Event(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    event_status: str
    resources: list[str]
    not_before: str = ""
    duration_in_seconds: int = -1


class _Document(msgspec.Struct, rename="pascal"):
    events: list[_Event]


_DOCUMENT = msgspec.json.Decoder(_Document)


class AzureNotice(BoundedSource):
    """The scheduled events of an Azure virtual machine.

    ``Preempt`` comes at least 30 seconds ahead, ``Terminate`` 5 to 15 minutes, ``Redeploy`` 10
    minutes, ``Reboot`` 15 minutes, and the last two days ahead if Azure predicts that the host will
    fail. ``Freeze``, a pause of some seconds, does not stop the training. Only events of this
    machine count; if its name cannot be read, all do. This source only reads: an approval would let
    an event begin at once for all machines that it names.

    ``before``: an event that is further away, in seconds, does not stop the training yet. ``check``
    raises ``OSError`` if the server does not answer as documented. Azure may answer the first
    request of a machine only after 2 minutes.

    Source: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    def __init__(
        self,
        base_url: str = LINK_LOCAL,
        *,
        before: float = BEFORE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``LimpetError`` for an invalid value."""
        super().__init__("the Azure metadata server", 2.0, clock)
        self._url = server_url(base_url)
        self._planned = PlannedEvents(before)
        self._machine: str | None = None

    def check(self) -> Notice | None:
        reply = fetch(self._url + _EVENTS, _HEADERS)
        events = reply.decode(_DOCUMENT).events
        if events and self._machine is None:
            self._machine = self._read_name()
        own = [e for e in events if self._machine in (None, *map(str.casefold, e.resources))]
        return self._planned.notice([self._plan(event, reply) for event in own])

    def _read_name(self) -> str | None:
        try:
            return fetch(self._url + _NAME, _HEADERS).text.casefold() or None
        except OSError:
            return None  # asked again at the next poll; until then, each event counts

    def _plan(self, event: _Event, reply: Reply) -> PlannedEvent:
        if event.event_status not in ("Scheduled", "Started"):
            raise reply.unclear("the status Scheduled or Started")
        if event.event_status == "Started" or not event.not_before:
            seconds = 0.0
        else:
            seconds = reply.seconds_until(event.not_before)
        duration = event.duration_in_seconds
        pause = f" for {duration} s" if duration > 0 and event.event_type == "Freeze" else ""
        return PlannedEvent(
            event.event_id,
            f"the Azure scheduled event {event.event_type!r}{pause}",
            seconds,
            stops=event.event_type in _STOPPING_TYPES,
            is_final=event.event_type in _FINAL_TYPES,
        )
