"""Workers that connect to the address of a queue over TCP."""

import gc
import re
import socket

import pytest

from limpet.errors import Denied, JobFailed, LimpetError, TaskError
from limpet.ranks import wire
from limpet.tasks import Queue, RemoteQueue, TaskServer
from limpet.tasks import remote as remote_module
from tests.interrupts import MOMENTS, SignalError, raise_at_start
from tests.tasks.test_processes import expected_results
from tests.tasks.worker import evaluate
from tests.tiers.peers import forked_child
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


def test_the_name_of_a_worker_is_in_the_error_of_its_job():
    queue = Queue(lease_seconds=None, attempts=1)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    with TaskServer(queue) as server:
        with RemoteQueue.connect(server.listen(), "actor 7 \udcff" + "a" * 100_000) as remote:
            assert remote.evaluation.get() is not None
        place = r"a+ at 127.0.0.1:\d+ \(connection 1\)"
        with pytest.raises(JobFailed, match=r"actor 7 \\\\udcff" + place) as caught:
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


def test_an_owner_that_does_not_answer_is_an_error_in_time(monkeypatch):
    monkeypatch.setattr(remote_module, "_REPLY_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"tcp://127.0.0.1:{stopped.getsockname()[1]}/{'a' * 64}"
        with pytest.raises(TaskError, match=r"the time is over|timed out"):
            RemoteQueue.connect(address)


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
