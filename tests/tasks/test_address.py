"""Workers that connect to the address of a queue over TCP."""

import gc
import re
import signal
import socket
import threading
from types import SimpleNamespace

import pytest

from limpet.errors import Denied, JobFailed, LimpetError, TaskError
from limpet.ranks import wire
from limpet.tasks import Queue, RemoteQueue, TaskServer
from limpet.tasks import remote as remote_module
from tests.interrupts import MOMENTS, SignalError, raise_at_start
from tests.tasks.test_processes import expected_results, worker
from tests.tasks.worker import evaluate
from tests.tiers.peers import Proxy, forked_child
from tests.waiting import wait_until


def port_of(address):
    found = re.fullmatch(r"tcp://.*:(\d+)/[0-9a-f]{64}", address)
    return int(found[1])


def test_workers_share_a_queue_at_an_address():
    queue = Queue(lease_seconds=None)
    job = queue.add("evaluation", 40, task_size=10, name="e")
    queue.add("training", 30, task_size=10, name="t")
    with TaskServer(queue) as server:
        address = server.listen()
        with RemoteQueue.connect(address) as a, RemoteQueue.connect(address) as b:
            while a.evaluation.evaluate_one(evaluate) or b.evaluation.evaluate_one(evaluate):
                pass
            assert job.results() == expected_results(40, 10)
            first, second = a.training.get(), b.training.get()
            assert (first.start, second.start) == (0, 10)
            first.consumed(4)
            a.close()
            wait_until(lambda: len(queue._jobs.leases) == 1)
            again = b.training.get()
            assert (again.id, again.position) == (first.id, 4)
        with RemoteQueue.connect(address) as c:  # as a worker that Ray has restarted
            wait_until(lambda: len(queue._jobs.leases) == 0)
            assert c.training.get().position == 4


@pytest.mark.slow
def test_processes_that_are_killed_change_no_result():
    queue = Queue(lease_seconds=None)
    job = queue.add("evaluation", 103, task_size=10, name="e")
    with TaskServer(queue) as server:
        address = server.listen()
        with worker(address, "hang") as a:
            assert a.stdout.readline() == "1\n"  # it has this task
            with worker(address, "work") as b:
                a.send_signal(signal.SIGKILL)
                job.wait(60)
                assert job.results() == expected_results(103, 10)
                assert b.wait(30) == 0


def test_the_name_of_a_worker_is_in_the_error_of_its_job():
    queue = Queue(lease_seconds=None, attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    with TaskServer(queue) as server:
        with RemoteQueue.connect(server.listen(), "actor 7 \udcff") as remote:
            assert remote.evaluation.get() is not None
        with pytest.raises(JobFailed, match=r"actor 7 \\\\udcff at 127.0.0.1:\d+ \(connection 1\)"):
            job.wait(30)


def test_a_long_name_of_a_worker_is_cut():
    queue = Queue(lease_seconds=None, attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    with TaskServer(queue) as server:
        with RemoteQueue.connect(server.listen(), "a\n" * 100_000) as remote:
            assert remote.evaluation.get() is not None
        with pytest.raises(JobFailed, match=r"a\\na\\n at 127.0.0.1") as caught:
            job.wait(30)
    assert len(str(caught.value)) < 1000


def test_another_secret_is_refused():
    with TaskServer(Queue()) as server:
        address = server.listen()
        other = address[:-64] + wire.make_secret()
        with pytest.raises(Denied, match=r"the owner of the task queue at 127\.0\.0\.1:"):
            RemoteQueue.connect(other)
        RemoteQueue.connect(address).close()
        second = server.listen()
        assert second[-64:] != address[-64:]
        RemoteQueue.connect(second).close()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://127.0.0.1:80",
        "tcp://127.0.0.1:80/short-secret",
        "tcp://127.0.0.1:80/a secret with spaces in it",
        "tcp://user@127.0.0.1:80/" + "a" * 64,
        "tcp://127.0.0.1/" + "a" * 64,
        "http://127.0.0.1:80/" + "a" * 64,
        "tcp://127.0.0.1:80/" + "a" * 64 + "\n",
        b"tcp://127.0.0.1:80/" + b"a" * 64,
        None,
    ],
)
def test_an_invalid_address_is_refused_without_showing_its_secret(address):
    with pytest.raises(LimpetError, match="Invalid address of a task queue") as caught:
        RemoteQueue.connect(address)
    assert "aaaa" not in str(caught.value)


@pytest.mark.parametrize("host", ["a..b", "x" * 80, "no-such-host.invalid"])
def test_a_host_without_an_address_is_an_error(host):
    with pytest.raises(TaskError, match="Cannot connect to the owner of the task queue at"):
        RemoteQueue.connect(f"tcp://{host}:80/" + "a" * 64)


def test_many_workers_that_connect_at_once_displace_none():
    with TaskServer(Queue()) as server:
        address = server.listen()
        nonce, ends = bytes(wire.NONCE_BYTES), list[socket.socket]()
        try:
            for _ in range(150):  # all of them begin before one of them is complete
                ends.append(socket.create_connection(("127.0.0.1", port_of(address)), 20))
                ends[-1].sendall(wire.MAGIC + nonce)
            for end in ends:
                challenge = end.recv(wire.CHALLENGE_BYTES, socket.MSG_WAITALL)
                end.sendall(wire.answer_challenge(address[-64:], nonce, challenge, "owner")[0])
            wait_until(lambda: len(server._connections) == len(ends))
        finally:
            for end in ends:
                end.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an open socket
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_error_of_a_signal_handler_while_a_worker_connects(monkeypatch, moment):
    raise_at_start(monkeypatch, "limpet-task", moment)
    with pytest.raises(SignalError), TaskServer(Queue()) as server:
        server.connect("w")
    gc.collect()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "localhost"])
def test_a_server_listens_at_one_address_of_this_host(host):
    with TaskServer(Queue()) as server, pytest.raises(TaskError, match="Cannot serve tasks at"):
        server.listen(host)


def test_a_closed_server_accepts_nobody():
    with TaskServer(Queue()) as server:
        address = server.listen()
        remote = RemoteQueue.connect(address)
    with pytest.raises(TaskError, match="connection to the owner of the task queue is over"):
        remote.evaluation.get()
    with pytest.raises(TaskError, match=r"Cannot connect to the owner .*Connection refused"):
        RemoteQueue.connect(address)
    with pytest.raises(TaskError, match="Cannot accept workers"):
        server.listen()


@pytest.mark.parametrize("answers", [0, 1])
def test_an_owner_that_does_not_answer_is_an_error_in_time(answers, monkeypatch):
    monkeypatch.setattr(remote_module, "_REPLY_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"tcp://127.0.0.1:{stopped.getsockname()[1]}/{'a' * 64}"
        if answers:

            def answer():
                connection, _ = stopped.accept()
                with connection:
                    hello = connection.recv(wire.HELLO_BYTES, socket.MSG_WAITALL)
                    made = wire.make_challenge("a" * 64, hello)
                    assert made is not None
                    connection.sendall(made[1])
                    connection.recv(1 << 16)
                    done.wait(20)

            done = threading.Event()
            thread = threading.Thread(target=answer)
            thread.start()
        try:
            with pytest.raises(TaskError, match=r"the time is over|timed out"):
                RemoteQueue.connect(address)
        finally:
            if answers:
                done.set()
                thread.join()


class Flip:
    """Changes one bit of the byte ``at`` in one direction."""

    def __init__(self, direction, at):
        self.direction, self.at, self.is_done = direction, at, False

    def __call__(self, direction, offset, data):
        place = self.at - offset
        if direction != self.direction or not 0 <= place < len(data):
            return data
        self.is_done = True
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_bit_that_flips_on_the_way_is_detected(direction, monkeypatch):
    """No changed byte of the handshake, a task, or a result is taken for another meaning."""
    monkeypatch.setattr(remote_module, "_REPLY_SECONDS", 5.0)
    assert sum(flip_a_bit(direction, at) for at in range(0, 900, 23)) > 8


def flip_a_bit(direction, at):
    """Evaluate one task while a bit flips, then the rest without. Return whether one flipped."""
    queue = Queue(lease_seconds=None, attempts=10)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    flip = Flip(direction, at)
    with TaskServer(queue) as server:
        address = server.listen()
        owner = SimpleNamespace(address="127.0.0.1", port=port_of(address))
        with Proxy(owner, flip) as proxy:
            changed = re.sub(r":\d+/", f":{proxy.port}/", address)
            raised: Exception | None = None
            try:
                with RemoteQueue.connect(changed) as remote:
                    assert remote.evaluation.evaluate_one(lambda task: [task.stop])
                    remote.finished("evaluation")
            except (TaskError, Denied) as e:
                raised = e
        assert (raised is not None) == flip.is_done, (at, raised)
        wait_until(lambda: not queue._jobs.leases)
        with RemoteQueue.connect(address) as remote:
            while remote.evaluation.evaluate_one(lambda task: [task.stop]):
                pass
        assert job.results() == [[1]]
    return flip.is_done


def test_a_forked_process_keeps_no_connection_alive():
    queue = Queue(lease_seconds=None)
    queue.add("evaluation", 1, task_size=1, name="e")
    with TaskServer(queue) as server:
        remote = RemoteQueue.connect(server.listen())
        assert remote.evaluation.get() is not None
        with forked_child():
            remote.close()
            wait_until(lambda: not queue._jobs.leases)


def test_without_a_thread_it_does_not_listen(monkeypatch):
    monkeypatch.setattr(wire, "start_thread", lambda thread: False)
    with TaskServer(Queue()) as server, pytest.raises(TaskError, match="no thread can be started"):
        server.listen()
