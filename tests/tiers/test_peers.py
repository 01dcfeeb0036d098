"""Transfers of copies between peers: what arrives, and what may go wrong with one connection."""

from __future__ import annotations

import errno
import math
import socket
import time
from dataclasses import replace
from threading import Event, Thread, Timer

import pytest

from limpet.deadline import Deadline
from limpet.errors import (
    AlreadyExists,
    Denied,
    DigestMismatch,
    FormatError,
    LimpetError,
    NoSpace,
    NotFound,
    StoreError,
    Unavailable,
)
from limpet.format.digest import digest
from limpet.ranks import wire
from limpet.ranks.wire import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAX_FRAME_BYTES,
    PROOF_BYTES,
    Channel,
    HandshakeLimits,
    make_secret,
)
from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.testing.contract import keys, partial_keys, put, random_bytes
from limpet.testing.faults import Fault, FaultFs
from limpet.tiers.peers import server as peer_server
from limpet.tiers.peers import transfer
from limpet.tiers.peers.transfer import MESSAGES, Fetch, Offer, Ready
from tests.tiers.peers import (
    LIMITS,
    SECRET,
    Proxy,
    ask,
    connect,
    eventually,
    forked_child,
    memory_folder,
    serving,
)

SIZE = (3 << 20) + 77


@pytest.fixture
def folder():
    with memory_folder() as path:
        yield path


@pytest.fixture
def source():
    store = MemoryStore()
    put(store, "v1/a", random_bytes(SIZE))
    return store


def is_idle(server):
    return not server._connections._threads


def test_a_file_is_sent_and_acknowledged(folder, source):
    with serving(folder) as server, connect(server) as peer:
        for number, size in enumerate([0, 1, SIZE]):
            data = random_bytes(size, number)
            put(source, f"v2/{number}", data)
            receipt = peer.send_file(source, f"v2/{number}")
            assert (receipt.length, receipt.digest) == (size, digest(data))
            assert LocalStore(folder).get(f"v2/{number}", size) == data
    assert partial_keys(LocalStore(folder)) == []


def test_files_and_ranges_are_fetched(source):
    with serving(None, store=source) as server, connect(server) as peer:
        data = random_bytes(SIZE)
        assert peer.fetch_file("v1/a", SIZE) == data
        for offset, length in [(0, SIZE), (0, 0), (SIZE, 0), (SIZE - 1, 1), (77, (2 << 20) + 5)]:
            into = memoryview(bytearray(length))
            peer.fetch_range("v1/a", SIZE, offset, into)
            assert into == data[offset : offset + length]
        with pytest.raises(NotFound, match="v1/none") as caught:
            peer.fetch_file("v1/none", SIZE)
        assert "Reported by rank 1 at 127.0.0.1" in caught.value.__notes__[0]


def test_a_file_that_the_peer_has_is_not_sent_again(folder, source):
    counted = []

    def count(direction, offset, data):
        counted.append(len(data) if direction == "up" else 0)
        return data

    with serving(folder) as server, Proxy(server, count) as proxy:
        for _ in range(2):
            with connect(proxy) as peer:
                receipt = peer.send_file(source, "v1/a")
                assert receipt.digest == digest(random_bytes(SIZE))
        assert SIZE < sum(counted) < SIZE + 4096


def test_other_bytes_under_the_key_are_refused(folder, source):
    put(TmpfsStore(folder), "v1/a", random_bytes(SIZE, 9))
    with (
        serving(folder) as server,
        connect(server) as peer,
        pytest.raises(AlreadyExists, match="other bytes"),
    ):
        peer.send_file(source, "v1/a")
    assert LocalStore(folder).get("v1/a", SIZE) == random_bytes(SIZE, 9)


def test_two_senders_of_one_file_both_succeed(folder, source):
    with serving(folder) as server, connect(server) as first, connect(server, rank=2) as second:
        channel = first._channel
        channel.send(Offer("v1/a", SIZE))
        channel.receive(Ready)
        assert second.send_file(source, "v1/a").length == SIZE
        peer_files = peer_server.send_content
        assert peer_files(channel, source, "v1/a", 0, SIZE) == digest(random_bytes(SIZE))
        stored = channel.receive(peer_server.Stored)
        assert stored.digest == digest(random_bytes(SIZE))
    assert keys(LocalStore(folder)) == ["v1/a"]
    assert partial_keys(LocalStore(folder)) == []


# damage


@pytest.mark.parametrize("at", [300, 1 << 20, SIZE])
def test_a_bit_that_flips_on_the_way_is_detected(folder, source, at):
    def flip(direction, offset, data):
        if direction == "up" and offset <= at < offset + len(data):
            data = bytearray(data)
            data[at - offset] ^= 4
        return data

    with serving(folder) as server, Proxy(server, flip) as proxy, connect(proxy) as peer:
        with pytest.raises(DigestMismatch, match="v1/a was damaged on its way from rank 0"):
            peer.send_file(source, "v1/a")
        eventually(lambda: is_idle(server))
    assert keys(LocalStore(folder)) == partial_keys(LocalStore(folder)) == []


def test_a_bit_that_flips_on_the_way_back_is_detected(source):
    def flip(direction, offset, data):
        if direction == "down" and offset <= SIZE // 2 < offset + len(data):
            data = bytearray(data)
            data[SIZE // 2 - offset] ^= 4
        return data

    with (
        serving(None, store=source) as server,
        Proxy(server, flip) as proxy,
        connect(proxy) as peer,
        pytest.raises(DigestMismatch, match="damaged on its way"),
    ):
        peer.fetch_range("v1/a", SIZE, 0, memoryview(bytearray(SIZE)))


@pytest.mark.slow
def test_every_changed_byte_of_the_messages_is_detected(folder):
    """The handshake, the frames, and their codes: no changed byte is taken for another meaning."""
    source = MemoryStore()
    put(source, "v1/a", b"12345678")
    lengths = {"up": 0, "down": 0}

    def count(direction, offset, data):
        lengths[direction] = max(lengths[direction], offset + len(data))
        return data

    with serving(folder) as server, Proxy(server, count) as proxy, connect(proxy) as peer:
        peer.send_file(source, "v1/a")
    LocalStore(folder).delete("v1/a")
    limits = replace(
        LIMITS, idle_seconds=0.2, part_seconds=0.2, handshakes=HandshakeLimits(seconds=0.2)
    )
    with serving(folder, limits) as server:
        for way, length in lengths.items():
            for at in range(0, length, 3):

                def flip(direction, offset, data, way=way, at=at):
                    if direction == way and offset <= at < offset + len(data):
                        data = bytearray(data)
                        data[at - offset] ^= 64
                    return data

                with (
                    Proxy(server, flip) as proxy,
                    pytest.raises(LimpetError),
                    connect(proxy, seconds=0.3) as peer,
                ):
                    peer.send_file(source, "v1/a")
                for key in keys(LocalStore(folder)):  # an acknowledgment was damaged
                    assert way == "down"
                    assert LocalStore(folder).get(key, 8) == b"12345678"
                    LocalStore(folder).delete(key)


@pytest.mark.parametrize(
    ("way", "at"),
    [
        *(("up", at) for at in (0, 39, 71, 150, 250, 1 << 20, SIZE)),
        *(("down", at) for at in (0, 63, 64, 80, 150)),
    ],
)
def test_a_torn_connection_leaves_nothing_visible(folder, source, at, way):
    def cut(direction, offset, data):
        return None if direction == way and offset + len(data) > at else data

    with serving(folder) as server, Proxy(server, cut) as proxy:
        with pytest.raises(Unavailable), connect(proxy) as peer:
            peer.send_file(source, "v1/a")
        eventually(lambda: is_idle(server))
        assert partial_keys(LocalStore(folder)) == []
        if way == "up":
            assert keys(LocalStore(folder)) == []
        with connect(server) as peer:  # and it can be sent again
            assert peer.send_file(source, "v1/a").length == SIZE


def test_a_file_that_is_deleted_while_it_is_served(source, monkeypatch):
    real = source.get_range

    def get_range(key, offset, length, into):
        if offset > SIZE // 2:
            source.delete(key)
        real(key, offset, length, into)

    monkeypatch.setattr(source, "get_range", get_range)
    with serving(None, store=source) as server, connect(server) as peer, pytest.raises(Unavailable):
        peer.fetch_file("v1/a", SIZE)


# strangers


def raw(server):
    return socket.create_connection((server.address, server.port), 10)


def test_a_wrong_secret_is_refused_by_both_sides(folder, source):
    with serving(folder) as server, pytest.raises(Denied, match="does not know the secret"):
        connect(server, secret=make_secret())
    # a client that does not check the proof of the server, and sends a wrong one itself
    with serving(folder) as server, raw(server) as stranger:
        stranger.sendall(b"LIMPET01" + bytes(32))
        assert len(stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        stranger.sendall(bytes(PROOF_BYTES))
        assert stranger.recv(1) == b""
        assert is_idle(server)


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES), b"\xff" * HELLO_BYTES])
def test_another_protocol_is_refused(folder, hello):
    with serving(folder) as server, raw(server) as stranger:
        stranger.sendall(hello)
        assert stranger.recv(1) == b""


def test_a_replayed_connection_is_refused(folder, source):
    sent = []

    def record(direction, offset, data):
        if direction == "up":
            sent.append(bytes(data))
        return data

    with serving(folder) as server:
        with Proxy(server, record) as proxy, connect(proxy) as peer:
            peer.send_file(source, "v1/a")
        eventually(lambda: is_idle(server))
        LocalStore(folder).delete("v1/a")
        everything = b"".join(sent)
        with raw(server) as stranger:
            stranger.sendall(everything[:HELLO_BYTES])
            assert len(stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
            stranger.sendall(everything[HELLO_BYTES : HELLO_BYTES + PROOF_BYTES])
            assert stranger.recv(1) == b""
        assert keys(LocalStore(folder)) == []


def test_a_reflected_challenge_is_refused(folder):
    """A stranger that passes the challenge of one server to another learns no proof of a client."""
    with serving(folder) as server, raw(server) as first, raw(server) as second:
        first.sendall(b"LIMPET01" + bytes(32))
        challenge = first.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        second.sendall(b"LIMPET01" + challenge[:32])
        answer = second.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        first.sendall(answer[32:])
        assert first.recv(1) == b""


def test_many_strangers_take_neither_threads_nor_the_place_of_peers(folder, source):
    limits = replace(LIMITS, handshakes=HandshakeLimits(8))
    with serving(folder, limits) as server:
        strangers = [raw(server) for _ in range(60)]
        for stranger in strangers[::2]:
            stranger.sendall(b"LIMPET01" + bytes(10))
        with connect(server) as peer:
            assert peer.send_file(source, "v1/a").length == SIZE
        assert is_idle(server) or len(server._connections._threads) == 1
        assert strangers[0].recv(1) == b""  # displaced
        for stranger in strangers:
            stranger.close()


def test_a_silent_stranger_is_dropped(folder):
    with (
        serving(folder, replace(LIMITS, handshakes=HandshakeLimits(seconds=0.05))) as server,
        raw(server) as stranger,
    ):
        assert stranger.recv(1) == b""


# peers that break the protocol or the limits


def channel_to(server):
    return connect(server)._channel


def test_an_oversized_frame_is_not_read(folder):
    with serving(folder) as server:
        channel = channel_to(server)
        channel.send_bytes((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(FormatError, match="1048577 bytes"):
            channel.receive(Ready)
        eventually(lambda: is_idle(server))
        channel.close()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00", b"\x81\xa4type\xa4Nope", b"\x80" * 50, b"\xc1", b"\x81\xa4type\xa5Offer"],
)
def test_an_invalid_message_ends_the_connection(folder, payload):
    with serving(folder) as server:
        channel = channel_to(server)
        code = channel.session.sign(payload)
        channel.send_bytes(len(payload).to_bytes(4, "big"), payload, code)
        with pytest.raises(FormatError, match="invalid message"):
            channel.receive(Ready)
        eventually(lambda: is_idle(server))
        channel.close()


def test_a_message_out_of_place_ends_the_connection(folder):
    with serving(folder) as server:
        channel = channel_to(server)
        channel.send(Ready())
        with pytest.raises(FormatError, match="found Ready"):
            channel.receive(Ready)
        channel.close()


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("v1/manifest.json", Denied),
        ("manifest.json", Denied),
        ("../x", StoreError),
        ("/etc/passwd", StoreError),
        ("v1/.a.partial", StoreError),
        ("a//b", StoreError),
    ],
)
def test_a_key_that_a_peer_must_not_write(folder, key, error):
    with serving(folder) as server:
        channel = channel_to(server)
        channel.send(Offer(key, 5))
        with pytest.raises(error):
            channel.receive(Ready)
        channel.close()
    assert list(folder.rglob("*")) == []


@pytest.mark.parametrize("key", ["../x", "/etc/passwd"])
def test_only_files_of_the_store_are_served(folder, key):
    with serving(folder) as server:
        channel = channel_to(server)
        channel.send(Fetch(key, 0, 5))
        with pytest.raises(StoreError, match="Invalid key"):
            channel.receive(Ready)
        channel.close()


@pytest.mark.parametrize(
    ("limit", "message"),
    [("file_bytes", "A file"), ("peer_bytes", "rank 0"), ("total_bytes", "all peers")],
)
def test_the_limits_of_sizes(folder, source, limit, message):
    put(source, "v1/b", random_bytes(SIZE, 1))
    limits = replace(LIMITS, **{limit: SIZE - 1 if limit == "file_bytes" else 2 * SIZE - 1})
    store = TmpfsStore(folder)
    with serving(folder, limits, store=store) as server:
        if limit != "file_bytes":
            with connect(server) as peer:
                peer.send_file(source, "v1/a")
        with connect(server) as peer, pytest.raises(NoSpace, match=message):
            peer.send_file(source, "v1/b")
        if limit != "file_bytes":
            store.delete("v1/a")  # what is deleted does not count any more
            with connect(server) as peer:
                assert peer.send_file(source, "v1/b").length == SIZE


def test_another_rank_has_its_own_limit(folder, source):
    put(source, "v1/b", random_bytes(SIZE, 1))
    with serving(folder, replace(LIMITS, peer_bytes=SIZE)) as server:
        for rank, key in ((0, "v1/a"), (1, "v1/b")):
            with connect(server, rank=rank) as peer:
                assert peer.send_file(source, key).length == SIZE


def test_an_enormous_length_is_refused_before_memory_is_allocated(folder):
    limits = replace(LIMITS, file_bytes=1 << 60, peer_bytes=1 << 60, total_bytes=1 << 60)
    with serving(folder, limits) as server:
        channel = channel_to(server)
        channel.send(Offer("v1/a", 1 << 59))
        with pytest.raises(StoreError):
            channel.receive(Ready)
        channel.close()
    assert list(folder.rglob("*")) == []


def test_full_memory_is_reported_to_the_sender(folder, source):
    store = TmpfsStore(folder, fs=FaultFs(None, Fault("fallocate", 1, errno.ENOSPC)))
    with (
        serving(folder, store=store) as server,
        connect(server) as peer,
        pytest.raises(NoSpace, match="v1/a"),
    ):
        peer.send_file(source, "v1/a")
    assert list(folder.rglob("*")) == []


def test_a_file_that_is_longer_than_expected_is_not_fetched(source):
    with (
        serving(None, store=source) as server,
        connect(server) as peer,
        pytest.raises(StoreError, match="another length"),
    ):
        peer.fetch_file("v1/a", SIZE - 1)


@pytest.mark.parametrize(
    ("length", "offset", "count"),
    [(SIZE - 1, 0, 10), (SIZE + 1, 0, 10), (SIZE, SIZE - 9, 10), (SIZE, SIZE + 9, 10)],
)
def test_a_range_of_a_file_of_another_length_is_not_fetched(source, length, offset, count):
    with (
        serving(None, store=source) as server,
        connect(server) as peer,
        pytest.raises(StoreError, match="another length"),
    ):
        peer.fetch_range("v1/a", length, offset, memoryview(bytearray(count)))


def test_stores_on_disks_send_and_receive(tmp_path, source):
    store = LocalStore(tmp_path / "a")
    data = source.get("v1/a", 1 << 30)
    with serving(None, store=store) as server, connect(server) as peer:
        assert peer.send_file(source, "v1/a").digest == digest(data)
        assert store.get("v1/a", 1 << 30) == data
        assert peer.fetch_file("v1/a", len(data)) == data


def test_an_error_of_the_server_itself_reaches_the_peer(folder, source, monkeypatch):
    with serving(folder) as server, connect(server) as peer:
        monkeypatch.setattr(server, "_receive", lambda *_: 1 // 0)
        with pytest.raises(StoreError, match="ZeroDivisionError"):
            peer.send_file(source, "v1/a")


def test_too_many_connections_are_refused_and_may_come_back(folder, source):
    with serving(folder, replace(LIMITS, connections=1)) as server:
        with connect(server) as first:
            ask(first)
            with pytest.raises(Unavailable), connect(server) as second:
                ask(second)
        eventually(lambda: is_idle(server))
        with connect(server) as third:
            assert third.send_file(source, "v1/a").length == SIZE


# time


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, part_seconds=0.2), replace(LIMITS, idle_seconds=0.2)]
)
def test_a_peer_that_stops_sending_loses_only_its_own_transfer(folder, source, limits):
    with serving(folder, limits) as server, connect(server) as slow:
        slow._channel.send(Offer("v1/slow", SIZE))
        slow._channel.receive(Ready)
        slow._channel.send_bytes(bytes(1000))
        with connect(server, rank=2) as other:
            assert other.send_file(source, "v1/a").length == SIZE
        eventually(lambda: is_idle(server))
        assert keys(LocalStore(folder)) == ["v1/a"]
        assert partial_keys(LocalStore(folder)) == []


def test_an_idle_connection_is_closed(folder):
    with serving(folder, replace(LIMITS, idle_seconds=0.05)) as server, connect(server):
        eventually(lambda: is_idle(server))


@pytest.mark.parametrize("answers", [0, 1])
def test_a_server_that_does_not_answer(source, answers):
    """It accepts the connection, perhaps makes the handshake, and is then stopped."""
    with memory_folder() as folder, serving(folder) as server:

        def stop(direction, offset, data):
            if direction == "down" and offset >= CHALLENGE_BYTES * answers:
                gate.recv(1)  # until the test has ended
                return None
            return data

        gate, opened = socket.socketpair()
        with (
            Proxy(server, stop) as proxy,
            pytest.raises(Unavailable, match=r"time is over|timed out|end"),
            connect(proxy, seconds=0.3) as peer,
        ):
            peer.send_file(source, "v1/a")
        opened.close()
        gate.close()


def test_a_server_that_does_not_read(source):
    """The buffers of the sockets are full; the sender ends by its deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.socket(), None]
        ends[0].connect(listener.getsockname())
        ends[1], _ = listener.accept()
        channel = Channel(ends[0], "rank 1", MESSAGES, Deadline.after(0.2, "the copy of v1/a"))
        with pytest.raises(Unavailable, match="time is over for the copy of v1/a"):
            while True:
                channel.send_bytes(memoryview(bytes(1 << 20)))
        for end in ends:
            end.close()


@pytest.mark.parametrize(
    ("pause", "seconds", "server_seconds"), [(0.02, 1, 1), (0.3, 1, 60), (0.3, 60, 1)]
)
def test_each_part_of_a_file_has_its_own_time(folder, monkeypatch, pause, seconds, server_seconds):
    """A long file may take long. A peer that accepts a few bytes now and then holds nobody."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1 << 20)
    source, size = MemoryStore(), 6 << 20
    put(source, "v1/a", random_bytes(size))

    def slow(direction, offset, data):
        time.sleep(pause if direction == "up" else 0)
        return data

    calls, began, is_too_slow = [], time.monotonic(), pause > 0.1
    with (
        serving(folder, replace(LIMITS, part_seconds=server_seconds)) as server,
        Proxy(server, slow) as proxy,
    ):
        proxy.limit_buffers(1 << 16)
        with connect(proxy, seconds=seconds) as peer:
            peer._channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            if is_too_slow:
                with pytest.raises(Unavailable):
                    peer.send_file(source, "v1/a")
            else:
                peer.send_file(source, "v1/a", lambda: calls.append(time.monotonic()))
        eventually(lambda: is_idle(server))
    if is_too_slow:
        assert time.monotonic() - began < 10
        assert keys(LocalStore(folder)) == partial_keys(LocalStore(folder)) == []
    else:
        assert time.monotonic() - began > 1.5
        assert len(calls) == 6
        assert LocalStore(folder).get("v1/a", size) == source.get("v1/a", size)


def test_the_time_of_a_connection_may_become_shorter(folder, source):
    """A notice arrives while a peer does not read."""
    ends = [math.inf]

    def limit():
        return ends[0] - time.monotonic()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        channel = Channel(
            client, "rank 1", MESSAGES, Deadline.after(30, "the copy of v1/a"), limit=limit
        )
        began = time.monotonic()
        Timer(0.2, ends.__setitem__, (0, 0.0)).start()
        with pytest.raises(Unavailable, match="time is over for the copy of v1/a"):
            while True:
                channel.send_bytes(memoryview(bytes(1 << 20)))
        assert time.monotonic() - began < 5
        for end in (client, other):
            end.close()


def test_a_host_that_is_gone(source):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = listener.getsockname()

    class Gone:
        address, port = gone

    with pytest.raises(Unavailable, match=r"Cannot connect to rank 1 at 127\.0\.0\.1"):
        connect(Gone)


def test_closing_ends_the_transfers(folder, source):
    with serving(folder) as server, connect(server) as peer:
        peer._channel.send(Offer("v1/a", SIZE))
        peer._channel.receive(Ready)
        assert len(partial_keys(LocalStore(folder))) == 1
        server.close()
        server.close()
        assert partial_keys(LocalStore(folder)) == []
        with pytest.raises(Unavailable):
            peer.send_file(source, "v1/a")


# addresses and processes


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "224.0.0.1", "203.0.113.7", "localhost"])
def test_a_server_listens_at_one_address_of_this_host(folder, host):
    with pytest.raises(StoreError, match="Cannot serve copies at"):
        peer_server.PeerServer(TmpfsStore(folder), host, SECRET, LIMITS)


def test_no_thread_can_be_started(folder, monkeypatch):
    monkeypatch.setattr(wire, "start_thread", lambda thread: False)
    with pytest.raises(StoreError, match="no thread can be started"):
        peer_server.PeerServer(TmpfsStore(folder), "127.0.0.1", SECRET, LIMITS)


def test_a_forked_process_keeps_no_connection_alive(folder, source):
    with serving(folder) as server:
        peer = connect(server)
        ask(peer)
        with forked_child():
            peer.close()
            eventually(lambda: is_idle(server))  # the server sees the end, although the child lives


@pytest.mark.parametrize("text", ["No room", "no such file: \udcff"])
def test_an_error_of_the_server_keeps_its_class_and_says_who_reports_it(folder, monkeypatch, text):
    """Also if its text has surrogates, such as the name of a file that is no UTF-8."""

    def answer(self, channel, rank, request):
        raise NoSpace(text, expected="5", found=3, todo="Buy some")

    monkeypatch.setattr(peer_server.PeerServer, "_answer", answer)
    with serving(folder) as server, connect(server) as peer:
        with pytest.raises(NoSpace, match=r"Expected 5, found 3\. Buy some") as caught:
            ask(peer)
        assert text.rpartition("\udcff")[0] in str(caught.value)
        assert caught.value.__notes__ == [f"Reported by rank 1 at 127.0.0.1:{server.port}"]


def test_transfers_in_both_directions_at_once(folder, source):
    with memory_folder() as other, serving(folder) as one, serving(other) as two:
        errors = []

        def send(server, rank):
            try:
                with connect(server, rank=rank) as peer:
                    for number in range(5):
                        data = random_bytes(100_000, number)
                        put(source, f"from{rank}/{number}", data)
                        peer.send_file(source, f"from{rank}/{number}")
            except BaseException as e:
                errors.append(e)

        threads = [Thread(target=send, args=(s, r)) for r, s in enumerate([one, two, one, two])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(keys(LocalStore(folder))) == len(keys(LocalStore(other))) == 10


def test_closing_ends_a_long_digest(folder, source, monkeypatch):
    """The server compares a file that it has with one that is offered."""
    store = TmpfsStore(folder)
    put(store, "v1/a", random_bytes(SIZE))
    begun, closing = Event(), Event()
    real = store.get_range

    def get_range(*arguments):
        begun.set()
        closing.wait(10)
        real(*arguments)

    monkeypatch.setattr(store, "get_range", get_range)
    with serving(folder, store=store) as server, connect(server) as peer:
        peer._channel.send(Offer("v1/a", SIZE))
        assert begun.wait(10)
        closer = Thread(target=server.close)
        closer.start()
        eventually(lambda: all(not c.seconds_left for c in list(server._connections._threads)))
        closing.set()
        closer.join()
        with pytest.raises(Unavailable):
            peer._channel.receive(peer_server.Stored)
