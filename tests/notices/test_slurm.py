"""The time limit of a Slurm job."""

import time

import pytest

from limpet.errors import LimpetError
from limpet.notices.notice import Notice
from limpet.notices.slurm import SlurmNotice

NAME = "the time limit of Slurm job 77"


def test_a_job_near_its_end_has_a_notice(clock):
    variables = {"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": f"{clock() + 1000:.0f}"}
    source = SlurmNotice(variables, now=clock)
    assert source.poll() is None
    clock.advance(699)
    assert source.poll() is None
    clock.advance(1)
    assert source.poll() == Notice(NAME, 300.0)
    clock.advance(400)
    assert source.poll() == Notice(NAME, 0.0)


@pytest.mark.parametrize("job", [None, "", "77; rm", "-1"])
@pytest.mark.parametrize("end", [None, "soon", "1800000000"])
def test_outside_a_job_it_is_refused(job, end):
    given = {"SLURM_JOB_ID": job, "SLURM_JOB_END_TIME": end}
    with pytest.raises(LimpetError, match="Cannot watch the time limit of a Slurm job"):
        SlurmNotice({name: value for name, value in given.items() if value is not None})


def test_the_variables_of_the_process(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + 20:.0f}")
    notice = SlurmNotice().poll()
    assert notice is not None
    assert notice.source == NAME
    assert 0 < (notice.seconds or 0) <= 21
