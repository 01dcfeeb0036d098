"""Tables in one process, against a plain-torch dict in which each row is a parameter of its own."""

import copy
import itertools
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import limpet
from limpet import tables
from limpet.errors import LimpetError
from limpet.storage.memory import MemoryStore
from tests.interrupts import InterruptOpcode
from tests.tables.contents import differing, live

DIM = 4
PADDING = 7


class RowwiseAdagrad(torch.optim.Optimizer):
    def __init__(self, params, lr, eps=1e-10):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].get("sum", 0) + (p.grad**2).mean()
                self.state[p]["sum"] = total
                p -= group["lr"] * p.grad / (total.sqrt() + group["eps"])


OPTIMIZERS = {
    "sgd": (
        tables.SGD(0.125, momentum=0.5),
        lambda params: torch.optim.SGD(params, 0.125, momentum=0.5),
    ),
    "adagrad": (
        tables.Adagrad(0.05, initial_accumulator=0.5),
        lambda params: torch.optim.Adagrad(params, 0.05, initial_accumulator_value=0.5),
    ),
    "rowwise": (tables.RowwiseAdagrad(0.05), lambda params: RowwiseAdagrad(params, 0.05)),
    "adam": (
        tables.Adam(0.01, betas=(0.8, 0.95)),
        lambda params: torch.optim.Adam(params, 0.01, betas=(0.8, 0.95)),
    ),
}


class PlainRows:
    """A row per id: a float32 parameter with an optimizer of its own. A row of bfloat16 is rounded
    after each step. Ids without a gradient are forgotten by ``step``."""

    def __init__(self, table, make_optimizer):
        self.table, self.make_optimizer = table, make_optimizer
        self.rows, self.new, self.last = {}, {}, {}

    def __getitem__(self, i):
        if i not in self.rows and i not in self.new:
            vector = self.table.initial(np.array([i]))[0].float().requires_grad_()
            self.new[i] = (vector, self.make_optimizer([vector]), [0, 0])
        return (self.rows.get(i) or self.new[i])[0]

    def step(self, number):
        for i, row in [*self.rows.items(), *self.new.items()]:
            vector, optimizer, counts = row
            if vector.grad is not None:
                optimizer.step()
                vector.grad = None
                vector.data = vector.data.to(self.table.dtype).float()
                self.rows[i] = row
                counts[:] = counts[0] + 1, number
        self.new = {}


class Plain(torch.nn.Module):
    """The same as ``Model``, from rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def bags(self, bags, mode, weights=None):
        out = []
        for n, bag in enumerate(bags):
            factors = [1.0] * len(bag) if weights is None else weights[n]
            found = [self.rows[i] * w for i, w in zip(bag, factors) if i != PADDING]
            if not found:
                out.append(torch.zeros(DIM))
            else:
                stacked = torch.stack(found)
                how = {"sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0)}
                out.append(how.get(mode, lambda x: x.max(0).values)(stacked))
        return torch.stack(out)

    def forward(self, bags, mode, weights, ids, factors):
        bagged = self.bags(bags, mode, weights)
        twice = self.bags(bags[::-1], mode)
        flat = [self.rows[i] if i != PADDING else torch.zeros(DIM) for i in ids]
        return ((bagged + 2 * twice) * factors).sum() + torch.stack(flat).sum()


class Model(torch.nn.Module):
    def __init__(self, servers, dtype):
        super().__init__()
        self.dtype = dtype
        self.bag = {
            mode: tables.EmbeddingBag(servers, "words", mode=mode, padding_idx=PADDING)
            for mode in ("sum", "mean", "max")
        }
        self.embedding = tables.Embedding(servers, "words", padding_idx=PADDING)

    def forward(self, bags, mode, weights, ids, factors):
        offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in bags])[:-1]])
        flat = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
        if weights is not None:
            weights = torch.tensor([w for each in weights for w in each], dtype=self.dtype)
        bagged = self.bag[mode](flat, offsets, weights)
        back = bags[::-1]
        offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in back])[:-1]])
        twice = self.bag[mode](torch.tensor([i for bag in back for i in bag]), offsets)
        rows = self.embedding(torch.tensor(ids).reshape(2, -1))
        return ((bagged + 2 * twice) * factors).sum() + rows.sum()


def batch(random):
    """Bags of powers of two: all gradients are multiples of 1/4, so that sums are exact."""
    bags = [
        [int(i) for i in random.zipf(1.3, 1 << random.integers(3)) % 30 - 5]
        for _ in range(random.integers(2, 6))
    ]
    mode = ["sum", "mean", "max"][random.integers(3)]
    if mode == "mean":  # the padding does not count
        bags = [[i + (i == PADDING) for i in bag] for bag in bags]
    weights = None
    if mode == "sum" and random.integers(2):
        weights = [[float(w) for w in random.integers(-2, 3, len(bag))] for bag in bags]
    ids = [int(i) for i in random.integers(-5, 30, 6)]
    return bags, mode, weights, ids, torch.tensor(random.integers(-2, 3, (len(bags), 1)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_bags_of_one_id_equal_those_of_torch(mode, padding):
    servers = tables.Servers([tables.Table("words", DIM, optimizer=tables.SGD(lr=1.0))])
    start = torch.randn(8, DIM)
    servers.fill("words", torch.arange(8), start)
    expected = torch.nn.EmbeddingBag(8, DIM, mode=mode, padding_idx=padding, _weight=start.clone())
    module = tables.EmbeddingBag(servers, "words", mode=mode, padding_idx=padding)
    ids = torch.tensor([[5], [PADDING], [5], [0], [7]])
    found, wanted = module(ids), expected(ids)
    assert torch.equal(found, wanted)
    gradient = torch.randint(-4, 5, found.shape).float()
    for vectors in (found, wanted):
        vectors.backward(gradient)
    servers.step()
    assert torch.equal(servers.lookup("words", torch.arange(8)), start - expected.weight.grad)
    with pytest.raises(ValueError, match="offsets"):
        module(ids, torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_equals_one_of_a_dict_of_parameters(kind, dtype):
    """B 10, 12, 16, 24, 28, 31."""
    optimizer, make_optimizer = OPTIMIZERS[kind]
    table = tables.Table("words", DIM, optimizer=optimizer, dtype=dtype)
    many = [tables.Servers([table], count) for count in (1, 3)]
    models, plain = [Model(servers, dtype) for servers in many], PlainRows(table, make_optimizer)
    expected, random = Plain(plain), np.random.default_rng(len(kind))
    for step in range(1, 9):
        for _ in range(random.integers(1, 3)):  # gradients are accumulated
            arguments = batch(random)
            loss = expected(*arguments)
            loss.backward()
            for model in models:
                found = model(*arguments)
                assert dtype == torch.bfloat16 or torch.allclose(found, loss, rtol=1e-5, atol=1e-5)
                found.backward()
        with torch.no_grad():  # an evaluation, also of new ids
            unseen = [[1000 + step], [3]], "sum", None, [2000, 1, 2, 3], torch.ones(2, 1)
            for model in models:
                model(*unseen)
        plain.new = {i: row for i, row in plain.new.items() if i < 1000}
        plain.step(step)
        for servers in many:
            servers.step()
        rows = live(many[0])["words"][0]
        assert rows.keys() == plain.rows.keys()
        assert not differing(live(many[0]), live(many[1]))
    for i, (vector, _, counts) in plain.rows.items():
        got = many[0].client.pull("words", np.array([i]))[0].float()
        rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (0.02, 0.004)
        assert torch.allclose(got, vector, rtol=rtol, atol=atol), (i, got, vector)
        assert np.frombuffer(rows[i]["counts"], np.int32).tolist() == [counts[0]]
        assert np.frombuffer(rows[i]["last_steps"], np.int64).tolist() == [counts[1]]


def words(dim=DIM, name="words", **options):
    return tables.Table(name, dim, **{"optimizer": tables.SGD(1.0), **options})


def push(servers, ids, value=1.0, name="words"):
    """Make a step with a gradient of ``value`` for each id, once for each time that it occurs."""
    (tables.Embedding(servers, name)(torch.as_tensor(ids)).sum() * value).backward()
    servers.step()


def test_a_look_up_changes_nothing():
    """B 10, in another way."""
    servers = tables.Servers([words()], 2)
    push(servers, [1, 2])
    before, statistics = live(servers), servers.statistics()
    out = tables.Embedding(servers, "words")(torch.tensor([[1, 5], [6, 5]]))
    assert out.shape == (2, 2, DIM)
    assert out.requires_grad
    servers.step()  # there was no backward
    assert live(servers) == before
    assert servers.statistics() == statistics


def part_of(found):
    return found[3:5]


def numbers_of(found):
    return found.numpy()[3:5]


def grown(found):
    return (found.requires_grad_() * 1).grad_fn.next_functions[0][0].variable


@pytest.mark.parametrize("keep", [part_of, numbers_of, grown], ids=lambda f: f.__name__)
def test_what_is_kept_of_a_look_up_is_not_overwritten(keep):
    """The memory of a look-up is used again only when nothing refers to it any more."""
    servers = tables.Servers([tables.Table("words", 8, optimizer=tables.SGD(1.0))])
    servers.fill("words", range(100), torch.arange(800.0).reshape(100, 8))
    expected = [np.array(keep(servers.lookup("words", range(n, n + 9))).tolist()) for n in range(9)]
    for sizes in ([9] * 9, [60, 9, 80, 9, 9, 100, 9]):
        found = [
            keep(servers.lookup("words", range(n, n + size))[:9]) for n, size in enumerate(sizes)
        ]
        for n in range(50):
            servers.lookup("words", range(n % 7))
        for each, right in zip(found, expected):
            assert np.array_equal(each.tolist(), right)


def test_the_memory_of_a_look_up_is_used_again():
    servers = tables.Servers([tables.Table("words", 8, optimizer=tables.SGD(1.0))])
    addresses = {servers.lookup("words", range(50)).data_ptr() for _ in range(20)}
    assert len(addresses) == 1


def test_the_memory_of_a_look_up_of_a_whole_table_is_given_back():
    servers = tables.Servers([tables.Table("words", 4096, optimizer=tables.SGD(1.0))])
    for _ in range(2):
        servers.lookup("words", range(5000))
    (server,) = servers.servers
    assert not server.shards["words"]._memory._free


def test_gradients_that_no_step_has_taken_are_part_of_the_next_one():
    servers = tables.Servers([words(initializer=tables.Constant(0.0))])
    look_up = tables.Embedding(servers, "words")
    for _ in range(3):
        look_up(torch.tensor([4, 4])).sum().backward()
    with torch.no_grad():
        assert look_up(torch.tensor([4])).tolist() == [[0.0] * DIM]
    servers.step()
    servers.step()
    with torch.no_grad():
        assert look_up(torch.tensor([4])).tolist() == [[-6.0] * DIM]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("bag", "shape"), [(None, (3000,)), ("sum", (3000, 1)), ("sum", (30, 100)), ("max", (3000, 2))]
)
def test_all_gradients_of_an_id_count(dtype, bag, shape):
    """The sum of more than 256 ones in bfloat16 is 256."""
    servers = tables.Servers([words(dtype=dtype, initializer=tables.Constant(0.0))])
    module = tables.EmbeddingBag(servers, "words", mode=bag) if bag else None
    module = module or tables.Embedding(servers, "words")
    out = module(torch.full(shape, 4))
    assert str(out.dtype) == f"torch.{dtype}"
    out.sum().backward()
    servers.step()
    assert servers.lookup("words", [4])[0].tolist() == pytest.approx([-3000.0] * DIM, rel=0.005)


def test_a_second_backward_through_one_graph_adds_its_gradient():
    servers = tables.Servers([words(initializer=tables.Constant(0.0))])
    loss = tables.Embedding(servers, "words")(torch.tensor([4])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    servers.step()
    assert servers.client.pull("words", np.array([4])).tolist() == [[-2.0] * DIM]


def test_a_changed_learning_rate_is_that_of_the_next_step():
    servers = tables.Servers([words(initializer=tables.Constant(0.0))])
    servers.learning_rates["words"] = 0.5
    push(servers, [1])
    assert servers.client.pull("words", np.array([1])).tolist() == [[-0.5] * DIM]


def test_a_copy_of_a_model_shares_the_tables():
    servers = tables.Servers([words(initializer=tables.Constant(0.0))], 2)
    model = torch.nn.Sequential(tables.EmbeddingBag(servers, "words"), torch.nn.Linear(DIM, 1))
    twin = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    ids = torch.tensor([[3, 5]])
    twin[0](ids).sum().backward()
    servers.step()
    for each in (model, twin, average.module):
        assert each[0](ids).tolist() == [[-0.5] * DIM]
    assert twin[1].weight is not model[1].weight


def test_tables_cannot_be_pickled_or_copied():
    servers = tables.Servers([words()])
    model = tables.EmbeddingBag(servers, "words")
    for refused in (
        lambda: pickle.dumps(model),
        lambda: pickle.dumps(servers),
        lambda: copy.deepcopy(servers),
        lambda: copy.copy(servers),
    ):
        with pytest.raises(LimpetError, match="cannot be pickled") as e:
            refused()
        assert "\n" not in str(e.value)


def test_filled_rows_are_new_rows():
    """B 13."""
    servers = tables.Servers([words(optimizer=tables.Adam(0.1))], 3)
    push(servers, range(20))
    values = np.random.default_rng(0).normal(size=(30, DIM)).astype(np.float32)
    ids = np.arange(10, 40)
    servers.fill("words", torch.from_numpy(ids), torch.from_numpy(values))
    assert np.array_equal(servers.client.pull("words", ids).numpy(), values)
    rows = live(servers)["words"][0]
    assert len(rows) == 40
    assert rows[10]["exp_avg"] == rows[39]["exp_avg"] == bytes(4 * DIM)
    assert rows[9]["exp_avg"] != bytes(4 * DIM)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([1.5, 2], np.ones((2, DIM)), "ids must be an array of integers"),
        ([[1, 2]], np.ones((1, 2, DIM)), "values of words must be floats"),
        ([1, 2], np.ones((2, DIM), np.int64), "values of words must be floats"),
        ([*range(50), 3], np.ones((51, DIM)), "ids of words has 3 twice"),
        (range(50), np.where(np.arange(50) == 49, np.nan, 1)[:, None].repeat(DIM, 1), "not finite"),
        (range(50), np.where(np.arange(50) == 0, np.inf, 1)[:, None].repeat(DIM, 1), "not finite"),
    ],
)
def test_values_that_cannot_be_filled_change_nothing(count, ids, values, message):
    servers = tables.Servers([words()], count)
    push(servers, range(10))
    before = live(servers)
    with pytest.raises(LimpetError, match=message):
        servers.fill("words", ids, values)
    assert live(servers) == before
    with pytest.raises(LimpetError, match="There is no table 'other'; the tables are 'words'"):
        servers.fill("other", [1], np.ones((1, DIM)))


# -- bad input -------------------------------------------------------------------------------------


def test_an_unknown_table():
    """B 17."""
    servers = tables.Servers([words()])
    for module in (tables.Embedding, tables.EmbeddingBag):
        with pytest.raises(LimpetError, match="There is no table 'word'; the tables are 'words'"):
            module(servers, "word")
        with pytest.raises(LimpetError, match="tables must be the Servers"):
            module(torch.nn.Linear(1, 1), "words")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([[words(), words(8)]], {}, "specs must be tables of different names"),
        ([[]], {}, "specs must be a list of Table"),
        ([["words"]], {}, "specs must be a list of Table"),
        ([[words()], 0], {}, "count must be a number of servers, 1 to 4096"),
        ([[words()], 4097], {}, "count must be a number of servers, 1 to 4096"),
        ([[words()], 2.5], {}, "count must be"),
        ([[words()]], {"engine": "threads"}, "engine= must be"),
        ([[words()]], {"staleness": -1}, "staleness= must be"),
        ([[words()]], {"grads_to_wait": 0}, "grads_to_wait= must be"),
        ([[words()]], {"grads_to_wait": 2, "staleness": 1}, "staleness= must be None"),
        ([[words()]], {"dense": lambda: torch.nn.Linear(1, 1)}, "dense= must be"),
    ],
)
def test_arguments_are_checked(arguments, options, message):
    """B 18: a clash of names."""
    with pytest.raises(LimpetError, match=message) as e:
        tables.Servers(*arguments, **options)
    assert "\n" not in str(e.value)


def test_one_table_is_not_a_list():
    with pytest.raises(LimpetError, match="specs must be a list of Table"):
        tables.Servers(words())


def test_several_ranks_of_torchrun_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LimpetError, match="start one process, and give it workers"):
        tables.Servers([words()])


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.0]), torch.tensor([True]), torch.empty(0), torch.tensor([1 + 2j])]
)
def test_ids_that_are_no_integers(ids):
    """B 26."""
    servers = tables.Servers([words()])
    for module in (
        tables.Embedding(servers, "words"),
        tables.Embedding(servers, "words", padding_idx=0),
    ):
        with pytest.raises(LimpetError, match="ids must be an array of integers"):
            module(ids)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.uint64])
def test_ids_of_any_integers(dtype):
    servers = tables.Servers([words()])
    for padding in (None, 3):
        module = tables.Embedding(servers, "words", padding_idx=padding)
        ids = torch.tensor([[1, 3], [2, 1]]).to(dtype)
        found = module(ids)
        found.sum().backward()
        assert torch.equal(found[0, 0], module(torch.tensor(1)))
        assert bool((found[0, 1] == 0).all()) is (padding is not None)
    servers.step()
    assert live(servers)["words"][0].keys() == {1, 2, 3}


class OnDevice(torch.Tensor):
    """A tensor as on an accelerator: NumPy cannot have its memory."""

    def __array__(self, *_):
        raise TypeError("can't convert a device tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("padding", [None, 3])
def test_ids_on_another_device(padding):
    servers = tables.Servers([words()])
    ids = torch.tensor([[1, 3], [2, 1]])
    expected = tables.EmbeddingBag(servers, "words", padding_idx=padding)(ids)
    ids = ids.as_subclass(OnDevice)
    found = tables.EmbeddingBag(servers, "words", padding_idx=padding)(ids)
    assert torch.equal(torch.Tensor(found), expected)
    servers.fill("words", ids[0], torch.ones(2, DIM))
    assert servers.lookup("words", ids[0]).eq(1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_change_no_table(value):
    """B 26. The table with the wrong gradient is the second one, on one of three servers."""
    servers = tables.Servers([tables.Table("a", 2, optimizer=tables.SGD(1.0)), words()], 3)
    for name in ("a", "words"):
        push(servers, range(10), name=name)
    before = live(servers)
    tables.Embedding(servers, "a")(torch.arange(20)).sum().backward()
    factors = torch.ones(20, 1)
    factors[13] = value
    (tables.Embedding(servers, "words")(torch.arange(20)) * factors).sum().backward()
    with pytest.raises(LimpetError, match="gradients of words are not finite, of 1 ids such as 13"):
        servers.step()
    assert live(servers) == before
    push(servers, [1])  # the gradients of the refused step are forgotten
    assert not [i for i in range(10) if live(servers)["a"][0][i] != before["a"][0][i]]


def test_gradients_that_are_not_finite_may_be_skipped():
    servers = tables.Servers([words(nan="skip")], 2)
    factors = torch.ones(20, 1)
    factors[13] = float("nan")
    (tables.Embedding(servers, "words")(torch.arange(20)) * factors).sum().backward()
    servers.step()
    assert live(servers)["words"][0].keys() == {*range(20)} - {13}
    assert servers.statistics()["words"]["refused"] == 1


def test_gradients_of_another_shape():
    """B 26."""
    servers = tables.Servers([words()])
    before = live(servers)
    servers.client._parts["words"] = [(np.array([1]), torch.ones(1, DIM + 1))]
    with pytest.raises(LimpetError, match=r"gradient of words must be float32 \[1, 4\]"):
        servers.step()
    assert live(servers) == before


@pytest.mark.parametrize("rate", [float("nan"), -1, "fast", None, 1e31, float("inf")])
def test_a_learning_rate_that_is_none_changes_no_table(rate):
    servers = tables.Servers([tables.Table("a", 2, optimizer=tables.SGD(1.0)), words()])
    before = live(servers)
    for name in ("a", "words"):
        tables.Embedding(servers, name)(torch.arange(3)).sum().backward()
    servers.learning_rates["words"] = rate
    with pytest.raises(LimpetError, match="learning rate of words must be a number, 0 or more"):
        servers.step()
    assert live(servers) == before


def test_a_table_without_a_learning_rate_changes_no_table():
    servers = tables.Servers([tables.Table("a", 2, optimizer=tables.SGD(1.0)), words()])
    before = live(servers)
    for name in ("a", "words"):
        tables.Embedding(servers, name)(torch.arange(3)).sum().backward()
    servers.learning_rates = {"a": 0.5}
    with pytest.raises(LimpetError, match="learning rate of words must be a number, 0 or more"):
        servers.step()
    assert live(servers) == before


@pytest.mark.parametrize("rate", [1, np.float32(0.5), np.float64(0.5), np.int8(2), 1e30], ids=repr)
def test_a_learning_rate_of_any_type_is_saved_as_a_float(rate):
    servers, store = tables.Servers([words()]), MemoryStore()
    servers.learning_rates["words"] = rate
    push(servers, [1], 0.0)
    msgspec.msgpack.encode(servers._rates())  # for workers on Ray
    limpet.save(store, {"tables": servers})
    assert type(limpet.load(store)["tables"]["words"]["optimizer"]["lr"]) is float
    other = tables.Servers([words()])
    limpet.load(store, into={"tables": other})
    assert other.learning_rates == {"words": float(rate)}


def test_a_learning_rate_of_no_table_is_not_ignored():
    servers = tables.Servers([words()])
    servers.learning_rates["word"] = 0.5
    with pytest.raises(LimpetError, match="There is no table 'word'; the tables are 'words'"):
        servers.step()


def test_admission_and_eviction_are_counted():
    servers = tables.Servers([words(admit_after=2, evict=tables.Evict(max_rows=16))], 1)
    push(servers, range(20))
    assert servers.statistics()["words"]["rows"] == 0
    assert servers.statistics()["words"]["candidates"] == 15
    push(servers, range(20))
    found = servers.statistics()["words"]
    assert (found["rows"], found["admitted"]) == (15, 15)


def in_rows(frame):
    return Path(frame.f_code.co_filename).name in ("rows.py", "ids.py", "shard.py")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["step", "fill"])
def test_an_interrupted_change_is_complete_or_the_tables_are_not_valid(change):
    """Ctrl-C at any opcode, while an index grows. Else, ids may be lost, or be there twice."""
    for at in itertools.count(1, 101):
        servers = tables.Servers([words(), words(name="more")])
        servers.fill("words", range(650), torch.ones(650, DIM))
        for name in ("words", "more"):
            tables.Embedding(servers, name)(torch.arange(600, 760)).sum().backward()
        before, interrupt = live(servers), InterruptOpcode(at, in_rows)
        sys.settrace(interrupt)
        try:
            if change == "step":
                servers.step()
            else:
                servers.fill("words", range(600, 760), torch.zeros(160, DIM))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        try:
            statistics = servers.statistics()
        except LimpetError as e:
            assert "not valid" in str(e)  # noqa: PT017
        else:
            assert statistics["words"]["rows"] in (650, 760)
            if statistics["words"]["rows"] == 650:
                assert live(servers) == before
            push(servers, range(800))
            assert servers.statistics()["words"]["rows"] == 800
        if interrupt.remaining > interrupt.seen:
            break
    assert at > 2000


@pytest.mark.slow
def test_an_interrupted_save_leaves_no_cut_or_the_tables_are_not_valid(tmp_path):
    """A cut that nobody ends would let updates wait forever."""
    servers = tables.Servers([words(admit_after=2), words(name="more")], 2)
    for _ in range(2):
        push(servers, range(50))
    limpet.save(tmp_path / "valid", {"tables": servers})

    def begins(frame):
        return Path(frame.f_code.co_filename).name in ("rows.py", "member.py")

    interrupted = invalid = 0
    for at in itertools.count(1, 101):
        interrupt = InterruptOpcode(at, begins)
        sys.settrace(interrupt)
        try:
            limpet.save(tmp_path / str(at), {"tables": servers})
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        try:
            push(servers, range(50))
        except LimpetError as e:
            assert "not valid" in str(e)  # noqa: PT017
            limpet.load(tmp_path / "valid", into={"tables": servers})
            invalid += 1
        limpet.save(tmp_path / "next", {"tables": servers})
        shards = [shard for server in servers.servers for shard in server.shards.values()]
        assert not any(rows._cuts for shard in shards for rows in shard.sets.values())
        assert all(server._lock.acquire(timeout=0) for server in servers.servers)
        restored = tables.Servers([*servers.specs.values()])
        limpet.load(tmp_path / "next", into={"tables": restored})
        assert live(restored) == live(servers)
        shutil.rmtree(tmp_path / "next")
        if interrupt.remaining > interrupt.seen:
            break
    assert interrupted > 20
    assert invalid > 0


OUT_OF_MEMORY = """
import resource, sys
import torch
import limpet
from limpet import tables
from limpet.errors import LimpetError

words = tables.Table("words", 1 << 20, optimizer=tables.SGD(1.0))
servers = tables.Servers([words])
vectors = torch.ones(1).expand(8, words.dim)
servers.fill("words", range(8), vectors)
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + (700 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    for first in range(8, 800):
        servers.fill("words", [*range(7), first], vectors)  # one of them is new
except LimpetError as e:
    print(e)
assert servers.statistics()["words"]["rows"] == first
assert servers.lookup("words", [first - 1]).sum() == words.dim
assert servers.lookup("words", range(8)).eq(1).all()
assert not servers.lookup("words", [first]).eq(1).any()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
limpet.save(sys.argv[1], {"tables": servers})
servers.fill("words", [first], vectors[:1])
limpet.load(sys.argv[1], into={"tables": servers})
assert servers.statistics()["words"]["rows"] == first
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is that of Linux")
def test_a_server_out_of_memory_says_what_to_do_and_has_its_rows(tmp_path):
    arguments = [sys.executable, "-c", OUT_OF_MEMORY, str(tmp_path / "a")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "no memory for" in done.stdout
    assert "Use more servers, or limit the rows: evict=Evict(max_rows=...)" in done.stdout
