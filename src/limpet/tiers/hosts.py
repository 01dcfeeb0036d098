"""The hosts of a job: which ranks share a memory, and where the copies of each rank are."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from limpet import machine
from limpet.tiers.placement import Placement, place_copies


class RankFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others when a tier starts.

    ``machine``: its machine or container; ``boot``: the boot of the kernel below it; ``memory``:
    the folder that it uses, as its host knows it; ``domain``: what the user says that fails as a
    whole with it, or None; ``nbytes``: the size of its shard.
    """

    machine: str
    boot: str
    memory: str
    domain: str | None
    nbytes: int

    @classmethod
    def of_this_rank(cls, folder: str, domain: str | None, nbytes: int) -> RankFacts:
        host, boot, _ = machine.process_identity()
        name = f"{host} {boot}"
        memory = f"{name} {os.path.realpath(folder)}"
        return cls(name, boot, memory, domain, nbytes)


def shorten_names(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the same facts with short names: only whether two are equal counts, and each rank
    reads those of all others."""
    numbers: dict[str, str] = {"": ""}

    def shorten(name: str) -> str:
        return numbers.setdefault(name, str(len(numbers)))

    return [
        RankFacts(
            shorten(f.machine),
            shorten(f.boot),
            shorten(f.memory),
            None if f.domain is None else shorten(f.domain),
            f.nbytes,
        )
        for f in facts
    ]


class Hosts:
    """The hosts of a job, as one rank sees them. All ranks compute the same placement.

    Ranks that use one folder of one machine share a memory, and are on one host.
    """

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
        """The bytes of one generation on this host: of its ranks, and of the copies they hold."""
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
    """Return what fails as a whole with each rank.

    Containers of one node are lost together, so it is the machine below them. If all ranks are on
    one machine, it is the folder: then the copies at least do not share that.
    """
    is_one_boot = len({f.boot for f in facts}) == 1
    default = [f.memory if is_one_boot else f.boot or f.memory for f in facts]
    return [d if f.domain is None else f.domain for f, d in zip(facts, default, strict=True)]
