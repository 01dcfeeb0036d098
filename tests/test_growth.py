"""The work of every public call grows in proportion to its state: to the number of leaves,
parameters, parameter groups, optimizers, modules, tied tensors, dicts, keys, and renames.

The tests count the lines that Limpet executes, at three sizes. They do not measure time, so they
give the same result on every machine. Each iteration counts, also one within a line, and each call.
"""

import copy
import gc
import itertools
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from click.testing import CliRunner
from torch import nn, optim

import limpet
from limpet.cli import cli
from limpet.errors import PlanError
from limpet.layout import select

PACKAGE = os.path.dirname(limpet.__file__)
SIZES = (16, 32, 64)


def count_lines(call):
    """Return the number of lines that Limpet executes in a call, in all threads, and the numbers
    by function. A jump back to the same line counts as one more, and so does a call."""
    counts: Counter[str] = Counter()
    functions: dict[Any, Callable[..., Any]] = {}

    def trace(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        counted = functions.get(code)
        if counted is None:
            name = f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_name}"

            def counted(_, event, __):
                counts[name] += event == "line"
                return counted

            functions[code] = counted
        counted(frame, "line", None)
        return counted

    previous = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
        threading.settrace(previous)
    return counts.total(), counts


def assert_linear(prepare, sizes=SIZES):
    """Assert that the work of ``prepare(n)()`` grows at most linearly with n.

    From n to 2n and from 2n to 4n, linear work grows by a factor of 2, and quadratic work by 4.
    """
    prepare(sizes[0])()  # imports and caches
    (a, first), (b, second), (c, third) = (count_lines(prepare(n)) for n in sizes)
    faster = {
        name: (first[name], second[name], n)
        for name, n in third.items()
        if n - second[name] > 2.5 * (second[name] - first[name]) + 200
    }
    assert c > 0
    assert not faster, (a, b, c)


class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(torch.full((2,), float(i))) for i in range(n)])


def stepped(parameters):
    optimizer = optim.AdamW(parameters)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def with_optimizer(n):
    m = Net(n // 4)
    return {"m": m, "o": stepped(m.parameters())}


def with_groups(n):
    m = Net(n // 4)
    return {"m": m, "o": stepped([{"params": [p]} for p in m.parameters()])}


def with_optimizers(n):
    """One optimizer per module, as for an optimizer step within the backward pass."""
    ms = [nn.Linear(2, 1) for _ in range(n // 6)]
    return {"m": ms, "o": [stepped(m.parameters()) for m in ms]}


def with_unstable_optimizers(n):
    """Optimizers whose slots a forward pass may change, because buffers share their memory."""
    state = with_optimizers(n)
    for m, o in zip(state["m"], state["o"], strict=True):
        m.register_buffer("average", o.state[m.weight]["exp_avg"])
    return state


def tied(n):
    tensors = {f"k{i}": torch.full((2,), float(i)) for i in range(n // 2)}
    return {"a": tensors, "b": dict(tensors)}


def one_tensor(n):
    return {"a": dict.fromkeys(map(str, range(n)), torch.ones(2))}


def dicts(n):
    return {f"a{i}": {"x": i, "y": {"z": [i, "t", None, 1.5], i: "i"}} for i in range(n // 4)}


def objects(n):
    return {"s": [Counted(i) for i in range(n // 3)], "r": limpet.PerRank(list(range(n)))}


class Counted:
    def __init__(self, i):
        self.i = i

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


def wrapped(n):
    return {"m": nn.ModuleList([nn.DataParallel(nn.Linear(2, 1)) for _ in range(n // 2)])}


def leaves(n):
    return {"d": {f"k{i}": torch.full((2,), float(i)) for i in range(n)}}


def everything(n):
    """All kinds of state, each with about n members."""
    kinds = {
        "leaves": leaves(n),
        "list": [torch.full((2,), float(i)) for i in range(n)],
        "arrays": {i: np.full(2, i) for i in range(n)},
        "sparse": {f"k{i}": torch.eye(2).to_sparse() for i in range(n)},
        "values": [[float(i) for i in range(n)], set(range(n)), list(range(n))],
        "equal texts": {**dict.fromkeys(range(n)), **dict.fromkeys(map(str, range(n)))},
        "dicts": dicts(n),
        "tied": tied(n),
        "one tensor": one_tensor(n),
    }
    live = (with_optimizer, with_groups, with_optimizers, with_unstable_optimizers)
    for make in (*live, objects, wrapped):
        kinds |= {f"{make.__name__} {key}": value for key, value in make(n).items()}
    return kinds


@pytest.fixture
def folder(tmp_path):
    numbers = itertools.count()
    return lambda: str(tmp_path / str(next(numbers)))


def run(*arguments, codes=(0,)):
    """Run a command that prints JSON."""
    invoke(*arguments, "--json", codes=codes)


def invoke(*arguments, codes=(0,)):
    """Run a command, which prints for people unless ``--json`` is one of the arguments."""
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code in codes, result.output[-500:]


def expect_error(call):
    def wrapper():
        with pytest.raises(PlanError):
            call()

    return wrapper


def save_in_background(url, state):
    limpet.save_async(url, state).wait()


def saved(make, n, folder):
    url = folder() + "/version_1"
    limpet.save(url, make(n))
    return url


@pytest.fixture(autouse=True)
def no_garbage_collection():
    """Finalizers of other tests' objects would count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    monkeypatch.setattr("limpet.threads.SLOW_LOOKUP", math.inf)


@pytest.mark.slow
def test_saves_and_loads_grow_linearly(folder):
    def load_into(n, change=lambda live: live, **options):
        url, live = saved(everything, n, folder), change(everything(n))
        return lambda: limpet.load(url, into=live, **options)

    assert_linear(lambda n: partial(limpet.save, folder() + "/version_1", everything(n)))
    assert_linear(lambda n: partial(save_in_background, folder() + "/version_1", everything(n)))
    assert_linear(lambda n: partial(limpet.load, saved(everything, n, folder)))
    assert_linear(load_into)
    assert_linear(lambda n: load_into(n, keys=["leaves", "**/exp_avg", "dicts/**"]))
    assert_linear(lambda n: expect_error(load_into(n, lambda live: {})))
    assert_linear(lambda n: expect_error(load_into(n, lambda live: {"other": live})))


COMMANDS = {
    "verify": [],
    "show": ["--layout"],
    "copy": ["{folder}/version_1"],
    "reshard": ["{folder}/version_1", "--shards", "2", "--split", "even"],
}


@pytest.mark.slow
@pytest.mark.parametrize("call", [run, invoke])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_grow_linearly(name, call, folder):
    def command(n):
        arguments = [a.format(folder=folder()) for a in COMMANDS[name]]
        return partial(call, name, saved(everything, n, folder), *arguments)

    assert_linear(command)


@pytest.mark.slow
def test_comparisons_grow_linearly(folder):
    def diff(n, other, call):
        a, b = saved(everything, n, folder), saved(other, n, folder)
        return lambda: call("diff", a, b, codes=(0, 7))

    for call in (run, invoke):
        assert_linear(lambda n, call=call: diff(n, everything, call))
        assert_linear(lambda n, call=call: diff(n, lambda n: {"other": everything(n)}, call))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "torch", "hf"])
def test_exports_and_imports_grow_linearly(to, folder):
    """With ``hf``, the number of files grows with the number of tensors."""
    size = ["--max-shard-size", "64B"] if to == "hf" else []

    def export_and_import(n):
        url, out = saved(everything if to == "torch" else leaves, n, folder), folder()

        def call():
            run("export", url, out, "--to", to, *size)
            file = "" if to == "hf" else f"/model.{'pt' if to == 'torch' else to}"
            run("import", out + file, folder(), "--step", "1")

        return call

    assert_linear(export_and_import)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_imports_of_training_states_grow_linearly(folder):
    def plain(n):
        state = leaves(n) | with_optimizer(n) | {"list": list(range(n)), "dicts": dicts(n)}
        return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}

    def from_torch(n):
        path = folder()
        torch.save(plain(n), path)
        return lambda: run("import", path, folder(), "--step", "1")

    def from_dcp(n):
        path = folder()
        torch.distributed.checkpoint.save(plain(n), checkpoint_id=path, no_dist=True)
        return lambda: run("import", path, folder(), "--step", "1")

    assert_linear(from_torch)
    assert_linear(from_dcp)


@pytest.mark.slow
def test_a_training_grows_linearly(folder):
    policy = limpet.EverySteps(2) | limpet.OnException()

    def train(n):
        url, state = folder(), everything(n)

        def call():
            with (
                pytest.raises(ZeroDivisionError),
                limpet.Checkpointer(url, state, save=policy) as c,
            ):
                for _ in range(3):
                    c.step()
                raise ZeroDivisionError
            with limpet.Checkpointer(url, state, save=policy) as c:
                c.resume()

        return call

    assert_linear(train)


def test_reading_leaves_one_by_one_grows_linearly(folder):
    def read(n):
        snapshot = limpet.open(saved(leaves, n, folder))
        return lambda: [snapshot[key][:] for key in snapshot]

    assert_linear(read)


def test_a_reshard_into_many_files_grows_with_the_files(folder):
    def reshard(n):
        url = saved(leaves, n, folder)
        return lambda: run("reshard", url, folder() + "/version_1", "--shards", str(n))

    assert_linear(reshard)


def test_a_load_with_many_keys_grows_linearly(folder, monkeypatch):
    work = 0

    class Regex:
        def __init__(self, pattern, flags):
            self.pattern, self.regex = pattern, select_re.compile(pattern, flags)

        def fullmatch(self, key):
            nonlocal work
            work += len(self.pattern)
            return self.regex.fullmatch(key)

    select_re = select.re
    fake = SimpleNamespace(**{**vars(select_re), "compile": Regex})
    monkeypatch.setattr(select, "re", fake)

    def load(n):
        url, live = saved(leaves, n, folder), leaves(n)
        keys = [f"d/k{i}" for i in range(0, n, 2)] + [f"o/p{i}/**" for i in range(n)]
        return lambda: limpet.load(url, into=live, keys=keys)

    assert_linear(load)
    done = []
    for n in SIZES:
        work = 0
        load(n)()
        done.append(work)
    assert done[2] - done[1] <= 2.4 * (done[1] - done[0]) + 100, done


@pytest.mark.parametrize("name", ["*", "?", ""])
def test_a_load_with_many_renames_grows_linearly(name, folder):
    class Layers(nn.Module):
        def __init__(self, n, prefix):
            super().__init__()
            for i in range(n):
                self.register_parameter(f"{prefix}{i}", nn.Parameter(torch.ones(1)))

    def load(n):
        def make(prefix):
            m = Layers(n // 4, prefix)
            return {"m": m, "o": stepped(m.parameters())}

        url, live = saved(lambda n: make(f"old{name}"), n, folder), make(f"new{name}")
        renames = {f"m/old{name}{i}": f"m/new{name}{i}" for i in range(n // 4)}
        return lambda: limpet.load(url, into=live, rename=renames)

    assert_linear(load)
    url = saved(lambda n: {"m": Layers(n, "a")}, 8, folder)
    missing = lambda n: {f"m/b{i}": f"m/c{i}" for i in range(n)}  # noqa: E731
    assert_linear(
        lambda n: expect_error(
            lambda: limpet.load(url, into={"m": Layers(8, "a")}, rename=missing(n))
        )
    )


def test_errors_for_equal_names_grow_linearly(folder):
    def equal_names(n):
        m = nn.Module()
        m._orig_mod = nn.Module()
        for i in range(n):
            for part in (m, m._orig_mod):
                part.register_parameter(f"p{i}", nn.Parameter(torch.ones(1)))
        return expect_error(lambda: limpet.save(folder(), {"m": m}))

    assert_linear(equal_names)


def test_the_state_of_the_test_is_not_changed_by_counting():
    """The counter sees quadratic work, and its result does not depend on earlier calls."""
    one_line = "sum(1 for i in range(n) for j in range(n))"
    for text in ("for i in range(n):\n for j in range(n): pass", one_line):
        code = compile(text, f"{PACKAGE}/x.py", "exec")
        with pytest.raises(AssertionError):
            assert_linear(lambda n, code=code: lambda: exec(code, {"n": n}))
    counted = [count_lines(lambda: copy.copy([exec(code, {"n": 5})]))[0] for _ in range(2)]
    assert counted[0] == counted[1] > 0
