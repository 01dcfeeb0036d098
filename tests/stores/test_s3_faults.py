"""Faults between a training and Ceph: the eight promises hold after each."""

import time
from dataclasses import replace

import boto3
import numpy as np
import pytest

import limpet
from limpet import sinks
from limpet.deadline import Deadline
from limpet.errors import Denied, DigestMismatch, LimpetError, StoreError, Unavailable
from limpet.testing.contract import keys, partial_keys
from limpet.types import MIB
from tests.stores import checks
from tests.stores.fault_proxy import Fault
from tests.stores.servers import Ceph

STATE = {"w": np.arange(5 * MIB, dtype=np.int32), "n": 3}  # 20 MiB: three parts

REQUESTS = {
    "pin": ("PUT", r"/pin-[^?]*$"), "create": ("POST", r"\?uploads"),
    "part": ("PUT", r"partNumber=2"), "complete": ("POST", r"uploadId="),
    "index": ("PUT", r"index\.json$"), "manifest": ("PUT", r"manifest\.json$"),
    "stat": ("HEAD", r"shard-"), "unpin": ("DELETE", r"/pin-"),
}  # fmt: skip
"""The requests of a save."""

READS = {
    "list": ("GET", r"list-type=2"),
    "manifest": ("GET", r"manifest\.json$"),
    "index": ("GET", r"index\.json$"),
    "shard": ("GET", r"safetensors$"),
    "stat": ("HEAD", r"shard-"),
}


@pytest.fixture
def store(s3, proxy):
    """A run on Ceph behind the proxy. No call takes longer than 20 s."""
    return open_run(s3, proxy)


def open_run(s3, proxy, **options):
    options = {"timeout": 20, "part_size": 8 * MIB, **options}
    return limpet.open_store(f"{s3}/run", endpoint=proxy.endpoint, **options)


def save(store, step=1):
    return limpet.save(store.at(f"version_{step}"), STATE, step=step)


def save_in_run(store, step=1):
    with limpet.Checkpointer(store, dict(STATE), save=limpet.Never()) as checkpointer:
        checkpointer.resume()
        while checkpointer.current_step < step:
            checkpointer.step()
        return checkpointer.save()


def check_intact(store, steps=(1,)):
    checks.check_intact(store, steps)
    assert partial_keys(store) == []


def check_nothing(store):
    """Nothing was committed, and the next save works."""
    assert limpet.Run(store).snapshots() == []
    save(store, 2)
    check_intact(store, [2])


# faults that pass


@pytest.mark.parametrize("action", ["status", "reset", "lose_reply", "ok_error", "truncate"])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_save_survives_a_fault(store, proxy, request_name, action):
    method, path = REQUESTS[request_name]
    proxy.inject(Fault(action, method, path, count=2))
    save(store)
    assert proxy.faults[0].hits >= 1
    proxy.inject()
    if request_name == "create":  # an upload without parts may remain
        limpet.Run(store).sweep(grace=0, now=time.time() + 8 * 24 * 3600)
    check_intact(store)
    leftover = [key for key in keys(store) if key.startswith("pin-")]
    assert leftover == []


@pytest.mark.parametrize("action", ["status", "reset", "cut", "truncate", "flip_reply"])
@pytest.mark.parametrize("request_name", READS)
def test_a_load_survives_a_fault(store, proxy, request_name, action):
    save(store)
    method, path = READS[request_name]
    if method == "HEAD" and action in ("cut", "truncate", "flip_reply"):
        pytest.skip("the reply to a HEAD has no body")
    proxy.inject(Fault(action, method, path, count=1, after=100))
    snapshot = limpet.Run(store).latest()
    assert snapshot is not None
    state = limpet.load(store.at("version_1"))
    assert np.array_equal(state["w"], STATE["w"])
    assert proxy.faults[0].hits == 1
    proxy.inject()
    check_intact(store)


@pytest.mark.parametrize("action", ["cut", "truncate"])
@pytest.mark.parametrize("after", [4 * MIB - 1, 4 * MIB, 5 * MIB])
def test_a_read_in_steps_goes_on_behind_what_has_arrived(store, proxy, action, after):
    data = np.random.default_rng(1).bytes(12 * MIB)
    with store.put("a", len(data)) as upload:
        upload.write_at(0, memoryview(data))
        upload.commit()
    proxy.inject(Fault(action, "GET", "/a$", after=after), Fault(action, "GET", "/a$"))
    before = store.statistics().requests.get("GetObject", 0)
    views = [memoryview(bytearray(4 * MIB)) for _ in range(3)]
    with store.open_range("a", 0, 12 * MIB) as reader:
        for view in views:
            reader.read_into(view)
    assert b"".join(views) == data
    assert store.statistics().requests["GetObject"] == before + 3
    assert [fault.hits for fault in proxy.faults] == [1, 1]
    assert len(proxy.targets("GET")) == 3


def test_a_replaced_object_is_an_error(store, proxy, monkeypatch):
    checks.check_a_replaced_object_is_an_error(store, proxy, monkeypatch)


def test_of_a_request_for_several_items_the_damaged_one_is_read_again(store, proxy, monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")  # so that the order is known
    save(store)
    events = []
    proxy.inject(Fault("flip_reply", "GET", "safetensors$", skip=1, after=5 * MIB))
    with limpet.attach(lambda name, fields: events.append(name)):
        state = limpet.load(store.at("version_1"))
    assert np.array_equal(state["w"], STATE["w"])
    assert events.count("read_again") == 1
    # 4 MiB with the header, 16 MiB, and one block again
    assert len([t for t in proxy.targets("GET") if "safetensors" in t]) == 3


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_gets_fewer_requests(store, proxy, code):
    proxy.inject(Fault("status", "PUT", "partNumber", count=3, code=code))
    before = store.statistics()
    save(store)
    after = store.statistics()
    assert after.throttled - before.throttled == 3
    assert after.retries - before.retries >= 3
    assert after.concurrency < before.concurrency
    check_intact(store)


def test_retry_after_is_honored(store, proxy):
    proxy.inject(Fault("status", "PUT", "manifest.json$", retry_after="3"))
    save(store)
    tries = [r.time for r in proxy.log if r.method == "PUT" and "manifest" in r.target]
    assert tries[1] - tries[0] >= 3
    check_intact(store)


def test_a_stalled_reply_is_abandoned(s3, proxy):
    store = open_run(s3, proxy, timeout=15)
    save(store)
    proxy.inject(
        Fault("stall_reply", "GET", "safetensors$", after=MIB, seconds=60),
        Fault("stall", "GET", "index.json$", seconds=60),
    )
    began = time.monotonic()
    state = limpet.load(store.at("version_1"))
    assert time.monotonic() - began < 15
    assert np.array_equal(state["w"], STATE["w"])


# faults that stay


@pytest.mark.parametrize("request_name", ["pin", "create", "part", "complete", "index", "manifest"])
@pytest.mark.parametrize("action", ["status", "reset", "ok_error"])
def test_a_save_fails_in_time(s3, proxy, request_name, action):
    store = open_run(s3, proxy, timeout=2)
    method, path = REQUESTS[request_name]
    proxy.inject(Fault(action, method, path, count=-1))
    began = time.monotonic()
    with pytest.raises(LimpetError) as caught:
        save(store)
    assert time.monotonic() - began < 10
    assert "Gave up after" in str(caught.value)
    assert store.url in str(caught.value)
    proxy.inject()
    if action != "reset":  # after refusals for the rate, an abort may find no turn in its 2 s
        limpet.Run(store).sweep(grace=0, now=time.time() + 8 * 24 * 3600)
    check_nothing(open_run(s3, proxy))  # with more time: the machine may be busy


@pytest.mark.usefixtures("no_time_for_bodies")
def test_a_server_that_goes_away_during_a_save_is_waited_for_once(s3, proxy):
    """The failed save also aborts its upload and removes its pin; these calls try once."""
    store = open_run(s3, proxy, timeout=6)
    proxy.inject(Fault("stall", skip=8, count=-1, seconds=40))
    began = time.monotonic()
    with pytest.raises(Unavailable, match="Gave up after"):
        save(store)
    assert time.monotonic() - began < 6 + 3 * 4 + 2  # patience, and three requests of 4 s
    proxy.inject()
    run = limpet.Run(open_run(s3, proxy))
    assert run.snapshots() == []
    save(run.store, 2)
    run.sweep(grace=0, now=time.time() + 8 * 24 * 3600)  # what could not be aborted
    check_intact(open_run(s3, proxy), [2])


def test_a_stopped_server_holds_no_call_up(s3, proxy, ceph):
    store = open_run(s3, proxy, timeout=3)
    save(store)
    calls = [
        lambda: store.stat("version_1/manifest.json"),
        lambda: store.get("version_1/manifest.json", MIB),
        lambda: store.get_range("version_1/manifest.json", 0, 9, memoryview(bytearray(9))),
        lambda: store.put_if_absent("x", b"1"),
        lambda: store.put("y", 30 * MIB),
        lambda: store.delete("z"),
        lambda: keys(store),
        lambda: partial_keys(store),
        lambda: store.within(Deadline.after(1, "the test")).stat("x"),
    ]
    checks.check_no_call_is_held_up(ceph, calls)
    run = limpet.Run(open_run(s3, proxy))
    assert run.latest().verify().ok  # what was requested meanwhile may have been done, too late


def test_a_lost_commit_whose_outcome_is_unknown_says_so(s3, proxy):
    store = open_run(s3, proxy, timeout=2)
    proxy.inject(
        Fault("lose_reply", "PUT", "manifest.json$", count=1),
        Fault("reset", ".*", "manifest.json$", count=-1, skip=2),
    )
    with pytest.raises(StoreError) as caught:
        save(store)
    assert caught.value.is_outcome_unknown
    proxy.inject()
    check_intact(open_run(s3, proxy))


@pytest.mark.parametrize("path", ["pin-", "partNumber=2", r"index\.json$", r"manifest\.json$"])
def test_the_deadline_of_a_save_ends_it(s3, proxy, path):
    """Although each call may take longer. What the save has left is removed."""
    store = open_run(s3, proxy, timeout=60)
    proxy.inject(Fault("stall", "PUT", path, count=-1, seconds=60))
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"the save of .*version_1: 3 s") as caught:
        limpet.save(store.at("version_1"), STATE, step=1, timeout=3)
    assert time.monotonic() - began < 8
    assert caught.value.is_outcome_unknown == ("manifest" in path)
    proxy.inject()
    check_nothing(store)


EXPIRED = Fault("status", "PUT", "partNumber=2", code=403, reason="ExpiredToken")


def test_credentials_that_expire_during_a_save(store, proxy):
    proxy.inject(replace(EXPIRED, count=-1))
    with pytest.raises(Denied, match=r"ExpiredToken.*renew them"):
        save(store)
    # the second one has the credentials that were found anew
    assert len([t for t in proxy.targets("PUT") if "partNumber=2" in t]) == 2
    proxy.inject()
    check_nothing(store)


def test_credentials_that_are_renewed_during_a_save(s3, proxy, monkeypatch, tmp_path):
    """As with a program that writes new credentials to the file when the old ones expire."""
    file = tmp_path / "credentials"
    lines = f"[default]\naws_access_key_id={Ceph.key}\naws_secret_access_key={Ceph.secret}\n"
    file.write_text(lines)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_run(s3, proxy)
    assert list(store.list("")) == []
    file.write_text(f"{lines}aws_account_id=123456789012\n")  # it counts as other credentials
    proxy.inject(replace(EXPIRED))
    save(store)
    assert proxy.faults[0].hits == 1
    check_intact(store)


def test_no_event_and_no_log_shows_credentials(s3, proxy, tmp_path, caplog):
    options = {"access_key_id": Ceph.key, "secret_access_key": Ceph.secret, "timeout": 3}
    store = open_run(s3, proxy, **options)
    caplog.set_level("DEBUG", logger="limpet")
    file = tmp_path / "events.jsonl"
    with limpet.attach(sinks.JsonLines(file)), limpet.attach(sinks.Logging()):
        save_in_run(store)
        assert "saved step" in caplog.text
        for reason in ("ExpiredToken", "SlowDown"):
            code = 403 if reason == "ExpiredToken" else 503
            fault = Fault("status", "PUT", r"partNumber=2", count=-1, code=code, reason=reason)
            proxy.inject(fault)
            with pytest.raises(StoreError, match=reason):
                save_in_run(store, 2)
    for shown in (file.read_text(), caplog.text):
        assert "ExpiredToken" in shown
        assert "SlowDown" in shown
        assert Ceph.secret not in shown


def test_wrong_bytes_of_the_store_are_damage(store, proxy):
    save(store)
    proxy.inject(Fault("flip_reply", "GET", "safetensors$", count=-1, after=5 * 1000))
    with pytest.raises(DigestMismatch, match="is damaged"):
        limpet.load(store.at("version_1"))


@pytest.mark.parametrize("action", ["lose_reply", "ok_error", "status"])
def test_a_small_shard_survives_a_fault(store, proxy, action):
    """It is one PUT, which finds its own object when it is repeated."""
    proxy.inject(Fault(action, "PUT", r"safetensors$", count=2))
    limpet.save(store.at("version_1"), {"w": STATE["w"][:1000]}, step=1)
    assert proxy.faults[0].hits == 2
    proxy.inject()
    check_intact(store)


def test_two_writers_of_one_version(store, proxy):
    checks.check_two_writers_of_one_version(store, proxy)


# leftovers


def test_sweep_finds_the_upload_of_a_failed_save(store, s3, proxy, ceph):
    save(store)
    proxy.inject(
        Fault("reset", "PUT", "partNumber=2", count=-1), Fault("reset", "DELETE", count=-1)
    )
    with pytest.raises(StoreError):
        save(open_run(s3, proxy, timeout=3), 2)
    proxy.inject()
    client = boto3.client("s3")
    bucket = s3.removeprefix("s3://")
    client.create_multipart_upload(Bucket=bucket, Key="somebody/else")
    client.create_multipart_upload(Bucket=bucket, Key="run/version_1/notes.bin")
    run = limpet.Run(store)
    (partial,) = (key for key in partial_keys(store) if ".safetensors" in key)
    assert run.sweep(grace=3600).removed == []
    removed = run.sweep(grace=0, now=time.time() + 8 * 24 * 3600).removed
    assert partial in removed
    uploads = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert {u["Key"] for u in uploads} == {"somebody/else", "run/version_1/notes.bin"}
    assert [s.step for s in run.snapshots()] == [1]


def test_the_statistics_of_a_training_show_the_server(store, proxy):
    with limpet.Checkpointer(store, dict(STATE), save=limpet.Never()) as checkpointer:
        checkpointer.resume()
        checkpointer.step()
        before = checkpointer.statistics()
        proxy.inject(Fault("status", "PUT", "partNumber", count=2))
        checkpointer.save()
        after = checkpointer.statistics()
    assert after["store_throttled"] - before["store_throttled"] == 2
    assert after["store_retries"] - before["store_retries"] >= 2
    assert after["store_requests"] > before["store_requests"] + 10
    assert after["store_concurrency"] < before["store_concurrency"]
    assert after["store_waited_seconds"] > before["store_waited_seconds"]
