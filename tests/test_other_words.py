"""The keywords of other libraries raise an error that names Limpet's."""

import inspect
import re

import pytest

import limpet
from limpet.errors import LimpetError
from limpet.storage.memory import MemoryStore

STRICT = 'missing="keep", unexpected="ignore"'
CALLS = [
    (lambda url: limpet.load(url, map_location="cpu"), 'map_location=, write device="?'),
    (lambda url: limpet.load(url, {}, strict=False), f"strict=, write {STRICT}"),
    (lambda url: limpet.open(url, map_location="cpu"), "write device="),
    (lambda url: limpet.open(url).load(into={}, strict=False), STRICT),
    (lambda url: limpet.open(url).load(map_location={}), "write device="),
    (lambda url: limpet.save(path=url, app_state={}), "the URL, as .* write the state: save"),
    (lambda url: limpet.save(url, {}, replicated=["**"]), "nothing, because what is equal"),
    (lambda url: limpet.save_async(url, app_state={}), "write the state"),
    (lambda url: limpet.load(url, weights_only=True), "a load never runs code"),
    (
        lambda url: limpet.Checkpointer(url, {}, max_to_keep=3),
        r"write keep=, such as keep=limpet\.KeepLast\(5\)\.$",
    ),
    (lambda url: limpet.Checkpointer(checkpoint_dir="x", state={}), "write the URL, as first arg"),
    (lambda url: limpet.Checkpointer(url, {}, checkpoint_steps=3), "such as save=limpet.EverySte"),
    (lambda url: limpet.Preemption(termination_watcher_fn=print), r"CallNotice\(termination_wat"),
    (lambda url: limpet.Preemption(grace_period=30), "write grace=, in seconds"),
    (lambda url: limpet.load(url, obj_out={}), "write into="),
    (lambda url: limpet.Checkpointer(url, {}, save_interval_steps=5), r"save=limpet\.EverySteps"),
    (lambda url: limpet.Checkpointer(url, {}, keep_checkpoint_every_n_hours=2), "KeepEvery"),
    (lambda url: limpet.Checkpointer(url, {}).resume(strict=False), STRICT),
    (lambda url: limpet.Checkpointer(url, {}).save(train_status=1), "a member of the state"),
    (lambda url: limpet.Run(directory=url), "the URL, as first argument"),
    (lambda url: limpet.export(url, path="x", map_location="cpu"), "write device="),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_word_of_another_library_names_the_word_of_limpet(number):
    store = MemoryStore()
    limpet.save(store, {"n": 1})
    call, expected = CALLS[number]
    with pytest.raises(TypeError, match=r"unexpected keyword argument '(\w+)'") as raised:
        call(store)
    assert re.search(expected, str(raised.value))
    assert not str(raised.value).startswith(("call(", "_wrap"))


@pytest.mark.parametrize("value", ["o/2", None, MemoryStore()], ids=type)
def test_a_snapshot_is_opened_by_open(value):
    with pytest.raises(LimpetError) as raised:
        limpet.Snapshot(value)
    assert str(raised.value) == f"To open a snapshot, write limpet.open({value!r})."


def test_other_errors_stay_as_python_says_them():
    for call, expected in (
        (lambda: limpet.load("x", mapp=1), "load() got an unexpected keyword argument 'mapp'"),
        (lambda: limpet.export(path="x"), "export() missing 1 required positional argument: 'snap"),
        (limpet.KeepLast, "missing 1 required positional argument"),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert expected in str(raised.value)
        assert "In place of" not in str(raised.value)


def test_an_error_within_a_call_stays():
    """A function that accepts any keyword gets options of these names."""

    def open_own(url, **options):
        raise TypeError("own")

    limpet.register_store("ownwords", open_own)
    with pytest.raises(TypeError, match=r"^own$"):
        limpet.open_store("ownwords://x", path="x", strict=False)


def test_signatures_do_not_accept_them():
    for function in (limpet.load, limpet.save, limpet.Checkpointer, limpet.Checkpointer.resume):
        parameters = inspect.signature(function).parameters
        assert {"map_location", "strict", "max_to_keep"}.isdisjoint(parameters)
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
