"""The key-value client and the current group."""

import multiprocessing
import threading
import time

import pytest
import torch.distributed as dist

from limpet.errors import RankFailed, Unsupported
from limpet.ranks.group import current_group
from limpet.ranks.kv import MAX_VALUE_BYTES, KVClient, Timeouts
from tests.fakegroup import FakeStore, StoreView

SHORT_TIMEOUTS = Timeouts(silent=0.4, stuck=1.5)


@pytest.fixture
def kv():
    made = KVClient(FakeStore(), 0, 2, SHORT_TIMEOUTS)
    yield made
    made.close()


@pytest.mark.parametrize(
    "length",
    [0, 1, MAX_VALUE_BYTES - 1, MAX_VALUE_BYTES, MAX_VALUE_BYTES + 1, 2 * MAX_VALUE_BYTES + 7],
)
def test_a_value_of_any_length_is_returned_and_deleted_completely(kv, length):
    value = bytes(range(256)) * (length // 256 + 1)
    kv.put_all({"k": value[:length]})
    assert kv.try_get("k") == value[:length]
    assert kv.try_get("k", delete=True) == value[:length]
    assert kv.try_get("k") is None
    assert [k for k in kv._store.values if not k.startswith("heartbeat/")] == []


def test_calls_raise_within_the_bound_after_the_store_fails_or_hangs():
    for hangs in (False, True):
        view = StoreView(FakeStore())
        kv = KVClient(view, 0, 2, SHORT_TIMEOUTS)
        kv.put_all({"a": b"1"})
        release = threading.Event()
        if hangs:
            view.before = lambda name, key: release.wait(20)  # noqa: B023
        else:
            view.disconnect()
        began = time.monotonic()
        with pytest.raises(RankFailed, match="does not respond") as raised:
            kv.try_get("a")
        assert raised.value.rank is None
        with pytest.raises(RankFailed, match="does not respond"):
            kv.try_get("a")
        assert time.monotonic() - began < 3 * SHORT_TIMEOUTS.silent
        release.set()
        kv.close()


def call_and_report(kv, answers):
    try:
        kv.has_all(["a"])
    except RankFailed as e:
        answers.put(str(e))


def test_a_forked_process_cannot_use_the_client_of_its_parent(kv):
    kv.has_all(["a"])
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=call_and_report, args=(kv, answers))
    child.start()
    assert "forked" in answers.get(timeout=20)
    child.join(20)


def test_a_process_group_of_one_rank_is_local_and_a_fake_one_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert current_group().kv is None
    finally:
        dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore as Fake

    dist.init_process_group("fake", store=Fake(), rank=0, world_size=4)
    try:
        with pytest.raises(Unsupported, match="fake process group"):
            current_group()
    finally:
        dist.destroy_process_group()
