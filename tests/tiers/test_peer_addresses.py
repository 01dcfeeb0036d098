"""Addresses and the secret of a job, through its key-value store."""

import pytest

from limpet.errors import StoreError
from limpet.tiers.peers.addresses import choose_address


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("localhost", r"cannot reach the address .*MASTER_ADDR"),
        ("no.such.host.invalid", "Cannot find the address"),
    ],
)
def test_other_hosts_need_an_address_that_they_can_reach(host, message):
    with pytest.raises(StoreError, match=message):
        choose_address(host, is_one_host=False)
