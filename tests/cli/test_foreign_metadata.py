"""Another program may have written a version's metadata and records. No command and no call raises
anything but an error of Limpet, and wrong values are never compared or shown as metrics."""

from contextlib import suppress
from functools import partial
from itertools import count

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError
from limpet.format.names import MANIFEST, lease_name
from limpet.run import lease
from limpet.run.policy import KeepBest, KeepEvery
from limpet.run.run import Run
from tests.cli.invoke import run_cli
from tests.forging import seal, sealed_content

pytestmark = pytest.mark.filterwarnings("ignore::limpet.errors.SkippedVersion")

HUGE = {"int": "0x" + "f" * 400}
VALUES = [
    None, True, 1.5, HUGE, {"float": "x"}, 1 << 70, "x", {}, {"nope": 1}, {"dict": None},
    {"dict": {"m": "x"}}, {"dict": {"m": None}}, {"dict": {"m": {"float": "nan"}}},
    {"dict": {"m": {"dict": {}}}}, {"list": [{"list": [HUGE, None]}]}, {"items": [[1, 2]]},
    {"bytes": "AAA="}, {"tensor": ["float32", [1]]},
]  # fmt: skip
FIELDS = [
    (), ("reason",), ("metrics",), ("note",), ("statistics",), ("training",), ("objectives",),
    ("devices",), ("resharded",), ("training", "sessions"), ("training", "trained_seconds"),
    ("training", "stop"), ("objectives", "m"), ("config",), ("config", "m"),
]  # fmt: skip
_numbers = count()


def change(store, key, edit):
    """Edit an object, which keeps a valid digest."""
    document = sealed_content(store.get(key, 1 << 20))
    edit(document)
    store.delete(key)
    store.put_if_absent(key, seal(document))


def set_metadata(document, path, value):
    if not path:
        document["metadata"] = value
        return
    node = document["metadata"]["dict"]
    for name in path[:-1]:
        node = node.setdefault(name, {"dict": {}})["dict"]
    node[path[-1]] = value


def use_everything(url):
    """Call everything that reads metadata; return the number of calls that succeeded."""
    run, number = Run(url), f"{url}-{next(_numbers)}"

    def show_all():
        for snapshot in run.snapshots():
            _ = snapshot.metadata, repr(snapshot), snapshot.tree

    def resume(**at):
        state = {"x": np.zeros(3)}
        policy = limpet.StopWhen("m", patience=3, mode="min")
        with limpet.Checkpointer(
            url, state, save=limpet.Never(), stop=policy, config={"m": 1}
        ) as ckpt:
            ckpt.resume(**at)

    calls = [
        show_all,
        lambda: run.metrics(20),
        run.records,
        lambda: run.best("m", mode="min"),
        lambda: limpet.open(f"{url}@best"),
        lambda: limpet.load(f"{url}@20"),
        run.ended,
        lambda: run.evaluations(20),
        lambda: run.retain(KeepBest(9, "m", mode="min") | KeepEvery(seconds=1)),
        lambda: resume(at=20),
        resume,
    ]
    done = 0
    for call in calls:
        with suppress(LimpetError):
            call()
            done += 1
    for command in (
        ("ls", url), ("ls", url, "--json"), ("show", f"{url}@20"), ("show", f"{url}@20", "--json"),
        ("diff", f"{url}@10", f"{url}@20"), ("diff", f"{url}@10", f"{url}@20", "--json"),
        ("verify", url), ("copy", url, number), ("sweep", url), ("rm", url, "20"),
        ("reshard", f"{url}@30", f"{number}-r", "--shards", "2"),
    ):  # fmt: skip
        result = run_cli(*command)  # raises what is no error of Limpet
        assert result.code in (0, 1, 3, 4, 8), (command, result)
        if result.code not in (0, 1, 8):
            assert result.err or result.out
        done += result.code == 0
    return done


@pytest.fixture
def url(empty_url):
    with Run(empty_url).writer() as writer:
        for step in (10, 20, 30):
            writer.save({"x": np.arange(3.0)}, step=step, metrics={"m": -step})
    return empty_url


@pytest.mark.slow
@pytest.mark.parametrize("path", FIELDS, ids="/".join)
def test_any_value_in_the_metadata(path, url):
    """Two versions of three have it, one of them the newest."""
    store, done = Run(url).store, []
    for value in VALUES:
        to = f"{url}-{next(_numbers)}"
        other = Run(to).store
        for stat in store.list(""):
            other.put_if_absent(stat.key, store.get(stat.key, 1 << 20))
        for version in (20, 30):
            key = f"version_{version}/{MANIFEST}"
            change(other, key, lambda d, value=value: set_metadata(d, path, value))
        done.append(use_everything(to))
    assert max(done) > 15


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_only_numbers_are_metrics(value, url):
    store = Run(url).store
    change(store, f"version_30/{MANIFEST}", lambda d: set_metadata(d, ("metrics",), value))
    for snapshot in Run(url).snapshots():
        if snapshot.step == 30:
            assert {*map(type, snapshot.metrics.values())} <= {int, float}
            assert not any(abs(v) >= 1 << 63 for v in snapshot.metrics.values())
    assert Run(url).best("m", mode="min").step == 20


RECORDS = {
    "version_20/eval-val.0123456789ab.json": {"metrics": {"m": 1.0}},
    "version_20/eval-val.0123456789ac.failed.json": {"cause": "x"},
    "version_30/eval-training.0123456789ad.ended.json": {
        "reason": "finished",
        "epochs": 0,
        "positions": None,
    },
    lease_name("val", 1): None,
    "branch-1.json": None,
    "pin-0123456789ab.json": None,
    "pin-version_20.json": None,
    "objective-" + "0" * 32 + ".json": None,
    "writer.json": None,
    "request-save.json": None,
    "run-id.json": None,
    "restart-0-0123456789ab.json": None,
    "deleting/0123456789ab.json": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("key", RECORDS)
def test_any_value_in_a_record(key, url, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.01)
    store = Run(url).store
    about = {"name": "val", "attempt": key.split(".")[1] if "eval" in key else "0" * 12}
    manifest = Run(url).catalog.open(Run(url).find(20)).digest
    about |= {"version": "version_20", "manifest_digest": manifest}
    about |= {"created": "2026-01-02T03:04:05+00:00", **(RECORDS[key] or {})}
    for value in (None, "x", 1, [], {}, {"m": None}, {"m": "x"}, {"m": 1 << 70}, 1 << 70, True):
        for field in (*about, "versions", "host", "process", "seconds", "from_version", "id"):
            with suppress(LimpetError):
                store.delete(key)
            store.put_if_absent(key, seal({**about, field: value}))
            for call in (
                Run.snapshots, Run.records, partial(Run.best, metric="m", mode="min"), Run.ended,
                partial(Run.evaluations, at=20), partial(Run.metrics, at=20), Run.pins, Run.branch,
                partial(Run.sweep, dry_run=True), lambda run: limpet.open(f"{run.url}@best"),
            ):  # fmt: skip
                with suppress(LimpetError):
                    call(Run(url))
    for command in (("ls", url), ("show", f"{url}@20"), ("verify", url), ("ls", url, "--json")):
        assert run_cli(*command).code in (0, 3)
