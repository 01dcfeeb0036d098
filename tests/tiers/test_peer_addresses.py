"""Addresses and the secret of a job, through its key-value store."""

import pytest

from limpet.errors import StoreError
from limpet.tiers.peers.addresses import choose_address


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
