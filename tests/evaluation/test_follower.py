"""A follower reads the manifest and the records of each version a bounded number of times."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import Unavailable
from holdfast.evaluation.follower import Follower
from holdfast.evaluation.schedule import Selection
from holdfast.format.names import Version
from holdfast.run.run import Run
from tests.run.test_retention import make_run


def test_each_version_is_opened_twice_whatever_the_number_of_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, opened = Run(make_run(*range(1, 41))), Counter[Version]()
    original = run.open

    def count(version: Version) -> Snapshot:
        opened[version] += 1
        return original(version)

    monkeypatch.setattr(run, "open", count)
    follower, found = Follower(run, "val", Selection(skip_none=True)), []
    while (next_one := follower.next()) is not None:
        snapshot, waiting = next_one
        assert len(waiting) == 40 - snapshot.version.step
        found.append(snapshot.version.step)
        follower.finish(snapshot.version)
    assert found == [*range(1, 41)]
    assert set(opened.values()) == {2}


def test_a_version_whose_records_could_not_be_read_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(make_run(1, 2))
    run.add_metrics(2, {"loss": 1.0}, "val")
    follower = Follower(run, "val", Selection())
    with monkeypatch.context() as patch:

        def fail(*arguments: object) -> None:
            raise Unavailable("503")

        patch.setattr(run.catalog.evaluations, "read", fail)
        with pytest.raises(Unavailable):
            follower.next()
    assert follower.next() is None, "it has been evaluated"
