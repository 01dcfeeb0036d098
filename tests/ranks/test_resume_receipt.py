"""Several ranks compare the live state after a resume with the version; rank 0 reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.errors import KeptValues
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from tests.ranks.trainings import TrainingJob, TrainingRank, initial_state


@contextmanager
def reports() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    found: list[tuple[str, dict[str, Any]]] = []

    def sink(name: str, fields: dict[str, Any]) -> None:
        if name.startswith("resume_"):
            found.append((name, fields))

    with limpet.attach(sink):
        yield found


@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_together_compare_all_bytes(size: int) -> None:
    with TrainingJob(size) as job:
        job.train(5, save=EverySteps(5))
        with reports() as found:
            job.train(7, save=EverySteps(5))
        ((name, fields),) = found
        assert name == "resume_checked"
        assert fields["bytes"] == fields["total"] > 0
        assert job.leftover_keys() == []


def test_a_rank_that_differs_is_reported_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.training.resuming import receipt

    compare = receipt._compare_on_this_rank

    def changed(snapshot: Any, state: dict[str, Any], rank: int, advance: Any) -> Any:
        if rank == 1:
            state["mine"].value[0] = 77
        return compare(snapshot, state, rank, advance)

    with TrainingJob(2) as job:
        job.train(5, save=EverySteps(5))
        monkeypatch.setattr(receipt, "_compare_on_this_rank", changed)
        with reports() as found:
            job.train(6, save=EverySteps(5))
        ((name, fields),) = found
        assert (name, fields["differing"]) == ("resume_differs", ["mine/1"])


def test_an_error_of_one_rank_is_reported_and_ends_no_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from limpet.training.resuming import receipt

    compare = receipt._compare_on_this_rank

    def fail(snapshot: Any, state: dict[str, Any], rank: int, advance: Any) -> Any:
        if rank == 1:
            raise OSError("boom")
        return compare(snapshot, state, rank, advance)

    with TrainingJob(2) as job:
        job.train(5, save=EverySteps(5))
        monkeypatch.setattr(receipt, "_compare_on_this_rank", fail)
        with reports() as found:
            job.train(6, save=EverySteps(5))
    ((name, fields),) = found
    assert name == "resume_differs"
    assert fields["differing"] == ["the state of rank 1, which cannot be compared: OSError: boom"]


@pytest.mark.filterwarnings("ignore::limpet.errors.RanksChanged")
def test_other_ranks_compare_what_they_can() -> None:
    """With fewer ranks, per-rank values of the others are not loaded, and so not compared."""
    with TrainingJob(3) as job:
        job.train(5, save=EverySteps(5))
        store = job.inner
    with TrainingJob(2, store) as job, reports() as found:
        job.train(6, save=EverySteps(5))
    ((name, fields),) = found
    assert name == "resume_checked"
    assert 0 <= fields["bytes"] <= fields["total"]


def test_kept_values_of_any_rank_are_recorded() -> None:
    with TrainingJob(2) as job:
        job.train(5, save=EverySteps(5))

        def resume(trainer: TrainingRank) -> None:
            state = initial_state(trainer.rank, 2)
            state["new"] = limpet.PerRank(np.zeros(trainer.rank + 1))
            with trainer.make_checkpointer(state=state) as ckpt:
                ckpt.resume(missing="keep")
                ckpt.step()

        with pytest.warns(KeptValues, match="new"):
            job.run(resume)
        newest = Run(job.inner).latest()
        assert newest is not None
        assert newest.metadata["note"]["kept"] == {"version": "version_5", "keys": ["new"]}
