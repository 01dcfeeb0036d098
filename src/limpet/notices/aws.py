"""Notices of Amazon EC2."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from limpet.notices.metadata import LINK_LOCAL, Reply, fetch, server_url
from limpet.notices.notice import BoundedSource, Notice
from limpet.notices.planned import BEFORE, PlannedEvent, PlannedEvents, most_urgent

_TOKEN_SECONDS = 6 * 3600
"""How long a token is valid: the maximum. It is renewed after half of that."""

_STOPPING_CODES = {"instance-reboot", "system-reboot", "instance-retirement", "instance-stop"}
_FINAL_CODES = {"instance-retirement", "instance-stop"}
_ACTIONS = {"terminate", "stop", "hibernate"}


class _SpotAction(msgspec.Struct):
    action: str
    time: str


class _Rebalance(msgspec.Struct, rename="camel"):
    notice_time: str


class _Maintenance(msgspec.Struct, rename="pascal"):
    code: str
    event_id: str
    state: str
    not_before: str


# created here: ``msgspec`` crashes if two threads describe a type at the same time
_SPOT_ACTION = msgspec.json.Decoder(_SpotAction)
_REBALANCE = msgspec.json.Decoder(_Rebalance)
_MAINTENANCE = msgspec.json.Decoder(list[_Maintenance])


class AwsNotice(BoundedSource):
    """The notices of the instance metadata service of EC2, version 2 (IMDSv2).

    These are the spot instance action (``terminate``, ``stop``, ``hibernate``), 2 minutes ahead or,
    for a hibernation, less; the rebalance recommendation, a risk that does not stop the training;
    and scheduled reboots, stops, and retirements, announced days ahead.

    ``before``: a scheduled event that is further away, in seconds, does not stop the training yet.
    ``check`` raises ``OSError`` if the server does not answer as documented, such as in a
    container, if the hop limit of the instance (``HttpPutResponseHopLimit``) is less than 2.

    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/, "Spot Instance interruption
    notices", "EC2 instance rebalance recommendations", "Use IMDS", and "View scheduled events".
    """

    def __init__(
        self,
        base_url: str = LINK_LOCAL,
        *,
        before: float = BEFORE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``LimpetError`` for an invalid value."""
        super().__init__("the AWS metadata server", 5.0, clock)
        self._url = server_url(base_url)
        self._planned = PlannedEvents(before)
        self._token = ""
        self._token_until = 0.0
        self._is_token_new = False
        self._rebalanced_at = ""
        self._maintenance_from = clock()

    def check(self) -> Notice | None:
        self._is_token_new = False
        if not self._token or self.clock() >= self._token_until:
            self._renew_token()
        return most_urgent([self._check_spot, self._check_rebalance, self._check_maintenance])

    def _check_spot(self) -> Notice | None:
        reply = self._get("spot/instance-action")
        if reply is None:
            return None
        spot = reply.decode(_SPOT_ACTION)
        if spot.action not in _ACTIONS:
            raise reply.unclear(f"an action ({', '.join(sorted(_ACTIONS))})")
        seconds: float | None = None
        with suppress(OSError):  # the action is certain, even if its time is unclear
            seconds = reply.seconds_until(spot.time)
        return Notice(f"the AWS spot instance action {spot.action!r}", seconds)

    def _check_rebalance(self) -> Notice | None:
        reply = self._get("events/recommendations/rebalance")
        if reply is None:
            return None
        notice_time = reply.decode(_REBALANCE).notice_time
        if notice_time == self._rebalanced_at:
            return None
        self._rebalanced_at = notice_time
        return Notice("the AWS rebalance recommendation", stops=False)

    def _check_maintenance(self) -> Notice | None:
        if self.clock() < self._maintenance_from:
            return None
        reply = self._get("events/maintenance/scheduled")
        events = [] if reply is None else reply.decode(_MAINTENANCE)
        notice = self._planned.notice(
            [
                PlannedEvent(
                    event.event_id,
                    f"the AWS scheduled event {event.code!r}",
                    reply.seconds_until(event.not_before),
                    stops=event.code in _STOPPING_CODES,
                    is_final=event.code in _FINAL_CODES,
                )
                for event in events
                if reply is not None and event.state == "active"
            ]
        )
        self._maintenance_from = self.clock() + 60.0  # it is announced days ahead
        return notice

    def _get(self, path: str) -> Reply | None:
        """Return the reply to a request for metadata, or None if there is none (404)."""
        while True:
            headers = {"X-aws-ec2-metadata-token": self._token}
            reply = fetch(f"{self._url}/latest/meta-data/{path}", headers, allow=(200, 401, 404))
            if reply.status != 401:
                return reply if reply.status == 200 else None
            if self._is_token_new:
                raise PermissionError(f"{reply.url} refuses a new token (status 401)")
            self._renew_token()

    def _renew_token(self) -> None:
        self._token = ""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        try:
            reply = fetch(f"{self._url}/latest/api/token", headers, method="PUT")
        except OSError as e:
            raise OSError(
                f"{e}. Without a token, there are no notices of AWS. In a container, set the hop "
                "limit of the instance's metadata to 2 or more"
            ) from e
        if not reply.text.isascii() or not reply.text.isprintable() or not reply.text:
            raise reply.unclear("a token")
        self._token = reply.text
        self._is_token_new = True
        self._token_until = self.clock() + _TOKEN_SECONDS / 2
