"""Which ranks share a host, and which hosts share a fate."""

import msgspec

from limpet.tiers.hosts import Hosts, RankFacts


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


def test_each_rank_reads_a_few_bytes_of_each_other_one(tmp_path):
    facts = RankFacts.of_this_rank(str(tmp_path / ("folder" * 30)), "rack" * 100, 1 << 40)
    assert len(msgspec.msgpack.encode(facts)) < 100


def test_the_domain_that_the_user_names_counts():
    racks = ["rack 1", "rack 1", "rack 2", "rack 2"]
    facts = [rank_in_pod(f"pod-{n}", f"boot-{n}", rack) for n, rack in enumerate(racks)]
    assert [Hosts(facts, rank, 2).peers[0] // 2 for rank in range(4)] == [1, 1, 0, 0]
