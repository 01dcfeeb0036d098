"""A listener hands over connections with the secret, and nothing that strangers do ends it."""

import errno
import os
import resource
import socket
import threading
from contextlib import contextmanager

import pytest

from limpet.errors import Denied, StoreError
from limpet.ranks.wire import (
    CHALLENGE_BYTES,
    MAGIC,
    NONCE_BYTES,
    HandshakeLimits,
    Listener,
    Session,
    answer_challenge,
    make_secret,
)
from tests.waiting import wait_until

SECRET = make_secret()
Accepted = list[tuple[socket.socket, Session]]


@contextmanager
def listening(
    address="127.0.0.1",
    limits=HandshakeLimits(),  # noqa: B008
):
    accepted: Accepted = []

    def accept(connection, session):
        accepted.append((connection, session))

    listener = Listener(address, SECRET, "serve tests", accept, limits)
    try:
        yield listener, accepted
    finally:
        listener.close()
        for connection, _ in accepted:
            connection.close()


def shake(listener, secret=SECRET):
    """Connect, and make the handshake."""
    connection = socket.create_connection((listener.address, listener.port), 20)
    try:
        nonce = bytes(NONCE_BYTES)
        connection.sendall(MAGIC + nonce)
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        proof, session = answer_challenge(secret, nonce, challenge, "the listener")
        connection.sendall(proof)
    except BaseException:
        connection.close()
        raise
    return connection, session


@pytest.mark.parametrize("change", ["again", "left out", "other payload", "own direction"])
def test_a_message_has_one_place(change):
    with listening() as (listener, accepted):
        connection, session = shake(listener)
        with connection:
            wait_until(lambda: accepted)
            own = accepted[0][1]
            first, second = session.sign(b"x"), session.sign(b"x")
            if change == "again":
                own.verify(b"x", first, "the client")
                second = first
            elif change == "other payload":
                own.verify(b"x", first, "the client")
            elif change == "own direction":
                second = own.sign(b"x")
            with pytest.raises(Denied, match="was changed on its way"):
                own.verify(b"y" if change == "other payload" else b"x", second, "the client")


def test_strangers_get_no_session_and_end_nothing():
    with listening(limits=HandshakeLimits(connections=4)) as (listener, accepted):
        with pytest.raises(Denied, match="does not know the secret"):
            shake(listener, make_secret())
        strangers = [
            socket.create_connection((listener.address, listener.port), 20) for _ in range(20)
        ]
        for number, stranger in enumerate(strangers):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * number)
        before = threading.active_count()
        for _ in range(3):
            connection, _ = shake(listener)
            connection.close()
        wait_until(lambda: len(accepted) == 3)
        assert threading.active_count() == before
        for stranger in strangers:
            stranger.close()


def count_of_files():
    return len(os.listdir("/proc/self/fd"))


def limit_for(left):
    """The limit on the numbers of descriptors with which so many more can be opened. A thread that
    waits in accept() holds a number that does not look open."""
    opened = [os.dup(0) for _ in range(left + 1)]
    for descriptor in opened:
        os.close(descriptor)
    return opened[-1]


def test_without_descriptors_it_listens_or_raises():
    """Once it listens, its thread needs no more of them."""
    with listening():
        pass
    before = count_of_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    for left in range(20):  # the process may have gaps
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(left), hard))
            try:
                listener = Listener("127.0.0.1", SECRET, "serve tests", lambda *_: None)
            except StoreError as e:
                found.append(str(e))
                continue
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            with pytest.raises(Denied):
                shake(listener, make_secret())
            listener.close()
        finally:
            assert count_of_files() == before
    assert 1 <= len(found) < 20
    assert all("Too many open files" in text for text in found)


def test_a_peer_that_has_gone_does_not_end_the_listener(monkeypatch):
    """On some systems, the options of its socket are invalid."""
    calls = []

    def fail(sock, *arguments):
        calls.append(arguments)
        raise OSError(errno.EINVAL, "Invalid argument")

    with listening() as (listener, accepted):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "setsockopt", fail)
            socket.create_connection((listener.address, listener.port), 20).close()
            wait_until(lambda: calls)
        connection, _ = shake(listener)
        connection.close()
        wait_until(lambda: accepted)


def test_a_forked_process_may_close_its_copy():
    with listening() as (listener, accepted):
        if not (child := os.fork()):
            try:
                listener.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        connection, _ = shake(listener)
        connection.close()
        wait_until(lambda: accepted)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "224.0.0.1", "192.0.2.1", "localhost", ""])
def test_it_listens_at_one_address_of_this_host(address):
    with pytest.raises(StoreError, match="Cannot serve tests at"), listening(address):
        pass
