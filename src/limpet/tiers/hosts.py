"""The hosts of a job: which ranks share a memory, and where the copies of each rank are.

The domains form groups of ``copies`` domains, of which the last has the rest, too; each rank has
its copies in its group, so that only failures within one group lose all copies of a shard. (The
mixed placement of Gemini, Wang et al., SOSP 2023, section 4.1.)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash
from msgspec.structs import replace

from limpet import machine


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the copies of each rank are, and which ones it holds, itself first. ``domains``: the
    fewest with copies of one rank; if below ``copies``, some share a fate."""

    copies: int
    holders: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    domains: int


def place_copies(domain_of_rank: Sequence[str], copies: int) -> Placement:
    """Return the placement, the same on all ranks: copies on different domains if there are enough,
    then on different ranks, equally many each or one more. ``copies``: 1 or more."""
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
    spread = [len({domain_of_rank[holder] for holder in ranks}) for ranks in holders.values()]
    return Placement(
        copies=copies,
        holders=tuple(holders[rank] for rank in range(len(domain_of_rank))),
        held=tuple(map(tuple, held)),
        domains=min(spread),
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


class RankFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others when a tier starts: digests of names, because only whether two
    are equal counts, and each rank reads those of all others. "" stands for an unknown name."""

    machine: str  # or container
    boot: str  # of the kernel below it
    memory: str  # the folder that it uses, as its host knows it
    domain: str | None  # what the user says that fails as a whole with it
    nbytes: int  # of its shard

    @classmethod
    def of_this_rank(cls, folder: str, domain: str | None, nbytes: int) -> RankFacts:
        host, boot, _ = machine.process_identity()
        name = f"{host} {boot}"
        return cls(
            machine=_digest(name),
            boot=_digest(boot) if boot else "",
            memory=_digest(f"{name} {os.path.realpath(folder)}"),
            domain=None if domain is None else _digest(domain),
            nbytes=nbytes,
        )


def _digest(name: str) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(name))


class Hosts:
    """The hosts of a job, as one rank sees them: ranks that use one folder of one machine."""

    def __init__(self, facts: Sequence[RankFacts], rank: int, copies: int) -> None:
        self._facts = facts
        self.rank = rank
        self.placement: Placement = place_copies(_domains(facts), copies)
        memory = facts[rank].memory
        self._by_memory: dict[str, list[int]] = {}
        for r, f in enumerate(facts):
            self._by_memory.setdefault(f.memory, []).append(r)
        self.local_ranks = self._by_memory[memory]
        self.is_first = self.local_ranks[0] == rank
        """True if this rank is the first one of its host, which acts for it."""

        self.is_one_machine = len({f.machine for f in facts}) == 1
        placement = self.placement
        self.peers = [r for r in placement.holders[rank][1:] if facts[r].memory != memory]
        """The ranks on other hosts that hold the copies of this rank."""

        self.held = [r for r in placement.held[rank][1:] if facts[r].memory != memory]
        """The ranks on other hosts whose copies this rank holds."""

    def resize(self, nbytes: Sequence[int]) -> Hosts:
        """Return the same hosts with other sizes of the shards, by rank."""
        facts = [replace(f, nbytes=n) for f, n in zip(self._facts, nbytes, strict=True)]
        return Hosts(facts, self.rank, self.placement.copies)

    @property
    def held_bytes(self) -> int:
        """The bytes of one snapshot on this host: of its ranks, and of the copies they hold."""
        held = [
            r
            for local in self.local_ranks
            for r in self.placement.held[local]
            if r == local or self._facts[r].memory != self._facts[local].memory
        ]
        return sum(self._facts[r].nbytes for r in held)

    @property
    def held_by_rank(self) -> list[int]:
        """The sizes in bytes of the shards of which this rank holds copies."""
        return [self._facts[r].nbytes for r in self.held]

    @property
    def count(self) -> int:
        return len(self._by_memory)

    def ranks_beside(self, rank: int) -> Sequence[int]:
        """Return the ranks on the host of a rank, which see the same files."""
        return self._by_memory[self._facts[rank].memory]


def _domains(facts: Sequence[RankFacts]) -> list[str]:
    """Return what fails as a whole with each rank: the machine, whose containers are lost together;
    if there is only one, the folder, so that copies at least do not share that."""
    is_one_boot = len({f.boot for f in facts}) == 1
    default = [f.memory if is_one_boot else f.boot or f.memory for f in facts]
    return [d if f.domain is None else f.domain for f, d in zip(facts, default, strict=True)]
