"""Train embedding tables on servers, with workers: word vectors, or a model of clicks.

    python examples/embeddings.py words --run runs/words
    python examples/embeddings.py clicks --run runs/clicks --engine ray --servers 2 --workers 3

With ``--engine ray``, servers and workers are processes on a Ray cluster (``ray start --head``).
Kill any of them: the training continues. Stop the whole training in any way, and start it again
with the same command, or with other numbers of servers and workers: it resumes.
"""

import argparse
import re
import sysconfig
from collections import Counter
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import limpet
from limpet import tables

# -- words: skip-gram with negative sampling, synchronous ------------------------------------------

DIM = 48
WORDS = tables.Table(
    "words", DIM, optimizer=tables.Adagrad(lr=0.2), initializer=tables.Uniform(0.01)
)
CONTEXTS = tables.Table(
    "contexts", DIM, optimizer=tables.Adagrad(lr=0.2), initializer=tables.Constant(0.0)
)
NEIGHBORS = torch.tensor([-4, -3, -2, -1, 1, 2, 3, 4])
NEGATIVES = 128
"""The number of random words of a mini-batch. Together, they count as two for each neighbor."""


def read_words(quick: bool = False) -> list[str]:
    """Return the words of Python's documentation, and of docstrings in Python, NumPy, and torch.

    ``quick``: without the docstrings.
    """
    texts = list(topics.values())
    folders = [] if quick else [sysconfig.get_path("stdlib"), np.__path__[0], torch.__path__[0]]
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("*.py")):
            if not {"site-packages", "test", "tests"} & {*path.relative_to(folder).parts}:
                texts += re.findall(r'"""(.*?)"""', path.read_text(errors="replace"), re.DOTALL)
    return re.findall(r"[a-z]{2,}", "\n".join(texts).lower())


class Text:
    """A text as ids of words: without rare words, and with fewer of the most frequent ones."""

    def __init__(self, words: list[str], min_count: int = 20) -> None:
        self.counts = {w: n for w, n in sorted(Counter(words).items()) if n >= min_count}
        self.vocabulary = torch.from_numpy(tables.hash_ids([*self.counts]))
        numbers = {word: number for number, word in enumerate(self.counts)}
        text = np.array([numbers[word] for word in words if word in numbers])
        frequency = np.bincount(text) / len(text)
        is_kept = np.random.default_rng(0).random(len(text)) < np.sqrt(2e-4 / frequency)[text]
        self.ids = self.vocabulary[text[is_kept]]
        self.noise = torch.from_numpy(frequency**0.75)

    def neighbors(self, positions: torch.Tensor) -> torch.Tensor:
        return self.ids[(positions[:, None] + NEIGHBORS).clamp(0, len(self.ids) - 1)]

    def negatives(self) -> torch.Tensor:
        return self.vocabulary[torch.multinomial(self.noise, NEGATIVES)]


class Loss(nn.Module):
    """The dense part of the model: it maps vectors of words to those of their neighbors."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM)
        nn.init.eye_(self.map.weight)
        nn.init.zeros_(self.map.bias)

    def forward(self, words, neighbors, negatives):  # [n, dim], [n, neighbors, dim], [m, dim]
        words = self.map(words)
        scores = torch.einsum("nd,nkd->nk", words, neighbors)
        noise = functional.softplus(words @ negatives.T).mean(1)
        return functional.softplus(-scores).sum() + 2 * len(NEIGHBORS) * noise.sum()


def make_loss():
    model = Loss()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_words(worker: tables.Worker, text: Text, batch_size: int) -> None:
    """Runs in each worker. A large text would be read here, from files."""
    words = tables.Embedding(worker.tables, "words")
    contexts = tables.Embedding(worker.tables, "contexts")
    model, _ = make_loss()
    worker.dense(model)
    while (records := worker.next(batch_size)) is not None:
        positions = torch.tensor(records)
        neighbors, negatives = contexts(text.neighbors(positions)), contexts(text.negatives())
        loss = model(words(text.ids[positions]), neighbors, negatives)
        loss.backward()
        worker.step({"loss": loss.item() / len(positions)})


def words(options: argparse.Namespace) -> None:
    text = Text(read_words(options.quick))
    batch_size = 256 if options.quick else 4096
    queue = limpet.tasks.Queue()
    queue.add("training", len(text.ids), task_size=3 * batch_size, epochs=3, name="text")
    train = partial(train_words, text=text, batch_size=batch_size)
    with tables.Servers(
        [WORDS, CONTEXTS],
        options.servers,
        engine=options.engine,
        dense=make_loss,
        grads_to_wait=3,
    ) as servers:
        state = {"tables": servers, "queue": queue}
        save = limpet.EverySteps(10)
        with limpet.Checkpointer(options.run, state, save=save, incremental=True) as ckpt:
            ckpt.resume()
            servers.train(train, workers=options.workers, queue=queue, ckpt=ckpt)


# -- clicks: DeepFM on a log whose ids come and go, asynchronous -----------------------------------

FIELDS, SLOTS, LIFE = 3, 200, 5
"""Such as user, item, and page. Each day has 200 ids in each field, of which 40 are new."""

FACTORS = 4
BATCH = 512
DAY_STEPS = 200
DAY_RECORDS = DAY_STEPS * BATCH  # so no mini-batch has records of two days

PLANTED = [
    tables.Table("weights", 1, optimizer=tables.SGD(0.0), initializer=tables.Normal(std=1.0)),
    tables.Table("factors", FACTORS, optimizer=tables.SGD(0.0), initializer=tables.Normal(std=0.3)),
]
"""Tables that are never trained: the initial vector of each id is what a model should learn."""

UNUSED = tables.Evict(unused_steps=DAY_STEPS, every=DAY_STEPS // 4)
LEARNED = [
    tables.Table("weights", 1, optimizer=tables.Adagrad(lr=0.3), evict=UNUSED),
    tables.Table("factors", FACTORS, optimizer=tables.Adagrad(lr=0.15), evict=UNUSED),
]


class FactorizationMachine(nn.Module):
    """``source``: Servers, the tables of a Worker, or a View."""

    def __init__(self, source) -> None:
        super().__init__()
        self.weights = tables.EmbeddingBag(source, "weights", mode="sum")
        self.factors = tables.Embedding(source, "factors")

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``ids``: ``[n, FIELDS]``. Returns logits, and the factors ``[n, FIELDS, FACTORS]``."""
        factors = self.factors(ids)
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return self.weights(ids)[:, 0] + pairs, factors


class DeepFM(nn.Module):
    def __init__(self, source) -> None:
        super().__init__()
        self.machine = FactorizationMachine(source)
        self.deep, _ = make_deep()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits, factors = self.machine(ids)
        return logits + self.deep(factors.flatten(1))[:, 0]


def make_deep():
    model = nn.Sequential(nn.Linear(FIELDS * FACTORS, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.002)


def click_log(day: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Generate a day: ids ``[n, FIELDS]``, clicks ``[n]``, and logits of the planted model."""
    random = np.random.default_rng([day, seed])
    popularity = np.arange(1, SLOTS + 1) ** -1.1
    slots = random.choice(SLOTS, (DAY_RECORDS, FIELDS), p=popularity / popularity.sum())
    born = (day + np.arange(SLOTS)) // LIFE
    names = [f"{field} {slot} {born[slot]}" for field in range(FIELDS) for slot in range(SLOTS)]
    ids = torch.from_numpy(tables.hash_ids(names)).view(FIELDS, SLOTS)
    ids = ids[torch.arange(FIELDS), torch.from_numpy(slots)]
    with torch.no_grad():
        logits = FactorizationMachine(tables.Servers(PLANTED))(ids)[0] - 0.5
    clicks = torch.from_numpy(random.random(DAY_RECORDS)) < logits.sigmoid()
    return ids, clicks.float(), logits


def train_clicks(worker: tables.Worker) -> None:
    model, log = DeepFM(worker.tables), cache(click_log)
    worker.dense(model.deep)
    while (records := worker.next(BATCH)) is not None:
        ids, clicks, _ = log(int(records[0][0]))
        numbers = torch.tensor([number for _, number in records])  # all of this day
        logits = model(ids[numbers])
        loss = functional.binary_cross_entropy_with_logits(logits, clicks[numbers], reduction="sum")
        loss.backward()
        worker.step({"loss": loss.item() / len(records)})


def clicks(options: argparse.Namespace) -> None:
    queue = limpet.tasks.Queue()
    days = {str(day): DAY_RECORDS for day in range(options.days)}
    queue.add("training", days, task_size=10 * BATCH, name="log")
    with tables.Servers(
        LEARNED, options.servers, engine=options.engine, dense=make_deep
    ) as servers:
        state = {"tables": servers, "queue": queue}
        save = limpet.EverySteps(DAY_STEPS // 2)
        with limpet.Checkpointer(options.run, state, save=save, incremental=True) as ckpt:
            ckpt.resume()
            servers.train(train_clicks, workers=options.workers, queue=queue, ckpt=ckpt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=["words", "clicks"])
    parser.add_argument("--run", required=True, help="folder or URL of the run")
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--days", type=int, default=7, help="of the click log")
    parser.add_argument("--quick", action="store_true", help="a part of the text")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as Ray does for actors of one CPU: more would round otherwise
    {"words": words, "clicks": clicks}[options.model](options)


if __name__ == "__main__":
    main()
