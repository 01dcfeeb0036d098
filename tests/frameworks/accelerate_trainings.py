"""Trainings with Accelerate, as scripts have them, and checks that need a process of their own."""

import random

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
)
from torch.utils import data

import limpet
from limpet.errors import LimpetError
from limpet.integrations.accelerate import checkpointer
from tests.frameworks.harness import reach
from tests.frameworks.samples import LENGTH, Images, make_model


class EpochImages(Images):
    """Samples that depend on the epoch, which Accelerate sets."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        return super().__getitem__(i) + self.epoch


class Lines(data.IterableDataset):
    """A stream in a random order, without a length and without a state."""

    def __iter__(self):
        for i in random.sample(range(LENGTH), LENGTH):
            yield torch.arange(4.0) + i / 10 + torch.randn(4) / 10


class Count:
    """An object with a state, to be registered."""

    samples = 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


DATASETS = {"images": Images, "epochs": EpochImages, "lines": Lines}


def make_accelerator(config=None, **options):
    return Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**config or {}), **options
    )


def train(
    run,
    *,
    dataset="images",
    own=False,
    peeks=False,
    scales=False,
    spans=False,
    accumulation=1,
    mixed_precision="no",
    config=None,
    save=2,
    epochs=3,
    batch_size=4,
    validates=False,
    **options,
):
    """``own``: the script makes a ``limpet.DataLoader``. ``peeks``: it looks at a batch first.
    ``scales``: as with float16 on a GPU. ``spans``: accumulation goes on across epochs. ``config``:
    of ``DataLoaderConfiguration``. ``validates``: also after each step, with random numbers.
    ``save``: a policy, or the number of steps. ``options``: of the loader."""
    accumulates = GradientAccumulationPlugin(accumulation, sync_with_dataloader=not spans)
    accelerator = make_accelerator(
        config, mixed_precision=mixed_precision, gradient_accumulation_plugin=accumulates
    )
    if scales:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    dataset = DATASETS[dataset]()
    if not isinstance(dataset, data.IterableDataset):
        options["shuffle"] = True
    loader = (limpet if own else data).DataLoader(dataset, batch_size=batch_size, **options)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    loader = limpet.elastic(loader)
    validation = accelerator.prepare(data.DataLoader(torch.arange(32.0).view(8, 4), batch_size=4))
    count = Count()
    accelerator.register_for_checkpointing(count)
    average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))
    more = {"average": limpet.Replicated(average)}
    if peeks:
        next(iter(loader))
    save = limpet.EverySteps(save) if isinstance(save, int) else save
    with checkpointer(accelerator, run, more, save=save) as ckpt:
        for epoch in ckpt.epochs(epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).float().square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    average.update_parameters(accelerator.unwrap_model(model))
                count.samples += len(batch)
                ckpt.step({"loss": loss, "data": batch.sum(), "samples": count.samples})
                if validates:
                    torch.rand(())
            ckpt.metrics({"drawn at the end": torch.rand(())})
            model.eval()
            with torch.no_grad():
                scores = [accelerator.gather_for_metrics(model(batch)) for batch in validation]
            model.train()
            ckpt.metrics({"score": torch.cat(scores).float().mean()})
            reach(f"end of epoch {epoch}")
    steps = optimizer.optimizer.state_dict()["state"][0]["step"]
    print(f"{ckpt.current_step} steps, {int(steps)} of the optimizer")


def train_two(run):
    """A GAN: two models, two optimizers, and no scheduler. A step is one of each."""
    accelerator = make_accelerator()
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    loader = data.DataLoader(Images(), batch_size=4, shuffle=True)
    first, second, *optimizers, loader = accelerator.prepare(*models, *optimizers, loader)
    loader = limpet.elastic(loader)
    with checkpointer(accelerator, run, save=limpet.EverySteps(1)) as ckpt:
        for _ in ckpt.epochs(2):
            for batch in loader:
                for sign, optimizer in zip((1, -1), optimizers):
                    optimizer.zero_grad()
                    accelerator.backward(sign * second(torch.tanh(first(batch))).mean())
                    optimizer.step()
                ckpt.step()


def train_fsdp2(run):
    """Accelerate shards models on GPUs only, unless its state says otherwise."""
    accelerator = make_accelerator()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = data.DataLoader(Images(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert hasattr(next(model.parameters()), "full_tensor")
    loader = limpet.elastic(loader)
    with checkpointer(accelerator, run, save=limpet.EverySteps(2)) as ckpt:
        for _ in ckpt.epochs(3):
            for batch in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step({"loss": loss})


def save_before_a_batch(run, *, first):
    """Start from a position within an epoch of another run, and save it again at once."""
    accelerator = make_accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = data.DataLoader(Images(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader = limpet.elastic(loader)
    with checkpointer(accelerator, run, save=limpet.EverySteps(2)) as ckpt:
        if ckpt.resume(start=first) is not None:
            ckpt.save()
            reach("saved")
        for _ in ckpt.epochs(2):
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step({"data": batch.sum()})


# -- checks --------------------------------------------------------------------------------------


class Moved:
    """A batch that records where it was moved to."""

    def __init__(self, samples):
        self.samples, self.device = samples, None

    def to(self, device, **_):
        self.device = device
        return self


def check_batches(run):
    """They are moved to the device, and the ranks have each sample once, in the last batch, too."""
    for kind in ("images", "lines"):
        accelerator = make_accelerator({"dispatch_batches": False, "non_blocking": True})
        dataset = range(LENGTH) if kind == "images" else Numbers()
        options = {"shuffle": True} if kind == "images" else {}
        loader = accelerator.prepare(data.DataLoader(dataset, batch_size=4, **options))
        loader = limpet.elastic(loader, seed=1)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        with checkpointer(accelerator, f"{run}-{kind}") as ckpt:
            for _ in ckpt.epochs(1):
                for batch in loader:
                    accelerator.backward(model(batch[:, None].float()).sum())
                    optimizer.step()
                    seen.append(accelerator.gather_for_metrics(batch))
                    ckpt.step()
        assert len(seen) == -(-LENGTH // (4 * accelerator.num_processes))
        seen = torch.cat(seen).tolist()
        if kind == "images":
            assert sorted(seen) == [*range(LENGTH)]
            assert loader.batch_sampler.even_batches  # which join_uneven_inputs() reads and sets
        else:  # here, Accelerate does not know which samples are repeated
            assert {*seen} == {*range(LENGTH)}


def check_device(run):
    accelerator = make_accelerator()
    options = {"collate_fn": Moved, "batch_size": 4}
    loader = limpet.elastic(accelerator.prepare(data.DataLoader(range(LENGTH), **options)))
    assert [batch.device for batch in loader] == [accelerator.device] * 6
    assert [len(batch.samples) for batch in loader] == [4, 4, 4, 4, 4, 2]


class Numbers(data.IterableDataset):
    """In an order that all ranks must share."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        yield from random.sample(range(LENGTH), LENGTH)


def check_buffers(run):
    """Buffers that DDP does not broadcast differ on the ranks, and are not saved as if equal."""
    kwargs = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = make_accelerator(kwargs_handlers=[kwargs])
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LimpetError, match="running_mean"), checkpointer(accelerator, run) as ckpt:
        for _ in ckpt.steps(1):
            accelerator.backward(model(torch.randn(4, 4) + accelerator.process_index).sum())
            optimizer.step()
            ckpt.step()
            ckpt.save()
    accelerator.wait_for_everyone()


def check_refused(run):
    accelerator = make_accelerator()
    kinds = [
        (DistributedType.DEEPSPEED, "not DEEPSPEED"),
        (DistributedType.MEGATRON_LM, "not MEGATRON_LM"),
        (DistributedType.XLA, "not XLA"),
    ]
    for kind, message in kinds:
        accelerator.state.distributed_type = kind
        with pytest.raises(LimpetError, match=message):
            checkpointer(accelerator, run)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = type("Plugin", (), {"fsdp_version": 1})
    with pytest.raises(LimpetError, match="not FSDP1"):
        checkpointer(accelerator, run)
    accelerator.state.fsdp_plugin.fsdp_version = 2
    checkpointer(accelerator, run)
    accelerator.state.distributed_type = DistributedType.NO
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(LimpetError, match="not tp_size"):
        checkpointer(accelerator, run)
    accelerator.state.parallelism_config = None
    with pytest.raises(LimpetError, match="no argument savee="):
        checkpointer(accelerator, run, savee=1)


def check_state(run):
    """What must be prepared, and what is in the state, by its keys."""
    accelerator = make_accelerator()
    with pytest.raises(LimpetError, match=r"no model: prepare\(\) it before this"):
        checkpointer(accelerator, run).resume()
    early = checkpointer(accelerator, run, save=limpet.Never())  # before prepare
    model = accelerator.prepare(make_model())
    with pytest.raises(LimpetError, match="no optimizer"):
        early.resume()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    early.resume()
    assert early.state.keys() == {"model", "optimizer"}
    plain = accelerator.prepare(data.DataLoader(Images(), batch_size=4))
    with pytest.raises(LimpetError, match=r"use limpet.elastic\(prepare\(loader\)\)"):
        checkpointer(accelerator, run).resume()
    with pytest.raises(
        LimpetError, match="No loader has a position"
    ):  # it was prepared, but not elastic
        accelerator.prepare(limpet.DataLoader(Images(), batch_size=4))
        checkpointer(accelerator, run).resume()
    own = limpet.DataLoader(Images(), batch_size=4)
    ckpt = checkpointer(accelerator, run, {"data": own}, save=limpet.Never())
    ckpt.resume()
    assert ckpt.state.keys() == {"model", "optimizer", "data"}
    with pytest.raises(LimpetError, match="state= has 'model'"):
        checkpointer(accelerator, run, {"model": make_model(), "data": own}).resume()
    limpet.elastic(plain)
    accelerator.prepare(make_model())
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    accelerator.register_for_checkpointing(Count(), Count())
    accelerator.scaler = torch.amp.GradScaler("cpu")
    ckpt = checkpointer(accelerator, run, save=limpet.Never())
    ckpt.resume()
    assert [*ckpt.state] == [
        *("model", "model_1", "optimizer", "scheduler", "loader", "scaler"),
        *("registered", "registered_1"),
    ]
    dispatched = make_accelerator().prepare(data.DataLoader(Lines(), batch_size=4))
    with pytest.raises(LimpetError, match="dispatch_batches=False"):
        limpet.elastic(dispatched)


def check_save_state(run):
    """A folder of Accelerate's own is imported, and a new run begins with it."""
    accelerator = make_accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = data.DataLoader(Images(), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
    accelerator.save_state(f"{run}-folder")
    limpet.import_checkpoint(f"{run}-folder", f"{run}-imported/version_6", step=6)
    weights, slots = model[0].weight.detach().clone(), optimizer.state_dict()["state"]
    expected = slots[0]["exp_avg"].clone()
    model[0].weight.data.zero_()
    slots[0]["exp_avg"].zero_()
    scheduler.scheduler.last_epoch = 0
    limpet.elastic(loader)
    with checkpointer(accelerator, run, save=limpet.Never()) as ckpt:
        ckpt.resume(start=f"{run}-imported@6", keys=["model", "optimizer", "scheduler"])
    assert torch.equal(model[0].weight, weights)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], expected)
    assert scheduler.scheduler.last_epoch == 6


def check_forgotten(run):
    """A step counts a batch. A loop over another loader than the elastic one is an error."""
    accelerator = make_accelerator()
    plain = data.DataLoader(Images(), batch_size=4)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    limpet.elastic(accelerator.prepare(plain))
    message = "more batches than the loader 'loader' has yielded"
    with pytest.raises(LimpetError, match=message), checkpointer(accelerator, run) as ckpt:
        for _ in ckpt.epochs(1):
            for batch in plain:
                model(batch)
                ckpt.step()


def check_save_within_step(run):
    """While gradients are accumulated, BatchNorm has seen batches that no step has counted."""
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model = make_model()
    loader = data.DataLoader(Images(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )
    limpet.elastic(loader)
    with checkpointer(accelerator, run, save=limpet.Never()) as ckpt:
        for _ in ckpt.epochs(1):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                ckpt.step()
                if accelerator.sync_gradients:
                    assert ckpt.save().step == ckpt.current_step
                else:
                    with pytest.raises(LimpetError, match="call it if accelerator"):
                        ckpt.save()
    assert ckpt.current_step == 3
