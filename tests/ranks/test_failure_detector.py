"""Waits for late and dead ranks, with a simulated clock: the event ``ranks_awaited``, and errors
that name all dead ranks."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import limpet
from limpet.errors import RankFailed
from limpet.ranks.collective import StoreCollective
from limpet.ranks.failure_detector import FailureDetector
from limpet.ranks.kv import CALL_ALONE, KVClient, Timeouts
from tests.fakegroup import FakeStore

WHAT = "the save of version_5"


class Scenario:
    """One rank in a collective with others, which exist only as values that the test writes to the
    store. Each pause takes one second and calls ``on_pause`` with the time."""

    def __init__(self, rank, size):
        self.now = 0.0
        self.store = FakeStore()
        self.on_pause: Callable[[float], object] = lambda now: None
        self.kv = KVClient(self.store, rank, size, Timeouts(), lambda: self.now)
        self.size = size
        self.reports: list[dict[str, Any]] = []

    def collective(self, number=1, within=None):
        return StoreCollective(self.kv, self.size, number, WHAT, within, sleep=self._pause)

    def _pause(self, seconds):
        self.now += 1
        self.on_pause(self.now)

    def send_heartbeat(self, rank, progress=0, waits=""):
        """Write a heartbeat of ``rank``."""
        self.store.set(
            f"heartbeat/{rank}", f"{int(self.now) + 1} {int(progress)} h {waits}".strip().encode()
        )

    def arrive(self, rank, number=1, op_number=1):
        """Write the value of ``rank``, which is its number, for a gather."""
        self.store.set(f"{number}/{op_number}/{rank}", b"0 " + msgspec.msgpack.encode(rank))

    def __call__(self, name, fields):
        if name == "ranks_awaited":
            self.reports.append({**fields, "at": self.now})


@pytest.fixture
def scenario(request):
    made = Scenario(getattr(request, "param", 0), 12)
    with limpet.attach(made):
        yield made
    made.kv.close()


def test_rank_0_emits_one_event_that_names_the_late_ranks(scenario):
    late_ranks = [2, *range(4, 12)]

    def on_pause(now):
        for rank in range(1, 12):
            if rank != 4:  # rank 4 never sends a heartbeat
                scenario.send_heartbeat(rank, progress=now if rank == 3 else 0)
        if now == 80:
            for rank in range(1, 12):
                scenario.arrive(rank)

    scenario.on_pause = on_pause
    scenario.arrive(1)
    collective = scenario.collective()
    assert collective.gather(0, int) == list(range(12))
    [report] = scenario.reports  # rank 1 has arrived, and rank 3 makes progress with a long task
    assert 10 < report.pop("at") == report.pop("seconds") < 14
    assert 586 < report.pop("longest") < 590
    assert report == {"what": WHAT, "ranks": late_ranks[:8], "count": 9,
                      "first": True, "todo": CALL_ALONE}  # fmt: skip
    scenario.on_pause = lambda now: [
        on_pause(now),
        now > 160 and [scenario.arrive(r, op_number=2) for r in range(12)],
    ]
    assert collective.gather(0, int) == list(range(12))
    assert scenario.now > 160
    assert len(scenario.reports) == 1  # there is one event for each collective


@pytest.mark.parametrize("scenario", [3], indirect=True)
def test_other_ranks_report_a_late_rank_0_but_not_one_that_waits_itself(scenario):
    value = msgspec.msgpack.encode("go")

    def on_pause(now):
        scenario.send_heartbeat(0, waits="1 0" if now < 100 else "")
        if now > 200:
            scenario.store.set("1/1/0", b"0 " + value)

    scenario.on_pause = on_pause
    assert scenario.collective().broadcast(None, str) == "go"
    [report] = scenario.reports
    assert (report["ranks"], report["count"]) == ([0], 1)
    assert 109 < report["at"] < 116


def test_a_rank_that_never_finds_rank_0_emits_an_event_and_raises():
    """This is the first call of a process, when there is no collective yet."""
    now = [0.0]

    def clock():
        now[0] += 5
        return now[0]

    reports: list[Any] = []
    kv = KVClient(FakeStore(), 1, 2, Timeouts(60, 300), clock, lambda prefix: FakeStore())
    with (
        limpet.attach(lambda name, fields: reports.append((name, fields))),
        pytest.raises(RankFailed, match="Rank 0"),
    ):
        kv.has_all(["a"])
    kv.close()
    [(name, fields)] = reports
    assert name == "ranks_awaited"
    assert 10 < fields["seconds"] < 100
    assert fields.pop("longest") == 300 - fields.pop("seconds")
    assert fields == {"what": "the first call of all ranks", "ranks": [0], "count": 1,
                      "first": True, "todo": CALL_ALONE}  # fmt: skip


def find_failed(ages, arrived=()):
    """Return the error that the detector finds if rank ``r`` sent its last heartbeat ``ages[r]``
    seconds ago."""
    scenario = Scenario(0, 12)
    detector = FailureDetector(scenario.kv, "it")
    oldest = max(ages.values())
    for now in range(int(oldest) + 1):
        scenario.now = float(now)
        for rank, age in ages.items():
            if now <= oldest - age:
                scenario.send_heartbeat(rank)
        found = detector.failed(sorted(ages), lambda rank: rank in arrived)
    scenario.kv.close()
    return found


@pytest.mark.parametrize(
    ("ages", "arrived", "expected"),
    [
        ({1: 60, 2: 60}, (), None),
        ({1: 61, 2: 29}, (), "Rank 1 on h did not join it"),
        ({1: 61, 2: 59}, (), "Rank 1 on h did not join it (nor did rank 2)"),
        ({1: 59, 2: 61}, (), "Rank 2 on h did not join it (nor did rank 1)"),
        ({1: 59, 2: 61, 3: 0, 4: 60}, (), "Rank 2 on h did not join it (nor did ranks 1, 4)"),
        ({1: 61, 2: 59}, (1,), None),
        ({1: 61, 2: 61, 3: 61}, (1, 3), "Rank 2 on h did not join it"),
        (dict.fromkeys(range(1, 12), 61), (), "Rank 1 on h did not join it (nor did ranks"
                                              " 2, 3, 4, 5, 6, 7, 8, 9, and 2 more)"),
    ],
)  # fmt: skip
def test_the_error_names_a_dead_rank_and_all_ranks_that_died_with_it(ages, arrived, expected):
    found = find_failed(ages, arrived)
    assert (found and found.what) == expected
    if found is not None:
        assert f"Rank {found.rank} " in found.what
