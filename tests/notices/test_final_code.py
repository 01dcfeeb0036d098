"""The table of what ``limpet run`` returns, and which statuses count."""

import itertools
import signal
from dataclasses import replace

import pytest

from limpet.notices.exit_status import (
    CODES,
    DONE,
    FAILED,
    GIVE_UP,
    SAVED,
    UNSAVED,
    Status,
    WorkerRecord,
)
from limpet.notices.final_code import Ended, decide, is_complete, last_attempt

TERM, KILL, SEGV, USR1 = signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1
ABRT = signal.SIGABRT
SILENT = None
"""A worker that announced itself and left without a status."""


def record(code, rank=0, *, launcher="job/1", size=2, restart=0, started=10.0, left=20.0):
    return WorkerRecord(
        pid=100 + rank,
        started=started + rank / 100,
        launcher=launcher,
        local_world_size=size,
        restart_count=restart,
        left=None if code is None else left + rank,
        status=None if code is None else Status(code, rank),
    )


def two_workers(codes):
    """The records of two workers of torchrun; a worker without a code is missing."""
    return [record(code, rank) for rank, code in enumerate(codes)]


EXIT_0, EXIT_1 = Ended(0), Ended(1)
STOPPED_1 = Ended(1, forwarded=(TERM,))
TERMINATED = Ended(None, killed_by=TERM, forwarded=(TERM,))
ABORTED = Ended(None, killed_by=ABRT, forwarded=(TERM,))
OVERDUE = Ended(None, killed_by=KILL, forwarded=(TERM,), killed=frozenset({7}), pid=7)


@pytest.mark.parametrize(
    ("ended", "codes", "expected"),
    [
        # the command alone
        (EXIT_0, (), DONE),
        (EXIT_1, (), FAILED),
        (Ended(3), (), FAILED),
        (Ended(SAVED), (), SAVED),
        (Ended(UNSAVED), (), UNSAVED),
        (Ended(GIVE_UP), (), GIVE_UP),
        (Ended(None, killed_by=SEGV), (), FAILED),
        (Ended(None, killed_by=TERM), (), FAILED),  # somebody else sent it
        # the command alone, asked to stop
        (TERMINATED, (), UNSAVED),
        (STOPPED_1, (), UNSAVED),
        (Ended(0, forwarded=(TERM,)), (), DONE),
        (Ended(None, killed_by=SEGV, forwarded=(TERM,)), (), FAILED),
        (Ended(None, killed_by=KILL, forwarded=(TERM,)), (), FAILED),  # out of memory
        (OVERDUE, (), UNSAVED),
        (Ended(None, killed_by=USR1, forwarded=(USR1,)), (), UNSAVED),
        (Ended(1, forwarded=(USR1,)), (), FAILED),  # long after a signal that it handled
        (Ended(1, forwarded=(USR1,)), (SILENT,), UNSAVED),  # torchrun stops at it
        (Ended(1, forwarded=(USR1,)), (DONE, DONE), DONE),
        # all workers said why they left
        (EXIT_0, (SAVED, SAVED), SAVED),
        (EXIT_0, (SAVED, UNSAVED), UNSAVED),
        (EXIT_0, (DONE, DONE), DONE),
        (EXIT_0, (DONE, SAVED), SAVED),
        (EXIT_0, (SAVED, GIVE_UP), GIVE_UP),
        (EXIT_0, (FAILED, SAVED), SAVED),
        (STOPPED_1, (SAVED, SAVED), SAVED),
        (STOPPED_1, (SAVED, UNSAVED), UNSAVED),
        (STOPPED_1, (SAVED, FAILED), FAILED),
        (STOPPED_1, (DONE, DONE), DONE),
        (EXIT_1, (SAVED, SAVED), SAVED),  # torchrun was signaled directly
        (EXIT_1, (DONE, DONE), FAILED),  # what followed the training failed
        (TERMINATED, (SAVED, SAVED), SAVED),  # a shell script, whose training saved
        (TERMINATED, (DONE, DONE), UNSAVED),  # the rest of the script did not run
        (Ended(3, forwarded=(TERM,)), (DONE, DONE), UNSAVED),  # torchrun returns 1
        (OVERDUE, (DONE, DONE), UNSAVED),
        (OVERDUE, (SAVED, SAVED), SAVED),
        (Ended(None, killed_by=KILL), (SAVED, SAVED), FAILED),
        (ABORTED, (SAVED, SAVED), SAVED),  # torchrun, while it exits
        (ABORTED, (DONE, DONE), DONE),
        (ABORTED, (FAILED, SAVED), FAILED),
        (ABORTED, (SAVED,), UNSAVED),
        (ABORTED, (), FAILED),  # not torchrun
        (Ended(None, killed_by=ABRT), (SAVED, SAVED), FAILED),
        # a worker is missing, or left without a word
        (EXIT_0, (SAVED,), SAVED),
        (EXIT_0, (SILENT, SILENT), DONE),
        (EXIT_0, (SAVED, SILENT), SAVED),
        (EXIT_1, (SAVED,), FAILED),
        (EXIT_1, (SAVED, SILENT), FAILED),
        (STOPPED_1, (SAVED,), UNSAVED),
        (STOPPED_1, (SAVED, SILENT), UNSAVED),
        (STOPPED_1, (DONE, SILENT), UNSAVED),
        (STOPPED_1, (GIVE_UP,), GIVE_UP),
        # a command with a code of the contract
        (Ended(SAVED), (SAVED, UNSAVED), UNSAVED),
        (Ended(UNSAVED), (SAVED, SAVED), UNSAVED),
        (Ended(SAVED), (DONE, FAILED), FAILED),
        (Ended(GIVE_UP), (SAVED, SAVED), GIVE_UP),
    ],
)
def test_the_exit_code(ended, codes, expected):
    decision = decide(ended, two_workers(codes))
    assert decision.code == expected
    assert decision.why


ENDS = [EXIT_0, EXIT_1, Ended(3), Ended(SAVED), STOPPED_1, TERMINATED, OVERDUE]


@pytest.mark.parametrize("ended", ENDS)
def test_the_exit_code_is_always_one_of_the_contract_and_ignores_the_order(ended):
    for codes in itertools.product((SILENT, *CODES), repeat=2):
        records = two_workers(codes)
        code = decide(ended, records).code
        assert code in CODES
        assert decide(ended, records[::-1]).code == code
        if GIVE_UP in codes:
            assert code == GIVE_UP
        if code == SAVED:
            assert SAVED in (*codes, ended.exit_code)
            assert UNSAVED not in codes


def test_a_worker_that_the_command_left_behind_and_that_was_killed_is_not_saved():
    ended = Ended(0, killed=frozenset({101}))
    assert decide(ended, two_workers((SAVED, SILENT))).code == UNSAVED
    assert decide(ended, two_workers((SILENT, SAVED))).code == SAVED


def test_the_reason_names_the_step_the_run_and_the_cause():
    status = Status(SAVED, 3, step=121, saved_step=120, run="s3://b/run", why="SIGTERM")
    records = [WorkerRecord(pid=1, started=1.0, left=2.0, status=status)]
    assert decide(EXIT_0, records).why == "rank 3 saved step 120 in s3://b/run: SIGTERM"


FIRST = [record(UNSAVED, 0), record(FAILED, 1)]


def test_one_worker_of_the_restart_makes_all_earlier_statuses_void():
    """The other may have died before its training started."""
    saved = two_workers((SAVED, SAVED))
    again = [record(SILENT, 1, restart=1, started=30.0)]
    assert last_attempt(saved + again) == again
    assert decide(EXIT_1, saved + again).code == FAILED
    assert decide(EXIT_1, saved).code == SAVED


def test_a_restart_that_torchrun_does_not_count_makes_earlier_statuses_void():
    """torchrun keeps the count if it restarts because a host joined or left."""
    again = [record(SAVED, rank, started=30.0, left=40.0) for rank in (0, 1)]
    assert last_attempt(FIRST + again) == again
    assert decide(STOPPED_1, FIRST + again).code == SAVED


def test_two_launchers_on_one_host_are_counted_separately():
    a = [record(SAVED, 0, launcher="job/1"), record(SAVED, 1, launcher="job/1")]
    b = [record(SAVED, 2, launcher="job/2", started=50.0, left=60.0)]
    assert last_attempt(a + b) == a + b, "the second launcher did not restart the first one's"
    assert not is_complete(a + b)
    assert decide(STOPPED_1, a + b).code == UNSAVED
    b.append(record(SAVED, 3, launcher="job/2", started=50.0, left=60.0))
    assert decide(STOPPED_1, a + b).code == SAVED


def test_a_script_that_goes_on_after_a_saved_training_does_not_hide_it():
    """Without torchrun nothing restarts: ``python train.py && python evaluate.py``."""
    train = record(SAVED, launcher=None)
    evaluate = record(SILENT, launcher=None, started=30.0)
    assert decide(EXIT_0, [train, evaluate]).code == SAVED


def test_without_a_launcher_every_process_must_say_why_it_left():
    saved = record(SAVED, launcher=None)
    assert decide(STOPPED_1, [saved]).code == SAVED
    assert decide(STOPPED_1, [saved, record(SILENT, 1, launcher=None)]).code == UNSAVED


@pytest.mark.parametrize("code", [1, 3])
def test_only_torchrun_excuses_a_code_after_a_complete_training(code):
    """Anything else that exits with another code than 0 has failed after the training."""
    ended = Ended(code, forwarded=(TERM,))
    launched, alone = record(DONE, size=1), record(DONE, 1, launcher=None)
    assert decide(ended, [launched]).code == (DONE if code == 1 else UNSAVED)
    assert decide(ended, [alone]).code == UNSAVED
    assert decide(ended, [launched, alone]).code == UNSAVED


def ended_before(rank, launcher="job/1"):
    """The record of a training that ended normally, without a notice."""
    return replace(record(SILENT, rank, launcher=launcher), left=20.0)


def test_a_training_that_ended_before_the_notice_does_not_keep_a_saved_one_from_counting():
    """``python a.py && python b.py``, and the same with torchrun."""
    saved = [record(SAVED, rank, launcher="job/2", started=30.0, left=40.0) for rank in (2, 3)]
    assert (
        decide(TERMINATED, [ended_before(0, None), record(SAVED, 1, launcher=None)]).code == SAVED
    )
    assert decide(TERMINATED, [ended_before(0), ended_before(1), *saved]).code == SAVED
    assert decide(STOPPED_1, [ended_before(0), ended_before(1), *saved]).code == SAVED
    assert decide(TERMINATED, [ended_before(0), *saved]).code == UNSAVED, "one rank is missing"


def test_a_training_that_ended_before_the_notice_excuses_nothing():
    """What the process did afterward is not known: its code may be why torchrun stops the rest."""
    both = [ended_before(0), ended_before(1)]
    assert decide(EXIT_0, both).code == DONE
    assert decide(EXIT_1, both).code == FAILED
    assert decide(STOPPED_1, both).code == UNSAVED
    assert decide(STOPPED_1, [ended_before(0), record(DONE, 1)]).code == UNSAVED
    assert decide(EXIT_1, [ended_before(0), record(SAVED, 1)]).code == FAILED
    assert decide(EXIT_1, [ended_before(0, None), record(DONE, 1, launcher=None)]).code == FAILED


def test_workers_count_although_each_is_rank_0_of_its_own_group():
    records = [replace(record(SAVED, rank), status=Status(SAVED, 0)) for rank in (0, 1)]
    assert is_complete(records)
    assert not is_complete(records[:1])
    assert decide(STOPPED_1, records).code == SAVED
