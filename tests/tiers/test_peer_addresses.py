"""Addresses and the secret of a job, through its key-value store."""

from __future__ import annotations

import pytest

from limpet.errors import StoreError
from limpet.ranks.kv import KVClient
from limpet.tiers.peers.addresses import (
    PeerAddress,
    choose_address,
    job_secret,
    look_up,
    publish,
)
from tests.fakegroup import QUICK_TIMEOUTS, FakeStore


@pytest.fixture
def clients():
    store = FakeStore()
    clients = [KVClient(store, rank, 3, QUICK_TIMEOUTS) for rank in range(3)]
    yield clients
    for client in clients:
        client.close()


def test_addresses_are_found_once_they_are_published(clients):
    first = PeerAddress(0, "10.0.0.1", 4000)
    assert look_up(clients[1], "try1", [0, 2]) == [None, None]
    used = publish(clients[0], "try1", first)
    assert look_up(clients[1], "try1", [0, 2]) == [first, None]
    assert look_up(clients[1], "try2", [0]) == [None]  # another start of the job
    clients[0].delete(used)
    assert look_up(clients[1], "try1", [0]) == [None]


def test_all_ranks_have_one_secret_and_each_start_another(clients):
    secrets = {job_secret(client, "try1") for client in clients}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64
    assert job_secret(clients[0], "try1") != job_secret(clients[0], "try2")


def test_the_address_by_the_route_to_the_store():
    assert choose_address("127.0.0.1", None, is_one_host=True) == "127.0.0.1"
    assert choose_address("localhost", None, is_one_host=True) in ("127.0.0.1", "::1")


@pytest.mark.parametrize("interface", ["lo", "127.0.0.2", "::1"])
def test_the_address_of_an_interface(interface):
    found = choose_address("203.0.113.7", interface, is_one_host=True)
    assert found == {"lo": "127.0.0.1"}.get(interface, interface)


@pytest.mark.parametrize(("host", "interface"), [("localhost", None), ("h", "lo"), ("h", "::1")])
def test_other_hosts_need_an_address_that_they_can_reach(host, interface):
    with pytest.raises(StoreError, match=r"cannot reach the address .* interface='eth0'"):
        choose_address(host, interface, is_one_host=False)


@pytest.mark.parametrize(("host", "interface"), [("no.such.host.invalid", None), ("h", "eth99")])
def test_an_unknown_host_or_interface(host, interface):
    with pytest.raises(StoreError, match=r"Cannot find the address"):
        choose_address(host, interface, is_one_host=False)
