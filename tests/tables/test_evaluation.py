"""Evaluation inside a training with tables, by its workers: exact while the training goes on."""

import pytest
import torch

import limpet
from limpet import tables
from tests.tables.test_training import add_records, count_records, counting_table, seen
from tests.training.test_training_evaluation import exact

RECORDS, EVALUATED = 400, 60


def make_dense():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), 1.0)


class Training:
    """A training whose state shows its ledger: the sum of the rows is the number of records that
    were consumed, and the dense weight is the number of steps."""

    def __init__(self, run, *, servers=2, workers=2, options=None, records=RECORDS, **more):
        self.run, self.workers, self.records = run, workers, records
        self.queue = limpet.tasks.Queue()
        add_records(self.queue, records)
        self.servers = tables.Servers(
            [counting_table()], servers, dense=make_dense, **(options or {})
        )
        state = {"tables": self.servers, "queue": self.queue, "progress": limpet.Progress()}
        more = {"save": limpet.EverySteps(1000), **more}
        self.ckpt = limpet.Checkpointer(run, state, **more)
        self.modes, self.evaluated_at = set(), []

    def train(self, worker):
        model = torch.nn.Linear(1, 1)
        worker.dense(model)
        while (records := worker.next(5, evaluate=self.evaluate(worker, model))) is not None:
            assert model.training
            assert not worker.tables.cut
            count_records(worker, records)
            (-model.weight.sum()).backward()
            worker.step()

    def evaluate(self, worker, model):
        module = tables.Embedding(worker.tables, "seen")

        def evaluate(records):
            self.modes.add((model.training, torch.is_grad_enabled()))
            self.evaluated_at.append(self.ckpt.current_step)
            torch.rand(3)
            ids = [i for i in range(self.records) if i % EVALUATED in records]
            return self.metrics(module(torch.tensor(ids)).sum(), model, records)

        return evaluate

    def metrics(self, found, model, records):
        return {
            "seen": (float(found), 1 / EVALUATED * len(records)),
            "weight": (float(model.weight.detach()) * len(records), len(records)),
        }

    def __call__(self, *, on="cut", every=10, **options):
        options = {"data": EVALUATED, "batch_size": 1, "name": "val", **options}
        self.evaluation = limpet.TrainingEvaluation(
            self.ckpt, every=limpet.EverySteps(every), queue=self.queue, on=on, **options
        )
        with self.ckpt, self.evaluation:
            self.ckpt.resume()
            self.servers.train(
                self.train, workers=self.workers, queue=self.queue, ckpt=self.ckpt,
                evaluation=self.evaluation,
            )  # fmt: skip
        return self

    @property
    def is_released(self):
        return all(not server._held for server in self.servers.servers)


def saved(run, version):
    """What a separate program finds in a version."""
    servers = tables.Servers([counting_table()], 3)
    loaded = limpet.load(f"{run}/{version}", into={"tables": servers}, unexpected="ignore")
    assert loaded is not None
    weight = int(version.removeprefix("version_"))  # each step adds 1
    return float(sum(seen(servers, RECORDS))), weight


@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 2}], ids=str)
@pytest.mark.parametrize("on", ["cut", "paused"])
def test_exact_metrics_are_those_of_the_version_of_the_step(tmp_path, on, options):
    """B 47, B 48."""
    training = Training(tmp_path, options=options)(on=on)
    found = exact(tmp_path)
    assert len(found) >= 2
    for version, metrics in found:
        assert (metrics["seen"], metrics["weight"]) == pytest.approx(saved(tmp_path, version))
    assert training.modes == {(False, False)}
    assert seen(training.servers, RECORDS) == [1] * RECORDS
    assert training.is_released
    assert found[-1][0] == f"version_{training.ckpt.current_step}"
    assert found[-1][1]["seen"] == pytest.approx(RECORDS)
