"""Who is told what another rank has raised: by notes, warnings, and the version that it became."""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

import pytest

from holdfast.engine.distributed.error_report import decode_error, encode_error, format_with_notes
from holdfast.engine.distributed.group import current_group
from holdfast.errors import CommitError, NotFound, RankFailed, SaveFailed
from holdfast.run.policy import EverySteps, OnException
from holdfast.run.run import Run
from holdfast.testing.fakegroup import FakeGroup
from holdfast.training.warn import warn_save_failed
from tests.ranks.trainings import TrainingJob, TrainingRank


def odd() -> Exception:
    return ValueError("NaN in the loss")


def closed() -> Exception:
    return RuntimeError("Connection closed by peer")


def wait_for(crew: TrainingJob, said: bytes) -> None:
    """Until a rank has said that on the board."""
    end = time.monotonic() + 20
    while not any(said in note for note in list(crew.group.store.values.values())):
        assert time.monotonic() < end
        time.sleep(0.001)


def outcomes(crew: TrainingJob, errors: dict[int, BaseException], step: int = 7) -> list[Any]:
    """Rank 2 raises, and then those who lose their connection to it; the others hang."""

    def work(m: TrainingRank) -> None:
        with m.make_checkpointer(save=EverySteps(100) | OnException()):
            m.train_steps(step)
            if m.rank != 2:
                wait_for(crew, b"NaN in the loss")
            if m.rank in errors:
                raise errors[m.rank]

    return crew.outcomes(work)


def test_where_all_raise_the_first_is_told_to_the_others_and_by_the_version() -> None:
    with TrainingJob(3) as crew, warnings.catch_warnings():
        warnings.simplefilter("error")
        made = outcomes(crew, {0: closed(), 1: closed(), 2: odd()})
        assert [getattr(e, "__notes__", None) for e in made] == [
            ["Rank 2 raised first: ValueError: NaN in the loss"],
            ["Rank 2 raised first: ValueError: NaN in the loss"],
            None,
        ]
        [version] = Run(crew.inner).snapshots()
        assert version.metadata["note"]["error"] == "ValueError: NaN in the loss (rank 2)"
        assert crew.leftover_keys() == []


def test_what_all_have_raised_alike_is_told_by_none() -> None:
    with TrainingJob(3) as crew:
        made = outcomes(crew, {r: odd() for r in range(3)})
        assert [getattr(e, "__notes__", None) for e in made] == [None] * 3
        [version] = Run(crew.inner).snapshots()
        assert version.metadata["note"]["error"] == "ValueError: NaN in the loss"


def test_where_one_hangs_it_is_told_what_the_first_has_raised() -> None:
    """Rank 0 hangs in its all-reduce, and is not what went wrong."""
    with (
        TrainingJob(3) as crew,
        mock.patch("holdfast.training.exception_save.JOIN_TIMEOUT", 0.5),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(100) | OnException()):
                m.train_steps(7)
                if m.rank == 0:
                    wait_for(crew, b"did not join")
                    return
                if m.rank == 1:
                    wait_for(crew, b"NaN in the loss")
                raise closed() if m.rank == 1 else odd()

        made = crew.outcomes(work)
        [one], [two] = made[1].__notes__, made[2].__notes__
        said = (
            "In addition, the state after step 7 was not saved: Rank 0 did not join the save after an"
            " exception. Expected it to arrive within 0.5 s, found that it has not arrived."
        )
        assert two == said
        assert one == f"{two} Rank 2 raised first: ValueError: NaN in the loss"
        told = sorted(str(w.message) for w in seen if w.category is SaveFailed)
        assert told == [
            f"The training ended with RuntimeError. {one}",
            f"The training ended with ValueError. {two}",
        ]
        assert crew.versions == []


@pytest.mark.parametrize("first", [0, 1])
def test_who_does_something_else_hears_what_has_been_raised(first: int) -> None:
    with FakeGroup(2) as group:

        def work(rank: int) -> None:
            if rank != first:
                while "1/what" not in group.store.values:
                    time.sleep(0.001)
            what, cause = [("the save of a", ""), ("the save after an exception", "OSError: x")][
                rank
            ]
            meeting = current_group().collective(what, cause=cause)
            try:
                with meeting:
                    meeting.gather(rank, int)
                    meeting.broadcast(None if rank else True, bool)
            finally:
                meeting.close()

        for error in group.outcomes(work):
            assert isinstance(error, RankFailed)
            assert "the save of a" in str(error)
            assert "the save after an exception (OSError: x)" in str(error)


# -- errors on their way ---------------------------------------------------------------------------


def test_a_warning_names_the_rank_that_has_told_the_error() -> None:
    told = decode_error(encode_error(CommitError("x changed"), 3, "the save", False), 0, "the save")
    assert str(told) == "x changed."
    assert format_with_notes(told) == "x changed. Reported by rank 3."
    with pytest.warns(SaveFailed, match=r"since step 5: x changed\. Reported by rank 3\.$"):
        warn_save_failed(told, 5, 2)
    assert format_with_notes(CommitError("x changed")) == "x changed."


@pytest.mark.parametrize(
    "error", [OSError(2, "none", "a\udcff"), NotFound("a\udcff", key="\udcff", keys=("\udcff",))]
)
def test_a_name_that_utf8_lacks_does_not_keep_an_error_from_being_told(error: Exception) -> None:
    """Who could not tell it would leave the others waiting for 600 s."""
    with FakeGroup(2) as group:

        def work(rank: int) -> None:
            meeting = current_group().collective("the save")
            try:
                with meeting:
                    if rank:
                        raise error
                    meeting.gather(rank, int)
            finally:
                meeting.close()

        zero, one = group.outcomes(work)
        assert one is error
        assert "a\\udcff" in str(zero)
