"""A command that was killed is repeated: it completes what it began, or finds it done."""

import itertools
from uuid import uuid4

import pytest
import torch

import limpet
from limpet.convert.export import prepare_export
from limpet.errors import StoreError
from limpet.format.names import Version
from limpet.run.run import Run
from limpet.snapshot.location import locate
from limpet.snapshot.reader import open_location
from limpet.storage.memory import MemoryStore, _MemoryUpload
from tests.cli.invoke import run_cli, train_branch

METHODS = ("put", "put_if_absent", "stat", "get", "get_range", "list", "list_level", "delete")


class Killed(StoreError):
    """The process has ended: this and every later call of a store has no effect."""


@pytest.fixture
def kill_at(monkeypatch):
    """Kill at a call of any store in memory, before or after its effect; 0: not. Returns the
    calls that were made since."""
    calls, end = [0], [0, False]

    def step(after):
        if end[0] and calls[0] >= end[0] and (after == end[1] or calls[0] > end[0]):
            calls[0] = end[0] + 1
            raise Killed("killed")

    def wrap(owner, name):
        inner = getattr(owner, name)

        def call(*arguments, **options):
            calls[0] += 1
            step(after=False)
            found = inner(*arguments, **options)
            step(after=True)
            return found

        monkeypatch.setattr(owner, name, call)

    for name in METHODS:
        wrap(MemoryStore, name)
    for name in ("write_at", "commit"):
        wrap(_MemoryUpload, name)

    def kill(at, after=False):
        made, calls[0] = calls[0], 0
        end[:] = at, after
        return made

    return kill


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")


COMMANDS = {
    "copy a whole run": ("copy", "{run}", "{to}"),
    "copy a snapshot": ("copy", "{run}/version_40", "{to}/version_40"),
    "copy an incremental snapshot": ("copy", "{run}/version_80.1", "{to}/x"),
    "reshard": ("reshard", "{run}/version_40", "{to}/version_40", "--shards", "2"),
    "reshard to a run": ("reshard", "{run}/version_40", "{to}", "--shards", "3"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if "whole" in n else ()) for n in COMMANDS]
)
def test_a_command_that_is_repeated_after_a_kill_at_any_call(name, store, kill_at):
    train_branch(store, start=40, last_step=80)
    run = Run(store)
    run.pin(40, branch=0)
    run.add_metrics(run.find(40), {"m": 1.0})
    if "whole" in name:  # three versions on two branches: each call is one run of the command
        run.delete(Version(20), Version(60))
    document, number = None, 0
    for after in (False, True):
        at = 1
        while True:
            to = f"{store.url}-to-{after}-{at}"
            if name == "reshard to a run":
                limpet.save(f"{to}/version_7", {"n": 1})
            command = [part.format(run=store.url, to=to) for part in COMMANDS[name]]
            kill_at(at, after)
            killed = run_cli(*command)
            made = kill_at(0)
            repeated = run_cli(*command, "--json")  # the last time, everything is there
            assert repeated.code == 0, (at, after, repeated)
            found = sorted(s.url.removeprefix(to) for s in Run(to).snapshots())
            document = document or found
            assert found == document
            assert run_cli("verify", command[2]).code == 0
            number += 1
            if killed.code == 0 and made < at:
                break
            at += 1
    assert number > 40


EXPORTS = {
    "hf": ("--to", "hf", "--max-shard-size", "100"),
    "safetensors": ("--to", "safetensors"),
    "torch": ("--to", "torch"),
}


def files_in(url):
    store = limpet.open_store(url)
    return {stat.key: store.get(stat.key, 1 << 20) for stat in store.list("")}


def repeat_at_each_call(make_command, kill_at):
    """Kill a command at each call, and repeat it. Yield the target of each."""
    for after in (False, True):
        at = 1
        while True:
            to = f"memory://repeated-{uuid4()}"
            command = make_command(to)
            kill_at(at, after)
            killed = run_cli(*command)
            made = kill_at(0)
            repeated = run_cli(*command, "--json")
            assert repeated.code == 0, (at, after, repeated)
            yield to
            if killed.code == 0 and made < at:
                break
            at += 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_that_is_repeated_after_a_kill_at_any_call(kind, tmp_path, kill_at):
    state = {"model": {f"w{i}": torch.arange(20.0) + i for i in range(4)}}
    limpet.save(tmp_path / "version_1", state)
    results = []
    for to in repeat_at_each_call(
        lambda to: ("export", tmp_path / "version_1", to, *EXPORTS[kind]), kill_at
    ):
        results.append(files_in(to))
        assert run_cli("verify", to).code == 0
    assert len(results) > 10
    assert results[1:] == results[:-1]


def test_an_import_that_is_repeated_after_a_kill_at_any_call(tmp_path, kill_at):
    model = torch.nn.Linear(3, 4)
    torch.save({"model": model.state_dict(), "step": 7}, tmp_path / "x.pt")
    number = 0
    for to in repeat_at_each_call(lambda to: ("import", tmp_path / "x.pt", to), kill_at):
        [snapshot] = limpet.Run(to).snapshots()
        assert snapshot.step == 7
        assert snapshot.verify().ok
        assert torch.equal(limpet.load(snapshot.url)["model"]["weight"], model.weight)
        number += 1
    assert number > 10


def test_an_import_of_other_bytes_is_still_refused(tmp_path):
    large = torch.zeros(3 << 20)
    for name in ("x.pt", "y.pt"):
        torch.save({"model": {"w": large}, "step": 7}, tmp_path / name)
    to = tmp_path / "run"
    assert limpet.import_checkpoint(tmp_path / "x.pt", to / "version_7").step == 7
    again = limpet.import_checkpoint(tmp_path / "x.pt", to / "version_7")
    assert again.url == limpet.open(to / "version_7").url
    assert run_cli("import", tmp_path / "x.pt", to).code == 0
    refused = [
        ("import", tmp_path / "y.pt", to),
        ("import", tmp_path / "x.pt", to, "--as", "net"),
    ]
    for command in refused:
        assert run_cli(*command).code == 8, command
    for changed in (large + 0, large.double(), large[1:]):
        changed[-1] = 1
        torch.save({"model": {"w": changed}, "step": 7}, tmp_path / "x.pt")
        assert run_cli("import", tmp_path / "x.pt", to).code == 8
    trained = tmp_path / "other"
    limpet.save(trained / "version_7", {"model": {"w": large}})
    assert run_cli("import", tmp_path / "y.pt", trained).code == 8


@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_of_other_bytes_is_still_refused_and_changes_nothing(kind, tmp_path):
    weights = {f"w{i}": torch.arange(20.0) + i for i in range(4)}
    others = {name: w + 1 for name, w in weights.items()}
    limpet.save(tmp_path / "run" / "version_1", {"model": weights, "ema": others})
    limpet.save(tmp_path / "run" / "version_2", {"model": weights, "ema": others})
    limpet.save(tmp_path / "run" / "version_3", {"model": others, "ema": weights})
    version, to = tmp_path / "run" / "version_1", tmp_path / "out"
    command = ("export", version, to, "--root", "model", *EXPORTS[kind])
    assert run_cli(*command).code == 0
    before = files_in(str(to))
    assert run_cli(*command).code == 0
    for other, root in ((1, "ema"), (2, "model"), (3, "model"), (3, "ema")):
        result = run_cli(
            "export", f"{tmp_path}/run/version_{other}", to, "--root", root, *command[5:]
        )
        assert result.code == 8, (other, root)
        assert "already another file" in result.err
    assert files_in(str(to)) == before
    *files, record = sorted(to.iterdir(), key=lambda file: file.name.endswith(".limpet.json"))
    for file in files:  # a flipped bit, a missing end, or a record that is not one
        for content in (file.read_bytes()[:-1] + b"x", file.read_bytes()[:-1]):
            whole = file.read_bytes()
            file.write_bytes(content)
            assert run_cli(*command).code == 8
            assert file.read_bytes() == content
            file.write_bytes(whole)
    record.write_text("{}")
    assert run_cli(*command).code == 8
    assert record.read_text() == "{}"
    record.unlink()  # as after a kill
    assert run_cli(*command).code == 0
    assert files_in(str(to)) == before
    files[0].unlink()
    assert run_cli(*command).code == 0
    assert files_in(str(to)) == before


def test_two_exports_into_one_folder_complete_each_other(tmp_path):
    """One of them creates a file, or all of them, while the other is about to do so. If one then
    fails, it does not delete what the other counts as its own."""
    limpet.save(tmp_path / "version_1", {"model": {f"w{i}": torch.zeros(1000) for i in range(3)}})
    options = {"max_shard_size": 4000}
    snapshot = open_location(locate(tmp_path / "version_1"))
    for at, fails in itertools.product(range(1, 4), (False, True)):
        to, calls = tmp_path / f"{at}{fails}", itertools.count(1)
        prepared = prepare_export(snapshot, to, "hf", **options)

        def advance(_, at=at, fails=fails, to=to, calls=calls):
            if next(calls) == at:
                limpet.export(tmp_path / "version_1", to, **options)
                if fails:
                    raise KeyboardInterrupt

        if fails:
            with pytest.raises(KeyboardInterrupt):
                prepared.write(advance)
        else:
            sizes = {name.rpartition("/")[2]: n for name, n in prepared.write(advance).files}
            assert sizes == {file.name: file.stat().st_size for file in to.iterdir()}
        assert len([*to.iterdir()]) == 5
        assert run_cli("verify", to).code == 0


def test_a_repeated_export_gives_the_size_of_the_record_that_is_kept(tmp_path):
    limpet.save(tmp_path / "run" / "version_1", {"model": {"w": torch.zeros(10)}})
    run = Run(tmp_path / "run")
    first = limpet.export(run.url + "@1", tmp_path / "out")
    run.add_metrics(run.find(1), {"loss": 1.0})
    assert limpet.export(run.url + "@1", tmp_path / "out").files == first.files


@pytest.mark.parametrize("place", ["header", "index", "data", "manifest"])
def test_a_damaged_import_is_not_taken_for_a_repeated_one(tmp_path, place):
    torch.save({"model": {"w": torch.arange(4.0)}, "step": 3}, tmp_path / "x.pt")
    command = ("import", tmp_path / "x.pt", tmp_path / "run")
    assert run_cli(*command).code == 0
    pattern = {"index": "*.index.json", "manifest": "manifest.json"}.get(place, "*.safetensors")
    [file] = (tmp_path / "run" / "version_3").glob(pattern)
    raw = bytearray(file.read_bytes())
    raw[-1 if place == "data" else 20] ^= 4
    file.write_bytes(raw)
    result = run_cli(*command)
    assert result.code == 8
    assert "already" in result.err
    assert file.read_bytes() == raw


def test_other_content_is_still_refused(store):
    to = f"{store.url}-other"
    reshard = ("reshard", f"{store.url}/version_40", f"{to}/version_40", "--shards")
    assert run_cli(*reshard, 2).code == 0
    for other in ((*reshard, 3), (*reshard, 2, "--split", "none"), ("copy", *reshard[1:3])):
        result = run_cli(*other)
        assert result.code == 8, other
        assert "nothing was changed" in result.err
