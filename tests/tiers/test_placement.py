"""Placement of copies, as properties of random trainings."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.tiers.hosts import place_copies

domain_lists = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40)


@given(domain_lists, st.integers(1, 6))
@settings(max_examples=150)
def test_the_copies_of_a_rank_are_in_different_domains_whenever_possible(labels, copies):
    placement = place_copies(labels, copies)
    count = min(copies, len(set(labels)))
    for rank, holders in enumerate(placement.holders):
        assert holders[0] == rank
        assert len(holders) == len(set(holders)) == min(copies, len(labels))
        assert len({labels[holder] for holder in holders}) == count
        assert len({labels[holder] for holder in holders[:count]}) == count
    assert placement.domains == count


@given(domain_lists, st.integers(1, 6))
@settings(max_examples=150)
def test_the_ranks_of_a_domain_hold_equally_many_copies_or_one_more(labels, copies):
    if len(set(labels)) < copies:
        return
    placement = place_copies(labels, copies)
    for label in set(labels):
        loads = [len(placement.held[r]) for r, other in enumerate(labels) if other == label]
        assert max(loads) - min(loads) <= 1


@given(st.integers(1, 30), st.integers(1, 6))
def test_the_groups_do_not_overlap_and_the_rest_joins_the_last_one(hosts, copies):
    placement = place_copies([str(i) for i in range(hosts)], copies)
    neighbors = {rank: {*holders} for rank, holders in enumerate(placement.holders)}
    whole = max(1, hosts // copies) - 1  # groups before the last one
    for rank in range(whole * copies):
        assert neighbors[rank] == {*range(rank // copies * copies, (rank // copies + 1) * copies)}
    last = {*range(whole * copies, hosts)}
    assert all(neighbors[rank] <= last for rank in last)
    # only a failure of a whole group can lose a rank's shard
    sets = Counter(frozenset(holders) for holders in neighbors.values())
    assert len(sets) <= whole + len(last)


def test_examples():
    # two hosts with two ranks each: each rank has a peer on the other host
    assert place_copies(["a", "a", "b", "b"], 2).holders == ((0, 2), (1, 3), (2, 0), (3, 1))
    # three hosts, two copies: a ring
    assert place_copies(["a", "b", "c"], 2).holders == ((0, 1), (1, 2), (2, 0))
    # five hosts, two copies: a group of two, and one of three
    assert place_copies([*"abcde"], 2).holders == ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
    # one host: the copies share its fate
    placement = place_copies(["a", "a", "a"], 2)
    assert (placement.holders, placement.domains) == (((0, 1), (1, 2), (2, 0)), 1)
    # one rank: there is no place for another copy
    assert place_copies(["a"], 2).holders == ((0,),)
    # hosts of similar size form a group
    assert place_copies([*"aaaabbbbcd"], 2).holders[8:] == ((8, 9), (9, 8))
