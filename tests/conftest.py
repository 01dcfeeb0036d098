"""The options of the tests, and the signals that they expect."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

# The cores are shared by several workers of pytest: an example may take long for no reason of ours.
settings.register_profile("limpet", deadline=None)
settings.load_profile("limpet")

# A job that a shell starts in the background, or by nohup, ignores these signals, and so would the
# commands that the tests start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# the Python processes of the tests, and the workers of pytest, import PyTorch faster
STARTUP = str(Path(__file__).parent / "startup")
python_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if STARTUP not in python_path:
    os.environ["PYTHONPATH"] = os.pathsep.join([*python_path, STARTUP])

# by default, Ray gives its workers processor time only if nothing else wants it: not beside tests
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_addoption(parser):
    parser.addoption(
        "--require-servers",
        action="store_true",
        help="fail a test whose storage server cannot be installed, instead of skipping it",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Do not search the imported modules for garbage, neither now nor in a later test.

    They have 700,000 objects. A search takes 0.4 s, and the collection of the tests begins dozens.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Nor what the tests of a file leave behind: caches and reports grow to millions of objects."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            _freeze()


def _freeze():
    gc.collect()
    from tests.trainings import threads_of_trainings

    if not threads_of_trainings():  # an unclosed training must be found as garbage, and ends then
        gc.freeze()


LONGEST = (
    "tests/evaluation/test_ray.py",
    "tests/tables/test_ray.py",
    "tests/frameworks/test_ray_train.py",
    "tests/ranks/test_survivors.py",
    "tests/examples/",
    "tests/zoo/",
)


def pytest_collection_modifyitems(items):
    """Begin with the longest tests. If one began last, the other workers would wait for it."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture
def memory():
    """A folder in memory."""
    path = tempfile.mkdtemp(prefix="limpet-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _no_timer_ends_pytest():
    """Let the exit timer of a training that a test has left behind end nothing: otherwise, it would
    end the process of pytest during a later test. Ranks in processes of their own are not affected.
    """
    from limpet.training import response

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response, "end_process", _report_end)
        yield


def _report_end(code, message):
    sys.stderr.write(
        f"the timer of an earlier test would end this process with {code}: {message}\n"
    )


@pytest.fixture
def poll_often(monkeypatch):
    """Poll for requests without delay. The thread of a discarded Checkpointer ends as soon."""
    from limpet.run.save_request import RequestWatcher

    watcher = partial(RequestWatcher, interval=0.002)
    monkeypatch.setattr("limpet.training.checkpointer.RequestWatcher", watcher)
