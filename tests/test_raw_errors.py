"""Errors of the system, a lack of memory, and objects of another class become errors of Limpet."""

import errno
import io
import itertools
import os

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import BrokenLink, Denied, LimpetError, NoSpace, StoreError, Unavailable
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from tests.cli.invoke import run_cli
from tests.public_calls import OBJECT_CALLS

CALLS = [name for name in vars(Fs) if not name.startswith("_")]
ERRORS = {
    errno.EIO: StoreError,
    errno.ENOMEM: Unavailable,
    errno.ENAMETOOLONG: StoreError,
    errno.ELOOP: StoreError,
    errno.ENOTDIR: StoreError,
    errno.ENOENT: StoreError,
    errno.EROFS: Denied,
    errno.EACCES: Denied,
    errno.EMFILE: Unavailable,
    errno.ETXTBSY: StoreError,
    errno.EDQUOT: NoSpace,
    errno.ESTALE: Unavailable,
    errno.ENXIO: StoreError,
    errno.EINVAL: StoreError,
}
MORE_ERRORS = {
    errno.EPERM: Denied,
    errno.ENOSPC: NoSpace,
    errno.EFBIG: NoSpace,
    errno.ETIMEDOUT: Unavailable,
    errno.EAGAIN: Unavailable,
}
STATE = {"w": np.zeros(300_000), "n": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limpet.save("run/version_1", {"n": 1, "w": np.zeros(3)}, step=1)
    torch.save({"n": torch.ones(1)}, "step_7.pt")
    return tmp_path


def error_of(operation):
    """Return the error of Limpet that a call raises, or None. Others pass."""
    try:
        operation()
    except LimpetError as e:
        return e
    return None


def train(run):
    with limpet.Checkpointer(run, {"n": 1, "w": np.zeros(3)}, quiet=True) as ckpt:
        ckpt.resume()
        ckpt.step()


NEW = map("new/version_{}".format, itertools.count())
OPERATIONS = {
    "open": lambda: limpet.open("run@1"),
    "load": lambda: limpet.load("run/version_1"),
    "load into": lambda: limpet.load("run/version_1", into={"n": 0, "w": np.ones(3)}),
    "save": lambda: limpet.save(next(NEW), STATE),
    "snapshots": lambda: [s.verify() for s in limpet.Run("run").snapshots()],
    "latest": lambda: limpet.Run("run").latest(),
    "pin": lambda: limpet.Run("run").pin(1),
    "sweep": lambda: limpet.Run("run").sweep(),
    "train": lambda: train(next(NEW)),
    "continue": lambda: train("run"),
    "import": lambda: limpet.import_checkpoint("step_7.pt", next(NEW)),
    "import folder": lambda: limpet.import_checkpoint(".", next(NEW)),
    "export": lambda: limpet.export("run@1", next(NEW), to="safetensors"),
    "missing": lambda: limpet.load("run/version_9"),
}


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", CALLS)
def test_each_error_of_each_system_call_is_one_of_limpet(folder, monkeypatch, name, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    for operation in OPERATIONS.values():
        with monkeypatch.context() as patch:
            patch.setattr(Fs, name, fail)
            error = error_of(operation)
        assert error is None or error.todo or os.strerror(number) not in str(error), error
    for words in (("ls", "run"), ("show", "run@1"), ("verify", "run"), ("sweep", "run")):
        with monkeypatch.context() as patch:
            patch.setattr(Fs, name, fail)
            assert run_cli(*words).code in range(10)


@pytest.mark.parametrize("number", ERRORS | MORE_ERRORS, ids=errno.errorcode.get)
def test_an_error_has_a_class_and_says_what_to_do(tmp_path, monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    store = LocalStore(tmp_path)
    monkeypatch.setattr(Fs, "open", fail)
    with pytest.raises(StoreError) as caught:
        store.put_if_absent("v/a", b"1")
    assert type(caught.value) is (ERRORS | MORE_ERRORS)[number]
    assert caught.value.todo
    assert caught.value.key == "v/a"
    assert caught.value.errno == number


@pytest.mark.parametrize("name", ["listdir", "scandir", "open", "stat", "lstat", "getsize"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOMEM])
def test_errors_outside_a_store(folder, monkeypatch, name, number):
    real = getattr(os, name, None) or getattr(os.path, name)

    def fail(path, *arguments, **options):
        if isinstance(path, str | bytes) and str(folder) in os.path.abspath(os.fsdecode(path)):
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **options)

    for operation in OPERATIONS.values():
        with monkeypatch.context() as patch:
            patch.setattr(os if hasattr(os, name) else os.path, name, fail)
            error_of(operation)


def test_real_names_and_links(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BrokenLink):
        limpet.load(tmp_path / "loop/version_1")
    with pytest.raises(StoreError, match="Use shorter names"):
        limpet.save(tmp_path / ("x" * 300), {"n": 1})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LimpetError, match=r"is in the way|Not a directory"):
        limpet.save(tmp_path / "file/version_1", {"n": 1})


# memory


def out_of_memory(*_, **__):
    raise MemoryError("Unable to allocate 1.00 TiB")


def no_pages(*_, **__):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def no_tensor(*_, **__):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


@pytest.mark.parametrize("fail", [out_of_memory, no_pages, no_tensor])
@pytest.mark.parametrize(
    ("place", "operation"),
    [
        ("numpy.empty", "load"),
        ("torch.empty", "load tensors"),
        ("limpet.buffers.BufferPool.acquire", "save"),
        ("limpet.buffers.BufferPool.acquire", "load into"),
        ("limpet.buffers.BufferPool.acquire", "save_async"),
    ],
)
def test_a_lack_of_memory_is_clear(folder, monkeypatch, fail, place, operation):
    limpet.save("t", {"w": torch.zeros(1 << 20, dtype=torch.float64)})
    into = {"w": torch.ones(1 << 20)}
    operations = {
        "load": lambda: limpet.load("run/version_1"),
        "load tensors": lambda: limpet.load("t"),
        "load into": lambda: limpet.load("t", into=into, cast=True),
        "save": lambda: limpet.save("s", into),
        "save_async": lambda: limpet.save_async("s", into).wait(),
    }
    monkeypatch.setattr(place, fail)
    with pytest.raises(LimpetError, match=r"not enough memory for the (load|save) of ") as caught:
        operations[operation]()
    assert caught.value.todo
    causes = [caught.value.__cause__, caught.value.__cause__.__cause__]
    assert any(isinstance(e, MemoryError | OSError | RuntimeError) for e in causes)
    assert not os.path.exists("s/manifest.json")


# objects of another class


class BytesPath:
    def __fspath__(self):
        return b"run"


class IntPath:
    def __fspath__(self):
        return 3


def test_an_object_of_another_class_is_an_error_of_one_line(folder):
    snapshot, run = limpet.open("run@1"), limpet.Run("run")
    with open("step_7.pt", "rb") as file:
        values = [
            7, b"run", 1.5, ["run"], {}, object(), file, io.BytesIO(), limpet.Run, limpet.Store,
            BytesPath(), IntPath(), "ru\0n", torch.ones(2), snapshot, run, None,
        ]  # fmt: skip
        accepted = {
            (name, value)
            for name, call in OBJECT_CALLS.items()
            for value in range(len(values))
            if is_accepted(call, values[value], name)
        }
    defaults = {
        "Checkpointer save",
        "Checkpointer keep",
        "Checkpointer stop",
        "resume",
        "resume at",
    }
    defaults |= {"Checkpointer preemption"}
    snapshots = {"metrics", "add_metrics", "evaluations", "export from", "load", "open"}
    expected = {(name, 16) for name in defaults} | {(name, 14) for name in snapshots}
    expected |= {("register_store", value) for value in (8, 9)} | {("best", 12)}
    expected |= {("MemoryTier", 10)} & accepted
    assert accepted == expected


def is_accepted(call, value, name):
    error = error_of(lambda: call(value))
    assert error is None or ("\n" not in str(error) and len(str(error)) < 600), (name, value)
    return error is None
