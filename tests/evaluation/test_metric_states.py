"""Metrics of parts of the data, merged, equal the metrics of all of it (BEHAVIOURS B 46, 51)."""

import json
from itertools import pairwise
from math import inf, isnan, nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MeanSquaredError, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from limpet.errors import LimpetError
from limpet.evaluation.metric_states import MetricStates, compute


def through_json(state):
    return json.loads(json.dumps(state))


def merged(parts):
    """The metrics of several tasks, each of several batches."""
    templates: dict[str, Any] = {}
    states = []
    for batches in parts:
        collected = MetricStates(templates)
        for batch in batches:
            collected.add(batch, "evaluate()")
        states.append(through_json(collected.to_plain()))
    return compute(states, templates)


def test_46_batches_of_different_sizes_are_weighted():
    labels, outputs = [[1, 0, 0], [0]], [[5, 4, 2], [0]]

    def batch(i):
        right = sum(a == b for a, b in zip(labels[i], outputs[i], strict=True))
        squares = sum((a - b) ** 2 for a, b in zip(labels[i], outputs[i], strict=True))
        return {"acc": (right, len(labels[i])), "mse": (squares, len(labels[i]))}

    assert merged([[batch(0)], [batch(1)]]) == {"acc": 0.25, "mse": (16 + 16 + 4) / 4}
    assert merged([[batch(0), batch(1)]]) == merged([[batch(1)], [batch(0)]])


METRICS: dict[str, Any] = {
    "accuracy": lambda: MulticlassAccuracy(3, average="macro"),
    "f1": lambda: MulticlassF1Score(3, average="weighted"),
    "auroc": BinaryAUROC,
    "binned auroc": lambda: BinaryAUROC(thresholds=50),
    "mse": MeanSquaredError,
    "mean": MeanMetric,
    "max": MaxMetric,
}


def update(name, metric, rows):
    if name in ("accuracy", "f1"):
        metric.update(rows[:, :3], rows[:, 3].abs().mul(10).long() % 3)
    elif "auroc" in name:
        metric.update(rows[:, 0].sigmoid(), (rows[:, 1] > 0).long())
    elif name == "mse":
        metric.update(rows[:, 0], rows[:, 1])
    else:
        metric.update(rows[:, 0])


@pytest.mark.filterwarnings("ignore:No (negative|positive) samples")
@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=25, derandomize=True)
@given(sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=5))
def test_51_any_partition_of_the_data_gives_the_metric_of_all_of_it(name, sizes):
    data = torch.randn(sum(map(sum, sizes)), 4, generator=torch.Generator().manual_seed(len(sizes)))
    whole = METRICS[name]()
    update(name, whole, data)
    rows = iter(data.split([size for part in sizes for size in part]))
    kept = METRICS[name]()  # one metric for all batches, or one for each
    parts = []
    templates: dict[str, Any] = {}
    for part in sizes:
        collected = MetricStates(templates)
        for number, _ in enumerate(part):
            metric = kept if number % 2 else METRICS[name]()
            update(name, metric, next(rows))
            collected.add({name: metric}, "evaluate()")
        parts.append(through_json(collected.to_plain()))
    assert compute(parts, templates)[name] == pytest.approx(
        whole.compute().item(), rel=1e-5, abs=1e-5
    )


@settings(max_examples=100, derandomize=True)
@given(
    pairs=st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(1, 1000)), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    seed=st.randoms(use_true_random=False),
)
def test_sums_do_not_depend_on_the_order_of_tasks(pairs, cuts, seed):
    bounds = sorted({0, len(pairs), *(cut for cut in cuts if cut < len(pairs))})
    batches = [{"x": pair} for pair in pairs]
    parts = [batches[a:b] for a, b in pairwise(bounds)]
    expected = merged(parts)
    seed.shuffle(parts)
    assert merged(parts) == expected


def test_a_metric_of_some_batches_only_is_merged_over_these():
    parts = [[{"a": (1, 1)}], [{"a": (3, 1), "b": (4, 2)}], [{"b": (0, 2)}]]
    assert merged(parts) == {"a": 2.0, "b": 1.0}


def test_numbers_of_every_kind_are_accepted():
    values = {"t": (torch.tensor(2.5), torch.tensor(1)), "i": [3, 1], "f": (torch.ones(1), 2)}
    assert merged([[values]]) == {"t": 2.5, "i": 3.0, "f": 0.5}


@pytest.mark.parametrize(("total", "is_right"), [(nan, isnan), (inf, inf.__eq__)])
def test_nan_and_infinity_are_values(total, is_right):
    assert is_right(merged([[{"x": (total, 1)}], [{"x": (1.0, 1)}]])["x"])
    assert isnan(merged([[{"x": (inf, 1)}], [{"x": (-inf, 1)}]])["x"])


class Averaged(Metric):
    """A metric whose state is an average over parts of the data, whatever their sizes."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, values):
        self.value = values.mean()

    def compute(self):
        return self.value


def averaged():
    metric = Averaged()
    metric.update(torch.ones(3))
    return metric


def cat():
    metric = CatMetric()
    metric.update(torch.ones(3))
    return metric


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "found nothing"),
        ({}, "did not return metrics"),
        (0.5, "found 0.5"),
        ({"loss": 0.5}, "found 0.5 for loss"),
        ({"loss": (1, 2, 3)}, "for loss"),
        ({"loss": ("a", 1)}, "other than a number for loss"),
        ({"loss": (torch.ones(3), 3)}, "other than a number for loss"),
        ({1: (1, 1)}, "the name 1"),
        ({"loss": (0.0, 0)}, "loss has no samples"),
        ({"x": averaged()}, "x cannot be merged exactly"),
        ({"x": cat()}, "other than a number for x"),
    ],
)
def test_what_is_no_metric_is_refused(returned, message):
    with pytest.raises(LimpetError, match=message):
        merged([[returned]])
