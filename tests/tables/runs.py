"""A small training with tables, whose steps depend on all earlier ones."""

import numpy as np
import torch

import limpet
from limpet import tables
from tests.tables.contents import live

IDS, MANY = 60, 1500


def specs(**words):
    """Three tables: one with admission and eviction, one of bfloat16, and one without any row."""
    optimizer = tables.Adam(0.05)
    evict = tables.Evict(unused_steps=15, min_count=2, every=3)
    words = {"optimizer": optimizer, "admit_after": 2, "evict": evict, **words}
    return [
        tables.Table("words", 4, **words),
        tables.Table("users", 3, optimizer=tables.Adagrad(0.1), dtype=torch.bfloat16),
        tables.Table("empty", 2, optimizer=tables.SGD(0.1)),
    ]


def make_state(count=1, **words):
    torch.manual_seed(0)
    servers = tables.Servers(specs(**words), count)
    model = torch.nn.ModuleDict(
        {
            "words": tables.EmbeddingBag(servers, "words", mode="sum"),
            "users": tables.Embedding(servers, "users"),
            "top": torch.nn.Linear(7, 1),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "tables": servers}


def train_step(state, step):
    """A step on a batch that is a function of ``step``. The learning rate of a table changes."""
    random = np.random.default_rng(step)
    model, servers = state["model"], state["tables"]
    words = torch.from_numpy((random.zipf(1.2, (8, 3)) % IDS).astype(np.int64) * 7 - 20)
    users = words[:, 0]
    if step % 4 == 0:
        users = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, 8))
    x = torch.cat([model["words"](words), model["users"](users).float()], 1)
    if step <= 2:  # most rows: later versions can be incremental
        for name in ("words", "users"):
            model[name](torch.arange(MANY)[:, None] * 1001).sum().mul(0.01).backward()
    state["optimizer"].zero_grad()
    (model["top"](x) - 1).square().mean().backward()
    state["optimizer"].step()
    servers.learning_rates["words"] *= 0.99
    servers.step()


def contents(state):
    """All that the training has, as plain values."""
    top = {name: value.tolist() for name, value in state["model"]["top"].state_dict().items()}
    return live(state["tables"]), state["tables"].learning_rates, top


class Killed(Exception):
    pass


def train(store, steps, *, count=1, kill=None, found=None, after=lambda state: None, **options):
    """Train to ``steps`` steps, and return the state. ``kill``: the step that does not end.
    ``found`` gets the contents after each step. ``after`` is called after each step."""
    words = options.pop("words", {})
    state = make_state(count, **words)
    options = {"save": limpet.EverySteps(1), **options}
    with limpet.Checkpointer(store, state, **options) as ckpt:
        ckpt.resume()
        while ckpt.current_step < steps:
            step = ckpt.current_step + 1
            train_step(state, step)
            if step == kill:
                raise Killed
            if found is not None:
                found[step] = contents(state)[0]
            ckpt.step()
            after(state)
    return state
