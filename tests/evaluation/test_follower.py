"""A follower reads the manifest and the records of each version a bounded number of times."""

from collections import Counter

import numpy as np
import pytest

import limpet
from limpet.errors import Unavailable
from limpet.evaluation.follower import Follower
from limpet.evaluation.options import Selection
from limpet.format.names import Version
from limpet.run.policy import KeepLast
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.run.test_retention import make_run
from tests.trainings import delete_version, leave_from


def test_a_version_whose_records_could_not_be_read_is_looked_up_again(monkeypatch):
    run = Run(make_run(1, 2))
    run.add_metrics(2, {"loss": 1.0}, "val")
    follower = Follower(run, "val", Selection())
    with monkeypatch.context() as patch:

        def fail(*arguments):
            raise Unavailable("503")

        patch.setattr(run.catalog.evaluations, "read", fail)
        with pytest.raises(Unavailable):
            follower.next()
    assert follower.next() is None, "it has been evaluated"


@pytest.mark.parametrize(
    "selection", [Selection(), Selection(skip_none=True), Selection(every_steps=2)]
)
def test_a_look_at_a_run_in_which_nothing_is_new_costs_one_listing(selection, monkeypatch):
    """It cost a request for each version."""
    follower, calls = Follower(Run(make_run(*range(1, 31))), "val", selection), Counter[str]()
    evaluate_all(follower)

    def count(method):
        original = getattr(MemoryStore, method)

        def call(*arguments):
            calls[method] += 1
            return original(*arguments)

        monkeypatch.setattr(MemoryStore, method, call)

    for method in ("list_level", "list", "stat", "get", "get_range"):
        count(method)
    assert follower.next() is None
    assert calls == {"list_level": 1}


def evaluate_all(follower):
    found = []
    while (next_one := follower.next()) is not None:
        found.append(next_one[0].version)
        follower.finish(next_one[0].version)
    return found


@pytest.mark.parametrize("skip_none", [False, True])
def test_no_other_version_replaces_one_that_was_evaluated_and_deleted(skip_none):
    """With every_steps=100, the version of step 130 was evaluated after that of step 100 had been
    deleted."""
    run = Run(make_run(*range(10, 160, 10)))
    follower = Follower(run, "val", Selection(100, skip_none))
    assert evaluate_all(follower) == [Version(100)]
    run.retain(KeepLast(3))
    assert evaluate_all(follower) == []
    origin = run.open(Version(130))
    leave_from(run, origin, origin.version, "on request")
    assert evaluate_all(follower) == [Version(130)]


def test_a_version_that_is_deleted_and_saved_again_is_evaluated_again(tmp_path):
    run = Run(tmp_path / "run")

    def save(step, value):
        limpet.save(tmp_path / f"run/version_{step}", {"x": np.array([value])}, step=step)

    save(1, 1)
    save(2, 2)
    follower = Follower(run, "val", Selection())
    assert evaluate_all(follower) == [Version(2)]
    delete_version(run.store, 2)
    assert evaluate_all(follower) == [], "an older one is not evaluated after a newer one"
    save(2, 3)
    assert evaluate_all(follower) == [Version(2)]


def test_a_save_in_progress_is_evaluated_when_it_is_committed(tmp_path):
    run, state = Run(tmp_path / "run"), {"x": np.array([1])}
    limpet.save(tmp_path / "run/version_1", state, step=1)
    limpet.save(tmp_path / "run/version_2", state, step=2)
    manifest = tmp_path / "run/version_2/manifest.json"
    manifest.rename(tmp_path / "manifest")
    follower = Follower(run, "val", Selection())
    assert evaluate_all(follower) == [Version(1)]
    (tmp_path / "manifest").rename(manifest)
    assert evaluate_all(follower) == [Version(2)]
