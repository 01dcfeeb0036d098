"""Whole trainings on real processes: the scenarios of ``test_training_processes.py``."""

import io
import json
import statistics
import threading
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import limpet
from limpet.errors import LimpetError
from limpet.notices.notice import Notice
from limpet.run.policy import EverySeconds, EverySteps, StopWhen
from limpet.run.run import Run
from limpet.run.save_request import read_request, request_and_wait

DATASET_LENGTH, BATCH = 101, 12


class IndexedSamples(Dataset):
    """A dataset whose sample ``i`` is the number ``i`` and a tensor computed from it."""

    def __len__(self):
        return DATASET_LENGTH

    def __getitem__(self, i):
        return i, torch.sin(torch.arange(8.0) * (i + 1))


def make_loader(**options):
    return limpet.DataLoader(
        IndexedSamples(), total_batch_size=BATCH, shuffle=True, seed=5, **options
    )


class Training:
    """A training of a DDP model whose loss depends on everything that a resume must restore.

    These are the weights, the slots, the order of the samples, and the random generators of this
    rank.
    """

    def __init__(self, workers=0):
        torch.manual_seed(7 + dist.get_rank())
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.model = DistributedDataParallel(model)  # it broadcasts the weights of rank 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.progress = limpet.Progress()
        self.loader = make_loader(num_workers=workers)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": self.progress,
            "loader": self.loader,
        }
        self.losses = {}
        self.seen_samples = []

    def run(self, url, last_step, save, **options):
        """Resume and train up to step ``last_step``. Return the result of ``resume``."""
        with limpet.Checkpointer(url, self.state, save=save, at_end=False, **options) as ckpt:
            resumed = ckpt.resume()
            while self.progress.step < last_step:
                for numbers, inputs in self.loader:
                    self.step(numbers, inputs)
                    ckpt.step({"loss": self.losses[self.progress.step + 1]})
                    if self.progress.step >= last_step:
                        return resumed
                ckpt.end_epoch()
        return resumed

    def step(self, numbers, inputs):
        loss = self.model(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses[self.progress.step + 1] = loss.item()
        self.seen_samples.append((self.progress.epoch, self.progress.step + 1, numbers.tolist()))


def run_url(ranks, name):
    return str(ranks.folder / name)


def all_gather(value):
    """Return the values of all ranks, on all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def no_collectives():
    """Make every collective of torch.distributed raise."""

    def refuse(*args, **kwargs):
        raise AssertionError("the step called a collective")

    names = [
        n
        for n in dir(dist)
        if n.startswith(("all_", "barrier", "broadcast", "gather", "reduce", "scatter", "send"))
        or n in ("isend", "irecv", "recv", "monitored_barrier")
    ]
    originals = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    c10d = dist.distributed_c10d
    try:
        for name in originals:
            setattr(dist, name, refuse)
            setattr(c10d, name, refuse)
        yield
    finally:
        for name, value in originals.items():
            setattr(dist, name, value)
            setattr(c10d, name, value)


def resumes_bit_for_bit(ranks):
    """Stopped in the middle of an epoch and resumed, a training has the losses of an uninterrupted
    one, also with forked data loader workers."""
    url, uninterrupted_url = run_url(ranks, "resumed"), run_url(ranks, "never")
    expected, losses = {}, {}

    def uninterrupted():
        training = Training()
        training.run(uninterrupted_url, 25, EverySteps(1000))
        expected.update(training.losses)

    def resume_and_train(resumed_step, last_step, workers):
        def work():
            training = Training(workers)
            resumed = training.run(url, last_step, EverySteps(4))
            assert (resumed.step if resumed else 0) == resumed_step
            losses.update(training.losses)

        return work

    ranks(2, uninterrupted)
    ranks(2, resume_and_train(0, 6, 0))
    ranks(2, resume_and_train(4, 15, 2))
    ranks(2, resume_and_train(12, 25, 0))
    if ranks.rank < 2:
        assert losses == expected
        assert len(expected) == 25


def sees_every_sample_once(ranks):
    """With 4 ranks, then 2, then 3, each stopped in the middle of an epoch, each sample of an epoch
    is seen once, in the batch in which a single rank would see it."""
    url, seen = run_url(ranks, "samples"), {}

    def resume_and_train(size, last_step):
        def work():
            training = Training()
            training.run(url, last_step, EverySteps(3))
            for samples in all_gather(training.seen_samples):
                for epoch, step, numbers in samples:
                    seen.setdefault((step, size, epoch), []).extend(numbers)

        return work

    for size, last_step in ((4, 5), (2, 13), (3, 27)):
        ranks(size, resume_and_train(size, last_step))
    if ranks.rank:
        return
    loader, batches = make_loader(rank=0, ranks=1), []
    for epoch in range(3):
        loader.begin_epoch(epoch)
        batches += [numbers.tolist() for numbers, _ in loader]
    assert [len(b) for b in batches] == ([BATCH] * 8 + [5]) * 3
    assert sorted(n for batch in batches[:9] for n in batch) == list(range(DATASET_LENGTH))
    assert {step for step, *_ in seen} == set(range(1, 28))
    repeated = 0
    for (step, size, epoch), numbers in seen.items():
        assert epoch == (step - 1) // 9
        batch, first = batches[step - 1], batches[9 * epoch]
        padding = first[: -len(batch) % size] if step % 9 == 0 else []
        assert sorted(numbers) == sorted(batch + padding), (step, size)
        repeated += len([s for s, *_ in seen if s == step]) - 1
    assert repeated  # the next ranks repeated the steps after the last version


def trains_ten_thousand_steps_without_a_collective(ranks):
    """Save at steps, by the clock of rank 0, and on request, and stop early."""
    url, costs = run_url(ranks, "long"), []

    def request_save(requested):
        requested.append(request_and_wait(Run(url), 60, interval=0.05).version.step)

    def work():
        rank = dist.get_rank()
        state = {
            "progress": limpet.Progress(),
            "w": limpet.Boxed(torch.zeros(2), (2 * rank,), (4,)),
        }
        requested, durations = [], []
        requester = threading.Thread(target=request_save, args=(requested,))
        stop = StopWhen("loss", patience=9_000)
        policy = EverySteps(2500) | EverySeconds(0.3)
        with limpet.Checkpointer(url, state, save=policy, stop=stop) as ckpt:
            ckpt.resume()
            ckpt.step({"loss": 1.0})
            with no_collectives():
                for step in range(2, 40_000):
                    state["w"].tensor.add_(1)
                    if step == 2000 and rank == 1:
                        requester.start()
                    if step == 5200 and rank == 1:
                        ckpt._preemption.on_notice(Notice("a test", stops=False))
                    began = time.perf_counter_ns()
                    ckpt.step({"loss": 1.0})
                    durations.append(time.perf_counter_ns() - began)
                    if ckpt.should_stop:
                        break
                    time.sleep(0.0006)  # so that the clock can request saves between the steps
        if rank == 1:
            requester.join()
        versions = [s.step for s in Run(url).snapshots()]
        results = all_gather((state["progress"].step, versions, requested))
        costs.append(statistics.median(durations))
        assert results[0][:2] == results[1][:2], results
        last_step = results[0][0]
        assert 9_000 < last_step < 39_000
        [requested_step] = results[1][2]
        assert requested_step in versions
        reasons = {s.step: s.metadata["reason"] for s in Run(url).snapshots()}
        assert {2500, 5000, 7500} <= set(versions)
        assert list(reasons.values()).count("request") in (1, 2), reasons
        assert len(versions) >= 6  # the clock caused saves too
        assert read_request(Run(url).store) is None
        for s in Run(url).snapshots():
            loaded = limpet.load(s.url)["w"]
            assert loaded.tolist() == [s.step - 1.0] * 4

    ranks(2, work)
    if ranks.rank < 2:
        (ranks.folder / f"cost{ranks.rank}.json").write_text(json.dumps(costs[0]))


def shows_one_line_for_each_save(ranks):
    url = run_url(ranks, "terminal")

    def work():
        terminal = io.StringIO()
        with limpet.attach(limpet.sinks.Terminal(terminal)):
            state = {"progress": limpet.Progress(), "w": torch.zeros(3)}
            with limpet.Checkpointer(url, state, save=EverySteps(2)) as ckpt:
                ckpt.resume()
                for _ in range(5):
                    ckpt.step({"loss": 1.0 + dist.get_rank()})
                    ckpt.wait()  # a save that waits for the previous one has an extra line
        lines = all_gather(terminal.getvalue().splitlines())
        assert lines[1:] == [[]] * (len(lines) - 1)
        words = [line.split()[0].rstrip(":") for line in lines[0]]
        assert words == ["started", "saved", "saved", "saved", "finished"]
        assert all("loss 1" in line for line in lines[0][1:4])

    ranks(3, work)


def refuses_a_second_job(ranks):
    """Ranks 0 and 1 train. Rank 2 writes to the same run alone, with ``group="alone"``."""
    url = run_url(ranks, "second")

    def work():
        pair = dist.new_group([0, 1])
        state = {"progress": limpet.Progress(), "w": torch.zeros(3)}
        if dist.get_rank() < 2:
            with limpet.Checkpointer(url, state, save=EverySteps(2), group=pair) as ckpt:
                ckpt.resume()
                ckpt.step()
                dist.barrier()
                dist.barrier()
                ckpt.step()
        else:
            dist.barrier()
            try:
                with limpet.Checkpointer(url, state, save=EverySteps(2), group="alone") as ckpt:
                    ckpt.resume()
                    ckpt.step()
            except LimpetError as e:
                error = str(e)
            assert "Another training writes to this run" in error
            dist.barrier()
        dist.barrier()
        assert [s.step for s in Run(url).snapshots()] == [2]

    ranks(3, work)


SCENARIOS = [
    resumes_bit_for_bit,
    sees_every_sample_once,
    trains_ten_thousand_steps_without_a_collective,
    shows_one_line_for_each_save,
    refuses_a_second_job,
]
