"""The states of many libraries: training continues with the same bits, or the state is refused.

Two processes for each family of libraries: see ``tests/zoo/worker.py``.
"""

import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.waiting import run_process
from tests.zoo.worker import MODULES

ROOT = Path(__file__).parents[2]
FAMILIES: dict[str, dict[str, int]] = {
    "torch": {"torch optimizers": 32, "torch schedulers": 22, "torch modules": 20},
    "vision": {"torchvision": 8, "timm": 16},
    "language": {"transformers": 20, "peft": 9},
    "tools": {
        "lightning": 3, "accelerate": 3, "torchmetrics": 9, "schedulefree": 10, "torch_ema": 2,
        "torchao": 6,
    },
}  # fmt: skip
"""By family, which shares two processes: its groups, and how many states each has at least. The
name of a group begins with that of the package that it needs."""

NOT_PLAIN = "it is not a tensor, an array, or a plain value"
REFUSED = {
    "transformers: TrainerState": NOT_PLAIN,
    "transformers: config": NOT_PLAIN,
    "torchmetrics: running mean": "'metric' has a RunningMean that would be lost: torchmetrics"
    " keeps a part of it outside of state_dict(). Save an object whose state_dict()",
    "torchmetrics: min and max": "'metric' has a MinMaxMetric that would be lost",
    "torchmetrics: mean, not persistent": "'metric' has a MeanMetric that would be lost: its"
    " state_dict() omits mean_value, weight, because these states are not persistent. Call"
    " persistent(True) of the MeanMetric and of the metrics in it, here and before a load.",
    # it adds a metric for each step, and a new one has none
    "torchmetrics: tracker": "does not fit the live state; nothing was changed. 2 unexpected in the"
    " snapshot: metric/1.sum_squared_error, metric/1.total",
    "schedulefree: ScheduleFreeWrapper": "'optimizer' has a ScheduleFreeWrapper that would be"
    " lost: its state_dict() omits whether the model has the weights of training or evaluation."
    " Call its eval() before the save",
}
"""By state: a part of the message with which the state is refused."""


def run_both(groups, folder):
    """Return the outcomes of the process that saves and of the one that resumes."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.zoo.worker", str(folder), *groups]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = run_process(command, 900, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{mode}.json").read_text()) for mode in ("save", "resume")]


def problem_of(saved, resumed, refusal):
    """Return what is wrong with a state, or None."""
    for outcome in (saved, resumed):
        if "error" in outcome:
            return str(outcome["error"])
    refused = saved.get("refused") or resumed.get("refused")
    if refusal is not None or refused is not None:
        if refusal is None or refusal not in (refused or ""):
            return f"expected to be refused with: {refusal}; found: {refused}"
        return None
    if resumed["created"] == saved["saved"]:
        return "a new training already equals the saved one, so the load proves nothing"
    for moment in ("saved", "ended"):
        first, second = saved[moment], resumed[moment]
        different = [p for p in {**first, **second} if first.get(p) != second.get(p)]
        if different:
            return f"different when {moment}: {different[:5]}"
    return None


def is_installed(group):
    package = group.partition(" ")[0]
    return importlib.util.find_spec(package) is not None or (ROOT / ".zoo" / package).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_process_continues_with_the_same_bits(family, tmp_path):
    groups = [group for group in FAMILIES[family] if is_installed(group)]
    saved, resumed = run_both(groups, tmp_path)
    assert [*saved] == [*resumed]
    counts = Counter(name.partition(": ")[0] for name in saved)
    assert [g for g in groups if counts[g] < FAMILIES[family][g]] == []
    assert [r for r in REFUSED if r.partition(": ")[0] in groups and r not in saved] == []
    problems = {name: problem_of(saved[name], resumed[name], REFUSED.get(name)) for name in saved}
    assert {name: problem for name, problem in problems.items() if problem is not None} == {}
    if missing := FAMILIES[family].keys() - {*groups}:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}; the rest passed")


def test_the_zoo_finds_a_difference():
    state = {"created": {"a": "0"}, "saved": {"a": "1"}, "ended": {"a": "2"}}
    assert problem_of(state, state, None) is None
    assert "proves nothing" in str(problem_of(state, {**state, "created": {"a": "1"}}, None))
    assert "different when saved" in str(problem_of(state, {**state, "saved": {"a": "0"}}, None))
    assert "different when ended" in str(problem_of(state, {**state, "ended": {}}, None))
    assert "found: no" in str(problem_of({"refused": "no"}, state, None))
    assert "found: None" in str(problem_of(state, state, "is a Metric"))
    assert problem_of(state, {"refused": "x is a Metric"}, "is a Metric") is None


def test_the_zoo_has_sixty_states():
    assert sum(sum(groups.values()) for groups in FAMILIES.values()) >= 60
    assert {g for groups in FAMILIES.values() for g in groups} == MODULES.keys()
