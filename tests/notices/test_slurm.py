"""The time limit of a Slurm job, from the environment and from a fake squeue."""

import time

import pytest

from limpet.errors import LimpetError
from limpet.notices import slurm
from limpet.notices.notice import Notice
from limpet.notices.slurm import SlurmNotice

NAME = "the time limit of Slurm job 77"


class FakeSlurm:
    """A squeue that prints a file, and counts how often it is called."""

    def __init__(self, folder):
        self.command = folder / "squeue"
        self._answer = folder / "answer"
        self._calls = folder / "calls"
        self._calls.touch()
        self.command.write_text(
            f'#!/bin/sh\necho "$@" >> {self._calls}\ncat {self._answer} || exit 3\n'
        )
        self.command.chmod(0o755)

    def say(self, text):
        self._answer.write_text(text)

    @property
    def calls(self):
        return self._calls.read_text().splitlines()


@pytest.fixture
def fake(tmp_path):
    return FakeSlurm(tmp_path)


def make(clock, fake, end=None):
    variables = {"SLURM_JOB_ID": "77"}
    if end is not None:
        variables["SLURM_JOB_END_TIME"] = f"{end:.0f}"
    command = "/nonexistent/squeue" if fake is None else str(fake.command)
    return SlurmNotice(variables, command=command, now=clock, clock=clock)


def test_without_squeue_the_variable_counts(clock):
    source = make(clock, None, clock() + 1000)
    assert source.poll() is None
    clock.advance(699)
    assert source.poll() is None
    clock.advance(1)
    assert source.poll() == Notice(NAME, 300.0)
    clock.advance(400)
    assert source.poll() == Notice(NAME, 0.0)


def test_slurm_is_not_asked_while_the_end_is_far_away(clock, fake):
    source = make(clock, fake, clock() + 100_000)
    for _ in range(20):
        assert source.poll() is None
        clock.advance(600)
    assert fake.calls == []


def test_a_job_whose_limit_was_raised_is_not_stopped(clock, fake):
    source = make(clock, fake, clock() + 200)
    fake.say("1:00:00\n")
    assert source.poll() is None
    assert fake.calls == ["-h -j 77 -o %L"]
    clock.advance(3299)
    assert source.poll() is None
    assert len(fake.calls) == 1
    fake.say("4:59\n")
    clock.advance(1)
    assert source.poll() == Notice(NAME, 299.0)
    clock.advance(59)
    assert source.poll() == Notice(NAME, 240.0)
    assert len(fake.calls) == 2, "asked once per minute at most"


def test_without_the_variable_slurm_is_asked_every_10_minutes(clock, fake):
    source = make(clock, fake)
    fake.say("1-00:00:00")
    for _ in range(12):
        assert source.poll() is None
        clock.advance(100)
    assert len(fake.calls) == 2


def test_an_end_that_slurm_named_counts_if_slurm_does_not_answer_later(clock, fake):
    source = make(clock, fake)
    fake.say("10:00")
    assert source.poll() is None
    fake.command.write_text("#!/bin/sh\nexit 1\n")
    clock.advance(500)
    assert source.poll() == Notice(NAME, 100.0)


def test_an_end_that_nobody_knows_is_an_outage(clock, fake):
    source = make(clock, None)
    with pytest.raises(OSError, match=r"Cannot find out when the job ends.*No such file"):
        source.poll()
    source = make(clock, fake)
    for _ in range(3):
        with pytest.raises(OSError, match="squeue -h -j 77 -o %L exited with 3: cat: "):
            source.poll()
    assert len(fake.calls) == 1
    clock.advance(600)
    fake.say("UNLIMITED")
    assert source.poll() is None


@pytest.mark.parametrize("answer", ["UNLIMITED", "NOT_SET"])
def test_a_job_without_a_limit_has_no_notice(clock, fake, answer):
    fake.say(answer)
    assert make(clock, fake, clock() + 10).poll() is None


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [("0:00", 0), ("0:07", 7), ("3:04", 184), ("0:03:04", 184), ("0-00:03:04", 184)],
)
def test_the_time_left(clock, fake, answer, seconds):
    fake.say(answer)
    assert make(clock, fake).poll() == Notice(NAME, float(seconds))


def test_the_first_end_of_a_heterogeneous_job_counts(clock, fake):
    fake.say("1:00:00\n2:00\nUNLIMITED\n")
    assert make(clock, fake).poll() == Notice(NAME, 120.0)


@pytest.mark.parametrize("answer", ["INVALID", "soon", "12", "-1:00", "1:2:3:4"])
def test_an_answer_that_is_not_understood_is_an_outage(clock, fake, answer):
    fake.say(answer)
    with pytest.raises(OSError, match="Expected the time left, as in 1-02:03:04"):
        make(clock, fake).poll()


@pytest.mark.parametrize("script", ["exit 0", "echo 5:00; exit 1"])
def test_a_command_that_fails_is_an_outage(clock, fake, script):
    """squeue prints nothing for a job that it does not know any more."""
    fake.command.write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(OSError, match="squeue -h -j 77 -o %L exited with"):
        make(clock, fake).poll()


def test_a_command_that_hangs_is_bounded(clock, fake, monkeypatch):
    monkeypatch.setattr(slurm, "_COMMAND_SECONDS", 0.2)
    fake.command.write_text("#!/bin/sh\nexec sleep 30\n")
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"squeue took over 0\.2 s"):
        make(clock, fake).poll()
    assert make(clock, fake, clock() + 100).poll() == Notice(NAME, 100.0)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("job", [None, "", "77; rm", "-1"])
def test_outside_a_job_it_is_refused(job):
    variables = {} if job is None else {"SLURM_JOB_ID": job}
    with pytest.raises(LimpetError, match="Cannot watch the time limit of a Slurm job"):
        SlurmNotice(variables)


def test_the_variables_of_the_process(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + 20:.0f}")
    notice = SlurmNotice(command="/nonexistent/squeue").poll()
    assert notice is not None
    assert notice.source == NAME
    assert 0 < (notice.seconds or 0) <= 21
