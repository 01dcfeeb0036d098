"""Transfers of copies between peers: what arrives, and what may go wrong with one connection."""

import errno
import os
import socket
import time
from dataclasses import replace

import pytest

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
from limpet.ranks.wire import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAX_FRAME_BYTES,
    PROOF_BYTES,
    HandshakeLimits,
    make_secret,
)
from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.testing.contract import keys, partial_keys, put, random_bytes
from limpet.testing.faults import Fault, FaultFs
from limpet.tiers.peers import transfer
from limpet.tiers.peers.transfer import Fetch, Offer, Ready
from tests.tiers.peers import LIMITS, A, B, Proxy, connect, file, memory_folder, serving
from tests.waiting import wait_until

SIZE = (3 << 20) + 77


@pytest.fixture
def source():
    store = MemoryStore()
    put(store, A, random_bytes(SIZE))
    return store


def is_idle(server):
    return not server._connections._threads


def test_a_file_is_sent_and_acknowledged(folder, source):
    with serving(folder) as server, connect(server) as peer:
        for number, size in enumerate([0, 1, SIZE]):
            data = random_bytes(size, number)
            put(source, file(str(number)), data)
            receipt = peer.send_file(source, file(str(number)))
            assert (receipt.length, receipt.digest) == (size, digest(data))
            assert LocalStore(folder).get(file(str(number)), size) == data
    assert partial_keys(LocalStore(folder)) == []


def test_files_and_ranges_are_fetched(source):
    with serving(None, store=source) as server, connect(server) as peer:
        data = random_bytes(SIZE)
        assert peer.fetch_file(A, SIZE) == data
        for offset, length in [(0, SIZE), (0, 0), (SIZE, 0), (SIZE - 1, 1), (77, (2 << 20) + 5)]:
            into = memoryview(bytearray(length))
            peer.fetch_range(A, SIZE, offset, into)
            assert into == data[offset : offset + length]
        with pytest.raises(NotFound, match=file("none")) as caught:
            peer.fetch_file(file("none"), SIZE)
        assert "Reported by rank 1 at 127.0.0.1" in caught.value.__notes__[0]


def test_other_bytes_under_the_key_are_refused(folder, source):
    put(TmpfsStore(folder), A, random_bytes(SIZE, 9))
    with (
        serving(folder) as server,
        connect(server) as peer,
        pytest.raises(AlreadyExists, match="other bytes"),
    ):
        peer.send_file(source, A)
    assert LocalStore(folder).get(A, SIZE) == random_bytes(SIZE, 9)


def test_two_senders_of_one_file_both_succeed(folder, source):
    with serving(folder) as server, connect(server) as first, connect(server, rank=2) as second:
        channel = first._channel
        channel.send(Offer(A, SIZE))
        channel.receive(Ready)
        assert second.send_file(source, A).length == SIZE
        peer_files = transfer.send_content
        assert peer_files(channel, source, A, 0, SIZE) == digest(random_bytes(SIZE))
        stored = channel.receive(transfer.Stored)
        assert stored.digest == digest(random_bytes(SIZE))
    assert keys(LocalStore(folder)) == [A]
    assert partial_keys(LocalStore(folder)) == []


# damage


def flip(way, at, mask=4):
    """Return a filter of a proxy that changes the byte ``at`` of one direction."""

    def change(direction, offset, data):
        if direction == way and offset <= at < offset + len(data):
            data = bytearray(data)
            data[at - offset] ^= mask
        return data

    return change


@pytest.mark.parametrize("at", [300, 1 << 20, SIZE])
def test_a_bit_that_flips_on_the_way_is_detected(folder, source, at):
    with serving(folder) as server, Proxy(server, flip("up", at)) as proxy, connect(proxy) as peer:
        with pytest.raises(DigestMismatch, match=f"{A} was damaged on its way from rank 0"):
            peer.send_file(source, A)
        wait_until(lambda: is_idle(server))
    assert keys(LocalStore(folder)) == partial_keys(LocalStore(folder)) == []


def test_a_bit_that_flips_on_the_way_back_is_detected(source):
    with (
        serving(None, store=source) as server,
        Proxy(server, flip("down", SIZE // 2)) as proxy,
        connect(proxy) as peer,
        pytest.raises(DigestMismatch, match="damaged on its way"),
    ):
        peer.fetch_range(A, SIZE, 0, memoryview(bytearray(SIZE)))


@pytest.mark.slow
def test_every_changed_byte_of_the_messages_is_detected(folder):
    """The handshake, the frames, and their codes: no changed byte is taken for another meaning."""
    source = MemoryStore()
    put(source, A, b"12345678")
    lengths = {"up": 0, "down": 0}

    def count(direction, offset, data):
        lengths[direction] = max(lengths[direction], offset + len(data))
        return data

    with serving(folder) as server, Proxy(server, count) as proxy, connect(proxy) as peer:
        peer.send_file(source, A)
    LocalStore(folder).delete(A)
    limits = replace(
        LIMITS, idle_seconds=0.2, part_seconds=0.2, handshakes=HandshakeLimits(seconds=0.2)
    )
    with serving(folder, limits) as server:
        for way, length in lengths.items():
            for at in range(0, length, 3):
                with (
                    Proxy(server, flip(way, at, 64)) as proxy,
                    pytest.raises(LimpetError),
                    connect(proxy, seconds=0.3) as peer,
                ):
                    peer.send_file(source, A)
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
            peer.send_file(source, A)
        wait_until(lambda: is_idle(server))
        assert partial_keys(LocalStore(folder)) == []
        if way == "up":
            assert keys(LocalStore(folder)) == []
        with connect(server) as peer:  # and it can be sent again
            assert peer.send_file(source, A).length == SIZE


def test_a_file_that_is_deleted_while_it_is_served(source, monkeypatch):
    real = source.get_range

    def get_range(key, offset, length, into):
        if offset > SIZE // 2:
            source.delete(key)
        real(key, offset, length, into)

    monkeypatch.setattr(source, "get_range", get_range)
    with serving(None, store=source) as server, connect(server) as peer, pytest.raises(Unavailable):
        peer.fetch_file(A, SIZE)


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


def test_a_replayed_connection_is_refused(folder, source):
    sent = []

    def record(direction, offset, data):
        if direction == "up":
            sent.append(bytes(data))
        return data

    with serving(folder) as server:
        with Proxy(server, record) as proxy, connect(proxy) as peer:
            peer.send_file(source, A)
        wait_until(lambda: is_idle(server))
        LocalStore(folder).delete(A)
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


# peers that break the protocol or the limits


def channel_to(server):
    return connect(server)._channel


def test_an_oversized_frame_is_not_read(folder):
    with serving(folder) as server:
        channel = channel_to(server)
        channel.send_bytes((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(FormatError, match="1048577 bytes"):
            channel.receive(Ready)
        wait_until(lambda: is_idle(server))
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
        wait_until(lambda: is_idle(server))
        channel.close()


@pytest.mark.parametrize(
    "key",
    [
        "version_1/manifest.json",
        "manifest.json",
        "../x",
        "/etc/passwd",
        "version_1/.a.partial",
        "version_1//b",
        "run-id.json",
        "writer.json",
        "pin-version_1.json",
        "version_1/eval-val.0123456789ab.json",
        "version_1/../" + A,
        "../tier/" + A,
        "/" + A,
        "./" + A,
        A + "/x",
        A + "\n",
        A.replace("version_1/", "version_01/"),
        A.replace("version_1/", "deleting/"),
        A.replace("version_1/", "spread-00/version_1/"),
        A.replace("version_1/", ""),
        A.replace("shard", "Shard"),
        f".{A}",
    ],
)
def test_a_key_that_a_peer_must_not_read_or_write(folder, key):
    """Only shards and indexes, and, to read, manifests."""
    store = LocalStore(folder)
    for other in ("run-id.json", "writer.json", "version_1/eval-val.0123456789ab.json"):
        store.put_if_absent(other, b"12345")
    before = keys(store)
    with serving(folder) as server:
        for request in (Offer(key, 5), Fetch(key, 0, 5)):
            if request != Fetch("version_1/manifest.json", 0, 5):
                channel = channel_to(server)
                channel.send(request)
                with pytest.raises(Denied, match=r"A peer must not (read|write)"):
                    channel.receive(Ready)
                channel.close()
    assert keys(store) == before
    assert partial_keys(store) == []


@pytest.mark.parametrize("linked", ["the file", "the folder", "a fifo"])
def test_a_peer_gets_nothing_through_a_symbolic_link(folder, tmp_path, linked):
    """Neither its bytes nor, by an offer of the same file, its digest. Nothing is written."""
    outside = tmp_path / A
    outside.parent.mkdir()
    outside.write_bytes(b"secret")
    path = folder / A
    if linked == "the folder":
        path.parent.symlink_to(outside.parent)
    else:
        path.parent.mkdir()
        path.symlink_to(outside) if linked == "the file" else os.mkfifo(path)
    for request in (Fetch(A, 0, 6), Offer(A, 6), Offer(B, 6)):
        if request == Offer(B, 6) and linked != "the folder":
            continue
        with serving(folder) as server:
            channel = channel_to(server)
            channel.send(request)
            with pytest.raises(StoreError):
                channel.receive(Ready) if isinstance(request, Fetch) else receive_all(channel)
            channel.close()
    assert outside.read_bytes() == b"secret"
    assert [p.name for p in outside.parent.iterdir()] == [outside.name]


def receive_all(channel):
    """Send a file of 6 bytes, as far as the server takes it."""
    channel.receive(Ready)
    channel.send_bytes(b"abcdef")
    channel.send(transfer.End(digest(b"abcdef")))
    channel.receive(transfer.Stored)


def test_a_link_that_replaces_a_file_while_it_is_served(folder, tmp_path, monkeypatch):
    data = random_bytes(SIZE)
    put(TmpfsStore(folder), A, data)
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(SIZE))

    def replace_file(opened=LocalStore.get_range):
        def get_range(store, key, offset, *rest):
            if offset:
                (folder / A).unlink(missing_ok=True)
                (folder / A).symlink_to(outside)
            return opened(store, key, offset, *rest)

        return get_range

    monkeypatch.setattr(LocalStore, "get_range", replace_file())
    with serving(folder) as server, connect(server) as peer, pytest.raises(StoreError):
        peer.fetch_file(A, SIZE)


@pytest.mark.parametrize(
    ("limit", "message"),
    [("file_bytes", "A file"), ("total_bytes", "all peers")],
)
def test_the_limits_of_sizes(folder, source, limit, message):
    put(source, B, random_bytes(SIZE, 1))
    limits = replace(LIMITS, **{limit: SIZE - 1 if limit == "file_bytes" else 2 * SIZE - 1})
    store = TmpfsStore(folder)
    with serving(folder, limits, store=store) as server:
        if limit != "file_bytes":
            with connect(server) as peer:
                peer.send_file(source, A)
        with connect(server) as peer, pytest.raises(NoSpace, match=message):
            peer.send_file(source, B)
        if limit != "file_bytes":
            store.delete(A)  # what is deleted does not count any more
            with connect(server) as peer:
                assert peer.send_file(source, B).length == SIZE


def test_an_enormous_length_is_refused_before_memory_is_allocated(folder):
    limits = replace(LIMITS, file_bytes=1 << 60, total_bytes=1 << 60)
    with serving(folder, limits) as server:
        channel = channel_to(server)
        channel.send(Offer(A, 1 << 59))
        with pytest.raises(StoreError):
            channel.receive(Ready)
        channel.close()
    assert list(folder.rglob("*")) == []


def test_full_memory_is_reported_to_the_sender(folder, source):
    store = TmpfsStore(folder, fs=FaultFs(None, Fault("fallocate", 1, errno.ENOSPC)))
    with (
        serving(folder, store=store) as server,
        connect(server) as peer,
        pytest.raises(NoSpace, match=A),
    ):
        peer.send_file(source, A)
    assert list(folder.rglob("*")) == []


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
        peer.fetch_range(A, length, offset, memoryview(bytearray(count)))


# time


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, part_seconds=0.2), replace(LIMITS, idle_seconds=0.2)]
)
def test_a_peer_that_stops_sending_loses_only_its_own_transfer(folder, source, limits):
    with serving(folder, limits) as server, connect(server) as slow:
        slow._channel.send(Offer(file("slow"), SIZE))
        slow._channel.receive(Ready)
        slow._channel.send_bytes(bytes(1000))
        with connect(server, rank=2) as other:
            assert other.send_file(source, A).length == SIZE
        wait_until(lambda: is_idle(server))
        assert keys(LocalStore(folder)) == [A]
        assert partial_keys(LocalStore(folder)) == []


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
            peer.send_file(source, A)
        opened.close()
        gate.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pause", "seconds", "server_seconds"), [(0.02, 1, 1), (0.3, 1, 60), (0.3, 60, 1)]
)
def test_each_part_of_a_file_has_its_own_time(folder, monkeypatch, pause, seconds, server_seconds):
    """A long file may take long. A peer that accepts a few bytes now and then holds nobody."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1 << 20)
    source, size = MemoryStore(), 6 << 20
    put(source, A, random_bytes(size))

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
                    peer.send_file(source, A)
            else:
                peer.send_file(source, A, lambda: calls.append(time.monotonic()))
        wait_until(lambda: is_idle(server))
    if is_too_slow:
        assert time.monotonic() - began < 10
        assert keys(LocalStore(folder)) == partial_keys(LocalStore(folder)) == []
    else:
        assert time.monotonic() - began > 1.5
        assert len(calls) == 6
        assert LocalStore(folder).get(A, size) == source.get(A, size)


def test_closing_ends_the_transfers(folder, source):
    with serving(folder) as server, connect(server) as peer:
        peer._channel.send(Offer(A, SIZE))
        peer._channel.receive(Ready)
        assert len(partial_keys(LocalStore(folder))) == 1
        server.close()
        server.close()
        assert partial_keys(LocalStore(folder)) == []
        with pytest.raises(Unavailable):
            peer.send_file(source, A)
