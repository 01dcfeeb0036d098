"""Signals as notices: which handlers run, in which process, and what is left afterward."""

import multiprocessing
import os
import signal
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

from limpet import Preemption
from limpet.errors import LimpetError
from limpet.notices import signals
from limpet.notices.signals import SignalNotice, protect_worker, stop_signals
from limpet.threads import no_op
from tests.notices.manual_clock import ManualClock
from tests.waiting import wait_until

USR1 = signal.SIGUSR1


@pytest.fixture
def previous():
    """Return the list of signals that the handler installed before receives."""
    received: list[int] = []
    before = signal.signal(USR1, lambda number, frame: received.append(number))
    yield received
    signal.signal(USR1, before)
    assert not [t for t in threading.enumerate() if t.name == "limpet-signals"]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_is_a_notice_and_reaches_the_previous_handler(previous):
    wakes: list[int] = []
    source = SignalNotice(USR1, seconds=40)
    source.start(lambda: wakes.append(1))
    assert source.poll() is None
    signal.raise_signal(USR1)
    assert previous == [USR1]
    wait_until(lambda: len(wakes) == 2)  # the pipe reports it too
    notice = source.poll()
    assert notice is not None
    assert notice.source == "SIGUSR1"
    assert notice.stops
    assert 39 < (notice.seconds or 0) <= 40
    assert source.poll() is None
    source.close()


@pytest.mark.parametrize("seconds", [None, 40])
def test_the_age_of_a_signal_counts(seconds, monkeypatch):
    """The thread that polls may have been busy when the signal came."""
    clock = ManualClock()
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=clock))
    source = SignalNotice(USR1, seconds=seconds)
    source.receive(USR1)
    clock.advance(12)
    notice = source.poll()
    assert notice is not None
    assert notice.age == 12
    assert notice.seconds == (None if seconds is None else 28)
    assert Preemption().plan(notice, 1.0).seconds == (18 if seconds is None else 28)


def test_a_signal_arrives_while_the_main_thread_is_in_a_call_of_a_library(previous):
    """Python runs no handler until the call returns. The pipe does not wait for that."""
    source, woken = SignalNotice(USR1), threading.Event()
    source.start(woken.set)
    pid, seen_at = os.getpid(), []

    def send():
        os.kill(pid, USR1)
        if woken.wait(20):
            seen_at.append(list(previous))

    sender = threading.Thread(target=send)
    # the lock is held by nobody else: only the time limit ends this call
    lock = threading.Lock()
    lock.acquire()
    signal.pthread_sigmask(signal.SIG_BLOCK, ())
    sender.start()
    sum(range(10_000_000))  # one call of C: no handler runs in it
    sender.join()
    source.close()
    assert seen_at
    assert previous == [USR1]


def test_close_restores_the_handlers(previous):
    before = signal.getsignal(USR1)
    first, second = SignalNotice(USR1), SignalNotice(USR1, signal.SIGUSR2)
    first.start(lambda: None)
    second.start(lambda: None)
    assert signal.getsignal(USR1) is not before
    first.close()
    assert signal.getsignal(USR1) is not before  # the second one needs it
    signal.raise_signal(USR1)
    assert first.poll() is None
    assert second.poll() is not None
    second.close()
    assert signal.getsignal(USR1) is before
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_close_keeps_a_handler_installed_later(previous):
    source = SignalNotice(USR1)
    source.start(lambda: None)
    later = signal.getsignal(USR1)

    def outer(number, frame):
        assert callable(later)
        later(number, frame)

    signal.signal(USR1, outer)
    source.close()
    assert signal.getsignal(USR1) is outer
    signal.signal(USR1, lambda *_: None)


@pytest.fixture
def hangup():
    """Return the list of signals that ``handle_hangup`` of a program receives."""
    before = signal.getsignal(signal.SIGHUP)
    yield []
    signal.signal(signal.SIGHUP, before)


def handle_hangup(received):
    signal.signal(signal.SIGHUP, lambda number, frame: received.append(number))


def test_a_handler_for_sighup_that_the_program_installs_later_keeps_it(hangup):
    wakes: list[int] = []
    source, explicit = stop_signals(), SignalNotice(signal.SIGHUP, USR1)
    source.start(lambda: wakes.append(1))
    explicit.start(no_op)
    handle_hangup(hangup)
    signal.raise_signal(signal.SIGHUP)
    wait_until(explicit.poll)  # who names the signal gets it
    assert hangup == [signal.SIGHUP]
    assert source.poll() is None
    signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: len(wakes) == 2)  # SIGTERM is a notice as before
    explicit.close()
    source.close()


def test_a_signal_that_requests_a_save_does_not_stop_another_training(hangup):
    request = SignalNotice(signal.SIGHUP, stops=False)
    request.start(no_op)
    assert signal.SIGHUP not in stop_signals().numbers
    request.close()
    first = stop_signals()
    first.start(no_op)
    assert signal.SIGHUP in stop_signals().numbers  # several trainings of one process stop
    first.close()


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_default_action_is_not_taken(previous, before):
    signal.signal(USR1, before)
    source = SignalNotice(USR1)
    source.start(lambda: None)
    signal.raise_signal(USR1)  # the default action would end this process
    assert source.poll() is not None
    source.close()
    assert signal.getsignal(USR1) == before


def test_a_source_that_could_not_be_started_keeps_no_handler_installed(previous):
    """The signal would reach nobody after the source of the main thread is closed."""
    refused, source = SignalNotice(USR1), SignalNotice(USR1)

    def start():
        with pytest.raises(LimpetError):
            refused.start(lambda: None)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    before = signal.getsignal(USR1)
    source.start(lambda: None)
    assert signal.getsignal(USR1) != before
    source.close()
    assert signal.getsignal(USR1) == before
    signal.raise_signal(USR1)
    assert previous == [USR1]
    assert refused.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, -1, 0, 999, "USR1", None, 1.5])
def test_invalid_signals_are_rejected(number):
    with pytest.raises(LimpetError, match=r"SignalNotice must be .*such as signal\.SIGTERM"):
        SignalNotice(number)


def test_another_owner_of_the_wakeup_pipe_gets_its_bytes(previous):
    """asyncio has one, for example."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    assert signal.set_wakeup_fd(write_end) == -1
    source = SignalNotice(USR1)
    source.start(lambda: None)
    signal.raise_signal(USR1)
    got = bytearray()

    def has_byte():
        try:
            got.extend(os.read(read_end, 8))
        except BlockingIOError:
            return False
        return bool(got)

    wait_until(has_byte)
    source.close()
    assert signal.set_wakeup_fd(-1) == write_end
    assert bytes(got) == bytes([USR1])
    os.close(read_end)
    os.close(write_end)


def test_a_file_with_the_number_of_a_closed_pipe_gets_no_byte(previous, tmp_path):
    """The bytes would damage it: it may be a file of a version."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end)
    source = SignalNotice(USR1)
    source.start(lambda: None)
    os.close(write_end)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    assert file == write_end
    wakes: list[int] = []
    source._wake = lambda: wakes.append(1)
    signal.raise_signal(USR1)
    wait_until(lambda: len(wakes) == 2)  # the pipe reports it too
    source.close()
    assert signal.set_wakeup_fd(-1) == -1
    assert os.fstat(file).st_size == 0
    os.close(file)
    os.close(read_end)


def test_close_from_another_thread_closes_no_pipe_that_is_in_use(previous):
    """Only the main thread may tell the system to use another pipe."""
    source = SignalNotice(USR1)
    source.start(lambda: None)
    signal.signal(USR1, lambda *_: None)  # with this one's own handler, the pipe stays anyway
    write_end = signals._dispatcher._pipe[2] if signals._dispatcher._pipe else -1
    thread = threading.Thread(target=source.close)
    thread.start()
    thread.join()
    os.fstat(write_end)  # raises if it is closed
    wakes: list[int] = []
    source.start(lambda: wakes.append(1))
    signal.raise_signal(USR1)
    wait_until(lambda: len(wakes) == 2)  # the pipe reports it too
    source.close()


def fork(run):
    """Fork a process that exits with the result of ``run()``, and return its id once it runs."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        try:
            signal.alarm(20)  # a hang fails
            os.write(write_end, b"1")  # Python drops the signals that arrive before
            code = run()
        finally:
            os._exit(code)
    os.close(write_end)
    assert os.read(read_end, 1) == b"1"
    os.close(read_end)
    return child


def sleep():
    """Sleep for a short time again and again: Python runs a handler only after the sleep if its
    signal arrives just before the system call."""
    for _ in range(3000):
        time.sleep(0.01)
    return 0


def result_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_to_a_forked_process_is_no_notice_for_the_parent(previous):
    """DataLoader ends its workers by SIGTERM."""
    source = SignalNotice(signal.SIGUSR2)
    source.start(lambda: None)
    child = fork(sleep)
    os.kill(child, signal.SIGUSR2)
    assert result_of(child) == -signal.SIGUSR2
    assert source.poll() is None
    source.close()


def test_a_signal_to_all_processes_does_not_end_a_forked_one(previous):
    def work():
        while signals._dispatcher._received[USR1] == 0:
            time.sleep(0.001)
        os.kill(os.getpid(), USR1)  # its own copy of the signal
        time.sleep(0.01)
        return 7

    signal.signal(USR1, signal.SIG_DFL)  # which would end it
    source = SignalNotice(USR1)
    source.start(lambda: None)
    child = fork(work)
    signal.raise_signal(USR1)
    assert result_of(child) == 7
    source.close()


def test_after_the_parent_has_closed_a_forked_process_ends_by_the_signal(previous, monkeypatch):
    monkeypatch.setattr(signals, "_PARENT_SECONDS", 0.01)
    signal.signal(USR1, signal.SIG_DFL)
    source = SignalNotice(USR1)
    source.start(lambda: None)
    signal.raise_signal(USR1)
    child = fork(sleep)
    source.close()
    os.kill(child, USR1)
    assert result_of(child) == -USR1


def test_a_signal_that_comes_later_ends_a_forked_process(previous, monkeypatch):
    """The parent has received a notice before, and now ends the process by the same signal."""
    signal.signal(USR1, signal.SIG_DFL)
    source = SignalNotice(USR1)
    source.start(lambda: None)
    signal.raise_signal(USR1)
    monkeypatch.setattr(signals, "_PARENT_SECONDS", 0.05)
    child = fork(sleep)
    wait_until(lambda: time.monotonic() > signals._dispatcher._received[USR1] + 0.1)
    os.kill(child, USR1)
    assert result_of(child) == -USR1
    source.close()


def test_a_pool_ends_when_it_is_terminated_after_a_notice(monkeypatch):
    monkeypatch.setattr(signals, "_PARENT_SECONDS", 0.05)
    source = SignalNotice()
    source.start(lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        pool = multiprocessing.get_context("fork").Pool(2)
    assert pool.map(abs, [-1, -2]) == [1, 2]
    pool.map_async(time.sleep, [30, 30])  # an idle worker would end by itself
    workers = list(pool._pool)
    signal.raise_signal(signal.SIGTERM)
    received = signals._dispatcher._received
    wait_until(lambda: time.monotonic() > received[signal.SIGTERM] + 0.1)
    terminator = threading.Thread(target=pool.terminate, daemon=True)
    terminator.start()
    terminator.join(10)
    source.close()
    is_done = not terminator.is_alive()
    for worker in workers:
        worker.kill()
    assert is_done


def test_a_worker_that_replaced_the_handler_can_be_protected(previous):
    """PyTorch's DataLoader installs a handler of its own in each worker."""

    def work():
        signal.signal(USR1, signal.SIG_DFL)
        protect_worker(0)
        os.kill(os.getpid(), USR1)
        return 5

    signal.signal(USR1, signal.SIG_DFL)  # which would end it
    source = SignalNotice(USR1)
    source.start(lambda: None)
    signal.raise_signal(USR1)
    assert result_of(fork(work)) == 5
    source.close()


@pytest.mark.parametrize("parent_watches", [False, True])
def test_a_forked_process_may_watch_its_own_signals(parent_watches, previous):
    """Ranks are often forked from a process that has imported this module, such as a fork server.
    They neither share what they have received, nor count as workers of that process."""
    own = SignalNotice(USR1)
    if parent_watches:
        own.start(lambda: None)

    def watch():
        source = SignalNotice(USR1)
        source.start(lambda: None)
        signal.raise_signal(USR1)
        assert previous == [USR1]  # the handler that was there before the fork
        wait_until(lambda: source.poll() is not None)
        worker = fork(lambda: os.kill(os.getpid(), USR1) or 3)
        assert result_of(worker) == 3  # this process has received the signal too
        source.close()
        return 5

    assert result_of(fork(watch)) == 5
    assert signals._dispatcher._received[USR1] == 0
    assert own.poll() is None
    own.close()
