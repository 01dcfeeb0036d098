"""Trainings of torchtitan on the CPU, with its own ``Trainer``."""

import importlib.machinery
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch._utils
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / ".zoo"))


def _import_on_cpu():
    """Import torchtitan, which assumes a GPU, without the libraries that only a GPU needs."""
    torch._utils._get_available_device_type = lambda: "cpu"
    for name in ("torchtitan.distributed.minimal_async_ep.kernels", "torch.utils.tensorboard"):
        sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
    import torchtitan.components.metrics
    import torchtitan.tools.utils
    import torchtitan.trainer

    torchtitan.trainer.time = SimpleNamespace(
        perf_counter=torchtitan.trainer.time.perf_counter, sleep=lambda seconds: None
    )
    memory = MagicMock(device_name="cpu")
    memory.get_peak_stats.return_value = torchtitan.components.metrics.DeviceMemStats(*[0] * 6)
    torchtitan.components.metrics.build_device_memory_monitor = lambda: memory
    torchtitan.tools.utils.get_peak_flops = lambda name: 1.0
    torchtitan.distributed.utils.set_pg_timeouts = lambda **kwargs: None


_import_on_cpu()

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import BaseValidator, Validator  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models.common.embedding import Embedding  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.module import Module, ModuleDict  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import limpet  # noqa: E402
from limpet.errors import LimpetError  # noqa: E402
from limpet.integrations.torchtitan import LimpetManager  # noqa: E402
from tests.frameworks import harness  # noqa: E402

VOCABULARY, WIDTH = 16, 8


class Layer(Module):
    """A layer with dropout."""

    def __init__(self):
        super().__init__()
        self.linear = Linear.Config(in_features=WIDTH, out_features=WIDTH).build()

    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x), 0.3, self.training)


class Model(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        layers: tuple = (0, 1, 2)  # torchtitan asks for its length

        def update_from_config(self, *, config, **kwargs):
            pass

        def get_nparams_and_flops(self, model, seq_len):
            return sum(p.numel() for p in model.parameters()), 1

    def __init__(self, config):
        super().__init__()
        embedding = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH)
        self.tok_embeddings = embedding.build()
        self.layers = ModuleDict({str(i): Layer() for i in config.layers})
        self.norm = None
        self.lm_head = Linear.Config(in_features=WIDTH, out_features=VOCABULARY).build()

    def forward(self, x, **kwargs):
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.lm_head is None else self.lm_head(x)


def parallelize(model, *, parallel_dims, **kwargs):
    mesh = parallel_dims.get_mesh(["fsdp"])
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Texts(torch.utils.data.IterableDataset):
    """Random texts, some of which the data set keeps in a buffer."""

    def __init__(self, rank, ranks, length, draws):
        self.rank, self.ranks, self.length, self.draws = rank, ranks, length, draws
        self.at, self.kept = 0, []

    def __iter__(self):
        while self.at < self.length:
            generator = torch.Generator().manual_seed(self.at * self.ranks + self.rank)
            self.at += 1
            self.kept.append(torch.randint(VOCABULARY, (6,), generator=generator).tolist())
            if len(self.kept) > 2:
                at = int(torch.randint(len(self.kept), ())) if self.draws else 0
                text = torch.tensor(self.kept.pop(at))
                yield {"input": text[:-1]}, text[1:]

    def state_dict(self):
        return {"at": self.at, "kept": [*self.kept]}

    def load_state_dict(self, state):
        self.at, self.kept = state["at"], [*state["kept"]]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        length: int = 10**9
        draws: bool = True

    def __init__(
        self,
        config,
        *,
        dp_world_size,
        dp_rank,
        local_batch_size,
        snapshot_every_n_steps=1,
        **kwargs,
    ):
        super().__init__(
            Texts(dp_rank, dp_world_size, config.length, config.draws),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()

    encode = decode = get_vocab_size = None


class RandomValidator(BaseValidator):
    """Draws random numbers, which must not change the training."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts, step):
        torch.rand(step)
        print("seed:", torch.initial_seed())
        harness.reach(f"validation {step}")


def pipeline_step(trainer, *, input_dict_mbs, label_mbs, global_valid_tokens):
    """As torchtitan's, but for the schedules of PyTorch 2.13, which divide a batch themselves."""
    inputs, losses = torch.cat([batch["input"] for batch in input_dict_mbs]), []
    trainer.pp_schedule.step(
        *([inputs] if trainer.pp_has_first_stage else []),
        target=torch.cat(label_mbs) if trainer.pp_has_last_stage else None,
        losses=losses if trainer.pp_has_last_stage else None,
        loss_kwargs={"global_valid_tokens": global_valid_tokens},
        return_outputs=False,
    )
    return torch.stack(losses).sum() if losses else torch.tensor([-1.0])


Trainer.pp_forward_backward_step = pipeline_step


def configure(run, *, steps=12, loader=None, accumulate=1, parallelism=None, **checkpoint):
    """Return the configuration of a training."""
    spec = ModelSpec(
        name="tiny",
        flavor="tiny",
        model=Model.Config(),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(Path(run).parent),
        metrics=MetricsProcessor.Config(log_freq=1000),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(**(loader or {})),
        optimizer=default_adamw(lr=0.01),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=2 * accumulate if accumulate > 1 else -1,
            seq_len=5,
            steps=steps,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **(parallelism or {})),
        checkpoint=LimpetManager.Config(
            **{"enable": True, "folder": Path(run).name, "interval": 2} | checkpoint
        ),
        validator=RandomValidator.Config(enable=True, freq=3),
        loss=CrossEntropyLoss.Config(),
        debug=DebugConfig(enable_structured_logging=False),
    )


def build(run, **options):
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    return configure(run, **options).build()


def train(run, **options):
    """What ``torchtitan.train.main`` does."""
    trainer = build(run, **options)
    try:
        trainer.train()
    except Exception:
        trainer.close()
        raise
    trainer.close()
    dist.destroy_process_group()
    print("trained", trainer.step, "steps")


def change_after_save(run):
    """A state that changes after a save is not what is saved, also if nothing has waited."""
    trainer = build(run, interval=1)
    manager, parts = trainer.checkpointer, trainer.model_parts
    manager.load()
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in (1, 2):
        trainer.train_step(batches)
        before = [p.to_local().clone() for p in parts[0].parameters()]
        assert manager.save(trainer.step) is True
        with torch.no_grad():
            for p in parts[0].parameters():
                p.zero_()
        if trainer.step == 2:
            manager.maybe_wait_for_saving()
            assert limpet.Run(run).latest().step == 2
        assert manager.load(trainer.step)
        assert all(a.equal(p.to_local()) for a, p in zip(before, parts[0].parameters()))
        batches = trainer.batch_generator(trainer.dataloader)
    trainer.close()


def refuse(run):
    """Each of these options is refused before the first step, and the error names it."""
    for options, message in (
        ({"last_save_model_only": True}, "needs checkpoint.last_save_model_only=False"),
        ({"initial_load_in_hf": True}, "needs checkpoint.initial_load_in_hf=False"),
        ({"create_seed_checkpoint": True}, "needs checkpoint.create_seed_checkpoint=False"),
        ({"exclude_from_loading": ["optimizer"]}, "exclude_from_loading cannot have 'optimizer'"),
        ({"exclude_from_loading": ["train_state"]}, "cannot have 'train_state'"),
        ({"options": {"every": 3}}, "Checkpointer has no argument every="),
        ({"folder": ""}, "The 'folder' field cannot be empty"),
    ):
        with pytest.raises((LimpetError, ValueError), match=re.escape(message)):
            build(run, **options)
    for name in ("async_mode", "save"):
        with pytest.raises(TypeError, match=name):
            build(run, **{name: "async"})
    assert not Path(run).exists()
    trainer = build(run, enable=False)
    assert not trainer.checkpointer.load()
    assert not trainer.checkpointer.save(1)
    trainer.close()
    assert not Path(run).exists()
