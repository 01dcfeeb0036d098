"""``Checkpointer(on_best=...)``: the function gets each version that becomes the best."""

import threading

import pytest

import limpet
from limpet.errors import Denied, LimpetError, SaveFailed
from limpet.format.names import Version
from limpet.run.policy import KeepPolicy
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.notices.announced import Announced
from tests.ranks.trainings import TrainingJob
from tests.trainings import forget, initial_state, train_step
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("error")

KEEP = limpet.KeepBest(1, "val", mode="min") | limpet.KeepLast(1)


class Given(list):
    """A function of ``on_best``: it notes the steps of its versions, and what exists meanwhile."""

    def __init__(self, store):
        super().__init__()
        self.store, self.error, self.names = store, None, set()

    def __call__(self, snapshot):
        assert snapshot.verify().ok
        self.append(snapshot.step)
        self.names.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error


def make(store, given, keep=KEEP, save=None, **options):
    options = {"preemption": None, **options}
    save = limpet.EverySteps(1) if save is None else save
    return limpet.Checkpointer(
        store, initial_state(), save=save, keep=keep, on_best=given, **options
    )


def step(ckpt, *scores):
    """Make a step for each score, and wait for its save and for the function."""
    for score in scores:
        train_step(ckpt.state)
        ckpt.step({} if score is None else {"val": score})
        settle(ckpt)


def settle(ckpt):
    for pending, _ in ckpt._saver._saves:
        pending.wait_ended()
    assert ckpt._saver.on_best._has_returned.wait(20)


def kill(ckpt):
    """Leave a training as if its process had been killed."""
    forget(ckpt)
    ckpt._watcher.close()


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def given(store):
    return Given(store)


def recorded(store):
    """The steps of the versions that were given, as the run records it."""
    return [int(s.key.split("/")[0][8:]) for s in store.list("") if s.key.endswith(".best.json")]


# -- when ----------------------------------------------------------------------------------------


def test_each_version_that_becomes_the_best_is_given_once_in_the_background(store, given):
    with make(store, given) as ckpt:
        step(ckpt, 0.5, 0.6, 0.4, 0.4, float("nan"), None, 0.3)
        assert given == [1, 3, 4, 7], "of equal ones, the newest is the best"
        assert given.names == {"limpet-best"}
    assert given == [1, 3, 4, 7]
    assert not [s.key for s in store.list("") if "pin-" in s.key]
    assert recorded(store) == [7], "its record is deleted with a version"


@pytest.mark.parametrize(
    "policies",
    [
        {"keep": limpet.KeepBest(1, "val", mode="max")},
        {"keep": KeepPolicy(), "stop": limpet.StopWhen("val", patience=9, mode="max")},
        {
            "keep": limpet.KeepBest(2, "val", mode="max") | limpet.KeepLast(2),
            "stop": limpet.StopWhen("val", patience=9, mode="max"),
        },
    ],
)
def test_the_metric_is_the_only_one_of_the_policies(store, given, policies):
    with make(store, given, **policies) as ckpt:
        step(ckpt, 0.1, 0.2, 0.15, 0.3)
    assert given == [1, 2, 4]


def test_metrics_that_are_added_later_count(store, given):
    with make(store, given, keep=limpet.KeepBest(9, "val", mode="min")) as ckpt:
        step(ckpt, None)
        ckpt.metrics({"val": 0.5})  # of a saved step
        step(ckpt, None)
        assert given == [1]
        Run(store).add_metrics(2, {"val": 0.4}, "elsewhere")  # by another process
        step(ckpt, None)
        assert given == [1, 2]
        ckpt.save({"val": 0.3})
        step(ckpt, 0.9)
        assert given == [1, 2, 3]
        Run(store).add_metrics(4, {"val": 0.35}, "elsewhere")
        Run(store).add_metrics(2, {"val": 0.1}, "elsewhere")
        step(ckpt, None)
        assert given == [1, 2, 3], "version 2 was the best before"
        ckpt.metrics({"val": 0.0})
        assert given == [1, 2, 3]
    assert given == [1, 2, 3, 5], "at the latest at the end"


def test_an_exact_score_of_an_evaluation_inside_the_training_counts(store, given):
    def evaluate(model, batch):
        return {"val": (1.0 / ckpt.current_step, 1)}

    with (
        make(store, given, save=limpet.AtEnd()) as ckpt,
        limpet.TrainingEvaluation(
            ckpt, None, evaluate, data=[0], batch_size=None, every=limpet.EverySteps(2)
        ) as evaluation,
    ):
        for _ in ckpt.steps(5):
            evaluation.step()
            train_step(ckpt.state)
            ckpt.step()
            settle(ckpt)
    assert given[-1] == 5, "the last step is evaluated, too"
    assert recorded(store) == [5]


def test_the_newest_best_version_counts_if_the_function_takes_long(store):
    began, go, given = threading.Event(), threading.Event(), []

    def export(snapshot):
        given.append(snapshot.step)
        began.set()
        assert go.wait(20)
        assert snapshot.verify().ok, "no retention deletes it meanwhile"

    with make(store, export, keep=limpet.KeepBest(1, "val")) as ckpt:
        for score in (0.5, 0.4, 0.3, 0.2):  # no step, save, or wait waits for the function
            train_step(ckpt.state)
            ckpt.step({"val": score})
            ckpt.wait()
            assert began.wait(20)
        assert given == [1]
        assert Run(store).line() == [Version(1), Version(4)]
        go.set()
    assert given == [1, 4]
    assert Run(store).line() == [Version(4)]


def test_with_more_versions_a_look_follows_fewer_saves(store, given, monkeypatch):
    """The cost of a save does not grow, as that of retention."""
    monkeypatch.setattr("limpet.training.on_best.VERSIONS_PER_SAVE", 5)
    with make(store, given, keep=KeepPolicy(), stop=limpet.StopWhen("val", 900)) as ckpt:
        step(ckpt, *(1 / i for i in range(1, 22)))
        assert given == [*range(1, 11), 12, 14, 16, 19]
    assert given[-1] == 21


# -- errors --------------------------------------------------------------------------------------


def test_an_error_is_raised_by_the_next_call_and_the_version_is_given_again(store, given):
    given.error = ValueError("no such bucket")
    with make(store, given) as ckpt:
        step(ckpt, 0.5)
        with pytest.raises(LimpetError, match=r"on_best\(\) failed for version_1.*bucket") as e:
            ckpt.step({})
        assert e.value.committed == "version_1"
        assert isinstance(e.value.__cause__, ValueError)
        assert not recorded(store)
        given.error = None
        step(ckpt, 0.6, 0.7)
    assert given == [1, 1]
    assert recorded(store) == [1]


def test_an_error_at_the_end_is_raised_by_it_and_the_next_start_gives_the_version(store, given):
    given.error = SystemExit(3)
    with pytest.raises(LimpetError, match=r"version_1.*SystemExit: 3"), make(store, given) as ckpt:
        train_step(ckpt.state)
        ckpt.step({"val": 1.0})
    given.error = None
    del given[:]
    for _ in range(2):
        with make(store, given) as ckpt:
            assert ckpt.resume().step == 1
        assert given == [1], "also if there is no step left to make, and once"


@pytest.mark.parametrize("failing", ["the end", "on_best", "both"])
def test_after_an_error_at_the_end_the_other_parts_of_the_end_follow(store, given, failing):
    """The next start would not make up for them: all its steps are made."""

    def fail(method, key):
        if failing != "on_best" and method == "put_if_absent" and "ended" in key:
            raise Denied("No records")

    given.error = None if failing == "the end" else ValueError("no such bucket")
    hooked = HookedStore(store)
    with pytest.raises(LimpetError) as e, make(hooked, given) as ckpt:
        step(ckpt, None, None, None)
        for number, score in enumerate((0.5, 0.6, 0.4), 1):
            Run(store).add_metrics(number, {"val": score})
        hooked.before = fail
    assert given == [3]
    assert [s.step for s in Run(store).snapshots()] == [3], "version_1 was the best"
    texts = [str(e.value), *getattr(e.value, "__notes__", [])]
    assert [("on_best() failed" in text, "be recorded" in text) for text in texts] == {
        "the end": [(False, True)],
        "on_best": [(True, False)],
        "both": [(False, True), (True, False)],
    }[failing]


def test_an_interrupt_at_the_end_ends_it(store, given):
    """The function of the user would begin after it."""

    def interrupt(method, key):
        if "ended" in key:
            raise KeyboardInterrupt

    hooked = HookedStore(store)
    with pytest.raises(KeyboardInterrupt), make(hooked, given) as ckpt:
        step(ckpt, None)
        Run(store).add_metrics(1, {"val": 0.5})
        hooked.before = interrupt
    assert given == []


def test_with_warn_an_error_is_a_warning(store, given):
    given.error = OSError("disk")
    match = r"^on_best\(\) failed for version_1.*OSError: disk"
    with (
        pytest.warns(SaveFailed, match=match) as w,
        make(store, given, on_error="warn") as ckpt,
    ):
        step(ckpt, 0.5)
        train_step(ckpt.state)
        ckpt.step({"val": 0.6})
    assert len(w) >= 2
    assert Run(store).latest().step == 2


def test_an_error_is_reported_once(store, given):
    """Also if the save of the next step was in flight when the function failed."""
    given.error, hooked = ValueError("no such bucket"), HookedStore(store)

    def wait_for_failure(method, key):
        if method == "put_if_absent" and key == "version_2/manifest.json":
            assert ckpt._saver.on_best._has_returned.wait(20)

    hooked.before = wait_for_failure
    with pytest.raises(LimpetError, match=r"on_best\(\) failed") as e, make(hooked, given) as ckpt:
        for score in (0.5, 0.4):
            train_step(ckpt.state)
            ckpt._saver._errors, errors = [], ckpt._saver._errors  # as if it failed a bit later
            ckpt.step({"val": score})
            ckpt._saver._errors = errors
        settle(ckpt)
        ckpt.step({"val": 0.3})
    assert given == [1]
    assert not hasattr(e.value, "__notes__")


def test_an_error_without_a_text_is_raised(store, given):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    given.error = Unprintable()
    with pytest.raises(LimpetError, match=r"on_best\(\) failed") as e, make(store, given) as ckpt:
        train_step(ckpt.state)
        ckpt.step({"val": 0.5})
    assert isinstance(e.value.__cause__, Unprintable)


def test_an_error_of_the_store_says_that_the_version_was_saved(store, given):
    is_broken = False

    def fail(method, key):
        if is_broken and method == "put_if_absent" and key.endswith(".best.json"):
            raise Denied("No records")

    hooked = HookedStore(store)
    hooked.before = fail
    with make(hooked, given) as ckpt:
        is_broken = True
        step(ckpt, 0.5)
        with pytest.raises(LimpetError, match=r"version_1 was saved.*again") as e:
            ckpt.step({})
        assert "Denied: No records" in str(e.value)
        is_broken = False
        step(ckpt, 0.6)
    assert given == [1, 1], "at least once"


def test_an_error_of_the_search_says_that_the_version_was_saved(store, given):
    is_broken = False

    def fail(method, key):
        if is_broken and method == "stat" and threading.current_thread().name == "limpet-save":
            raise Denied("No look")

    def then(method, key):
        nonlocal is_broken
        is_broken |= key == "version_1/manifest.json"

    hooked = HookedStore(store)
    hooked.before, hooked.after = fail, then
    with make(hooked, given) as ckpt:
        train_step(ckpt.state)
        ckpt.step({"val": 0.5})
        with pytest.raises(
            LimpetError, match=r"search of the best version failed .*No look.*was saved"
        ) as e:
            ckpt.wait()
        assert e.value.committed == "version_1"
        with pytest.raises(Denied, match="old versions could not be deleted"):
            ckpt.wait()
        hooked.before = hooked.after = lambda method, key: None
    assert given == [1], "at the end"


def test_a_call_of_the_checkpointer_is_refused_and_does_not_block(store):
    for call in ("save", "wait", "step", "close", "resume"):
        store, found = MemoryStore(), []

        def use(snapshot, call=call, found=found):
            with pytest.raises(LimpetError, match=rf"{call}\(\) of a Checkpointer"):
                getattr(ckpt, call)()
            found.append(call)

        with make(store, use) as ckpt:
            step(ckpt, 0.5)
        assert found == [call]


def test_a_snapshot_can_be_loaded_and_exported(store, tmp_path):
    def export(snapshot):
        assert limpet.load(snapshot)["history"]
        limpet.export(snapshot, tmp_path / f"best-{snapshot.step}", to="safetensors")

    with make(tmp_path / "run", export) as ckpt:
        step(ckpt, 0.5, 0.4, 0.6)
    assert sorted(p.name for p in tmp_path.glob("best-*")) == ["best-1", "best-2"]


@pytest.mark.parametrize(
    ("keep", "stop", "found"),
    [
        (KeepPolicy(), None, "none"),
        (limpet.KeepLast(2), limpet.StopWhen("val"), "('val', 'min')] and KeepLast("),
        (limpet.KeepLast(2) | limpet.KeepEvery(5), limpet.StopWhen("val"), "('val', 'min')] and "),
        (limpet.KeepLast(2), None, "none"),
        (limpet.KeepBest(1, "a") | limpet.KeepBest(1, "b"), None, "('b', 'min')"),
        (limpet.KeepBest(1, "a"), limpet.StopWhen("b"), "('a', 'min')"),
        (limpet.KeepBest(1, "a"), limpet.StopWhen("a", mode="max"), "('a', 'max')"),
    ],
)
def test_there_must_be_one_metric(store, keep, stop, found):
    with pytest.raises(LimpetError) as e:
        make(store, print, keep=keep, stop=stop)
    expected = (
        "on_best= needs one metric with one mode, whose best version is kept: write keep=KeepBest("
    )
    assert expected in str(e.value)
    assert found in str(e.value)


@pytest.mark.parametrize("bad", ["export", 3, True, ["f"]])
def test_what_is_no_function_is_refused(store, bad):
    with pytest.raises(LimpetError, match="on_best= must be a function"):
        make(store, bad)


# -- ends, and the next start --------------------------------------------------------------------


def test_a_version_that_was_given_is_not_given_again_after_a_crash(store, given):
    ckpt = make(store, given)
    step(ckpt, 0.5, 0.4)
    kill(ckpt)  # the process dies right after the function
    with make(store, given) as ckpt:
        ckpt.resume()
        step(ckpt, 0.9)
        assert given == [1, 2]
        step(ckpt, 0.3)
    assert given == [1, 2, 4]


def test_a_process_that_dies_in_the_function_gives_the_version_again(store, given):
    began, go = threading.Event(), threading.Event()

    def hang(snapshot):
        began.set()
        go.wait(20)
        raise OSError("killed")  # so that there is no record

    ckpt = make(store, hang)
    train_step(ckpt.state)
    ckpt.step({"val": 0.5})
    assert began.wait(20)
    ckpt.wait()
    kill(ckpt)
    with make(store, given) as again:
        again.resume()
        step(again, 0.9)
        assert given == [1]
    go.set()


def test_after_another_metric_versions_are_the_best_anew(store, given):
    with make(store, given) as ckpt:
        step(ckpt, 0.5)
    with make(store, given, keep=limpet.KeepBest(1, "val", mode="max")) as ckpt:
        ckpt.resume()
        step(ckpt, 0.1)
    assert given == [1, 1]


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(3)])
def test_after_an_exception_it_is_left_to_the_next_start(store, given, error):
    may_commit, slow = threading.Event(), HookedStore(store)
    slow.before = lambda method, key: (
        may_commit.wait(20) if method == "put_if_absent" and "manifest" in key else None
    )
    with pytest.raises(type(error)), make(slow, given) as ckpt:
        train_step(ckpt.state)
        ckpt.step({"val": 0.5})
        threading.Timer(0.1, may_commit.set).start()
        raise error
    assert Run(store).latest().step == 1
    assert ckpt._saver.on_best._has_returned.wait(20)
    assert given == []
    with make(store, given) as ckpt:
        ckpt.resume()
        step(ckpt, 0.9)
    assert given == [1]


def test_after_a_notice_it_is_left_to_the_next_start(store, given):
    """The function may take longer than the time that is left."""
    source = Announced()
    preemption = limpet.Preemption(notices=[source])
    ckpt = make(store, given, save=limpet.AtEnd(), preemption=preemption)
    with pytest.raises(limpet.errors.Preempted), ckpt:
        ckpt.resume()
        for i in range(10_000):
            train_step(ckpt.state)
            ckpt.step({"val": 1 / (i + 1)})
            if i == 3:
                source.announce()
    assert given == []
    with make(store, given) as ckpt:
        step_before = ckpt.resume().step
        step(ckpt, 2.0)
    assert given == [step_before]


def test_a_save_in_flight_at_a_notice_calls_nothing(store, given):
    source, hooked = Announced(), HookedStore(store)

    def announce(method, key):
        if method == "put_if_absent" and key == "version_1/manifest.json":
            source.announce()
            wait_until(lambda: ckpt._preemption.is_pending)

    hooked.before = announce
    ckpt = make(hooked, given, preemption=limpet.Preemption(notices=[source]))
    with pytest.raises(limpet.errors.Preempted), ckpt:
        for _ in range(10_000):
            train_step(ckpt.state)
            ckpt.step({"val": 0.5} if ckpt.current_step == 0 else {})
    assert Run(store).find(1)
    settle(ckpt)
    assert given == []


def test_a_function_in_progress_does_not_delay_an_exception_or_a_notice(store):
    began, go = threading.Event(), threading.Event()

    def hang(snapshot):
        began.set()
        go.wait(20)

    with pytest.raises(ZeroDivisionError), make(store, hang) as ckpt:
        train_step(ckpt.state)
        ckpt.step({"val": 0.5})
        assert began.wait(20)
        raise ZeroDivisionError
    assert not ckpt._saver.on_best._has_returned.is_set()
    go.set()


# -- several ranks -------------------------------------------------------------------------------


def test_only_rank_0_calls_it_and_no_rank_waits_for_it():
    with TrainingJob(2) as job:
        began, go, calls = threading.Event(), threading.Event(), []

        def work(trainer):
            def export(snapshot):
                calls.append((trainer.rank, snapshot.step))
                began.set()
                assert go.wait(20)

            with trainer.make_checkpointer(
                save=limpet.EverySteps(1), keep=KEEP, on_best=export
            ) as ckpt:
                trainer.train_steps(1, lambda step: {"val": 1.0})
                ckpt.wait()
                assert began.wait(20)
                trainer.train_steps(3, lambda step: {"val": 1.0 / step})
                ckpt.wait()
                go.set()

        job.run(work)
        assert calls == [(0, 1), (0, 3)]


def test_an_error_of_rank_0_is_raised_on_all_ranks_when_the_next_save_is_due():
    with TrainingJob(2) as job:

        def work(trainer):
            failed = threading.Event()

            def export(snapshot):
                failed.set()
                raise ValueError("bucket")

            with trainer.make_checkpointer(
                save=limpet.EverySteps(1), keep=KEEP, on_best=export
            ) as ckpt:
                trainer.train_steps(1, lambda step: {"val": 1.0})
                if trainer.rank == 0:
                    settle(ckpt)
                job.wait_for_step(trainer.rank)
                trainer.train_steps(2, lambda step: {"val": 2.0})

        outcomes = job.outcomes(work)
        assert all(isinstance(o, LimpetError) for o in outcomes), outcomes
        assert all("on_best() failed for version_1" in str(o) for o in outcomes)
