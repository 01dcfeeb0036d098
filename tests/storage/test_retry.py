"""What is repeated, for all stores on servers: creations, parts, ranges, lists; and views."""

import math
import time

import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from limpet.storage.retry import LEAST_RATE, Remote, Reply, RetryStore, Server
from limpet.storage.store import Entry, Stat, Traits

KEY, DATA = "v/manifest.json", b"mine"


class Bucket(Remote):
    """A bucket in memory. ``faults``: for each kind of request, what happens instead.

    An error is raised; "lose": the request is done, and its reply is lost; a function is called
    before the request.
    """

    traits = Traits("test", 1, durable=True, part_size=4 << 20)
    server = None

    def __init__(self):
        super().__init__("test://bucket", "run")
        self.server = Server(1, 20.0)
        self.server.throttle._sleep = lambda seconds: None
        self.objects, self.log, self.cut_at = {}, [], []
        self.faults = {kind: [] for kind in ("put", "head", "get", "list", "part", "complete")}
        self.is_conditional = True

    def do(self, kind, key, function):
        assert self.deadline.seconds_left <= 20 + (8 << 20) / LEAST_RATE
        self.log.append(kind)
        fault = self.faults[kind].pop(0) if self.faults[kind] else None
        if isinstance(fault, Exception):
            raise fault
        if callable(fault):
            fault()
        result = function()
        if fault == "lose":
            raise lost(key)
        return result

    def find(self, key):
        name = self.object_name(key)
        if name not in self.objects:
            raise NotFound("There is none", key=key, store=self.url)
        return self.objects[name]

    def create(self, key, data):
        def put():
            if self.object_name(key) in self.objects and self.is_conditional:
                return False
            self.objects[self.object_name(key)] = data
            return True

        return self.do("put", key, put)

    def stat(self, key):
        return self.do("head", key, lambda: Stat(key, len(self.find(key)), 1.0))

    def open(self, key, offset, length, tag):
        data = self.do("get", key, lambda: self.find(key))
        data = data[offset : None if length is None else offset + length]
        return Bytes(data, self.cut_at.pop(0) if self.cut_at else len(data))

    def page(self, folder, prefix, marker, *, deep, partial):
        found = sorted(self.objects)[(marker or 0) : (marker or 0) + 2]
        after = (marker or 0) + 2
        entries = [Entry(n[4:], "object", Stat(n[4:], len(self.objects[n]), 1.0)) for n in found]
        self.do("list", folder, lambda: None)
        return entries, after if after < len(self.objects) else None

    def begin(self, key, length, head):
        return None if length <= 4 << 20 else Parts(self, key)

    def delete(self, key):
        self.objects.pop(self.object_name(key), None)


class Bytes(Reply):
    def __init__(self, data, cut_at):
        super().__init__("a", "test://bucket/run", len(data))
        self.data, self.cut_at = data, cut_at

    def receive(self, most, deadline):
        piece = self.data[: min(most, self.cut_at)]
        self.data, self.cut_at = self.data[len(piece) :], self.cut_at - len(piece)
        return piece


class Parts:
    def __init__(self, bucket, key):
        self.bucket, self.key, self.parts, self.sent = bucket, key, {}, []

    def write(self, remote, offset, views):
        self.sent.append(offset)
        data = b"".join(views)
        remote.do("part", self.key, lambda: self.parts.__setitem__(offset, data))

    def commit(self, remote):
        name, data = (
            remote.object_name(self.key),
            b"".join(self.parts[n] for n in sorted(self.parts)),
        )
        remote.do("complete", self.key, lambda: remote.objects.__setitem__(name, data))

    def abort(self, remote):
        remote.log.append("abort")
        self.parts.clear()


def lost(key):
    return Unavailable("the reply is lost", outcome="unknown", key=key, store="test://bucket/run")


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def store(bucket):
    return RetryStore(bucket, 20.0)


def denied():
    return Denied("no", key=KEY, store="test://bucket/run", status=403)


def test_an_object_is_created_once(bucket, store):
    assert store.put_if_absent(KEY, DATA) == Stat(KEY, 4, 1.0)
    assert bucket.objects == {f"run/{KEY}": DATA}
    assert bucket.log == ["put", "put", "head"]  # the second one must be refused
    store.put_if_absent("v/other", DATA)
    assert bucket.log[3:] == ["put", "head"]  # the server is known


@pytest.mark.parametrize("times", [1, 3])
def test_the_object_of_a_lost_reply_is_found(bucket, store, times):
    bucket.faults["put"] = ["lose"] * times
    assert store.put_if_absent(KEY, DATA).length == 4
    store._create("v/shard", DATA, accept_equal=False)


@pytest.mark.parametrize("other", [b"", b"your", b"mine too"])
@pytest.mark.parametrize("accept_equal", [False, True])
def test_after_a_lost_reply_the_object_of_another_writer_stays(bucket, store, other, accept_equal):
    def write():
        bucket.objects[f"run/{KEY}"] = other

    bucket.faults["put"] = [lost(KEY), write]
    with pytest.raises(AlreadyExists, match="already in test://bucket/run") as caught:
        store._create(KEY, DATA, accept_equal=accept_equal)
    assert (caught.value.key, caught.value.store) == (KEY, store.url)
    assert bucket.objects == {f"run/{KEY}": other}


def test_an_object_that_another_process_deletes_meanwhile_is_not_a_missing_one(bucket, store):
    bucket.objects[f"run/{KEY}"] = b"your"
    bucket.faults["head"] = [bucket.objects.clear]
    with pytest.raises(Unavailable, match="created and deleted by another process"):
        store.put_if_absent(KEY, DATA)


@pytest.mark.parametrize("kind", ["head", "get"])
def test_the_outcome_is_unknown_if_what_was_written_cannot_be_read(bucket, store, kind):
    """The object exists: nobody may say that nothing was committed."""
    bucket.faults |= {"put": ["lose"], kind: [denied()]}
    with pytest.raises(Denied) as caught:
        store.put_if_absent(KEY, DATA)
    assert caught.value.is_outcome_unknown
    assert (caught.value.key, caught.value.status) == (KEY, 403)


@pytest.mark.parametrize(
    "faults",
    [{"head": [denied()]}, {"put": [None, denied()]}, {"head": [NotFound("x")]}],
    ids=["stat", "condition", "gone"],
)
def test_an_error_after_the_creation_does_not_claim_that_there_is_no_object(bucket, store, faults):
    """Such as credentials that expire between the PUT and the HEAD."""
    bucket.faults |= faults
    with pytest.raises(StoreError) as caught:
        store.put_if_absent(KEY, DATA)
    assert caught.value.is_outcome_unknown
    assert f"run/{KEY}" in bucket.objects


def test_a_wrong_length_of_what_was_written_is_an_error(bucket, store):
    def truncate():
        bucket.objects[f"run/{KEY}"] = DATA[:3]

    bucket.faults["head"] = [truncate]
    with pytest.raises(StoreError, match=r"differs from the bytes written.*4 bytes, found 3") as e:
        store.put_if_absent(KEY, DATA)
    assert e.value.is_outcome_unknown


def test_a_server_that_replaces_objects_is_refused_each_time(bucket, store):
    bucket.is_conditional = False
    for key in (KEY, KEY, "v/other"):
        with pytest.raises(StoreError, match="cannot hold a run: its server replaces objects"):
            store.put_if_absent(key, DATA)


def test_an_unfinished_upload_is_not_written(bucket, store):
    with pytest.raises(StoreError, match="reserved for unfinished uploads"):
        store.put_if_absent("v/.a.partial", DATA)
    assert bucket.log == []


def test_a_part_is_repeated_and_not_the_object(bucket, store):
    bucket.faults |= {"part": [None, Unavailable("reset"), lost("v/a")], "complete": ["lose"]}
    data, part = bytes(range(256)) * (40 << 10), 4 << 20
    with store.put("v/a", len(data)) as upload:
        for start in range(0, len(data), part):
            upload.write_at(start, memoryview(data)[start : start + part])
        assert upload._target.upload.sent == [0, part, part, part, 2 * part]
        assert upload.commit() == Stat("v/a", len(data), 1.0)
    assert bucket.objects["run/v/a"] == data
    assert "abort" not in bucket.log
    assert bucket.log.count("complete") == 2


def test_an_upload_that_fails_is_aborted_once(bucket, store):
    bucket.faults["part"] = [denied()]
    with store.put("v/a", 9 << 20) as upload, pytest.raises(Denied):
        upload.write_at(0, memoryview(bytes(9 << 20)))
    assert bucket.log == ["part", "abort"]


def test_a_failure_that_is_final_is_not_repeated(bucket, store):
    bucket.faults["head"] = [Unavailable("given up", is_final=True)]
    with pytest.raises(Unavailable, match="given up"):
        store.stat("a")
    assert bucket.log == ["head"]


@pytest.mark.parametrize("cuts", [[0], [3, 0, 2], [5, 4]])
def test_a_read_goes_on_behind_what_has_arrived(bucket, store, cuts):
    bucket.objects["run/a"], bucket.cut_at = b"0123456789", list(cuts)
    with store.open_range("a", 1, 8) as reader:
        first, second = bytearray(5), bytearray(3)
        reader.read_into(memoryview(first))
        store.stat("a")  # a reply that waits does not count as a request: here, only one may run
        reader.read_into(memoryview(second))
    assert first + second == b"12345678"
    with pytest.raises(StoreError, match="too short"):
        store.get_range("a", 5, 6, memoryview(bytearray(6)))


def test_a_list_repeats_a_page(bucket, store):
    bucket.objects |= {f"run/{n}": b"1" for n in range(5)}
    bucket.faults["list"] = [None, Unavailable("reset"), Unavailable("reset")]
    assert [stat.key for stat in store.list("")] == ["0", "1", "2", "3", "4"]
    assert bucket.log == ["list"] * 5


# views and keys, of all of them

URLS = ["s3://bucket/run", "az://bucket/run", "gs://bucket/run", "hdfs://127.0.0.1:1/run"]
URLS += ["s3://bucket", "hdfs://127.0.0.1:1", "fsspec+memory://run"]


def open_url(url):
    return limpet.open_store(url)


@pytest.mark.parametrize("url", URLS)
def test_views(url):
    store = open_url(url)
    view = store.at("a/b").at("c")
    assert store.url == url
    assert view.url == f"{url}/a/b/c"
    assert url in repr(store)
    near, far = Deadline.after(5, "near"), Deadline.after(50, "far")
    for bounded in (view.within(near).within(far), view.within(far).within(near)):
        assert bounded.url == view.url
        assert bounded.repeat("read", "a", lambda remote: remote.deadline.purpose) == "near"
    assert store.deadline is None
    for folder in ("", "/", "a//b", "..", "a/"):
        with pytest.raises(StoreError, match="Invalid key"):
            store.at(folder)


@pytest.mark.parametrize("url", URLS)
def test_a_call_of_a_view_is_repeated_for_no_longer_than_any_other(url):
    """Its deadline may be that of a save, which is hours away."""
    store = open_url(url).within(Deadline.after(7200, "the save"))
    deadline = store.repeat("read", "a", lambda remote: remote.deadline)
    assert deadline.seconds_left <= 300
    assert deadline.purpose == "at most 300 s to read a"


@pytest.mark.parametrize("url", [u for u in URLS if not u.startswith("fsspec")])
def test_a_key_that_no_server_can_have_is_refused_at_once(url):
    store = open_url(url)
    began = time.monotonic()
    for call in (store.stat, store.delete, lambda key: store.put_if_absent(key, DATA)):
        with pytest.raises(StoreError, match=r"Invalid key.*UTF-8") as caught:
            call("a\ud800")
        assert not isinstance(caught.value, Unavailable)
        assert (caught.value.key, caught.value.store) == ("a\ud800", url)
    assert time.monotonic() - began < 2  # nothing is repeated


@pytest.mark.parametrize("name", ["timeout", "concurrency"])
@pytest.mark.parametrize("value", [True, 0, -1, None, "8", math.nan, math.inf])
@pytest.mark.parametrize("url", ["s3://bucket", "az://bucket", "gs://bucket", "hdfs://host:1"])
def test_an_option_that_is_no_valid_number_is_refused(url, name, value):
    if (url, name, value) == ("s3://bucket", "concurrency", None):
        pytest.skip("it adapts")
    with pytest.raises(StoreError, match=f"Invalid value for {name}="):
        limpet.open_store(url, **{name: value})


# stores that move a file to its name


class Folder(Bucket):
    """A file system: every object is an upload, whose commit may find another one."""

    has_conditional_put = False
    traits = Traits("test", 1, durable=True, ordered=True)

    def begin(self, key, length, head):
        return Moving(self, key)


class Moving(Parts):
    def commit(self, remote):
        if remote.object_name(self.key) in remote.objects:
            raise AlreadyExists("there is one", key=self.key, store=remote.url)
        super().commit(remote)


@pytest.fixture
def folder():
    return Folder()


def test_a_moved_file_is_accepted_only_if_its_bytes_are_equal(folder):
    folder.objects[f"run/{KEY}"] = b"your"
    store = RetryStore(folder, 20.0)
    assert store.put_if_absent(KEY, b"your") == Stat(KEY, 4, 1.0)
    for other in (DATA, b"you", b""):
        with pytest.raises(AlreadyExists):
            store.put_if_absent(KEY, other)
    folder.faults["complete"] = ["lose"]
    assert store.put_if_absent("v/other", DATA) == Stat("v/other", 4, 1.0)
