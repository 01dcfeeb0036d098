"""Trainings with servers and workers on Ray, which are killed. ``test_ray.py`` runs this file."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import limpet
from limpet import tables
from limpet.errors import FormatError, LimpetError
from limpet.evaluation import Selection, Workers
from limpet.storage.memory import MemoryStore
from limpet.tasks import Queue
from tests.tables import ray_driver, test_lost_buckets
from tests.tables.ray_driver import RAY, Train, servers_alive
from tests.tables.trainings import URLS, WORDS, Training
from tests.waiting import run_process, wait_until


@pytest.fixture(autouse=True)
def _no_servers_are_left(cluster):
    yield
    wait_until(lambda: not servers_alive() and not view_servers(), 30)


def view_servers():
    return servers_alive("LimpetViewServer")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The rows and the model of an undisturbed training in one process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("expected")
    ray_driver.run(folder / "run", Train(folder), servers=1, workers=1, engine="local")
    return content(folder / "run")


def content(url):
    """All of the newest version that does not depend on the number of servers, by name."""
    version = limpet.load(f"{url}@latest")
    rows = {}
    for _, segment in sorted(version["tables"]["words"]["segments"].items(), key=segment_number):
        for gone in segment["deleted"].tolist():
            rows.pop(gone, None)
        columns = [segment[name] for name in ("values", "counts", "last_steps")]
        columns += [segment["slots"][name] for name in sorted(segment["slots"])]
        values = zip(*(column.tolist() for column in columns), strict=True)
        rows.update(zip(segment["ids"].tolist(), values, strict=True))
    found = {"rows": rows, "queue": version["queue"]}
    for key in ("scheduler", "model", "optimizer"):
        if key in version:
            found[key] = plain(version[key])
    return found


def segment_number(item):
    return int(item[0].partition(".")[0])


def plain(value):
    if isinstance(value, dict):
        return {
            key: plain(each) for key, each in sorted(value.items(), key=lambda item: str(item[0]))
        }
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def check_versions(url):
    """All versions are intact, and the incremental ones carry segments."""
    snapshots = limpet.Run(url).snapshots()
    assert all(snapshot.verify().ok for snapshot in snapshots)
    return snapshots


def test_a_training_on_ray_has_the_bits_of_one_in_one_process(tmp_path, expected):
    steps = ray_driver.run(tmp_path / "run", Train(tmp_path), servers=2, workers=3)
    assert steps == 2 * -(-ray_driver.RECORDS // ray_driver.BATCH // 3)
    assert content(tmp_path / "run") == expected
    versions = check_versions(tmp_path / "run")
    segments = [{*limpet.load(v.url)["tables"]["words"]["segments"]} for v in versions]
    carried = [a & b for a, b in itertools.pairwise(segments)]
    assert any(carried), "incremental versions carry the segments of earlier ones"
    last = versions[-1]
    assert last.metadata["metrics"]["loss"] > 0
    code = [sys.executable, "-m", "limpet", "verify", str(tmp_path / "run")]
    subprocess.run(code, check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_a_worker_and_servers_are_killed_and_nothing_changes(tmp_path, expected):
    """The loss of a server leads back to the newest version; a worker is replaced."""
    found = []
    kills = {20: ("worker",), 100: ("server",)}
    with limpet.events.attach(lambda name, fields: found.append(name)):
        ray_driver.run(tmp_path / "run", Train(tmp_path, kills), servers=2, workers=2)
    assert content(tmp_path / "run") == expected
    assert found.count("server_lost") == found.count("resumed") == 1
    check_versions(tmp_path / "run")


ROOT = Path(__file__).parents[2]


def drive(url, servers, workers, record, number):
    arguments = [str(url), str(servers), str(workers), str(record), str(int(number))]
    command = [sys.executable, "-m", "tests.tables.ray_driver", *arguments]
    return run_process(command, 120, cwd=Path(__file__).parents[2])


def test_the_driver_is_preempted_and_killed_and_others_continue(tmp_path, expected):
    """Each on another number of servers and workers, the last one in one process."""
    url = tmp_path / "run"
    done = drive(url, 2, 1, 50, signal.SIGTERM)
    assert done.returncode == 75, done.stderr
    reasons = [snapshot.metadata["reason"] for snapshot in limpet.Run(url).snapshots()]
    assert reasons.count("preemption") == 1
    assert reasons[-1] == "preemption"
    done = drive(url, 3, 2, 130, signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not servers_alive(), 30)
    ray_driver.run(url, Train(tmp_path), servers=1, workers=1, engine="local")
    assert content(url) == expected
    check_versions(url)


COUNTS = tables.Table("counts", 1, optimizer=tables.SGD(lr=1.0), initializer=tables.Constant(0.0))


class Count:
    """Adds 1 to the row of each record. Kills this worker and a server, once each."""

    def __init__(self, folder, kills=()):
        self.train = Train(folder, kills)

    def __call__(self, worker):
        bag = tables.Embedding(worker.tables, "counts")
        while (records := worker.next(4)) is not None:
            bag(torch.tensor(records)).sum().neg().backward()
            for record in records:
                if record in self.train.kills:
                    self.train.kill(record, *self.train.kills[record])
            worker.step()


def count(url, train, *, workers=1, then=lambda servers: None):
    queue = Queue()
    queue.add("training", 200, task_size=4, epochs=2, name="train")
    with tables.Servers([COUNTS], 2, engine="ray", ray=RAY) as servers:
        state = {"tables": servers, "queue": queue}
        with limpet.Checkpointer(url, state, save=limpet.EverySteps(9)) as ckpt:
            then(servers)
            servers.train(train, workers=workers, queue=queue, ckpt=ckpt, ray=RAY)
            return ckpt.current_step, servers.statistics()["counts"]["rows"]


def test_asynchronous_records_count_once_and_the_number_of_workers_changes(tmp_path):
    def resize(servers):
        def wait():
            wait_until((tmp_path / "killed-30").exists, 60)
            servers.resize_workers(2)

        threading.Thread(target=wait, daemon=True).start()

    kills = {30: ("worker",), 110: ("server",)}
    found = count(tmp_path / "run", Count(tmp_path, kills), then=resize)
    assert found == (100, 200)
    segments = limpet.load(f"{tmp_path}/run@latest")["tables"]["counts"]["segments"]
    rows = {}
    for _, segment in sorted(segments.items(), key=segment_number):
        rows.update(zip(segment["ids"].tolist(), segment["values"][:, 0].tolist(), strict=True))
    assert rows == dict.fromkeys(range(200), 2.0)
    check_versions(tmp_path / "run")


class Killing(test_lost_buckets.Training):
    """Kills processes of servers, by their age."""

    def kill(self, *numbers):
        for pid in [servers_alive()[number] for number in numbers]:
            os.kill(pid, signal.SIGKILL)


def test_only_the_buckets_of_killed_servers_return_to_a_version(tmp_path):
    """Of one before the first save but that of the beginning, and of both during a save."""
    training = Killing(tmp_path / "run", {3: [0], 35: [0, 1]}, ray=RAY).run()
    assert len(test_lost_buckets.check(training)) == 3
    assert not training.names("resumed")
    check_versions(tmp_path / "run")


class Evaluate(Count):
    """The sum of all rows, by an evaluation that kills a worker and a server, once each."""

    def __call__(self, worker):
        bag = tables.Embedding(worker.tables, "counts")

        def evaluate(records):
            if records[0] in self.train.kills:
                self.train.kill(f"evaluation {records[0]}", *self.train.kills[records[0]])
            return {"seen": (bag(torch.tensor(records)).sum(), len(records) / 200)}

        while (records := worker.next(4, evaluate=evaluate)) is not None:
            bag(torch.tensor(records)).sum().neg().backward()
            worker.step()


def test_workers_evaluate_a_step_exactly_whoever_is_killed(tmp_path):
    queue, run = Queue(), limpet.Run(tmp_path / "run")
    queue.add("training", 200, task_size=4, epochs=2, name="train")
    train = Evaluate(tmp_path, {24: ("worker",), 96: ("server",)})
    with tables.Servers([COUNTS], 2, engine="ray", ray=RAY) as servers:
        state = {"tables": servers, "queue": queue}
        with (
            limpet.Checkpointer(run.url, state, save=limpet.EverySteps(9)) as ckpt,
            limpet.TrainingEvaluation(
                ckpt, data=200, batch_size=8, every=limpet.EverySteps(20), queue=queue, on="cut"
            ) as evaluation,
        ):
            servers.train(
                train, workers=2, queue=queue, ckpt=ckpt, evaluation=evaluation, ray=RAY
            )  # fmt: skip
        assert servers.statistics()["counts"]["rows"] == 200
    assert {path.name for path in tmp_path.glob("killed-*")} == {
        "killed-evaluation 24", "killed-evaluation 96"
    }  # fmt: skip
    found = {s.step: run.metrics(s.step)["seen"] for s in run.snapshots() if run.metrics(s.step)}
    assert len(found) > 3
    assert found == {step: pytest.approx(4 * step) for step in found}
    assert max(found) == 100


def test_an_answer_that_is_larger_than_the_object_store_arrives(cluster):
    """Ray puts what does not fit onto the disk."""
    large = tables.Table("large", 4096, optimizer=tables.SGD(1.0))
    with tables.Servers([large], engine="ray", ray=RAY) as servers:
        servers.fill("large", [7], torch.ones(1, 4096))
        vectors = servers.lookup("large", range(6000))  # 98 MB, and the store has 84
    assert torch.equal(vectors[7], torch.ones(4096))
    assert torch.equal(vectors[5999:], large.initial(np.array([5999])))


def fail(worker):
    raise KeyError("a mistake of the user")


def test_errors_reach_the_driver(tmp_path):
    queue = Queue()
    queue.add("training", 200, task_size=4, name="train")
    with tables.Servers([COUNTS], engine="ray", ray=RAY) as servers:
        state = {"tables": servers, "queue": queue}
        with pytest.raises(LimpetError, match="run must be the URL of a store that other"):
            limpet.Checkpointer("memory://a", state)
        with limpet.Checkpointer(tmp_path / "run", state) as ckpt:
            options = {"workers": 1, "queue": queue, "ckpt": ckpt, "ray": RAY}
            with pytest.raises(KeyError, match="a mistake of the user"):
                servers.train(fail, **options)
            with pytest.raises(LimpetError, match="not finite"):
                servers.train(push_nan, **options)


def push_nan(worker):
    bag = tables.Embedding(worker.tables, "counts")
    records = worker.next(4)
    (bag(torch.tensor(records)) * torch.nan).sum().backward()
    worker.step()


def test_servers_that_do_not_fit_into_the_cluster_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LIMPET_STUCK", "2")
    with (
        tables.Servers([COUNTS], 2, engine="ray", ray={"resources": {"unknown": 1}}) as servers,
        pytest.raises(LimpetError, match=r"not started 2 of 2 servers.*`ray status`"),
    ):
        limpet.Checkpointer(tmp_path / "run", {"tables": servers})


# -- views -----------------------------------------------------------------------------------------


IDS = [*range(-40, 40), *(i * 2**50 for i in range(-40, 40))]
"""Some of them are in the tables."""


def look_up(url):
    """What a view of another process finds, and the servers that it has started."""
    before = view_servers()
    words = tables.open(url, servers=2, ray=RAY)["words"]
    return words.lookup(IDS), len(words), {*view_servers()} - {*before}


def test_views_share_servers_which_are_started_again_and_end_with_the_views(tmp_path):
    import ray

    training, url = Training(str(tmp_path / "run"), WORDS, URLS, count=2), f"{tmp_path}/run@1"
    with training.saving(incremental=True):
        training.change()
        training.save()
        for servers in (1, 3):
            training.assert_equal(tables.open(url, servers=servers, ray=RAY), 1)
        wait_until(lambda: not view_servers(), 30)
        view = tables.open(url, servers=2, ray=RAY)
        words, started = view["words"], {*view_servers()}
        expected = words.lookup(IDS)
        for version in (url, training.run.latest()):
            found = ray.remote(num_cpus=0.01)(look_up).remote(version)
            rows, count, others = ray.get(found, timeout=60)
            assert torch.equal(rows, expected)
            assert (count, others) == (len(words), set())
        os.kill(max(started), signal.SIGKILL)
        assert torch.equal(words.lookup(IDS), expected)
        wait_until(lambda: len(view_servers()) == 2, 30)
        assert min(started) in view_servers()
        for _ in range(2):
            training.change()
            training.save()
    started, bag = {*view_servers()}, tables.EmbeddingBag(view, "words")
    assert view.follow() is True
    training.assert_equal(view, 3)
    assert view.follow() is False
    wait_until(lambda: len(view_servers()) == 2 and not started & {*view_servers()}, 30)
    ids = torch.tensor([IDS])
    assert torch.equal(bag(ids), tables.EmbeddingBag(training.servers, "words")(ids))
    del view, words
    assert len(view_servers()) == 2, "the module needs them"
    del bag
    wait_until(lambda: not view_servers(), 30)
    (shard,) = (tmp_path / "run" / "version_1").glob("*.safetensors")
    flip(shard)
    with pytest.raises(FormatError, match="version_1"):
        tables.open(url, servers=2, ray=RAY)
    in_memory = MemoryStore()
    limpet.save(in_memory, {"tables": training.servers})
    with pytest.raises(LimpetError, match="url must be the URL of a store that other processes"):
        tables.open(in_memory, servers=2, ray=RAY)


def flip(path):
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def data():
    return torch.tensor(IDS)


def setup_in_process(snapshot):
    return tables.EmbeddingBag(tables.open(snapshot), "words", mode="sum"), None


def setup_on_servers(snapshot):
    """A model, and the files of the workers that have one, each with the process ids of servers."""
    view = tables.open(snapshot, servers=2, ray=RAY)
    folder = Path(snapshot.url).parents[1] / f"version {snapshot.step}"
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).write_text(f"{view_servers()[-2:]}")
    return tables.EmbeddingBag(view, "words", mode="sum"), folder


def evaluate(model, ids):
    bag, folder = model
    if folder is not None:
        wait_until(lambda: len([*folder.iterdir()]) == 2, 30)
    return {"sum": (bag(ids[:, None]).sum(), len(ids))}


def test_an_evaluation_starts_servers_once_per_version_for_all_workers(tmp_path):
    training = Training(str(tmp_path / "run"), WORDS, count=2)
    with training.saving():
        for _ in range(2):
            training.change()
            training.save()
    found = []
    for name, workers in (("in_process", Workers(0)), ("on_servers", Workers(2, ray=RAY))):
        functions = [f"tests.tables.ray_cases:{each}" for each in (f"setup_{name}", "evaluate")]
        evaluation = limpet.Evaluation(
            training.run.url,
            *functions,
            data="tests.tables.ray_cases:data",
            name=name,
            workers=workers,
            select=Selection(skip_none=True),
        )
        found.append({o.version.step: (o.state, o.metrics, o.cause) for o in evaluation.run()})
    assert found[0] == found[1]
    assert [found[0][step][0] for step in (1, 2)] == ["DONE", "DONE"]
    files = [[*(tmp_path / f"version {step}").iterdir()] for step in (1, 2)]
    servers = [{file.read_text() for file in each} for each in files]
    assert [(len(a), len(b)) for a, b in zip(files, servers)] == [(2, 1), (2, 1)]
    assert not servers[0] & servers[1]
