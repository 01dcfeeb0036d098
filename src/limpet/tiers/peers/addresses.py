"""At which addresses the ranks serve their copies, and the secret of the job.

Both go through the job's key-value store. Who can reach that has the secret, and the job.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

import msgspec

from limpet.errors import StoreError
from limpet.ranks.kv import KVClient
from limpet.ranks.wire import make_secret

_SIOCGIFADDR = 0x8915


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a rank serves copies: an IP address and a port."""

    rank: int
    host: str
    port: int


_DECODER = msgspec.json.Decoder(PeerAddress)


def job_secret(kv: KVClient, prefix: str) -> str:
    """Return the secret of this start of the job, which the first rank that asks creates."""
    return kv.compare_and_set(f"{prefix}/peer-secret", make_secret())


def publish(kv: KVClient, prefix: str, address: PeerAddress) -> list[str]:
    """Let the other ranks look up this rank's address, once per ``prefix``. Returns the keys to
    delete when it stops serving."""
    value = msgspec.json.encode(address)
    return kv.put_all({f"{prefix}/peer/{address.rank}": value})


def look_up(kv: KVClient, prefix: str, rank: int) -> PeerAddress | None:
    """Return the address of a rank, or None if it has not published one (yet)."""
    value = kv.try_get(f"{prefix}/peer/{rank}")
    return None if value is None else _DECODER.decode(value)


def choose_address(store_host: str, interface: str | None, *, is_one_host: bool) -> str:
    """Return the address at which this rank serves copies: of ``interface``, or that to
    ``store_host``. Raises ``StoreError``, also for loopback unless ``is_one_host``."""
    try:
        if interface is None:
            found = _route_to(store_host)
        else:
            found = _parse_ip(interface) or _interface_address(interface)
    except OSError as e:
        raise StoreError(
            "Cannot find the address at which this rank serves copies",
            expected=f"a route to {store_host}" if interface is None else "a network interface",
            found=f"{interface or store_host}: {e.strerror or e}",
            todo="Name the interface of the network between the hosts: interface='eth0'",
        ) from e
    if ipaddress.ip_address(found.partition("%")[0]).is_loopback and not is_one_host:
        raise StoreError(
            f"The other hosts cannot reach the address {found} of this rank",
            expected="an address of the network between the hosts",
            found=f"a loopback address, by {interface or store_host}",
            todo="Name the interface of the network between the hosts: interface='eth0'",
        )
    return found


def _parse_ip(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _route_to(host: str) -> str:
    """Return the own address of packets to a host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface."""
    import fcntl  # a tier needs Linux

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
