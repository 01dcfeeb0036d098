"""Checkpoints of other libraries are imported once, and the training continues from the snapshot.

Both the original and the restored training make the same two steps, and all bits are equal.
"""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import limpet
from limpet.errors import AlreadyExists, MissingLeaf, NotFound, PlanError, Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

X, Y = torch.randn(16, 4), torch.randn(16, 2)
DATA = torch.utils.data.TensorDataset(X, Y)


class Net(nn.Module):
    """A model with a frozen layer, a tied weight, and a parameter without gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(3))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.frozen(self.first(x)) + self.tied(x)))


def make(optimizer_class=torch.optim.AdamW, **options):
    """Return a fresh state: a model, its optimizer with two groups, and a scheduler."""
    net = Net()
    decay = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decay, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = optimizer_class(groups, lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}


def make_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def make_state(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}


def train(state, steps=2):
    """Train and return a copy of everything."""
    model, optimizer = state["model"], state["optimizer"]
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - Y).square().mean().backward()
        optimizer.step()
        state["scheduler"].step()
    return copy_of(state)


def copy_of(state):
    values = [state["model"].state_dict(), state["optimizer"].state_dict()]
    return json.dumps([_plain(v) for v in values])


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().double().tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def state_dicts(state):
    return {name: value.state_dict() for name, value in state.items()}


def assert_continues(original, path, tmp_path, restored=None, **options):
    """Import a checkpoint of ``original``, and load it into fresh objects."""
    restored = make() if restored is None else restored
    snapshot = limpet.import_checkpoint(path, tmp_path / "imported")
    assert snapshot.verify().ok
    limpet.load(snapshot.url, into=restored, keys=[*restored], **options)
    assert copy_of(restored) == copy_of(original)
    assert train(restored) == train(original)
    return snapshot


@pytest.mark.parametrize("suffix", ["", "_state_dict", "_state"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_with_numbered_state_continues(tmp_path, suffix, zipped):
    original = make()
    train(original, 3)
    content = {name + suffix: value for name, value in state_dicts(original).items()}
    content["epoch"] = 3
    torch.save(content, tmp_path / "step_7.pt", _use_new_zipfile_serialization=zipped)
    snapshot = assert_continues(original, tmp_path / "step_7.pt", tmp_path)
    assert snapshot.step == 7
    assert snapshot["epoch"] == 3


@pytest.mark.parametrize("kind", ["numbered", "named"])
def test_a_dcp_folder_continues(tmp_path, kind):
    original = make_state(make_net(0))
    train(original)
    content = state_dicts(original)
    if kind == "named":
        model, optimizer = get_state_dict(original["model"], original["optimizer"])
        content |= {"model": model, "optimizer": optimizer}
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    assert_continues(original, tmp_path / "d", tmp_path, make_state(make_net(1)))


def test_a_folder_in_a_store_continues(tmp_path):
    original = make()
    train(original)
    store = limpet.open_store("memory://foreign-folder")
    model = dict(original["model"].state_dict())
    del model["tied.weight"]  # as Transformers does
    files = {"model.safetensors": save(model)}
    for name in ("optimizer", "scheduler"):
        torch.save(original[name].state_dict(), tmp_path / "t")
        files[f"{name}.bin"] = (tmp_path / "t").read_bytes()
    for name, raw in files.items():
        store.put_if_absent(f"c/{name}", raw)
    assert_continues(original, "memory://foreign-folder/c", tmp_path)


def test_recorded_names_count_more_than_the_order(tmp_path):
    net, other = Net(), Net()
    original = {"model": net, "optimizer": torch.optim.AdamW(net.named_parameters(), lr=0.1)}
    net(X).square().mean().backward()
    original["optimizer"].step()
    torch.save(state_dicts(original), tmp_path / "c.pt")
    reverse = list(other.parameters())[::-1]
    restored = {"model": other, "optimizer": torch.optim.AdamW(reverse, lr=0.5)}
    limpet.load(limpet.import_checkpoint(tmp_path / "c.pt", tmp_path / "v").url, into=restored)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        slots, copies = original["optimizer"].state[p], restored["optimizer"].state[q]
        assert slots.keys() == copies.keys()
        assert all(torch.equal(slots[s], copies[s]) for s in slots)


def test_another_order_or_other_groups_are_refused_and_nothing_changes(tmp_path):
    original = make()
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    url = limpet.import_checkpoint(tmp_path / "c.pt", tmp_path / "v").url
    reversed_, lacking = make(), make()
    for group in reversed_["optimizer"].param_groups:
        group["params"].reverse()
    lacking["optimizer"].param_groups[0]["params"].pop()
    for live, found in ((reversed_, r"live \[2, 8\]"), (lacking, "groups of 3, 4 parameters")):
        before = copy_of(live)
        with pytest.raises(PlanError, match=found):
            limpet.load(url, into=live)
        assert copy_of(live) == before


def test_a_training_starts_from_an_imported_checkpoint(tmp_path):
    original = make()
    train(original)
    torch.save(state_dicts(original), tmp_path / "c.pt")
    limpet.import_checkpoint(tmp_path / "c.pt", tmp_path / "imported" / "version_500")
    restored = make()
    with limpet.Checkpointer(tmp_path / "run", restored) as ckpt:
        ckpt.resume(start=f"{tmp_path}/imported@500")
        assert ckpt.current_step == 500
        assert copy_of(restored) == copy_of(original)


@pytest.mark.parametrize("kind", ["file", "folder", "url"])
def test_the_errors_of_load_open_and_resume_say_what_to_do(tmp_path, kind):
    path = str(tmp_path / "c.pt")
    torch.save({"model": nn.Linear(4, 2).state_dict()}, path)
    if kind == "folder":
        path = str(tmp_path / "folder")
        (tmp_path / "folder").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / "folder" / "model.safetensors")
    elif kind == "url":
        store = limpet.open_store("memory://foreign-advice")
        store.put_if_absent("a/c.pt", (tmp_path / "c.pt").read_bytes())
        path = "memory://foreign-advice/a/c.pt"
    call = r"import it first: limpet\.import_checkpoint\("
    with pytest.raises(NotFound, match=call):
        limpet.open(path)
    for into in (None, make()):
        with pytest.raises(NotFound, match=call):
            limpet.load(path, into=into)
    with limpet.Checkpointer(tmp_path / "run", make()) as ckpt, pytest.raises(NotFound, match=call):
        ckpt.resume(start=path)


def test_what_is_left_out_is_listed_and_nothing_is_imported_twice(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"")
    events = []
    with (
        limpet.attach(lambda name, fields: events.append((name, fields))),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")  # it is no error: the Trainer always writes this file
        limpet.import_checkpoint(tmp_path, tmp_path / "v")
    imported = dict(events)["imported"]
    assert (imported["kind"], imported["left_out"]) == ("huggingface", ["training_args.bin"])
    events.clear()
    assert limpet.import_checkpoint(tmp_path, tmp_path / "v").step is None
    assert "imported" not in dict(events)
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(AlreadyExists):
        limpet.import_checkpoint(tmp_path, tmp_path / "v")


def test_options_of_the_import(tmp_path):
    torch.save({"module.w": torch.ones(2)}, tmp_path / "c.pt")
    snapshot = limpet.import_checkpoint(tmp_path / "c.pt", tmp_path / "a", key="net", step=3)
    assert (list(snapshot), snapshot.step) == (["net/w"], 3)
    snapshot = limpet.import_checkpoint(tmp_path / "c.pt", tmp_path / "b", keep_names=True)
    assert (list(snapshot), snapshot.step) == (["model/module.w"], None)


def test_tied_weights_that_differ_are_refused(tmp_path):
    content = dict(Net().state_dict()) | {"tied.weight": torch.ones(8, 4)}
    save_file(content, tmp_path / "y")
    url = limpet.import_checkpoint(tmp_path / "y", tmp_path / "v").url
    with pytest.raises(PlanError, match="share memory, but would get different"):
        limpet.load(url, into={"model": Net()})
    torch.save({"first.weight": torch.ones(8, 4)}, tmp_path / "part.pt")
    url = limpet.import_checkpoint(tmp_path / "part.pt", tmp_path / "part").url
    with pytest.raises(MissingLeaf, match=r"model/first\.bias"):
        limpet.load(url, into={"model": Net()})


@pytest.mark.parametrize("spaces", [1, 7, 8, 5000])
def test_spaces_before_the_header(tmp_path, spaces):
    raw = save({"a": torch.arange(3.0), "b": torch.ones(2)})
    size = int.from_bytes(raw[:8], "little")
    padded = (size + spaces).to_bytes(8, "little") + b" " * spaces + raw[8:]
    (tmp_path / "x").write_bytes(padded)
    loaded = limpet.load(limpet.import_checkpoint(tmp_path / "x", tmp_path / "v").url)["model"]
    assert torch.equal(loaded["a"], torch.arange(3.0))
    (tmp_path / "y").write_bytes(raw[:8] + b" " * size)
    with pytest.raises(Unsupported, match="not a checkpoint"):
        limpet.import_checkpoint(tmp_path / "y", tmp_path / "w")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            state = make_state(self.net)
            schedule = {"scheduler": state["scheduler"], "interval": "step"}
            return [state["optimizer"]], [schedule]

    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Module(make_net(0))
    trainer.fit(module, torch.utils.data.DataLoader(DATA, 4))
    trainer.save_checkpoint(tmp_path / "epoch=0.ckpt")
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    original = {"model": module.net, "optimizer": trainer.optimizers[0], "scheduler": scheduler}
    snapshot = limpet.import_checkpoint(tmp_path / "epoch=0.ckpt", tmp_path / "v")
    assert snapshot.step == 3
    fresh = Module(make_net(1))
    [optimizer], [schedule] = fresh.configure_optimizers()
    into = {"model": fresh, "optimizer": optimizer, "scheduler": schedule["scheduler"]}
    limpet.load(snapshot.url, into=into, keys=[*into])
    assert train(into | {"model": fresh.net}) == train(original)
    inner = make_net(2)
    limpet.load(snapshot.url, into={"model": nn.ModuleDict({"net": inner})}, keys="model/net")
    assert inner[0].weight.shape == original["model"][0].weight.shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("safe", [True, False])
def test_accelerate(tmp_path, safe):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    states = [make_state(make_net(seed)) for seed in (0, 1)]
    for number, state in enumerate(states):
        train(state, 1 + number)
        accelerator.prepare(*state.values())
    accelerator.save_state(tmp_path / "c", safe_serialization=safe)
    found = []
    with limpet.attach(lambda name, fields: name == "imported" and found.append(fields)):
        snapshot = limpet.import_checkpoint(tmp_path / "c", tmp_path / "v")
    assert found[0]["left_out"]
    restored = [make_state(make_net(seed)) for seed in (2, 3)]
    into = {k + ("_1" if i else ""): v for i, s in enumerate(restored) for k, v in s.items()}
    limpet.load(snapshot.url, into=into)
    for mine, theirs in zip(restored, states, strict=True):
        assert train(mine) == train(theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")

    def make_trainer(seed):
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        args = transformers.TrainingArguments(
            str(tmp_path / "t"), max_steps=2, save_steps=2, report_to=[], use_cpu=True,
            disable_tqdm=True, weight_decay=0.1,
        )  # fmt: skip
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(32).view(4, 8)]
        return transformers.Trainer(model, args, train_dataset=rows)

    trainer = make_trainer(0)
    trainer.train()
    found = []
    with limpet.attach(lambda name, fields: name == "imported" and found.append(fields)):
        snapshot = limpet.import_checkpoint(tmp_path / "t" / "checkpoint-2", tmp_path / "v")
    assert "training_args.bin" in str(found[0]["left_out"])
    assert snapshot.step == 2
    fresh = make_trainer(1)
    fresh.create_optimizer_and_scheduler(2)
    into = {"model": fresh.model, "optimizer": fresh.optimizer, "scheduler": fresh.lr_scheduler}
    limpet.load(snapshot.url, into=into)
    original = {"model": trainer.model, "optimizer": trainer.optimizer.optimizer}
    assert copy_of(into) == copy_of(original)
