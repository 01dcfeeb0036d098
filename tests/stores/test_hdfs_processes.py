"""Two processes that use one folder in HDFS."""

import uuid

import pytest

import holdfast
from holdfast.run.writer_lock import WriterLock


@pytest.fixture
def run_url(hdfs):
    return f"{hdfs.url}/{uuid.uuid4().hex}"


def other_process(url):
    """Return a store that shares nothing with the others of this process."""
    return holdfast.open_store(url, timeout=299)


def test_a_file_that_another_process_has_replaced_is_read_anew(run_url):
    store, other = holdfast.open_store(run_url), other_process(run_url)
    store.put_if_absent("a", b"old")
    assert store.get("a", 9) == b"old"
    for data in (b"new", b"longer", b"-"):
        other.delete("a")
        other.put_if_absent("a", data)
        assert store.get("a", 9) == data


def test_a_training_that_was_replaced_notices_it_at_once(run_url):
    """The records of two trainings have the same length."""
    first, second = WriterLock(holdfast.open_store(run_url)), WriterLock(other_process(run_url))
    first.acquire()
    first.check(first._store)
    second._store.delete("writer.json")  # as if the two were on different machines
    second.acquire()
    with pytest.raises(holdfast.errors.HoldfastError, match="taken this run over"):
        first.check(first._store)
