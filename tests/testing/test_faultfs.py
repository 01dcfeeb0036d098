"""Test that ``FaultFs`` fails the specified call in the specified way."""

import errno
import os

import pytest

from limpet.testing.faults import Fault, FaultFs


def test_the_nth_call_of_a_kind_fails(tmp_path):
    fs = FaultFs(None, Fault("mkdir", 2, errno.EIO))
    fs.mkdir(str(tmp_path / "a"))
    fs.stat(str(tmp_path))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        fs.mkdir(str(tmp_path / "b"))
    fs.mkdir(str(tmp_path / "b"))
    assert (fs.fired, fs.counts["mkdir"], fs.counts.total()) == (["mkdir"], 3, 4)


def test_a_lasting_fault_fails_the_nth_call_of_any_kind_and_all_later_calls(tmp_path):
    fs = FaultFs(None, Fault(None, 2, errno.EIO, lasting=True))
    fs.mkdir(str(tmp_path / "a"))
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            fs.stat(str(tmp_path))


def test_a_lost_fault_makes_the_call_before_it_raises(tmp_path):
    fs = FaultFs(None, Fault("mkdir", 1, errno.EIO, lost=True))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        fs.mkdir(str(tmp_path / "a"))
    assert (tmp_path / "a").is_dir()


def test_short_faults_limit_the_bytes_of_writes_and_reads(tmp_path):
    fs = FaultFs(None, Fault("pwrite", 1, short=2), Fault("preadv", 1, short=1))
    fd = fs.open(str(tmp_path / "a"), os.O_RDWR | os.O_CREAT)
    assert fs.pwrite(fd, memoryview(b"abc"), 0) == 2
    into = bytearray(3)
    assert fs.preadv(fd, memoryview(into), 0) == 1
    assert fs.preadv(fd, memoryview(into), 0) == 2
    fs.close(fd)
    assert into == b"ab\0"
