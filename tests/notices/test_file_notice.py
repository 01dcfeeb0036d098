"""Which files are notices: those that were created or changed since the training began."""

import os
import time

import pytest

from limpet.errors import LimpetError
from limpet.notices.file import FileNotice
from limpet.notices.notice import Notice


def long_ago():
    return time.time() - 3600


def later():
    """A start of the process after the files of a test."""
    return time.time() + 3600


def test_a_file_that_is_created_is_a_notice(tmp_path):
    path = tmp_path / "stop"
    source = FileNotice(path)
    assert source.poll() is None
    path.touch()
    assert source.poll() == Notice(f"the file {path}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45.0), (" 2.5\n", 2.5), ("-1", 0.0), ("", 7.0), ("please stop", 7.0), ("nan", 7.0)],
)
def test_the_contents_may_be_the_seconds(tmp_path, text, seconds):
    source = FileNotice(tmp_path / "stop", seconds=7, started_at=long_ago)
    (tmp_path / "stop").write_text(text)
    assert source.poll() == Notice(source.name, seconds)


def test_contents_that_cannot_be_read_do_not_matter(tmp_path, monkeypatch):
    (tmp_path / "stop").write_text("5")
    source = FileNotice(tmp_path / "stop", started_at=long_ago)

    def refuse(*_):
        raise PermissionError("not readable")

    monkeypatch.setattr("builtins.open", refuse)
    notice = source.check()
    monkeypatch.undo()
    assert notice == Notice(source.name)


def test_a_large_file_is_not_read_completely(tmp_path):
    with open(tmp_path / "stop", "wb") as file:
        file.truncate(1 << 40)
    assert FileNotice(tmp_path / "stop", started_at=long_ago).poll() is not None


def test_a_file_that_is_left_over_may_be_replaced(tmp_path):
    path = tmp_path / "stop"
    path.touch()
    source = FileNotice(path, started_at=later)
    assert source.poll() is None
    path.unlink()
    assert source.poll() is None
    wait_for_next_change_time(tmp_path)
    path.touch()
    assert source.poll() is not None


def wait_for_next_change_time(folder):
    """Wait until a new file gets a later change time than all before."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.touch()


def test_the_clock_of_a_file_server_matters_only_for_the_first_poll(tmp_path):
    """A server whose clock is late makes files that look older than the process."""
    source = FileNotice(tmp_path / "stop", started_at=later)
    assert source.poll() is None
    (tmp_path / "stop").touch()
    assert source.poll() is not None


@pytest.mark.parametrize("how", ["moved", "linked"])
def test_an_old_file_that_is_moved_or_linked_there_is_a_notice(tmp_path, how):
    old = tmp_path / "old"
    old.touch()
    os.utime(old, (1, 1))
    started = time.time() - 60
    if how == "moved":
        old.rename(tmp_path / "stop")
    else:
        (tmp_path / "stop").symlink_to(old)
    assert FileNotice(tmp_path / "stop", started_at=lambda: started).poll() is not None


def test_a_file_with_a_time_in_the_future_does_not_stop_each_training(tmp_path):
    path = tmp_path / "stop"
    path.touch()
    os.utime(path, (time.time() + 1e6, time.time() + 1e6))
    assert FileNotice(path, started_at=later).poll() is None


def test_a_restart_in_the_same_process_is_not_stopped_by_the_same_file(tmp_path):
    path = tmp_path / "stop"
    first = FileNotice(path, started_at=long_ago)
    path.touch()
    assert first.poll() is not None
    second = FileNotice(path, started_at=long_ago)
    assert second.poll() is None
    assert first.poll() is not None
    wait_for_next_change_time(tmp_path)
    path.touch()
    assert second.poll() is not None


def test_two_sources_that_exist_at_once_both_report_a_file(tmp_path):
    sources = [FileNotice(tmp_path / "stop", started_at=long_ago) for _ in range(2)]
    (tmp_path / "stop").touch()
    assert all(source.poll() is not None for source in sources)


def test_a_folder_that_does_not_exist_is_an_outage_until_it_is_created(tmp_path):
    path = tmp_path / "runs" / "stop"
    source = FileNotice(path)
    with pytest.raises(OSError, match="runs is not a folder, so nobody can create"):
        source.poll()
    path.parent.mkdir()
    assert source.poll() is None
    path.touch()
    assert source.poll() is not None


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "stop")
    with pytest.raises(OSError, match="stop is not a file"):
        FileNotice(tmp_path / "stop").poll()


def test_a_relative_path_is_that_of_the_folder_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = FileNotice("stop")
    monkeypatch.chdir("/")
    (tmp_path / "stop").touch()
    assert source.poll() is not None


@pytest.mark.parametrize("path", ["", None, 3])
def test_an_invalid_path_is_refused(path):
    with pytest.raises(LimpetError, match="The path"):
        FileNotice(path)
