"""Evaluation inside the training: exact or marked as inexact, once, and without a trace in the
training."""

import threading
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import limpet
from limpet.errors import LimpetError, Preempted, Unavailable
from limpet.format.records import Evaluation, InexactEvaluation
from limpet.loading.snapshot import reader_of
from limpet.notices.notice import Notice
from limpet.run.policy import AtEnd, EverySteps, KeepBest, KeepLast, Never, StopWhen
from limpet.run.run import Run
from limpet.sinks.wording import describe_event
from limpet.storage.memory import MemoryStore
from limpet.training.training_evaluation import TrainingEvaluation
from tests.cli.invoke import run_cli
from tests.evaluation.functions import data, evaluate, expected, make_model
from tests.unreliable_stores import HookedStore

DATA = torch.utils.data.Subset(data(), range(100))
PER_BATCH = 5  # 20 batches


def mean_weight(model, batch):
    """The sum of a parameter, once per record, so that the result shows which were used."""
    value = float(next(model.parameters()).sum())
    return {"weight": (value * len(batch[0]), len(batch[0]))}


class Training:
    """A training whose steps add 1 to each parameter, so that the step can be seen in it."""

    def __init__(self, store, **options):
        self.store = store
        self.model = make_model()
        self.state = {
            "model": self.model, "progress": limpet.Progress(), "rng": limpet.RNG()
        }  # fmt: skip
        options = {"save": Never(), **options}
        self.ckpt = limpet.Checkpointer(store, self.state, **options)
        self.evaluation: TrainingEvaluation = None

    def evaluating(self, function=mean_weight, **options):
        options = {"data": DATA, "batch_size": PER_BATCH, "every": EverySteps(10), **options}
        options.setdefault("name", "val")
        self.evaluation = TrainingEvaluation(self.ckpt, self.model, function, **options)
        return self.evaluation

    def step(self, *, mini_batches=1):
        for _ in range(mini_batches):
            self.evaluation.step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self.ckpt.current_step + 1)
        self.ckpt.step()
        self.ckpt.wait()

    def weight(self, step):
        """What ``mean_weight`` returns for the parameters after a step."""
        return step * next(self.model.parameters()).numel()


@contextmanager
def training(store=None, **options):
    job = Training(MemoryStore() if store is None else store, **options)
    with job.ckpt:
        job.ckpt.resume()
        yield job


def inexact(store):
    """The inexact records of a run: version, first and last step, and metrics."""
    run = Run(store)
    found = []
    for snapshot in run.snapshots():
        records = run.catalog.evaluations.read(snapshot.version, reader_of(snapshot).digest)
        for r in records.of(InexactEvaluation):
            found.append((r.version, r.first_step, r.last_step, r.decoded_metrics()))
    return found


def exact(store):
    """The exact records of a run: version and metrics."""
    run = Run(store)
    return [
        (record.version, record.decoded_metrics())
        for snapshot in run.snapshots()
        for record in run.catalog.evaluations.read(snapshot.version, reader_of(snapshot).digest).of(
            Evaluation
        )
    ]


@contextmanager
def ends():
    """Record the fields of the event that reports how an evaluation ended."""
    found: list[dict[str, Any]] = []

    def add(name, fields):
        if name == "training_evaluated":
            found.append(fields)

    with limpet.attach(add):
        yield found


def test_paused_metrics_are_exactly_those_of_the_version_of_the_step():
    with training() as job, job.evaluating(evaluate, data=data(), batch_size=30) as evaluation:
        for _ in range(11):
            job.step()
        (snapshot,) = Run(job.store).snapshots()
        state = limpet.load(job.store.at("version_10"))
        wanted = expected({"model": state["model"]})
        assert snapshot.step == 10
        assert Run(job.store).metrics(10) == pytest.approx(wanted, rel=1e-6)
        assert evaluation.newest is not None
        assert (evaluation.newest.version, evaluation.newest.is_exact) == ("version_10", True)


def test_every_epoch_evaluates_at_the_first_batch_after_end_epoch_and_at_the_end():
    with training() as job, job.evaluating(every=limpet.EveryEpoch()):
        for _ in range(3):
            for _ in range(4):
                job.step()
            job.ckpt.end_epoch({"loss": 1.0})
    versions = [version for version, _ in exact(job.store)]
    assert versions == ["version_4", "version_8", "version_12"]


@settings(derandomize=True, max_examples=30)
@given(records=st.integers(1, 40), batch_size=st.none() | st.integers(1, 45))
def test_metrics_of_batches_equal_those_of_the_whole(records, batch_size):
    """B 46 and B 51, whatever the sizes of the batches."""
    values = torch.arange(records, dtype=torch.float64) / 7

    def mean(model, batch):
        return {"mean": (batch[0].sum(), batch[0].numel())}

    with (
        training() as job,
        job.evaluating(
            mean, data=TensorDataset(values), batch_size=batch_size, every=EverySteps(1)
        ) as evaluation,
    ):
        job.step()
    assert evaluation.newest is not None
    assert evaluation.newest.metrics["mean"] == pytest.approx(float(values.mean()), rel=1e-12)


def test_a_version_that_is_saved_already_gets_the_record():
    with training(save=EverySteps(10)) as job, job.evaluating():
        for _ in range(11):
            job.step()
    assert exact(job.store) == [(f"version_{n}", {"weight": job.weight(n)}) for n in (10, 11)]


def test_keep_best_stop_when_and_best_see_exact_scores():
    scores = iter([3.0, 1.0, 2.0, 4.0, 5.0])

    def loss(model, batch):
        return {"loss": (next(scores) * 100, 100)}

    keep, stop = KeepBest(1, "loss", mode="min"), StopWhen("loss", patience=2)
    with (
        training(keep=keep | KeepLast(1), stop=stop) as job,
        job.evaluating(loss, batch_size=100, every=EverySteps(2)),
    ):
        while not job.ckpt.should_stop:
            job.step()
            assert job.ckpt.current_step < 20
        assert job.ckpt.current_step == 9, "the step after the fourth score"
        best = Run(job.store).best("loss")
        assert best is not None
        assert best.step == 4


@pytest.mark.parametrize("mode", ["min", "max"])
def test_retention_decides_with_the_score_of_the_last_step(mode):
    with training(keep=KeepBest(1, "weight", mode)) as job, job.evaluating():
        for _ in range(15):
            job.step()
    best = Run(job.store).best("weight", mode)
    assert best is not None
    assert best.step == (10 if mode == "min" else 15)
    assert [s.step for s in Run(job.store).snapshots()] == ([10, 15] if mode == "min" else [15])


def test_random_numbers_and_modes_of_the_training_do_not_change():
    def draw(model, batch):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return {"x": (torch.rand(()), 1)}

    with training() as job, job.evaluating(draw, every=EverySteps(1)) as evaluation:
        job.step()
        job.model.train()
        job.model[1].eval()
        modes = [module.training for module in job.model.modules()]
        torch.manual_seed(1)
        evaluation.step()
        assert evaluation.newest is not None
        drawn = torch.rand(())
        assert [module.training for module in job.model.modules()] == modes
        assert torch.is_grad_enabled()
    torch.manual_seed(1)
    assert drawn == torch.rand(())


def test_current_parameters_are_evaluated_one_batch_before_each_mini_batch():
    steps = []

    def record(model, batch):
        steps.append(job.ckpt.current_step)
        return mean_weight(model, batch)

    with (
        training(save=EverySteps(7)) as job,
        job.evaluating(record, on="current", batch_size=20) as evaluation,
    ):
        for _ in range(16):
            job.step()
        assert steps == [10, 11, 12, 13, 14]
        mean = job.weight(sum(steps) / 5)
        assert inexact(job.store) == [("version_14", 10, 14, {"weight": pytest.approx(mean)})]
        assert evaluation.newest is not None
        assert not evaluation.newest.is_exact


def test_an_inexact_score_never_makes_a_version_the_best_and_never_stops():
    stop = StopWhen("weight", patience=1)
    with training(save=EverySteps(5), stop=stop) as job, job.evaluating(on="current"):
        for _ in range(100):
            job.step()
        job.ckpt.wait()
        run = Run(job.store)
        assert len(inexact(job.store)) >= 3
        assert not job.ckpt.should_stop
        assert run.best("weight") is None
        assert all("weight" not in run.metrics(s.version) for s in run.snapshots())


def test_inexact_scores_that_count_decide_which_version_is_the_best():
    keep = KeepLast(1) | KeepBest(1, "weight")
    with training(save=EverySteps(5), keep=keep) as job, job.evaluating(on="current", counts=True):
        for _ in range(100):
            job.step()
        run = Run(job.store)
        # steps 10 to 29 are evaluated, and then 30 to 49; smaller is better
        assert [v.step for v in run.line()] == [25, 100]
        best = run.best("weight")
        assert best is not None
        assert best.step == 25
        assert run.metrics(25) == {"weight": job.weight(sum(range(10, 30)) / 20)}
        run.add_metrics(25, {"weight": 10.0**9}, "exact")
        late = {"metrics": {"weight": 1.0}, "first_step": 26, "last_step": 30, "counts": True}
        run.put_record(InexactEvaluation, "late", 25, **late)
        assert run.metrics(25) == {"weight": 10.0**9}, "a score of the version itself counts"


@pytest.mark.parametrize("counts", [False, True])
def test_the_state_of_an_inexact_evaluation_has_its_steps(counts, tmp_path):
    url = str(tmp_path / "run")
    with training(url, save=EverySteps(5)) as job, job.evaluating(on="current", counts=counts):
        for _ in range(45):
            job.step()
    status = Run(url).evaluations(25)["val"]
    assert (status.state, status.first_step, status.last_step) == ("INEXACT", 10, 29)
    assert (status.counts, status.cause) == (counts, "")
    assert status.metrics == {"weight": job.weight(sum(range(10, 30)) / 20)}
    shown = run_cli("show", f"{url}@25", "--json").json
    fields = {"first_step": 10, "last_step": 29, "counts": counts}
    assert fields.items() <= shown["evaluations"]["val"].items()
    versions = run_cli("ls", url, "--json").json["versions"]
    [listed] = [v["evaluations"]["val"] for v in versions if v["step"] == 25]
    assert listed == shown["evaluations"]["val"]
    text = run_cli("show", f"{url}@25").out
    assert text.count("steps 10 to 29") == 1
    assert f"steps 10 to 29, {'counts' if counts else 'does not count'})" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("options", "is_used"),
    [
        ({"keep": KeepLast(1) | KeepBest(1, "weight")}, True),
        ({"stop": StopWhen("weight", patience=9)}, True),
        ({"stop": StopWhen("loss", patience=9)}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("counts", [False, True])
def test_a_score_that_a_policy_waits_for_says_why_it_does_not_count(options, is_used, counts):
    missing, lines = list[dict[str, Any]](), list[str | None]()

    def collect(name, fields):
        if name == "metric_missing":
            missing.append(fields)
        if name in ("metric_missing", "training_evaluated"):
            lines.append(describe_event(name, fields))

    with limpet.attach(collect):
        for _ in range(2):  # also of a training that finds the records of an earlier one
            with (
                training(save=EverySteps(5), **options) as job,
                job.evaluating(on="current", counts=counts),
            ):
                for _ in range(30):
                    job.step()
    said = [line for line in lines if line and ("evaluated" in line or "has weight" in line)]
    if counts or not is_used:
        assert said == []
        assert all(fields["inexact"] == [] for fields in missing)
    else:
        assert said[0].startswith("evaluated weight ")
        assert "measured over steps 10 to 29, so it decides neither" in said[0]
        assert "counts=True" in said[0]
        assert "no version has weight" in said[-1]
        assert "counts=True" in said[-1]
        assert [(fields["metrics"], fields["inexact"]) for fields in missing] == [
            (["weight"], ["weight"])
        ] * 2


def last_evaluated_step(store, killed_at, saves, function):
    """Train until the training stops, and return the step. The process is lost in each of the
    steps ``killed_at``, and continues from its last version."""
    stop = StopWhen("loss", patience=3)
    for life, kill in enumerate((*killed_at, None)):
        with suppress(KeyboardInterrupt), training(store, save=saves, stop=stop) as job:
            # an evaluation that is repeated may end at another step than the lost one
            options = {"data": range(2 + life), "batch_size": 1, "counts": True}

            def measure(model, batch, ckpt=job.ckpt):
                return {"loss": (function(ckpt.current_step // 10), 1)}

            with job.evaluating(measure, on="current", **options):
                while not job.ckpt.should_stop:
                    assert job.ckpt.current_step < 200
                    if kill is not None and job.ckpt.current_step >= kill:
                        raise KeyboardInterrupt
                    job.step()
                return job.ckpt.current_step
    raise AssertionError


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 90), max_size=3).map(sorted),
    st.integers(1, 60),
    st.sampled_from([1, 2, 4]),
)
def test_each_inexact_score_is_counted_once_whatever_a_resume_repeats(kills, interval, best):
    """Several evaluations are about one version if saves are rare, and a resume repeats those that
    began after it. The scores of an epoch of 10 steps are equal; ``best`` is the best one."""
    stopped_at = last_evaluated_step(
        MemoryStore(), kills, EverySteps(interval), lambda n: 0.0 if n == best else 1.0 + n
    )
    assert stopped_at // 10 == best + 3


@pytest.mark.parametrize("keep", [False, True])
def test_the_state_is_kept_on_request_and_if_there_is_no_version(keep):
    with training() as job, job.evaluating(on="current", keep=keep, batch_size=20):
        for _ in range(30):
            job.step()
    weights = [[float(s["model/0.weight"][0, 0][()])] for s in Run(job.store).snapshots()]
    if keep:
        assert [r[:3] for r in inexact(job.store)] == [
            ("version_14", 10, 14), ("version_24", 20, 24), ("version_30", 30, 30)
        ]  # fmt: skip
        assert weights == [[14.0], [24.0], [30.0]], "the parameters of the last batch"
    else:
        found = [r[:3] for r in inexact(job.store)]
        assert found == [("version_14", 10, 14), ("version_14", 20, 24), ("version_14", 30, 30)]


def test_an_inexact_record_is_about_the_first_version_while_it_is_written():
    """It requests no other one."""
    store = HookedStore(MemoryStore())
    with training(store, save=EverySteps(12), at_end=False) as job:
        ended = threading.Event()

        def wait_until_evaluated(method, key):
            if method == "put_if_absent" and key == "version_12/manifest.json":
                ended.wait(0.2)  # the evaluation, which ends after step 14, waits for this save

        store.before = wait_until_evaluated
        with patch.object(job.ckpt, "wait"), job.evaluating(on="current", batch_size=20):
            for _ in range(15):
                job.step()
            ended.set()
    assert [r[:3] for r in inexact(store)][:1] == [("version_12", 10, 14)]
    assert [s.step for s in Run(store).snapshots()] == [12]


@pytest.mark.parametrize("on", ["current", "paused"])
def test_a_step_is_evaluated_once_with_any_number_of_mini_batches(on):
    """B 50: version 10 starts, and 10 again is ignored."""
    calls: list[int] = []

    def count(model, batch):
        calls.append(job.ckpt.current_step)
        return {"n": (1, 1)}

    with training() as job, job.evaluating(count, on=on, batch_size=50):
        for _ in range(25):
            job.step(mini_batches=3)
    assert calls == [10, 10, 20, 20, 25, 25]


def test_what_is_due_while_an_evaluation_runs_follows_and_becomes_one():
    """B 50 and C8: 20 and 30 wait for the evaluation of 10, and stale ones coalesce."""
    with training(save=EverySteps(1)) as job, job.evaluating(on="current"):
        for _ in range(60):
            job.step()
    steps = [(first, last) for _, first, last, _ in inexact(job.store)]
    assert steps == [(10, 29), (30, 49), (50, 60), (60, 60)], "20 batches each"


def test_a_loader_that_reads_ahead_does_not_evaluate():
    """The cause that seeds/003 names: only the step asks for evaluation tasks."""
    calls = []

    def count(model, batch):
        calls.append(job.ckpt.current_step)
        return {"n": (1, 1)}

    loader = DataLoader(DATA, batch_size=5, num_workers=1, prefetch_factor=8)
    with training() as job, job.evaluating(count, on="current", every=EverySteps(2)):
        for _ in loader:
            before = len(calls)
            job.step()
            assert len(calls) - before <= 1
    assert calls[:19] == [*range(2, 20), 20][:19]


def test_the_last_step_of_a_loop_that_never_calls_step_is_evaluated():
    with training() as job, job.evaluating(every=EverySteps(2) | AtEnd()):
        for _ in range(4):
            job.ckpt.step()
    assert [record[0] for record in exact(job.store)] == ["version_4"]


def test_a_result_that_is_no_metric_is_named_once_with_its_records():
    with training() as job, job.evaluating(lambda model, batch: 0.5, on="paused"):
        with pytest.raises(LimpetError) as e:
            for _ in range(30):
                job.step()
        text = str(e.value)
        assert text.count("records 0 to ") == text.count("at step 10:") == 1, text
        assert ".." not in text


@pytest.mark.parametrize("on", ["current", "paused"])
def test_an_error_records_nothing_and_names_the_records_and_the_step(on):
    def fail(model, batch):
        if batch[0][0].equal(DATA[40][0]):
            raise ZeroDivisionError("one bad batch")
        return mean_weight(model, batch)

    at_end = pytest.raises(LimpetError, match=r"records 40 to 44 at step 1[19].*one bad")
    with ends() as ended, at_end, training() as job, job.evaluating(fail, on=on):
        job.model.train()
        with pytest.raises(LimpetError, match=r"records 40 to 44 at step 1[08].*one bad") as e:
            for _ in range(30):
                job.step()
        assert isinstance(e.value.__cause__, ZeroDivisionError)
        assert all(module.training for module in job.model.modules())
        assert torch.is_grad_enabled()
        job.step()
        assert job.ckpt.current_step == (11 if on == "paused" else 20) - (on == "current")
    assert [e["state"] for e in ended] == ["FAILED", "FAILED"]
    assert inexact(job.store) == exact(job.store) == []
    saved = [s.step for s in Run(job.store).snapshots()]
    assert saved == ([11] if on == "paused" else []), "it was to be saved in any case"


@pytest.mark.parametrize("on", ["current", "paused"])
def test_a_notice_leaves_nothing_half_recorded_and_the_resume_evaluates_again(on):
    store, calls = MemoryStore(), list[int]()

    def interrupted(model, batch):
        calls.append(job.ckpt.current_step)
        if len(calls) == 2:
            job.ckpt._preemption.on_notice(Notice("test"))
        return mean_weight(model, batch)

    options = {"preemption": limpet.Preemption(notices=[]), "save": EverySteps(10**9)}
    with (
        ends() as ended,
        pytest.raises(Preempted),
        training(store, **options) as job,
        job.evaluating(interrupted, on=on, batch_size=20),
    ):
        for _ in range(30):
            job.step()
    assert [(e["state"], e["first_step"]) for e in ended] == [("ABANDONED", 10)]
    assert len(calls) <= 3
    assert inexact(store) == exact(store) == []
    last = Run(store).snapshots()[-1].step
    assert last is not None
    with training(store) as job, job.evaluating(on=on, batch_size=20) as evaluation:
        for _ in range(8):
            job.step()
        assert evaluation.newest is not None
        assert evaluation.newest.first_step == last


@pytest.mark.parametrize("on", ["current", "paused"])
@pytest.mark.parametrize("last_step", [10, 14, 19])
def test_a_resume_does_not_repeat_a_finished_evaluation(on, last_step):
    store = MemoryStore()
    finished = last_step >= 14 or (on == "paused" and last_step >= 10)
    with (
        pytest.raises(KeyboardInterrupt),
        training(store, keep=KeepLast(1)) as job,
        job.evaluating(on=on, batch_size=20) as evaluation,
    ):
        while job.ckpt.current_step < last_step:
            job.step()
        evaluation.step()
        job.ckpt.save()
        raise KeyboardInterrupt
    with training(store, keep=KeepLast(1)) as job, job.evaluating(on=on, batch_size=20) as again:
        assert job.ckpt.current_step == last_step
        again.step()
        assert (again._share is None and again.newest is None) == finished
        while job.ckpt.current_step < 26:
            job.step()
        assert again.newest is not None
        assert again.newest.first_step == 20


def test_two_evaluations_with_two_names_are_independent():
    store = MemoryStore()
    with training(store) as job:
        first = job.evaluating(name="first", every=EverySteps(4))
        with first, job.evaluating(name="second", every=EverySteps(6)) as second:
            for _ in range(13):
                first.step()
                job.step()
            job.ckpt.save()
    with training(store) as job:
        first = job.evaluating(name="first", every=EverySteps(4))
        with first, job.evaluating(name="second", every=EverySteps(6)) as second:
            first.step()
            job.step()
            assert first.newest is second.newest is None
    assert [version for version, _ in exact(store)] == [
        f"version_{n}" for n in (4, 6, 8, 12, 12, 13, 13, 14, 14)
    ]


@settings(derandomize=True, max_examples=25)
@given(
    st.lists(st.sampled_from([1, 3, 8, 14, "save", "crash", "end"]), max_size=8),
    st.sampled_from(["paused", "current"]),
)
def test_whatever_ends_the_training_each_evaluation_is_recorded_once(actions, on):
    store, step, last = MemoryStore(), 0, set[int]()
    parts = list[list[Any]]([[]])
    for action in [*actions, "end"]:
        parts[-1].append(action)
        if action in ("crash", "end"):
            parts.append([])
    for part in parts[:-1]:
        try:
            with training(store) as job, job.evaluating(on=on, batch_size=20):
                for action in part:
                    if action == "save":
                        job.ckpt.save()
                    elif action == "crash":
                        raise KeyboardInterrupt
                    for _ in range(action if isinstance(action, int) else 0):
                        job.step(mini_batches=2)
                step = job.ckpt.current_step
                if action == "end":
                    job.ckpt.save()
                    last.add(step)
        except KeyboardInterrupt:
            pass
    if on == "paused":
        found = exact(store)
        for version, metrics in found:
            assert metrics == {"weight": job.weight(int(version.removeprefix("version_")))}
        evaluated = [int(version.removeprefix("version_")) for version, _ in found]
    else:
        evaluated = [first for _, first, _, _ in inexact(store)]
        assert exact(store) == []
        assert all(first <= last < first + 10 for _, first, last, _ in inexact(store))
    due = {*range(10, step + 1, 10), *last} - {0}
    assert {n // 10 for n in due} <= {n // 10 for n in evaluated}, "none is missing"
    if on == "paused" or "crash" not in actions:  # else, steps that were lost are made again
        assert sorted(evaluated) == sorted(due), "and none is repeated"


def test_a_crash_between_the_version_and_its_record_repeats_the_evaluation():
    store = HookedStore(MemoryStore())

    def fail(method, key):
        if "eval-val" in key and method == "put_if_absent":
            raise Unavailable("no answer")

    store.before = fail
    with pytest.raises(Unavailable), training(store) as job, job.evaluating():
        for _ in range(11):
            job.step()
    store.before = lambda method, key: None
    assert [s.step for s in Run(store).snapshots()] == [10]
    assert exact(store) == []
    with training(store) as job, job.evaluating():
        job.step()
    assert exact(store) == [(f"version_{n}", {"weight": job.weight(n)}) for n in (10, 11)]


@pytest.mark.parametrize("on", ["paused", "current"])
@pytest.mark.parametrize("every", [AtEnd(), EverySteps(10)])
def test_a_crash_after_the_last_step_does_not_lose_the_last_evaluation(on, every):
    """The resumed training makes no step."""
    store, error = MemoryStore(), pytest.raises(ZeroDivisionError)
    with error, training(store, save=EverySteps(10)) as job, job.evaluating(on=on, every=every):
        for _ in range(10):
            job.step()
        raise ZeroDivisionError
    for _ in range(2):
        with training(store, save=EverySteps(10)) as job, job.evaluating(on=on, every=every):
            assert job.ckpt.current_step == 10
    metrics = {"weight": job.weight(10)}
    if on == "paused":
        assert exact(store) == [("version_10", metrics)]
    else:
        assert inexact(store) == [("version_10", 10, 10, metrics)]


def test_going_back_abandons_the_evaluation_in_progress():
    with ends() as ended, training(save=EverySteps(5)) as job, job.evaluating(on="current"):
        for _ in range(15):
            job.step()
        job.ckpt.resume(at=5)
        job.step()
        job.step()
        assert job.evaluation._share is None
    assert [(e["state"], e["first_step"]) for e in ended] == [("ABANDONED", 10), ("INEXACT", 7)]


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("every", Never(), "every="), ("every", 10, "every="),
        ("every", limpet.OnException(), "every="), ("every", limpet.OnPreemption(), "every="),
        ("on", "version", "on="),
        ("batch_size", 0, "batch_size="), ("batch_size", True, "batch_size="),
        ("keep", True, "keep="), ("counts", True, "always count"),
        ("data", [], "is empty"), ("data", iter([1]), "map-style"),
        ("name", "a b", "must be 1 to 64"), ("name", "metrics", "must be another one"),
        ("function", "evaluate", "evaluate="),
    ],
)  # fmt: skip
def test_an_invalid_argument_is_an_error(option, value, match):
    with training() as job, pytest.raises(LimpetError, match=match):
        job.evaluating(**{option: value})


def test_it_must_be_entered_and_the_checkpointer_open():
    with training() as job:
        job.evaluating()
        with pytest.raises(LimpetError, match="outside of its `with` block"):
            job.step()
        with job.evaluation as evaluation:
            job.step()
        with pytest.raises(LimpetError, match="outside of its `with` block"):
            evaluation.step()
        with pytest.raises(LimpetError, match="used before"), evaluation:
            pass
        late = job.evaluating()
    with late, pytest.raises(LimpetError, match="closed"):
        late.step()
