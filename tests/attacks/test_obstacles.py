"""Something else under the names that Limpet writes: folders, links, FIFOs, files without access.

Every call ends soon. It succeeds, or raises an error that names what is in the way. It deletes and
changes nothing of that, and works once it is gone.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.errors import AlreadyExists, LimpetError, NotFound, StoreError
from limpet.format.names import Version
from limpet.run.lineage import MAX_SEARCHES
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.run.save_request import RequestWatcher, put_request, request_and_wait
from limpet.run.writer_lock import WriterLock
from limpet.storage.local import store as local_store
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.store import MAX_PUTS, Stat
from tests.cli.invoke import run_cli
from tests.trainings import initial_state, leave_from, train, training

pytestmark = pytest.mark.filterwarnings("ignore::limpet.errors.SkippedVersion")

TIME_LIMIT = 20.0
"""Seconds for one call. A call takes milliseconds; the rest is for a busy machine."""

MAX_FILE = 1 << 20
SHARD, INDEX = "version_1/shard", "version_1/index"
NAMES = [
    "writer.json",
    "request-save.json",
    "branch-1.json",
    "pin-version_3.json",
    "pin-0c9d1e2f3a4b.json",
    "version_1/eval-val.0c9d1e2f3a4b.json",
    "version_1/manifest.json",
    SHARD,
    INDEX,
    "version_3/manifest.json",
    "version_4",
    "version_4/manifest.json",
    ".writer.json.0123456789abcdef.partial",
    "version_4/.manifest.json.0123456789abcdef.partial",
]


def make_folder(path):
    path.mkdir()


def make_full_folder(path):
    path.mkdir()
    (path / "data").write_bytes(b"kept")
    (path / "inner").mkdir()


def make_link(path):
    target = outside(path) / "target"
    target.write_bytes(b"kept")
    path.symlink_to(target)


def make_dangling_link(path):
    path.symlink_to(outside(path) / "nothing")


def make_fifo(path):
    os.mkfifo(path)


def make_unreadable(path):
    path.write_bytes(b"kept")
    path.chmod(0)


def make_oversized(path):
    path.write_bytes(b"")
    os.truncate(path, MAX_FILE + 1)


KINDS: dict[str, Callable[[Path], None]] = {
    "empty-folder": make_folder,
    "full-folder": make_full_folder,
    "link": make_link,
    "dangling-link": make_dangling_link,
    "fifo": make_fifo,
    "unreadable": make_unreadable,
    "oversized": make_oversized,
}
FILES = ("link", "unreadable", "oversized")
"""The kinds that can be read as files, so that they are damaged records and not obstacles.

Reading follows links. If such a record is removed, the link is removed, but never its target.
"""


def outside(path):
    """The folder of what links point to; it belongs to no run."""
    folder = next(p for p in path.parents if p.name == "cell") / "outside"
    folder.mkdir(exist_ok=True)
    return folder


class UnreadableFs(Fs):
    """The real file system, but files with the mode 0 cannot be read, not even by root.

    Nothing is synced: no power is cut here.
    """

    def fsync(self, fd):
        pass

    def open(self, path, flags):
        if not flags & os.O_CREAT and os.lstat(path).st_mode & 0o777 == 0:
            raise PermissionError(13, "Permission denied")
        return super().open(path, flags)


def contents(path):
    """Everything that a path is and contains, without following links."""
    if not os.path.lexists(path):
        return []
    status = path.lstat()
    facts: list[Any] = [path.name, status.st_mode, status.st_ino, status.st_size]
    if path.is_symlink():
        return [*facts, os.readlink(path), contents(path.resolve())]
    if path.is_dir():
        return [*facts, [contents(p) for p in sorted(path.iterdir())]]
    return [*facts, status.st_mtime_ns]


def call_train(root):
    """Train in a run that has nothing but what is in the way."""
    store = LocalStore(root)
    with training(store, EverySteps(1)) as (state, ckpt):
        if Run(store).listing().versions:  # from a first call
            ckpt.resume()
        train(state, ckpt, 4)
    assert Run(store).line()[-1] == Version(4)


def call_resume(root, at=None):
    with training(LocalStore(root), EverySteps(1), KeepLast(10)) as (state, ckpt):
        ckpt.resume(at=at)
        train(state, ckpt, state["progress"].step + 1)


def call_resume_at(root):
    call_resume(root, 2)


def call_latest(root):
    snapshot = Run(LocalStore(root)).latest()
    assert snapshot is not None
    limpet.load(snapshot.url, into=initial_state())


def call_pin(root):
    run = Run(LocalStore(root))
    version = run.pin(3 if Version(3) in run.listing().versions else 2)
    assert run.pins() == [version]


def call_unpin(root):
    run = Run(LocalStore(root))
    try:
        run.unpin(3)
    except NotFound as e:
        if e.found is not None and "no version of step 3" not in str(e):
            raise
    assert run.pins() == []


def call_request_save(root):
    store = LocalStore(root)
    now = [0.0]
    watcher = RequestWatcher(store)

    def wait(seconds):
        """Answer the request, as a training does."""
        now[0] += seconds
        watcher.poll()
        if watcher.pending_request is not None:
            request = watcher.accept()
            step = Run(store).listing().versions[-1].step + 1
            limpet.save(f"{root}/version_{step}", initial_state(), step=step)
            watcher.mark(request, True)

    answer = request_and_wait(Run(store), 5.0, wait=wait, clock=lambda: now[0])
    assert answer.version == Run(store).listing().versions[-1]


def call_sweep(root):
    Run(LocalStore(root)).sweep(grace=0, abandoned=True)


def call_retain(root):
    Run(LocalStore(root)).retain(KeepLast(1))


def call_delete(root):
    Run(LocalStore(root)).delete(Version(1))


def call_copy(root):
    copy(root, root.parent / "copy")


def call_copy_into(root):
    copy(root.parents[2] / "template", root)


def copy(source, target):
    result = run_cli("copy", source, target, "--json")
    if result.code:
        raise LimpetError(str(result.json.get("error") or result.json["damaged"]))


def call_add_metrics(root):
    run = Run(LocalStore(root))
    run.add_metrics(2, {"accuracy": 0.5})
    assert run.metrics(2)["accuracy"] == 0.5


CALLS = [
    call_train,
    call_resume,
    call_resume_at,
    call_latest,
    call_pin,
    call_unpin,
    call_request_save,
    call_sweep,
    call_retain,
    call_delete,
    call_copy,
    call_copy_into,
    call_add_metrics,
]


def limited(call, root):
    """Run a call on a thread, and return its error. It ends within the limit."""
    errors: list[BaseException] = []

    def run():
        try:
            call(root)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIME_LIMIT)
    assert not thread.is_alive(), "the call does not end"
    if not errors:
        return None
    if not isinstance(errors[0], LimpetError):
        raise errors[0]
    return errors[0]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run with three versions."""
    root = tmp_path_factory.mktemp("obstacles") / "template"
    with training(str(root), EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 3)
    return root


def is_handled(name, kind, call):
    """Return True if the call is meant to replace or remove a damaged file of this name."""
    if kind not in FILES:
        return False
    trains = call in (call_train, call_resume, call_resume_at)
    if name == "writer.json":
        return trains and kind != "unreadable"
    if name == "request-save.json":
        return (trains or call == call_request_save) and kind != "unreadable"
    if name == "pin-version_3.json":
        return call == call_unpin
    is_partial = name.endswith(".partial")
    deletes = call in (call_delete, call_retain)
    return is_partial or (deletes and name.startswith("version_1/"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_the_way_is_named_and_kept(template, monkeypatch, name, kind):
    monkeypatch.setattr(local_store, "Fs", UnreadableFs)
    monkeypatch.setattr("limpet.snapshot.reader.MAX_MANIFEST", MAX_FILE)
    problems = []
    for call in CALLS:
        cell = template.parent / call.__name__ / "cell"
        try:
            check_cell(template, cell / "run", name, kind, call)
        except Exception as e:
            problems.append(f"{call.__name__}: {type(e).__name__}: {e}")
        shutil.rmtree(cell)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def check_cell(template, root, name, kind, call):
    if call in (call_train, call_copy_into):
        root.mkdir(parents=True)
    else:
        shutil.copytree(template, root, copy_function=os.link)
    if name in (SHARD, INDEX):
        suffix = ".safetensors" if name == SHARD else ".index.json"
        name = next(f"version_1/{p.name}" for p in (template / "version_1").glob(f"*{suffix}"))
    path = root / name
    path.parent.mkdir(exist_ok=True)
    original = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    before = contents(path)
    error = limited(call, root)
    if error is not None and "contains another training" not in str(error):
        assert name in str(error) or name.partition("/")[0] in str(error), str(error)
    if name == "version_4" and kind.endswith("folder"):  # a save may add its files to a folder
        assert all(entry in contents(path)[-1] for entry in before[-1]), "it was changed"
    elif not is_handled(name, kind, call):
        assert contents(path) == before, "it was changed"
    if kind == "link":
        assert (outside(path) / "target").read_bytes() == b"kept", "its target was changed"
    if error is not None:
        remove(path)
        if original is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(original)
        error = limited(call, root)
        assert error is None, f"still fails afterwards: {error}"


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class RecreatingStore(MemoryStore):
    """A store in which another process creates each object before this one, and then deletes it."""

    def __init__(self):
        super().__init__()
        self.puts: list[str] = []

    def put_if_absent(self, key, data):
        self.puts.append(key)
        raise AlreadyExists(f"{key} exists", key=key, store=self.url)


@pytest.mark.parametrize(
    "put",
    [
        lambda store: WriterLock(store).acquire(),
        lambda store: put_request(store, "0c9d1e2f3a4b"),
        lambda store: leave_from(Run(store), opened(), Version(1), "test"),
    ],
    ids=["writer lock", "save request", "branch"],
)
def test_the_tries_to_create_a_file_are_bounded(put):
    store = RecreatingStore()
    with pytest.raises(StoreError, match="exists again") as caught:
        put(store)
    assert len(store.puts) == MAX_PUTS
    assert caught.value.todo is not None
    assert caught.value.key == store.puts[-1]


def opened():
    store = MemoryStore()
    return limpet.save(store.at("version_1"), initial_state(), step=1)


class OutdatedStore(MemoryStore):
    """A store that can never read a manifest that it shows, and every ``period``-th time denies it.

    So each search finds a version, fails to read it, and finds that the run has changed meanwhile.
    """

    def __init__(self, period):
        super().__init__()
        self.looks, self.period = 0, period

    def stat(self, key):
        if not key.endswith("/manifest.json"):
            return super().stat(key)
        self.looks += 1
        if self.looks % self.period == 0:
            raise NotFound(f"There is no {key}", key=key, store=self.url)
        return Stat(key, 1, 0.0)


@pytest.mark.parametrize(("search", "period"), [(Run.latest, 2), (lambda run: run.best("loss"), 3)])
def test_searches_among_deleted_versions_are_bounded(search, period):
    store = OutdatedStore(period)
    store.put_if_absent("version_9/shard", b"")
    with pytest.raises(NotFound, match="before they can be read") as caught:
        search(Run(store))
    assert MAX_SEARCHES <= store.looks <= 5 * MAX_SEARCHES
    assert caught.value.todo is not None


def test_a_fifo_that_replaces_a_file_does_not_block_its_reader(tmp_path):
    os.mkfifo(tmp_path / "shard")

    def read(root):
        LocalStore(root).get_range("shard", 0, 8, memoryview(bytearray(8)))

    error = limited(read, tmp_path)
    assert isinstance(error, StoreError)
    assert "shard" in str(error)


@pytest.mark.parametrize("kind", ["empty-folder", "full-folder", "link", "dangling-link", "fifo"])
@pytest.mark.parametrize("level", ["key", "folder"])
def test_an_object_is_not_written_over_what_is_in_the_way(tmp_path, kind, level):
    path = tmp_path / "cell" / "run" / "version_1" / "a"
    obstacle = path if level == "key" else path.parent
    obstacle.parent.mkdir(parents=True)
    KINDS[kind](obstacle)
    before = contents(obstacle)
    store = LocalStore(tmp_path / "cell" / "run")
    if level == "folder" and kind.endswith("folder"):
        store.put_if_absent("version_1/a", b"1")
        return
    with pytest.raises(StoreError) as caught:
        store.put_if_absent("version_1/a", b"1")
    assert str(obstacle) in str(caught.value) or isinstance(caught.value, AlreadyExists)
    assert isinstance(caught.value, AlreadyExists) is ((level, kind) == ("key", "link"))
    assert not isinstance(caught.value, NotFound)
    assert contents(obstacle) == before
