"""Checkpoints that Lightning, Accelerate, and Transformers wrote load into live objects.

Each test trains with the library, saves with it, and loads the checkpoint into fresh objects of
PyTorch. Both then make the same two steps, and all bits are equal.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import PlanError
from tests.interop.test_load_foreign import X, Y, snapshot_of, train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DATA = torch.utils.data.TensorDataset(X, Y)


def make_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def make_state(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}


def load(path, state, left_out, **options):
    """Load a checkpoint, and check that the warning lists what was left out."""
    with pytest.warns(UserWarning, match="Not loaded from") as caught:
        limpet.load(path, into=state, **options)
    message = str(next(w.message for w in caught if "Not loaded" in str(w.message)))
    assert all(name in message for name in left_out), message


# -- Lightning -----------------------------------------------------------------------------------


def make_module(net, automatic=True):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"lr": 0.01})
            self.net = net
            self.metric = nn.Linear(2, 2).requires_grad_(False)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return (self(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            state = make_state(self.net)
            schedule = {"scheduler": state["scheduler"], "interval": "step"}
            return [state["optimizer"]], [schedule]

    return Module()


def fit_lightning(path, **options):
    """Train three steps with Lightning. Return the state as live objects."""
    lightning = pytest.importorskip("lightning")
    module = make_module(make_net(0))
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[
            lightning.pytorch.callbacks.EarlyStopping("loss", check_on_train_epoch_end=False)
        ], **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(DATA, 4))
    trainer.save_checkpoint(path)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return {"model": module, "optimizer": trainer.optimizers[0], "scheduler": scheduler}


LIGHTNING_REST = ("loops", "callbacks", "hyper_parameters", "epoch", "global_step")


def test_a_lightning_checkpoint_loads_into_a_lightning_module(tmp_path):
    original = fit_lightning(tmp_path / "epoch=0.ckpt")
    module = make_module(make_net(1))
    [optimizer], [schedule] = module.configure_optimizers()
    restored = {"model": module, "optimizer": optimizer, "scheduler": schedule["scheduler"]}
    load(tmp_path / "epoch=0.ckpt", restored, LIGHTNING_REST)
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)


def test_a_lightning_checkpoint_loads_into_the_inner_model(tmp_path):
    original = fit_lightning(tmp_path / "last.ckpt")
    restored = make_state(make_net(1))
    load(tmp_path / "last.ckpt", restored, (*LIGHTNING_REST, "state_dict: metric.weight"))
    original["model"] = original["model"].net
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)


def test_two_inner_models_are_ambiguous(tmp_path):
    net = make_net(0)
    module = make_module(net)
    module.ema = make_net(1)
    content = {"pytorch-lightning_version": "2.5.0", "state_dict": module.state_dict()}
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(PlanError, match=r"Several parts of state_dict fit .*Found ema\., net\."):
        limpet.load(tmp_path / "x.ckpt", into={"model": net})


# -- Accelerate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_accelerate(tmp_path, safe):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    original = make_state(make_net(0))
    prepared = accelerator.prepare(*original.values(), torch.utils.data.DataLoader(DATA, 4))
    model, optimizer, scheduler, loader = prepared
    progress = limpet.Progress()
    progress.step = 2
    accelerator.register_for_checkpointing(progress)
    for x, y in loader:
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(tmp_path / "c", safe_serialization=safe)
    original = {"model": model, "optimizer": optimizer.optimizer, "scheduler": scheduler.scheduler}
    restored = make_state(make_net(1))
    load(tmp_path / "c", restored, ["random_states_0.pkl", "custom_checkpoint_0.pkl"])
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)
    named = {"custom_checkpoint_0": limpet.Progress()}
    load(tmp_path / "c", named, ["optimizer.bin"])
    assert named["custom_checkpoint_0"].step == 2


def test_accelerate_numbers_its_members(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    states = [make_state(make_net(seed)) for seed in (0, 1)]
    for number, state in enumerate(states):
        state["model"][0].bias.data += number
        train(state, 1 + number)
        accelerator.prepare(*state.values())
    accelerator.save_state(tmp_path / "c")
    restored = [make_state(make_net(seed)) for seed in (2, 3)]
    into = {f"{k}_{'ab'[i]}": v for i, state in enumerate(restored) for k, v in state.items()}
    load(tmp_path / "c", into, ["random_states_0.pkl"])
    for mine, theirs in zip(restored, states, strict=True):
        assert train(mine) == train(theirs)


def test_wrapped_optimizers_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    original = make_state(make_net(0))
    train(original)
    accelerator.prepare(*original.values())
    accelerator.save_state(tmp_path / "c")
    restored = make_state(make_net(1))
    wrapped = accelerator.prepare(*restored.values())
    load(tmp_path / "c", dict(zip(restored, wrapped, strict=True)), ["random_states_0.pkl"])
    assert train(restored) == train(original)


# -- Transformers --------------------------------------------------------------------------------


def make_trainer(folder, seed, **options):
    """Return a Trainer of Transformers for a tiny model."""
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "tiny"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.net = make_net(seed)
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, x, labels=None):
            logits = self.net(x)
            if labels is None:
                return logits
            return {"loss": (logits - labels).square().mean(), "logits": logits}

    settings = {
        "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "learning_rate": 0.01,
        "weight_decay": 0.1, "seed": 3, **options,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **settings)
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    return transformers.Trainer(Model(Config()), args, train_dataset=rows)


def test_a_folder_of_transformers(tmp_path):
    trainer = make_trainer(tmp_path / "t", 0)
    trainer.train()
    # the first two steps, at which the folder was saved
    half = make_trainer(tmp_path / "half", 0, max_steps=4, save_steps=100)
    half.add_callback(_StopAfter(2))
    half.train()
    original = {
        "model": half.model,
        "optimizer": half.optimizer.optimizer,
        "scheduler": half.lr_scheduler,
    }
    fresh = make_trainer(tmp_path / "fresh", 1)
    fresh.create_optimizer_and_scheduler(4)
    restored = {"model": fresh.model, "optimizer": fresh.optimizer, "scheduler": fresh.lr_scheduler}
    assert len(fresh.optimizer.param_groups) == 2
    rest = ["rng_state.pth", "training_args.bin", "trainer_state.json"]
    load(tmp_path / "t" / "checkpoint-2", restored, rest)
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)
    one_group = make_state(fresh.model)
    with pytest.raises(PlanError, match="Expected groups of 2, 4 parameters, found groups of 6"):
        limpet.load(tmp_path / "t" / "checkpoint-2", into=one_group)


def _StopAfter(step):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= step

    return Stop()


def test_sharded_models_of_transformers(tmp_path):
    trainer = make_trainer(tmp_path / "t", 0)
    trainer.model.save_pretrained(tmp_path / "m", max_shard_size=200)
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 1
    net = make_trainer(tmp_path / "u", 1).model
    limpet.load(tmp_path / "m", into={"model": net})
    assert all(map(torch.equal, net.parameters(), trainer.model.parameters()))
