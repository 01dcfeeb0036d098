"""``limpet ls --watch``."""

import json
import shutil

import pytest

from limpet.cli import watch
from limpet.errors import Denied, Unavailable
from limpet.run import overview
from limpet.run.policy import EverySteps
from limpet.run.writer_lock import WriterLock
from limpet.storage.local.store import LocalStore
from tests.cli.invoke import check_error_line, run_cli
from tests.trainings import flip_bit, train, training


@pytest.fixture
def clock(monkeypatch):
    """Replace the waits: each one calls the next action, or else ends the command as Ctrl-C does.
    Returns the actions and the waits."""
    actions, waits = [], []

    def sleep(seconds):
        waits.append(seconds)
        if not actions:
            raise KeyboardInterrupt
        actions.pop(0)()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    return actions, waits


def save(place, step):
    with training(place, EverySteps(20)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, step)


def save_running(place, step):
    """Save as a training that goes on."""
    for record in (place / f"version_{step - 20}").glob("eval-*"):
        record.unlink()
    save(place, step)
    for record in (place / f"version_{step}").glob("eval-*"):
        record.unlink()


@pytest.fixture(params=["run", "folder"])
def watched(request, tmp_path):
    """The folder of a run that has not ended, and what is watched: it, or the folder above it."""
    run = tmp_path / "runs" / "a"
    save_running(run, 20)
    return run, run if request.param == "run" else run.parent


def steps_of(document):
    return [int(v["step"]) for v in document["versions"]] if "versions" in document else [
        int(r["latest"].removeprefix("version_")) for r in document["runs"]
    ]  # fmt: skip


def test_it_ends_when_the_training_has_ended(watched, clock):
    run, place = watched
    actions, waits = clock
    actions += [lambda: save_running(run, 40), lambda: None, lambda: save(run, 60)]
    result = run_cli("ls", place, "--watch", "--json")
    assert result.code == 0
    documents = [json.loads(line) for line in result.out.splitlines()]
    assert [steps_of(d)[-1] for d in documents] == [20, 40, 60]
    assert len(waits) == 3
    assert min(waits) >= 2
    assert result.err == ""


def test_tables_without_a_terminal(watched, clock):
    run, place = watched
    actions, _ = clock
    actions += [lambda: None, lambda: save(run, 40)]
    result = run_cli("ls", place, "--watch")
    assert result.code == 0
    assert result.out.count("age") == 2
    assert " 40 " in result.out


def test_a_training_that_has_ended_is_shown_once(watched, clock):
    run, place = watched
    save(run, 40)
    result = run_cli("ls", place, "--watch")
    assert result.code == 0
    assert not clock[1]
    assert result.out.count("age") == 1
    assert " 40 " in result.out


def test_ctrl_c(watched, clock):
    result = run_cli("ls", watched[1], "--watch")
    assert result.code == 130
    assert "20" in result.out
    assert len(clock[1]) == 1


def test_a_deletion(watched, clock):
    run, place = watched
    clock[0].append(lambda: shutil.rmtree(run))
    check_error_line(run_cli("ls", place, "--watch"), 4, f"{place} was deleted")
    save_running(run, 20)
    clock[0].append(lambda: shutil.rmtree(run.parent))
    result = run_cli("ls", place, "--watch", "--json")
    assert result.code == 4
    _, last = (json.loads(line) for line in result.out.splitlines())
    assert last["exit"] == 4


def fail_to_list(monkeypatch, error):
    def fail(self, *_, **__):
        raise error

    monkeypatch.setattr(LocalStore, "list_level", fail)


def test_errors_are_told_and_pass(watched, clock, monkeypatch):
    run, place = watched

    def recover():
        monkeypatch.undo()
        monkeypatch.setattr(watch.time, "sleep", lambda seconds: save(run, 40))

    clock[0].append(lambda: fail_to_list(monkeypatch, Unavailable("The server is down")))
    clock[0].append(recover)
    result = run_cli("ls", place, "--watch", "--json")
    assert result.code == 0
    if place == run:
        assert result.err == "limpet: The server is down.; trying again\n"
    assert [steps_of(json.loads(line)) for line in result.out.splitlines()][-1][-1] == 40


def test_errors_that_last_end_it(tmp_path, clock, monkeypatch):
    save_running(tmp_path / "a", 20)
    now = [0.0]

    def fail():
        fail_to_list(monkeypatch, Denied("No permission"))
        now[0] += 100

    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    clock[0].extend([fail] * 9)
    result = run_cli("ls", tmp_path / "a", "--watch")
    assert result.code == 5
    assert len(clock[1]) == 4
    assert result.err.count("trying again") == 3
    assert result.err.splitlines()[-1].startswith("limpet: No permission")


def test_an_error_at_first_ends_it(tmp_path, clock, monkeypatch):
    save_running(tmp_path / "a", 20)
    fail_to_list(monkeypatch, Denied("No permission"))
    check_error_line(run_cli("ls", tmp_path / "a", "--watch"), 5)
    assert not clock[1]


def test_damage_does_not_end_it(watched, clock):
    run, place = watched
    save_running(run, 40)
    store = LocalStore(run)
    clock[0].append(lambda: flip_bit(store, "version_40/manifest.json"))
    result = run_cli("ls", place, "--watch")
    assert result.code == 130
    assert "damaged" in result.out


def test_before_the_first_version(tmp_path, clock):
    run = tmp_path / "a"
    WriterLock(LocalStore(run)).acquire()
    clock[0].append(lambda: save_running(run, 20))
    result = run_cli("ls", run, "--watch", "--json")
    assert result.code == 130
    assert [steps_of(json.loads(line)) for line in result.out.splitlines()[:2]] == [[], [20]]


def test_a_look_that_takes_long_is_repeated_less_often(tmp_path, clock, monkeypatch):
    save_running(tmp_path / "a", 20)
    now = [0.0]
    real = overview.line_ends

    def line_ends(*arguments):
        now[0] += 10
        return real(*arguments)

    monkeypatch.setattr(overview, "line_ends", line_ends)
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    assert run_cli("ls", tmp_path / "a", "--watch").code == 130
    assert clock[1] == [30]


def test_on_a_terminal_the_end_of_the_table_is_shown_in_place(watched, clock, monkeypatch):
    """The table is longer than the screen, which shows its last lines."""
    _, place = watched
    shown = []

    class Live:
        def __init__(self, **options):
            self.console = type("Console", (), {"height": 3})

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, text, refresh):
            shown.append(text.plain.splitlines())
            assert text.no_wrap

    monkeypatch.setattr("rich.live.Live", Live)
    monkeypatch.setattr(
        "click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False
    )
    clock[0].append(lambda: None)
    assert run_cli("ls", place, "--watch").code == 130
    assert len(shown) == 2
    assert all(len(lines) == 2 for lines in shown)
