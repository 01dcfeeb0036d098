"""The events that the tests send to the sinks, and fake destinations."""

import io
import json
import sys
import types
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import torch

from limpet import sinks
from limpet.errors import NoSpace

SAVED: dict[str, Any] = {
    "run": "runs/a",
    "version": "version_1300",
    "step": 1300,
    "reason": "cadence",
    "bytes": 1_407_374_883,
    "referred": 0,
    "blocked": 0.0123,
    "seconds": 2.31,
    "metrics": {"loss": 0.25123, "accuracy": 0.91},
}
NO_SPACE = NoSpace("No space for shard-0", expected="4096 bytes", found="1024", todo="Free space")
EVENTS: dict[str, dict[str, Any]] = {
    "saved": SAVED,
    "save_failed": {"run": "runs/a", "step": 1400, "error": NO_SPACE},
    "save_waited": {"run": "runs/a", "step": 1400, "seconds": 1.2},
    "began": {"run": "runs/a"},
    "stopped": {"run": "runs/a", "step": 1500, "metric": "val_loss", "best": 0.231234},
    "resume_checked": {
        "run": "runs/a",
        "url": "runs/a/version_1200",
        "bytes": 1_407_374_883,
        "seconds": 0.21,
    },
    "resume_differs": {
        "run": "runs/a",
        "url": "runs/a/version_1200",
        "differing": ["scaler/scale", "tracker/values"],
    },
    "config_changed": {
        "run": "runs/a",
        "url": "runs/a/version_1200",
        "changes": ["lr 0.001 -> 0.0001", "dropout 0.1 (new)"],
    },
    "options_replaced": {
        "run": "runs/a",
        "url": "runs/a/version_1200",
        "options": ["lr: the script has 0.0001, had 0.001; the version's 0.00042 is in use"],
    },
    "finished": {"run": "runs/a", "step": 1512, "saved": 1500, "new": True, "reason": "finished",
                 "error": None},
    "left_unsaved": {"run": "runs/a", "step": 1512, "since": 1500},
    "taken_over": {"run": "runs/a", "step": 1512, "saved": 1500},
    "resumed": {"url": "runs/a/version_1200", "step": 1200, "branch": 0,
        "changes": ["64 samples per step, was 128"]},
    "skipped": {"version": "version_1250", "error": NO_SPACE},
    "deleted": {"version": "version_1000"},
    "pin_left": {"key": "pin-1.json", "store": "runs/a", "error": "timeout"},
    "read_again": {"store": "s3://b/runs/a", "error": NO_SPACE},
    "waiting": {
        "store": "s3://b/runs/a",
        "action": "write manifest.json",
        "error": NO_SPACE,
        "seconds": 290.0,
    },
    "worker_lost": {"worker": "worker 3", "error": "worker 3 was lost: it hangs"},
    "server_lost": {"run": "runs/a", "servers": "server 1", "error": "server 1 was lost"},
    "read_alone": {"url": "runs/a/version_1200", "reason": "rank 2 cannot map it"},
    "metrics_unwritten": {"run": "runs/a", "error": NO_SPACE},
    "request_unseen": {"store": "runs/a", "error": "timeout"},
    "not_agreed": {"wanted": ["save 3", "stop"], "error": "Rank 2 has died"},
    "ranks_awaited": {
        "what": "the save of version_5",
        "ranks": [3, 5],
        "count": 6,
        "seconds": 31.2,
        "longest": 600.0,
        "first": True,
        "todo": "Call it on all ranks",
    },
    "notice": {"source": "SIGTERM", "seconds": 29.8},
    "preempted": {
        "run": "runs/a", "step": 1512, "saved": 1500, "code": 76, "source": "SIGTERM",
        "seconds_left": 3.1, "error": NO_SPACE,
    },
    "notice_source_failed": {"source": "the AWS metadata server", "error": "timeout"},
    "platform_detected": {"sources": ["the AWS metadata server", "Slurm's time limit"]},
    "staged": {"url": "runs/a/version_1300", "bytes": 1, "seconds": 0.1},
}  # fmt: skip


class RecordingStream(io.StringIO):
    """A stream that records each call of ``write``."""

    def __init__(self, is_terminal=False, encoding="utf-8"):
        super().__init__()
        self.writes: list[str] = []
        self.flushes = 0
        self._is_terminal, self._encoding = is_terminal, encoding

    encoding = property(lambda self: self._encoding)

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        text.encode(self._encoding)  # raises an error where a file would
        self.writes.append(text)
        return super().write(text)

    def flush(self):
        self.flushes += 1


class FakeSummaryWriter(list):
    def add_scalar(self, tag, scalar_value, global_step):
        assert type(scalar_value) is float
        assert type(global_step) is int
        self.append((tag, scalar_value, global_step))


class FakeWandbRun:
    """What the sink uses of a ``wandb.Run``. The program itself calls ``commit``."""

    def __init__(self):
        self.step, self.rows, self.summary, self.defined = 0, [{}], {}, []

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, point, commit):
        assert not commit  # the steps of the program's own rows would change
        assert all(type(v) in (float, int, str) for v in point.values())
        self.rows[-1].update(point)

    def commit(self):
        self.step += 1
        self.rows.append({})


class FakeMlflowClient:
    """What the sink uses of an ``MlflowClient``."""

    def __init__(self):
        self.metrics, self.tags = [], {}

    def log_batch(self, run_id, metrics, tags, synchronous):
        assert (run_id, synchronous) == ("id", False)
        assert all(type(value) is float for _, value, *_ in metrics)
        assert all(type(value) is str for _, value in tags)
        self.metrics += [(key, value, step) for key, value, _, step in metrics]
        self.tags |= tags


def make_mlflow_sink(client):
    """Return the sink as if MLflow were installed."""
    entities = types.SimpleNamespace(Metric=lambda *args: args, RunTag=lambda *args: args)
    modules = {"mlflow": types.ModuleType("mlflow"), "mlflow.entities": entities}
    with mock.patch.dict(sys.modules, modules):
        return sinks.MLflow(client, "id")


def read_json_lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class BrokenRepr:
    shape = (3,)

    def __repr__(self):
        raise RuntimeError("repr failed")


circular_list: list[Any] = []
circular_list.append(circular_list)
ODD_VALUES = [
    None, True, -1, 10**5000, float("nan"), -float("inf"), "", "\x1b[31m\n\udcff\u5dee",
    b"x" * 9999, np.float32(0.5), np.arange(3), torch.tensor(2.5), torch.zeros(2, 3),
    torch.empty(1, device="meta"), {1: {(2, 3): {4}}}, circular_list, BrokenRepr(), BrokenRepr,
    NO_SPACE,
    ValueError(), [[[[[[[[[[[[1]]]]]]]]]]]], object(),
]  # fmt: skip
nested_odd_values = st.recursive(
    st.integers(0, len(ODD_VALUES) - 1).map(lambda n: ODD_VALUES[n])
    | st.text()
    | st.floats()
    | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)
