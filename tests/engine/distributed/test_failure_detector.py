"""Ranks that are waited for, by a clock that the test turns: told once, and missed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.engine.distributed.failure_detector import FailureDetector
from holdfast.engine.distributed.kv import KVClient, Timeouts
from holdfast.engine.distributed.session import SessionKVClient
from holdfast.engine.distributed.store_collective import StoreCollective
from holdfast.errors import RankFailed
from holdfast.testing.fakegroup import FakeStore

WHAT = "the save of version_5"


class Scene:
    """One rank that meets others, of which there is nothing but what the test lets them say. A
    pause takes a second, at which ``acts`` is called with the time."""

    def __init__(self, rank: int, size: int) -> None:
        self.now = 0.0
        self.store = FakeStore()
        self.acts: Callable[[float], object] = lambda now: None
        self.board = KVClient(self.store, rank, size, Timeouts(), lambda: self.now)
        self.size = size
        self.told: list[dict[str, Any]] = []

    def meet(self, number: int = 1, within: float | None = None) -> StoreCollective:
        return StoreCollective(self.board, self.size, number, WHAT, within, sleep=self._pause)

    def _pause(self, seconds: float) -> None:
        self.now += 1
        self.acts(self.now)

    def pulse(self, rank: int, progress: float = 0, waits: str = "") -> None:
        """``rank`` is alive."""
        self.store.set(
            f"pulse/{rank}", f"{int(self.now) + 1} {int(progress)} h {waits}".strip().encode()
        )

    def puts(self, rank: int, number: int = 1, turn: int = 1) -> None:
        """``rank`` comes, with its number."""
        self.store.set(f"{number}/{turn}/{rank}", b"0 " + msgspec.msgpack.encode(rank))

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if name == "ranks_awaited":
            self.told.append({**fields, "at": self.now})


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(getattr(request, "param", 0), 12)
    with holdfast.attach(made):
        yield made
    made.board.close()


def test_rank_0_tells_once_for_whom_it_waits(scene: Scene) -> None:
    late = [2, *range(4, 12)]

    def acts(now: float) -> None:
        for rank in range(1, 12):
            if rank != 4:  # which has never been heard of
                scene.pulse(rank, progress=now if rank == 3 else 0)
        if now == 80:
            for rank in range(1, 12):
                scene.puts(rank)

    scene.acts = acts
    scene.puts(1)
    meeting = scene.meet()
    assert meeting.gather(0, int) == list(range(12))
    [told] = scene.told  # rank 1 has come, and rank 3 gets on with something long
    assert 30 < told.pop("at") == told.pop("seconds") < 34
    assert told == {"what": WHAT, "ranks": late[:8], "count": 9, "longest": 600.0}
    scene.acts = lambda now: [acts(now), now > 160 and [scene.puts(r, turn=2) for r in range(12)]]
    assert meeting.gather(0, int) == list(range(12))
    assert scene.now > 160
    assert len(scene.told) == 1  # of one meeting


def test_each_meeting_is_told_of_by_itself(scene: Scene) -> None:
    for number in (1, 2):
        end = scene.now + 50

        def acts(now: float, end: float = end, number: int = number) -> None:
            for rank in range(1, 12):
                scene.pulse(rank)
                if now > end:
                    scene.puts(rank, number)

        scene.acts = acts
        scene.meet(number).gather(0, int)
    assert [told["count"] for told in scene.told] == [11, 11]


@pytest.mark.parametrize("scene", [3], indirect=True)
def test_the_others_tell_that_rank_0_does_not_come_but_not_that_it_waits_too(scene: Scene) -> None:
    said = msgspec.msgpack.encode("go")

    def acts(now: float) -> None:
        scene.pulse(0, waits="1 0" if now < 100 else "")
        if now > 200:
            scene.store.set("1/1/0", b"0 " + said)

    scene.acts = acts
    assert scene.meet().broadcast(None, str) == "go"
    [told] = scene.told
    assert (told["ranks"], told["count"]) == ([0], 1)
    assert 129 < told["at"] < 136


def test_nothing_is_told_of_who_comes_in_time(scene: Scene) -> None:
    def acts(now: float) -> None:
        for rank in range(1, 12):
            scene.pulse(rank, progress=now // 25)  # a write of 25 s each
            if now > 29 * (rank > 6) + 200 * (rank == 6):
                scene.puts(rank)

    scene.acts = acts
    scene.meet().gather(0, int)
    assert scene.now > 200
    assert scene.told == []


def test_within_less_than_that_it_is_an_error_that_names_all(scene: Scene) -> None:
    def acts(now: float) -> None:
        for rank in range(1, 12):
            scene.pulse(rank)

    scene.acts = acts
    for rank in (1, 5):
        scene.puts(rank)
    with pytest.raises(RankFailed) as e:
        scene.meet(within=20.0).gather(0, int)
    assert scene.told == []
    assert e.value.rank == 2
    assert e.value.what == (
        f"Rank 2 on h did not join {WHAT} (nor did ranks 3, 4, 6, 7, 8, 9, 10, 11)"
    )
    assert "Expected it to arrive within 20 s, found that it has not arrived" in str(e.value)


def test_before_it_is_an_error_it_is_told_with_the_end(scene: Scene) -> None:
    scene.acts = lambda now: [scene.pulse(rank) for rank in range(1, 12)]
    with pytest.raises(RankFailed, match="some progress within 600 s") as e:
        scene.meet().gather(0, int)
    assert e.value.what.endswith("(nor did ranks 2, 3, 4, 5, 6, 7, 8, 9, and 2 more)")
    assert 600 < scene.now < 605
    assert len(scene.told) == 1


def test_a_bound_of_a_wait_stands_in_the_event(scene: Scene) -> None:
    scene.acts = lambda now: [scene.pulse(rank) for rank in range(1, 12)]
    with pytest.raises(RankFailed, match="within 90 s"):
        scene.meet(within=90.0).gather(0, int)
    assert [told["longest"] for told in scene.told] == [90.0]


def test_who_never_finds_rank_0_says_so() -> None:
    """The first call of a process: there is no meeting yet."""
    now = [0.0]

    def clock() -> float:
        now[0] += 5
        return now[0]

    told: list[Any] = []
    board = SessionKVClient(FakeStore(), 1, 2, Timeouts(60, 300), lambda prefix: FakeStore(), clock)
    with (
        holdfast.attach(lambda name, fields: told.append((name, fields))),
        pytest.raises(RankFailed, match="Rank 0"),
    ):
        board.has_all(["a"])
    board.close()
    [(name, fields)] = told
    assert name == "ranks_awaited"
    assert 30 < fields.pop("seconds") < 100
    assert fields == {"what": "the first call of all ranks", "ranks": [0], "count": 1,
                      "longest": 300}  # fmt: skip


# -- missed together -------------------------------------------------------------------------------


def missed(ages: dict[int, float], came: tuple[int, ...] = ()) -> RankFailed | None:
    """What is found when rank ``r`` has given its last pulse ``ages[r]`` seconds ago."""
    scene = Scene(0, 12)
    vigil = FailureDetector(scene.board, "it")
    oldest = max(ages.values())
    for now in range(int(oldest) + 1):
        scene.now = float(now)
        for rank, age in ages.items():
            if now <= oldest - age:
                scene.pulse(rank)
        found = vigil.failed(sorted(ages), lambda rank: rank in came)
    scene.board.close()
    return found


@pytest.mark.parametrize(
    ("ages", "came", "said"),
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
def test_who_is_missed_is_named_with_all_that_died_with_it(
    ages: dict[int, float], came: tuple[int, ...], said: str | None
) -> None:
    found = missed(ages, came)
    assert (found and found.what) == said
    if found is not None:
        assert f"Rank {found.rank} " in found.what
