"""Which ranks share a host, and which hosts share a fate."""

import msgspec
import pytest

from limpet.tiers.hosts import Hosts, RankFacts, shorten_names


def rank_in_pod(pod, node, domain=None):
    machine = f"{pod} pid:[1] {node}"
    return RankFacts(machine, node, f"{machine} /dev/shm/limpet-0/id", domain, 100)


def test_copies_of_pods_of_one_node_are_on_another_node():
    facts = [rank_in_pod(f"pod-{n}", f"boot-{n // 2}") for n in range(4)]
    for rank in range(4):
        hosts = Hosts(facts, rank, 2)
        (peer,) = hosts.peers
        assert peer // 2 != rank // 2
        assert hosts.count == 4, "each pod has a memory of its own"
        assert hosts.placement.domains == 2


@pytest.mark.parametrize("label", [None, "rack"])
def test_each_rank_reads_a_few_bytes_of_each_other_one(label):
    boot = "2f9c1c53-5f5b-4c39-9c0e-0a8c6f1d8f{:02}"
    facts = [
        rank_in_pod(f"pod-{n // 2}", boot.format(n // 4), label and f"{label} {n // 8}")
        for n in range(64)
    ]
    short = shorten_names(facts)
    assert len(msgspec.msgpack.encode(short)) < 64 * 16
    for rank in (0, 13, 63):
        found, expected = Hosts(short, rank, 2), Hosts(facts, rank, 2)
        assert found.placement == expected.placement
        assert (found.peers, found.held) == (expected.peers, expected.held)
        assert (found.local_ranks, found.count) == (expected.local_ranks, expected.count)
        assert found.is_one_machine == expected.is_one_machine
    (unknown,) = shorten_names([RankFacts("machine", "", "memory", None, 5)])
    assert unknown == RankFacts("1", "", "2", None, 5)


def test_the_domain_that_the_user_names_counts():
    racks = ["rack 1", "rack 1", "rack 2", "rack 2"]
    facts = [rank_in_pod(f"pod-{n}", f"boot-{n}", rack) for n, rack in enumerate(racks)]
    assert [Hosts(facts, rank, 2).peers[0] // 2 for rank in range(4)] == [1, 1, 0, 0]
