"""Which ranks hold the copies of a rank's shard.

The domains form groups of ``copies`` domains, and each rank has its copies in the domains of its
group. If the number of domains is not divisible, the rest of them joins the last group, whose ranks
have their copies in the next domains of a ring. (This is the mixed placement of Gemini, Wang et
al., SOSP 2023, section 4.1. There, it minimizes the probability that a failure of several machines
loses all copies of a shard: only failures within one group can.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from limpet.errors import LimpetError
from limpet.text import to_repr


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the copies of each rank are.

    ``holders``: for each rank, the ranks that hold its copies: itself, then its peers. ``held``:
    for each rank, the ranks whose copies it holds: itself, then the others in rank order.
    ``domains``: the smallest number of domains in which the copies of one rank are. If it is less
    than ``copies``, some copies share the fate of a domain, or do not exist at all.
    """

    copies: int
    holders: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    domains: int


def place_copies(domain_of_rank: Sequence[str], copies: int) -> Placement:
    """Return the placement of ``copies`` copies of each rank's shard, including its own.

    ``domain_of_rank``: for each rank, its host or the label of its domain. All ranks compute the
    same result. The copies of a rank are in different domains, as far as there are enough; then on
    different ranks. The ranks of a domain hold equally many copies or one more; so do all ranks, if
    the domains are equally large. Raises ``LimpetError`` for an invalid argument.
    """
    if type(copies) is not int or copies < 1:
        raise LimpetError(
            "Invalid value for copies=",
            expected="a whole number, 1 or more; it includes the copy on the rank's own host",
            found=to_repr(copies),
        )
    if not domain_of_rank:
        raise LimpetError("There are no ranks to place copies of", expected="1 rank or more")
    by_label: dict[str, list[int]] = {}
    for rank, label in enumerate(domain_of_rank):
        by_label.setdefault(label, []).append(rank)
    # Groups of domains of similar size, so that few ranks do not get the copies of many.
    domains = sorted(by_label.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    holders: dict[int, tuple[int, ...]] = {}
    for group in _make_groups(domains, copies):
        holders.update(_place_in_group(group, copies))
    held: list[list[int]] = [[rank] for rank in range(len(domain_of_rank))]
    for rank in range(len(domain_of_rank)):
        for holder in holders[rank][1:]:
            held[holder].append(rank)
    return Placement(
        copies,
        tuple(holders[rank] for rank in range(len(domain_of_rank))),
        tuple(map(tuple, held)),
        min(len({domain_of_rank[holder] for holder in ranks}) for ranks in holders.values()),
    )


Domain = Sequence[int]
"""The ranks of a domain, in rank order."""


def _make_groups(domains: Sequence[Domain], copies: int) -> Iterator[Sequence[Domain]]:
    """Yield the domains in groups of ``copies``. The rest joins the last group."""
    count = max(1, len(domains) // copies)
    for number in range(count):
        stop = len(domains) if number == count - 1 else (number + 1) * copies
        yield domains[number * copies : stop]


def _place_in_group(group: Sequence[Domain], copies: int) -> dict[int, tuple[int, ...]]:
    """Return the holders of each rank of a group, which is a ring of domains."""
    next_position: Counter[int] = Counter()  # in each domain, so that its ranks take turns
    holders: dict[int, tuple[int, ...]] = {}
    for number, domain in enumerate(group):
        peers: list[list[int]] = [[] for _ in domain]
        for distance in range(1, min(copies, len(group))):
            other_number = (number + distance) % len(group)
            other = group[other_number]
            for of_rank in peers:
                of_rank.append(other[next_position[other_number] % len(other)])
                next_position[other_number] += 1
        for position, rank in enumerate(domain):
            found = [rank, *peers[position]]
            others = _other_ranks(group, number, position)
            while len(found) < copies and (other_rank := next(others, None)) is not None:
                if other_rank not in found:
                    found.append(other_rank)
            holders[rank] = tuple(found)
    return holders


def _other_ranks(group: Sequence[Domain], number: int, position: int) -> Iterator[int]:
    """Yield the ranks after one position of a domain, then those of the next domains. They hold
    the copies for which there are too few domains."""
    for distance in range(len(group)):
        domain = group[(number + distance) % len(group)]
        for step in range(1, len(domain) + 1):
            yield domain[(position + step) % len(domain)]
