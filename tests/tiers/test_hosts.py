"""Which ranks share a host, and which hosts share a fate."""

from __future__ import annotations

from holdfast.tiers.hosts import Hosts, RankFacts


def rank_in_pod(pod: str, node: str, domain: str | None = None) -> RankFacts:
    machine = f"{pod} pid:[1] {node}"
    return RankFacts(machine, node, f"{machine} /dev/shm/holdfast-0/id", domain, 100)


def test_copies_of_pods_of_one_node_are_on_another_node() -> None:
    facts = [rank_in_pod(f"pod-{n}", f"boot-{n // 2}") for n in range(4)]
    for rank in range(4):
        hosts = Hosts(facts, rank, 2)
        (peer,) = hosts.peers
        assert peer // 2 != rank // 2
        assert hosts.count == 4, "each pod has a memory of its own"
        assert hosts.placement.domains == 2


def test_the_ranks_beside_a_rank_share_its_memory() -> None:
    facts = [rank_in_pod(f"pod-{n // 3}", f"boot-{n // 3}") for n in range(7)]
    hosts = Hosts(facts, 1, 2)
    assert [[*hosts.ranks_beside(rank)] for rank in (0, 2, 4, 6)] == [
        [0, 1, 2],
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    assert hosts.count == 3


def test_on_one_machine_each_folder_counts_as_a_host() -> None:
    facts = [rank_in_pod(f"pod-{n}", "boot") for n in range(2)]
    assert Hosts(facts, 0, 2).peers == [1]
    assert Hosts(facts, 0, 2).placement.domains == 2


def test_the_domain_that_the_user_names_counts() -> None:
    racks = ["rack 1", "rack 1", "rack 2", "rack 2"]
    facts = [rank_in_pod(f"pod-{n}", f"boot-{n}", rack) for n, rack in enumerate(racks)]
    assert [Hosts(facts, rank, 2).peers[0] // 2 for rank in range(4)] == [1, 1, 0, 0]


def test_fewer_nodes_than_copies_is_known() -> None:
    facts = [rank_in_pod(f"pod-{n}", f"boot-{n // 2}") for n in range(4)]
    assert Hosts(facts, 0, 3).placement.domains == 2
