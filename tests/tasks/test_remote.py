"""The messages between a queue and its workers: lost, doubled, cut off, and wrong."""

import os
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.deadline import Deadline
from limpet.errors import FormatError, JobFailed, LeaseLost, LimpetError, TaskError
from limpet.ranks.wire import Channel
from limpet.tasks import Queue, RemoteQueue, TaskBatches, TaskServer
from limpet.tasks import remote as remote_module
from tests.tasks.clock import FakeClock
from tests.waiting import wait_until


@contextmanager
def remote(queue, count=1):
    with TaskServer(queue) as server:
        workers = [RemoteQueue(server.connect("w")) for _ in range(count)]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.close()


def frame(payload):
    return len(payload).to_bytes(4) + payload


class RawWorker:
    """A worker that sends any bytes."""

    def __init__(self, server):
        self.socket = server.connect("raw")
        self.socket.settimeout(30)
        self.file = self.socket.makefile("rb")

    def send(self, **fields):
        self.send_payload(msgspec.msgpack.encode(fields))

    def send_payload(self, payload):
        self.socket.sendall(frame(payload))

    def reply(self):
        length = self.file.read(4)
        return msgspec.msgpack.decode(self.file.read(int.from_bytes(length))) if length else None

    def close(self):
        self.file.close()
        self.socket.close()


@pytest.fixture
def raw():
    queue = Queue(lease_seconds=None)
    queue.add("evaluation", 3, task_size=1, name="e")
    queue.add("training", 9, task_size=9, name="t")
    with TaskServer(queue) as server:
        worker = RawWorker(server)
        try:
            yield queue, worker
        finally:
            worker.close()


def test_a_remote_queue_does_what_a_queue_does():
    queue = Queue()
    job = queue.add("evaluation", {"v": 4}, task_size=3, name="e")
    queue.add("training", {"s": None, "f": range(2, 5)}, task_size=3, epochs=2, name="t")
    with remote(queue) as (worker,):
        task = worker.evaluation.get()
        assert (task.id, task.attempt, task.job, task.data) == (1, 1, "e", "v")
        assert (task.start, task.stop, task.epoch, task.position) == (0, 3, 0, 0)
        task.renew()
        assert task.done({"loss": [float("inf"), 3]})
        assert not task.done({"loss": [0.0, 3]})
        assert worker.evaluation.evaluate_one(lambda task: [task.stop])
        assert not worker.evaluation.evaluate_one(lambda task: [task.stop])
        assert worker.finished("evaluation")
        assert job.results() == [{"loss": [float("inf"), 3]}, [4]]
        stream, part = worker.training.get(), worker.training.get()
        assert (stream.stop, part.start, part.stop, part.position) == (None, 2, 5, 2)
        stream.consumed(1000)
        part.consumed(1)
        assert part.release()
        again = worker.training.get()
        assert (again.position, again.attempt) == (3, part.attempt + 1)
        assert again.fail("x")
        assert stream.done()
        assert not worker.training.finished()


def test_errors_arrive_as_they_were_raised():
    queue = Queue(attempts=1)
    queue.add("evaluation", 2, task_size=1, name="e")
    with remote(queue) as (worker,):
        task = worker.evaluation.get()
        with pytest.raises(TaskError, match="cannot return the result"):
            task.done(b"bytes")
        task.fail("no")
        with pytest.raises(LeaseLost, match="lease of task 1") as caught:
            task.renew()
        assert caught.value.todo is not None
        queue.add("training", 1, task_size=1, name="t")
        part = worker.training.get()
        part.fail("no")
        with pytest.raises(JobFailed, match="attempt: no"):
            worker.finished("training")
        with pytest.raises(LimpetError, match="kind of a task must be"):
            worker.get("neither")


def test_texts_that_are_no_utf_8_do_not_end_a_connection():
    """Such as the name of a file in the message of an error."""
    queue = Queue(attempts=2)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    end = queue.add("evaluation", 1, task_size=1, name="later")
    with TaskServer(queue) as server, RemoteQueue(server.connect("\udcff")) as worker:

        def evaluate(task):
            if task.job == "e":
                raise FileNotFoundError("\udcff")
            return ["\udcff"]

        for _ in range(3):
            assert worker.evaluation.evaluate_one(evaluate)
        with pytest.raises(JobFailed, match=r"FileNotFoundError: \\udcff"):
            job.wait(0)
        assert end.results() == [["\udcff"]]


def test_a_worker_that_leaves_while_its_owner_is_gone_still_leaves():
    queue = Queue()
    queue.add("evaluation", 1, task_size=1, name="e")
    with TaskServer(queue) as server, RemoteQueue(server.connect("w")) as worker:

        def leave(task):
            server.close()
            raise SystemExit(75)

        with pytest.raises(SystemExit):
            worker.evaluation.evaluate_one(leave)


def test_a_result_that_arrives_twice_counts_once(raw):
    queue, worker = raw
    worker.send(type="Get", kind="evaluation", lease_seconds=None)
    task = worker.reply()
    report = [task["job"], task["id"], task["attempt"], task["position"]]
    for _ in range(2):
        worker.send(type="Done", report=report, result="[1, NaN]")
    assert [worker.reply()["value"] for _ in range(2)] == [True, False]
    assert queue.job("e").completed == 1


def test_a_worker_cannot_leave_its_leases_under_another_name(raw):
    queue, worker = raw
    for _ in range(2):  # it arrives twice
        worker.send(type="Hello", worker="a")
        assert worker.reply()["value"]
    worker.send(type="Get", kind="evaluation", lease_seconds=None)
    assert worker.reply()["id"] == 1
    worker.send(type="Hello", worker="b")
    assert worker.reply()["value"]
    worker.send(type="Get", kind="evaluation", lease_seconds=None)
    assert worker.reply()["id"] == 1, "its first attempt has failed: it has one at most"
    names = [lease.worker for lease in queue._jobs.leases.values()]
    assert names == ["a at raw (connection 1)"]
    worker.close()
    wait_until(lambda: len(queue._jobs.leases) == 0)


def test_a_worker_that_never_reads_its_reply_keeps_nothing(raw):
    queue, worker = raw
    worker.send(type="Get", kind="evaluation", lease_seconds=None)
    worker.send(type="Get", kind="training", lease_seconds=None)
    wait_until(lambda: len(queue._jobs.leases) == 2)
    worker.close()
    wait_until(lambda: len(queue._jobs.leases) == 0)
    assert [queue.evaluation.get(f"v{i}").id for i in range(3)] == [1, 2, 3]


REPORT = ["e", 1, 1, 0]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"garbage",
        b"\xff\xfe",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"type": "Get", "kind": "training"}),
        msgspec.msgpack.encode({"type": "Eval", "code": "1"}),
        msgspec.msgpack.encode({"type": "Done", "report": REPORT[:3], "result": "1"}),
        msgspec.msgpack.encode({"type": "Done", "report": ["e", 1, "1", 0], "result": "1"}),
        msgspec.msgpack.encode({"type": "Done", "report": REPORT, "result": 1}),
        msgspec.msgpack.encode({"type": "Done", "report": REPORT, "result": "1"})[:-1],
        msgspec.msgpack.encode({"type": "Done", "report": REPORT, "result": "1", "more": 1}),
        msgspec.msgpack.encode({"type": "Reply", "value": True}),
        b"\x91" * 100_000,
    ],
    ids=lambda payload: payload[:40].decode(errors="replace"),
)
def test_a_worker_that_sends_something_else_is_lost(raw, payload):
    queue, worker = raw
    worker.send(type="Get", kind="evaluation", lease_seconds=None)
    assert worker.reply()["id"] == 1
    worker.send_payload(payload)
    answer = worker.reply()
    assert (answer["type"], answer["error"]["name"]) == ("Refused", "FormatError")
    assert worker.reply() is None
    wait_until(lambda: len(queue._jobs.leases) == 0)
    for i in range(2):
        queue.evaluation.get(f"v{i}")
        queue.recover(f"v{i}", "the third attempt")
    with pytest.raises(JobFailed, match="the third attempt"):
        queue.job("e").wait(0)


def test_half_a_message_has_no_effect(raw):
    queue, worker = raw
    worker.send(type="Get", kind="evaluation", lease_seconds=None)
    worker.reply()
    message = {"type": "Done", "report": ["e", 1, 1, 0], "result": "1"}
    worker.socket.sendall(frame(msgspec.msgpack.encode(message))[:-1])
    worker.close()
    wait_until(lambda: len(queue._jobs.leases) == 0)
    assert queue.job("e").completed == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"type": "Done", "report": ["e", 1, 7, 0], "result": "1"}, "TaskError"),
        ({"type": "Done", "report": ["e", 1, 1, 0], "result": "{"}, "TaskError"),
        ({"type": "Consumed", "reports": [["e", 1, 1, 0]]}, "TaskError"),
        ({"type": "Consumed", "reports": [["t", 4, 2, 10]]}, "TaskError"),
        ({"type": "Consumed", "reports": [["t", 4, 2, 1], ["t", 4, 9, 1]]}, "LeaseLost"),
        ({"type": "Renew", "report": ["e", 2, 1, 0], "seconds": None}, "LeaseLost"),
        ({"type": "Renew", "report": ["e", 1, 1, 0], "seconds": -1.0}, "LimpetError"),
        ({"type": "Get", "kind": "x", "lease_seconds": None}, "LimpetError"),
        ({"type": "Get", "kind": "training", "lease_seconds": -1.0}, "LimpetError"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_and_the_connection_goes_on(raw, fields, error):
    queue, worker = raw
    for kind in ("evaluation", "training"):
        worker.send(type="Get", kind=kind, lease_seconds=None)
        worker.reply()
    before = queue.state_dict()
    worker.send(**fields)
    answer = worker.reply()
    assert (answer["type"], answer["error"]["name"]) == ("Refused", error)
    assert queue.state_dict() == before
    worker.send(type="Renew", report=["e", 1, 1, 0], seconds=None)
    assert worker.reply() == {"type": "Reply", "value": True}


def test_two_connections_with_one_name_are_two_workers():
    queue = Queue()
    queue.add("evaluation", 2, task_size=1, name="e")
    with remote(queue, 2) as (a, b):
        first, second = a.evaluation.get(), b.evaluation.get()
        assert first is not None
        a.close()
        wait_until(lambda: len(queue._jobs.leases) == 1)
        second.renew()


def test_batches_of_a_remote_queue_are_leased_for_a_time_and_renewed():
    clock = FakeClock()
    queue = Queue(clock=clock)
    queue.add("training", 10, task_size=2, name="t")
    with remote(queue) as (worker,):
        with pytest.raises(LimpetError, match=r"lease_seconds= must be .*finite"):
            list(TaskBatches(worker.training, 3))
        batches = TaskBatches(worker.training, 3, lease_seconds=10)
        found = []
        for batch in batches:
            clock.advance(8)
            found.append(batch)
            batches.consumed()
        assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert worker.training.finished()


def test_a_client_waits_for_a_task_and_no_longer_than_told():
    queue = Queue()
    with remote(queue) as (worker,):
        assert worker.get("training", timeout=0.05) is None
        threading.Timer(0.05, queue.add, ["training", 1], {"task_size": 1, "name": "t"}).start()
        assert worker.get("training", timeout=30) is not None
        with pytest.raises(LimpetError, match=r"timeout= must be .*finite"):
            worker.get("training", timeout=float("inf"))
        with pytest.raises(LimpetError, match="the queue of one worker"):
            worker.get("training", "me")


@pytest.fixture
def waiting():
    """The end of an owner that does not reply, and a request that waits for it in a thread."""
    own, other = socket.socketpair()
    worker = RemoteQueue(other)

    def request():
        with suppress(TaskError):
            worker.finished("training")

    thread = threading.Thread(target=request)
    thread.start()
    own.settimeout(30)
    assert b"Finished" in own.recv(1000)
    time.sleep(0.05)  # now, it waits in the system
    yield own, worker, thread
    worker.close()
    own.close()
    thread.join(40)


def test_close_ends_a_request_of_another_thread(waiting):
    own, worker, thread = waiting
    worker.close()
    thread.join(10)
    assert not thread.is_alive()
    assert own.recv(1) == b""


def test_a_process_that_was_forked_during_a_request_gets_an_error(waiting):
    _, worker, _ = waiting
    if not (child := os.fork()):
        try:
            signal.alarm(10)  # it would wait for a lock that nobody releases
            with pytest.raises(TaskError, match="this process was forked"):
                worker.finished("training")
            worker.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_program_that_a_worker_starts_keeps_no_connection_alive():
    queue = Queue(lease_seconds=None)
    queue.add("evaluation", 1, task_size=1, name="e")
    with TaskServer(queue) as server:
        end = server.connect("w")
        end.set_inheritable(True)  # as pass_fds does
        assert RemoteQueue(end).evaluation.get() is not None
        child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
        try:
            end.close()  # without a shutdown: as if this process was killed
            wait_until(lambda: not queue._jobs.leases)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_an_owner_that_sends_a_byte_now_and_then_is_given_up(monkeypatch):
    monkeypatch.setattr(remote_module, "_REPLY_SECONDS", 0.1)
    own, other = socket.socketpair()
    stop = threading.Event()

    def drip():
        with suppress(BrokenPipeError):  # the worker has closed its end
            while not stop.wait(0.01):
                own.sendall(b"\1")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        worker = RemoteQueue(other)
        for expected in ("the time is over", "closed"):  # the reply may still come
            with pytest.raises(TaskError, match=f"connection to the owner.*{expected}"):
                worker.get("training")
    finally:
        stop.set()
        thread.join(30)
        own.close()


def test_an_owner_that_has_ended_or_sends_something_else_is_an_error():
    for sent in (b"", frame(b"{}"), frame(b"\x81\xa4type\xa5Reply")[:-1]):
        own, other = socket.socketpair()
        own.sendall(sent)
        own.shutdown(socket.SHUT_WR)
        with own, RemoteQueue(other) as worker:
            for _ in range(2):
                with pytest.raises(TaskError, match=r"owner of the task queue"):
                    worker.get("training")


def test_a_long_message_is_refused_on_both_sides(monkeypatch):
    monkeypatch.setattr(remote_module, "MAX_RESULT", 100_000)
    queue = Queue()
    queue.add("evaluation", 2, task_size=1, name="e")
    with TaskServer(queue) as server:
        with RemoteQueue(server.connect("w")) as worker:
            task = worker.evaluation.get()
            with pytest.raises(TaskError, match=r"too long.*sums and counts"):
                task.done("x" * 100_000)
            assert task.release()  # nothing was sent: the connection goes on
        wait_until(lambda: len(queue._jobs.leases) == 0)
        raw = RawWorker(server)
        raw.send(type="Get", kind="evaluation", lease_seconds=None)
        assert raw.reply() is not None
        raw.socket.sendall((remote_module.MESSAGES.max_bytes + 1).to_bytes(4))
        assert raw.reply()["error"]["name"] == "FormatError"
        wait_until(lambda: len(queue._jobs.leases) == 0)
        raw.close()


def test_large_results_arrive():
    queue = Queue()
    job = queue.add("evaluation", 1, task_size=1, name="e")
    with remote(queue) as (worker,):
        worker.evaluation.evaluate_one(lambda task: ["é" * 10] * 100_000)
    assert job.results() == [["é" * 10] * 100_000]


def test_a_closed_server_has_no_threads_and_no_leases():
    queue = Queue(lease_seconds=None)
    queue.add("evaluation", 3, task_size=1, name="e")
    before = threading.active_count()
    server = TaskServer(queue)
    workers = [RemoteQueue(server.connect("w")) for _ in range(3)]
    for worker in workers:
        assert worker.evaluation.get() is not None
    server.close()
    assert threading.active_count() == before
    assert len(queue._jobs.leases) == 0
    with pytest.raises(TaskError, match=r"Cannot connect worker 'late'.*is closed"):
        server.connect("late")
    for worker in workers:
        with pytest.raises(TaskError):
            worker.finished("evaluation")
        worker.close()


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_error(data):
    own, other = socket.socketpair()
    with own, other:
        own.sendall(frame(data))
        own.shutdown(socket.SHUT_WR)
        deadline = Deadline.after(10, "the test")
        channel = Channel(other, "a worker", remote_module.MESSAGES, deadline)
        with pytest.raises(FormatError, match="invalid message came from a worker"):
            channel.receive()
