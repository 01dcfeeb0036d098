"""What the stores on a server share: the creation of a small object, and views."""

import math
import time

import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from limpet.storage.hdfs import store as hdfs_store
from limpet.storage.remote import BucketStore, Server
from limpet.storage.store import Stat

KEY, DATA = "v/manifest.json", b"mine"


class Bucket(BucketStore):
    """A bucket in memory. ``faults``: for each request by kind, what happens instead.

    An error is raised; "lose": the request is done, and its reply is lost; a function is called
    before the request.
    """

    def __init__(self):
        super().__init__("test://bucket", "run", 20.0)
        self.server = Server(4, 20.0)
        self.server.throttle._sleep = lambda seconds: None
        self.objects, self.log = {}, []
        self.faults = {"put": [], "head": [], "get": [], "list": []}
        self.is_conditional = True

    @property
    def endpoint(self):
        return self.server

    def _send(self, action, key, request, deadline, longest):
        return request(self)

    def _do(self, kind, key, function):
        self.log.append(kind)
        fault = self.faults[kind].pop(0) if self.faults[kind] else None
        if isinstance(fault, Exception):
            raise fault
        if callable(fault):
            fault()
        result = function()
        if fault == "lose":
            raise Unavailable("the reply is lost", outcome="unknown", key=key, store=self.url)
        return result

    def _try_to_create(self, client, name, key, data):
        def put():
            if name in self.objects and self.is_conditional:
                return False
            self.objects[name] = data
            return True

        return self._do("put", key, put)

    def _find(self, name, key):
        if name not in self.objects:
            raise NotFound("There is none", key=key, store=self.url)
        return self.objects[name]

    def _head(self, client, name, key):
        return self._do("head", key, lambda: Stat(key, len(self._find(name, key)), 1.0))

    def _get_first_byte(self, client, name, key):
        self._do("get", key, lambda: self._find(name, key))

    def _list_any(self, client):
        self._do("list", "", lambda: None)

    def get(self, key, limit):
        name = self.object_name(key)
        return self.call(
            "g", "read", key, lambda c: self._do("get", key, lambda: self._find(name, key))
        )


@pytest.fixture
def bucket():
    return Bucket()


def denied():
    return Denied("no", key=KEY, store="test://bucket/run", status=403)


def test_an_object_is_created_once(bucket):
    assert bucket.put_if_absent(KEY, DATA) == Stat(KEY, 4, 1.0)
    assert bucket.objects == {f"run/{KEY}": DATA}
    assert bucket.log == ["put", "put", "head"]  # the second one must be refused
    bucket.put_if_absent("v/other", DATA)
    assert bucket.log[3:] == ["put", "head"]  # the server is known


@pytest.mark.parametrize("lost", [1, 3])
def test_the_object_of_a_lost_reply_is_found(bucket, lost):
    bucket.faults["put"] = ["lose"] * lost
    assert bucket.put_if_absent(KEY, DATA).length == 4
    bucket.create_object("v/shard", DATA, accept_equal=False)


@pytest.mark.parametrize("other", [b"", b"your", b"mine too"])
@pytest.mark.parametrize("accept_equal", [False, True])
def test_after_a_lost_reply_the_object_of_another_writer_stays(bucket, other, accept_equal):
    def write():
        bucket.objects[f"run/{KEY}"] = other

    lost = Unavailable("lost before the server had it", outcome="unknown")
    bucket.faults["put"] = [lost, write]
    with pytest.raises(AlreadyExists, match="already in test://bucket/run") as caught:
        bucket.create_object(KEY, DATA, accept_equal=accept_equal)
    assert (caught.value.key, caught.value.store) == (KEY, bucket.url)
    assert bucket.objects == {f"run/{KEY}": other}


def test_equal_bytes_are_accepted_only_if_that_was_asked_for(bucket):
    bucket.objects[f"run/{KEY}"] = DATA
    assert bucket.put_if_absent(KEY, DATA).length == 4
    with pytest.raises(AlreadyExists):
        bucket.create_object(KEY, DATA, accept_equal=False)


def test_an_object_that_another_process_deletes_meanwhile_is_not_a_missing_one(bucket):
    bucket.objects[f"run/{KEY}"] = b"your"
    bucket.faults["head"] = [bucket.objects.clear]
    with pytest.raises(Unavailable, match="created and deleted by another process"):
        bucket.put_if_absent(KEY, DATA)


@pytest.mark.parametrize("kind", ["head", "get"])
def test_the_outcome_is_unknown_if_what_was_written_cannot_be_read(bucket, kind):
    """The object exists: nobody may say that nothing was committed."""
    bucket.faults |= {"put": ["lose"], kind: [denied()] * 2}
    with pytest.raises(Denied) as caught:
        bucket.put_if_absent(KEY, DATA)
    assert caught.value.is_outcome_unknown
    assert (caught.value.key, caught.value.status) == (KEY, 403)


@pytest.mark.parametrize(
    "faults",
    [
        {"head": [denied()] * 2, "get": [denied()]},
        {"put": [None, denied()]},
        {"head": [NotFound("x")]},
    ],
    ids=["stat", "condition", "gone"],
)
def test_an_error_after_the_creation_does_not_claim_that_there_is_no_object(bucket, faults):
    """Such as credentials that expire between the PUT and the HEAD."""
    bucket.faults |= faults
    with pytest.raises(StoreError) as caught:
        bucket.put_if_absent(KEY, DATA)
    assert caught.value.is_outcome_unknown
    assert f"run/{KEY}" in bucket.objects


def test_a_wrong_length_of_what_was_written_is_an_error(bucket):
    def truncate():
        bucket.objects[f"run/{KEY}"] = DATA[:3]

    bucket.faults["head"] = [truncate]
    with pytest.raises(StoreError, match=r"differs from the bytes written.*4 bytes, found 3") as e:
        bucket.put_if_absent(KEY, DATA)
    assert e.value.is_outcome_unknown


def test_a_server_that_replaces_objects_is_refused_each_time(bucket):
    bucket.is_conditional = False
    for key in (KEY, KEY, "v/other"):
        with pytest.raises(StoreError, match="cannot hold a run: its server replaces objects"):
            bucket.put_if_absent(key, DATA)


def test_an_unfinished_upload_is_not_written(bucket):
    with pytest.raises(StoreError, match="reserved for unfinished uploads"):
        bucket.put_if_absent("v/.a.partial", DATA)
    assert bucket.log == []


def test_a_missing_bucket_is_not_a_missing_object(bucket):
    missing = StoreError("There is no bucket", key=KEY, store=bucket.url)
    bucket.faults["list"] = [missing, denied()]
    with pytest.raises(StoreError, match="no bucket"):
        bucket.stat("a")
    with pytest.raises(NotFound):  # it may be there
        bucket.stat("a")
    with pytest.raises(NotFound):
        bucket.stat("a")
    assert bucket.log == ["head", "list", "head", "list", "head"]


def test_the_reason_of_a_denied_head_is_that_of_a_get(bucket):
    bucket.faults |= {"head": [denied()], "get": [Denied("ExpiredToken: renew them", status=403)]}
    with pytest.raises(Denied, match="ExpiredToken"):
        bucket.stat("a")


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
        assert bounded.deadline_for("read", "a").purpose == "near"
    assert store.deadline is None
    for folder in ("", "/", "a//b", "..", "a/"):
        with pytest.raises(StoreError, match="Invalid key"):
            store.at(folder)


@pytest.mark.parametrize("url", URLS)
def test_a_call_of_a_view_is_repeated_for_no_longer_than_any_other(url):
    """Its deadline may be that of a save, which is hours away."""
    store = open_url(url).within(Deadline.after(7200, "the save"))
    deadline = store.deadline_for("read", "a")
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


@pytest.fixture
def hdfs(monkeypatch):
    store = limpet.open_store("hdfs://127.0.0.1:1/run")

    def put_small(store, key, data):
        raise AlreadyExists("there is one", key=key, store=store.url)

    monkeypatch.setattr(hdfs_store, "put_small", put_small)
    store.get = lambda key, limit: b"your"
    store.stat = lambda key: Stat(key, 4, 1.0)
    return store


def test_hdfs_accepts_only_equal_bytes(hdfs):
    assert hdfs.put_if_absent(KEY, b"your") == Stat(KEY, 4, 1.0)
    for other in (DATA, b"you", b""):
        with pytest.raises(AlreadyExists):
            hdfs.put_if_absent(KEY, other)


def test_hdfs_does_not_say_that_a_file_is_missing_which_it_should_create(hdfs):
    def stat(key):
        raise NotFound("deleted meanwhile", key=key, store=hdfs.url)

    hdfs.stat = stat
    with pytest.raises(Unavailable, match="created and deleted by another process"):
        hdfs.put_if_absent(KEY, DATA)


def test_hdfs_says_that_the_outcome_is_unknown_if_a_file_cannot_be_compared(hdfs):
    def get(key, limit):
        raise denied()

    hdfs.get = get
    with pytest.raises(Denied) as caught:
        hdfs.put_if_absent(KEY, DATA)
    assert caught.value.is_outcome_unknown
