"""Whole trainings on real ranks: ``python -m tests.ranks.whole_runs RANK PORT FOLDER`` is one."""

from __future__ import annotations

import io
import json
import os
import signal
import statistics
import sys
import threading
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.errors import HoldfastError, PlanError
from holdfast.run.policy import EverySeconds, EverySteps, OnException, StopWhen
from holdfast.run.run import Run
from holdfast.run.save_request import read_request, request_and_wait
from tests.ranks.world import run_as_rank

DATASET_LENGTH, BATCH = 101, 12


class IndexedSamples(Dataset):
    """Sample ``i`` is ``i``, and something made of it."""

    def __len__(self):
        return DATASET_LENGTH

    def __getitem__(self, i):
        return i, torch.sin(torch.arange(8.0) * (i + 1))


class Training:
    """A model in DDP, whose loss depends on all that is to be resumed: weights, slots, samples in
    their order, and the generators of this rank."""

    def __init__(self, workers=0):
        torch.manual_seed(7 + dist.get_rank())
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.model = DistributedDataParallel(model)  # with the weights of rank 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.progress = holdfast.Progress()
        self.sampler = holdfast.ElasticSampler(DATASET_LENGTH, BATCH, seed=5)
        self.loader = DataLoader(IndexedSamples(), batch_sampler=self.sampler, num_workers=workers)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": self.progress,
            "sampler": self.sampler,
            "rng": holdfast.RNG(),
        }
        self.losses = {}
        self.seen_samples = []

    def run(self, url, last_step, save, **given):
        """Until step ``to``; what ``resume`` has found."""
        with holdfast.Checkpointer(url, self.state, save=save, **given) as ckpt:
            found = ckpt.resume()
            while self.progress.step < last_step:
                for numbers, inputs in self.loader:
                    self.step(numbers, inputs)
                    ckpt.step({"loss": self.losses[self.progress.step + 1]})
                    if self.progress.step >= last_step:
                        return found
                self.progress.epoch += 1
        return found

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
    """The values of all ranks, on all."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def no_collectives():
    """Any collective of torch.distributed raises."""

    def refuse(*args, **kwargs):
        raise AssertionError("a collective in the step")

    names = [
        n
        for n in dir(dist)
        if n.startswith(("all_", "barrier", "broadcast", "gather", "reduce", "scatter", "send"))
        or n in ("isend", "irecv", "recv", "monitored_barrier")
    ]
    kept = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    c10d = dist.distributed_c10d
    try:
        for name in kept:
            setattr(dist, name, refuse)
            setattr(c10d, name, refuse)
        yield
    finally:
        for name, value in kept.items():
            setattr(dist, name, value)
            setattr(c10d, name, value)


# -- scenarios -----------------------------------------------------------------------------------


def resumes_bit_by_bit(ranks):
    """Stopped in the middle of an epoch and resumed, the losses are those of a training that was
    never interrupted, and so are they with workers that are forked in between."""
    url, never = run_url(ranks, "resumed"), run_url(ranks, "never")
    whole, parts = {}, {}

    def undisturbed():
        training = Training()
        training.run(never, 25, EverySteps(1000))
        whole.update(training.losses)

    def until(step, to, workers):
        def work():
            training = Training(workers)
            found = training.run(url, to, EverySteps(4))
            assert (found.step if found else 0) == step
            parts.update(training.losses)

        return work

    ranks(2, undisturbed)
    ranks(2, until(0, 6, 0))
    ranks(2, until(4, 15, 2))
    ranks(2, until(12, 25, 0))
    if ranks.rank < 2:
        assert parts == whole
        assert len(whole) == 25


def sees_every_sample_once(ranks):
    """4 ranks, then 2, then 3, each stopped in the middle of an epoch: each sample of an epoch is
    seen once, in the batch in which one rank would have seen it."""
    url, seen = run_url(ranks, "samples"), {}

    def until(size, to):
        def work():
            training = Training()
            training.run(url, to, EverySteps(3))
            for mine in all_gather(training.seen_samples):
                for epoch, step, numbers in mine:
                    seen.setdefault((step, size, epoch), []).extend(numbers)

        return work

    for size, to in ((4, 5), (2, 13), (3, 27)):
        ranks(size, until(size, to))
    if ranks.rank:
        return
    order = holdfast.ElasticSampler(DATASET_LENGTH, BATCH, seed=5, rank=0, ranks=1)
    batches = []
    for _ in range(3):
        for batch in order:
            batches.append(batch)
            order.advance()
    assert [len(b) for b in batches] == ([BATCH] * 8 + [5]) * 3
    assert sorted(n for batch in batches[:9] for n in batch) == list(range(DATASET_LENGTH))
    assert {step for step, *_ in seen} == set(range(1, 28))
    again = 0
    for (step, size, epoch), numbers in seen.items():
        assert epoch == (step - 1) // 9
        batch, first = batches[step - 1], batches[9 * epoch]
        padding = first[: -len(batch) % size] if step % 9 == 0 else []
        assert sorted(numbers) == sorted(batch + padding), (step, size)
        again += len([s for s, *_ in seen if s == step]) - 1
    assert again  # steps that were not in a version were made again, by others


def gives_new_ranks_seeds_of_their_own(ranks):
    url, drawn = run_url(ranks, "seeds"), []

    def work():
        torch.manual_seed(3)
        state = {"rng": holdfast.RNG(), "progress": holdfast.Progress()}
        with holdfast.Checkpointer(url, state, save=EverySteps(1)) as ckpt:
            found = ckpt.resume()
            if found is None:
                torch.manual_seed(100 + dist.get_rank())
                torch.rand(5)
                ckpt.step()
            drawn.extend(all_gather(torch.rand(1).item()))

    ranks(2, work)
    ranks(2, work)
    ranks(4, work)
    if ranks.rank < 2:
        first, second, third = drawn[:2], drawn[2:4], drawn[4:]
        assert first == second == third[:2]
        assert len(set(third)) == 4, third


def trains_ten_thousand_steps_without_a_collective(ranks):
    """By steps, by the clock of rank 0, on request, and with an early stop."""
    url, told = run_url(ranks, "long"), []

    def asking(asked):
        asked.append(request_and_wait(Run(url), 60, interval=0.05).version.step)

    def work():
        rank = dist.get_rank()
        state = {
            "progress": holdfast.Progress(),
            "w": holdfast.Boxed(torch.zeros(2), (2 * rank,), (4,)),
        }
        asked, took = [], []
        asks = threading.Thread(target=asking, args=(asked,))
        stop = StopWhen("loss", patience=9_000)
        policy = EverySteps(2500) | EverySeconds(0.3)
        with holdfast.Checkpointer(url, state, save=policy, stop=stop) as ckpt:
            ckpt.resume()
            ckpt.step({"loss": 1.0})
            with no_collectives():
                for step in range(2, 40_000):
                    state["w"].tensor.add_(1)
                    if step == 2000 and rank == 1:
                        asks.start()
                    if step == 5200 and rank == 1:
                        ckpt._watcher._signalled = True
                    began = time.perf_counter_ns()
                    ckpt.step({"loss": 1.0})
                    took.append(time.perf_counter_ns() - began)
                    if ckpt.should_stop:
                        break
                    time.sleep(0.0006)  # so that the clock has time to ask between two
        if rank == 1:
            asks.join()
        versions = [s.step for s in Run(url).snapshots()]
        both = all_gather((state["progress"].step, versions, asked))
        told.append((both, statistics.median(took)))
        assert both[0][:2] == both[1][:2], both
        last = both[0][0]
        assert 9_000 < last < 39_000
        [of_request] = both[1][2]
        assert of_request in versions
        reasons = {s.step: s.metadata["reason"] for s in Run(url).snapshots()}
        assert {2500, 5000, 7500} <= set(versions)
        assert list(reasons.values()).count("request") in (1, 2), reasons
        assert len(versions) >= 6  # the clock as well
        assert read_request(Run(url).store) is None
        for s in Run(url).snapshots():
            loaded = holdfast.load(s.url)["w"]
            assert loaded.tolist() == [s.step - 1.0] * 4

    ranks(2, work)
    if ranks.rank < 2:
        (ranks.folder / f"cost{ranks.rank}.json").write_text(json.dumps(told[0][1]))


def answers_a_signal_on_any_rank(ranks):
    url = run_url(ranks, "signal")

    def work():
        rank = dist.get_rank()
        state = {"progress": holdfast.Progress(), "w": torch.zeros(3)}
        before = signal.getsignal(signal.SIGUSR1)
        with holdfast.Checkpointer(url, state, save=EverySteps(10**6)) as ckpt:
            ckpt.resume()
            ckpt.save_on_signal(signal.SIGUSR1)
            for step in range(200):
                if step == 20 and rank == 2:
                    os.kill(os.getpid(), signal.SIGUSR1)
                ckpt.step()
                dist.barrier()
                time.sleep(0.005)
        assert signal.getsignal(signal.SIGUSR1) is before
        [snapshot] = Run(url).snapshots()
        assert snapshot.metadata["reason"] == "request"
        assert 20 < snapshot.step < 200

    ranks(3, work)


def shows_a_line_for_each_save_once(ranks):
    url = run_url(ranks, "shown")

    def work():
        shown = io.StringIO()
        with holdfast.attach(holdfast.sinks.Terminal(shown)):
            state = {"progress": holdfast.Progress(), "w": torch.zeros(3)}
            with holdfast.Checkpointer(url, state, save=EverySteps(2)) as ckpt:
                ckpt.resume()
                for _ in range(5):
                    ckpt.step({"loss": 1.0 + dist.get_rank()})
        lines = all_gather(shown.getvalue().splitlines())
        assert lines[1:] == [[]] * (len(lines) - 1)
        assert [line.split()[0] for line in lines[0]] == ["began", "saved", "saved", "left"]
        assert all("loss 1" in line for line in lines[0][1:3])

    ranks(3, work)


def refuses_a_second_job(ranks):
    """Ranks 0 and 1 train; rank 2 is told by group= to write there as well, alone."""
    url = run_url(ranks, "second")

    def work():
        pair = dist.new_group([0, 1])
        state = {"progress": holdfast.Progress(), "w": torch.zeros(3)}
        if dist.get_rank() < 2:
            with holdfast.Checkpointer(url, state, save=EverySteps(2), group=pair) as ckpt:
                ckpt.resume()
                ckpt.step()
                dist.barrier()
                dist.barrier()
                ckpt.step()
        else:
            dist.barrier()
            try:
                with holdfast.Checkpointer(url, state, save=EverySteps(2), group="alone") as ckpt:
                    ckpt.resume()
                    ckpt.step()
            except HoldfastError as e:
                refused = str(e)
            assert "Another training writes to this run" in refused
            dist.barrier()
        dist.barrier()
        assert [s.step for s in Run(url).snapshots()] == [2]

    ranks(3, work)


def saves_the_state_before_an_exception_of_all(ranks):
    url = run_url(ranks, "raised")

    def work():
        training = Training()
        try:
            with holdfast.Checkpointer(
                url, training.state, save=EverySteps(100) | OnException()
            ) as ckpt:
                ckpt.resume()
                for numbers, inputs in training.loader:
                    if training.progress.step == 3:
                        raise ArithmeticError("NaN")
                    training.step(numbers, inputs)
                    ckpt.step()
        except ArithmeticError as e:
            notes = getattr(e, "__notes__", None)
        assert notes is None
        [snapshot] = Run(url).snapshots()
        assert (snapshot.step, snapshot.metadata["reason"]) == (3, "exception")

    ranks(3, work)


def tells_unlike_arguments(ranks):
    url = run_url(ranks, "unlike")

    def work():
        state = {"progress": holdfast.Progress(), "w": torch.zeros(3)}
        policy = EverySteps(5 + 2 * (dist.get_rank() == 1))
        began = time.monotonic()
        try:
            with holdfast.Checkpointer(url, state, save=policy) as ckpt:
                ckpt.resume()
                for _ in range(20):
                    ckpt.step()
        except PlanError as e:
            told = str(e)
        assert "rank 1" in told
        assert time.monotonic() - began < 15

    ranks(3, work)


SCENARIOS = [
    resumes_bit_by_bit,
    sees_every_sample_once,
    gives_new_ranks_seeds_of_their_own,
    trains_ten_thousand_steps_without_a_collective,
    answers_a_signal_on_any_rank,
    shows_a_line_for_each_save_once,
    refuses_a_second_job,
    saves_the_state_before_an_exception_of_all,
    tells_unlike_arguments,
]

if __name__ == "__main__":
    run_as_rank(
        [course for course in SCENARIOS if not sys.argv[4:] or course.__name__ in sys.argv[4:]]
    )
