"""Tensors of classes with ``__tensor_flatten__`` are saved by their inner tensors."""

import dataclasses
import enum
import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import limpet
from limpet.errors import (
    DTypeMismatch,
    LimpetError,
    ManifestInvalid,
    MemberFailed,
    NotFound,
    Unsupported,
)
from limpet.loading.snapshot import reader_of
from tests.fakegroup import FakeGroup
from tests.forging import Json, manifest_key, save_to_files, seal, sealed_content, store_of
from tests.golden.make import Scaled, scaled
from tests.states import unused_url


class Other(Scaled):
    """Another class with the same inner tensors."""


class Detachable(Scaled):
    """A tensor that can be a parameter. As in torchao, an alias may have copies of its scale."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return cls(args[0].codes, args[0].scale.clone(), args[0].bits)


class Viewable(Scaled):
    """A tensor that can be the local part of a ``DTensor``."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.view.default)
        return cls(args[0].codes, args[0].scale, args[0].bits)


class Kind(enum.Enum):
    ROWS = 1
    BLOCKS = 2


@dataclasses.dataclass
class Options:
    kind: Kind = Kind.ROWS
    sizes: tuple[int, ...] = (1, 2)


class WithContext(Scaled):
    """A tensor with any context."""

    context: Any = None

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.context


def with_context(context):
    made = WithContext(scaled(0).codes, scaled(0).scale)
    made.context = context
    return made


def inner(t):
    return [t.codes.tolist(), t.scale.tolist()]


def save(state):
    url = unused_url()
    limpet.save(url, state)
    return url


def test_a_load_fills_the_inner_tensors_in_place():
    live = {"w": scaled(7), "list": [scaled(8)]}
    objects = live["w"], live["w"].codes, live["w"].scale
    limpet.load(save({"w": scaled(1), "list": [scaled(2)]}), into=live)
    assert inner(live["w"]) == inner(scaled(1))
    assert inner(live["list"][0]) == inner(scaled(2))
    assert (live["w"], live["w"].codes, live["w"].scale) == objects or all(
        a is b for a, b in zip((live["w"], live["w"].codes, live["w"].scale), objects, strict=True)
    )


def test_a_load_without_a_live_tensor_gives_what_it_consists_of():
    loaded = limpet.load(save({"w": scaled(1)}))["w"]
    assert loaded["class"] == "tests.golden.make.Scaled"
    assert (loaded["dtype"], loaded["shape"]) == (torch.float32, torch.Size([2, 3]))
    assert loaded["context"] == {"bits": 8, "dtype": torch.float32}
    assert loaded["tensors"]["codes"].tolist() == scaled(1).codes.tolist()


def test_the_leaves_are_the_inner_tensors():
    snapshot = limpet.open(save({"w": scaled(1)}))
    assert snapshot.keys() == ["w/codes", "w/scale"]
    assert snapshot["w/scale"][0:1].tolist() == [[0.5]]
    assert snapshot.verify().ok


def test_tied_tensors_are_stored_once():
    t = scaled(1)
    url = save({"a": t, "b": t, "codes": t.codes})
    assert len(reader_of(limpet.open(url)).leaves) == 2
    tied = scaled(9)
    live = {"a": tied, "b": tied, "codes": tied.codes}
    limpet.load(url, into=live)
    assert inner(tied) == inner(t)


def test_nested_subclasses():
    def nested(step):
        return Scaled(scaled(step), torch.full((2, 1), float(step)))

    live = {"w": nested(5)}
    limpet.load(save({"w": nested(1)}), into=live)
    assert inner(live["w"].codes) == inner(scaled(1))
    assert live["w"].scale.tolist() == [[1.0], [1.0]]


def test_parameters_and_buffers_of_a_module():
    def module(step):
        made = nn.Linear(2, 3)
        weight, table = scaled(step), scaled(step + 1)
        weight.scale += step
        made.weight = nn.Parameter(Detachable(weight.codes, weight.scale), requires_grad=False)
        made.register_buffer("table", Detachable(table.codes, table.scale))
        return made

    live = {"m": module(5)}
    weight = live["m"].weight
    limpet.load(save({"m": module(1)}), into=live)
    assert live["m"].weight is weight
    for name in ("weight", "table"):
        assert inner(getattr(live["m"], name)) == inner(getattr(module(1), name))


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (Other(scaled(0).codes, scaled(0).scale), "class tests.golden.make.Scaled, live"),
        (Scaled(scaled(0).codes, scaled(0).scale, 4), r"context .*8.*, live .*4"),
        (Scaled(scaled(0).codes[:1], scaled(0).scale[:1]), r"shape \[2, 3\], live \[1, 3\]"),
        (Scaled(scaled(0).codes, scaled(0).scale.double()), "dtype float32, live float64"),
        (Scaled(scaled(0).codes.short(), scaled(0).scale), "w/codes int8, live int16"),
        (torch.zeros(2, 3), r"tests.golden.make.Scaled, live torch.Tensor"),
        (None, "no tensor of the class tests.golden.make.Scaled at 'w'"),
        ([], "list"),
    ],
    ids=["class", "context", "shape", "dtype", "inner dtype", "tensor", "none", "list"],
)
@pytest.mark.parametrize("cast", [False, True])
def test_another_live_value_is_refused(live, message, cast):
    url = save({"w": scaled(1), "x": torch.ones(2)})
    state = {"w": live, "x": torch.zeros(2)}
    with pytest.raises(LimpetError, match=message):
        limpet.load(url, into=state, cast=cast)
    assert state["x"].tolist() == [0, 0]


def test_a_plain_tensor_does_not_fill_a_subclass():
    with pytest.raises(DTypeMismatch, match=r"tensor, live tests.golden.make.Scaled"):
        limpet.load(save({"w": torch.ones(2, 3)}), into={"w": scaled(0)})


def test_a_list_that_would_get_new_elements_is_refused():
    live: dict[str, Any] = {"w": []}
    with pytest.raises(LimpetError, match="no tensor of the class"):
        limpet.load(save({"w": [scaled(1)]}), into=live)
    assert live == {"w": []}


def test_contexts_are_compared_but_never_created():
    context = {"options": Options(), "kinds": [Kind.BLOCKS], "size": torch.Size([1]), "n": None}
    url = save({"w": with_context(context)})
    assert limpet.load(url)["w"]["context"]["kinds"] == [f"{__name__}.Kind.BLOCKS"]
    limpet.load(url, into={"w": with_context(dict(context))})
    for changed in ({"n": 0}, {"options": Options(Kind.BLOCKS)}, {"kinds": [Kind.ROWS]}):
        with pytest.raises(DTypeMismatch, match="context"):
            limpet.load(url, into={"w": with_context({**context, **changed})})
    with pytest.raises(DTypeMismatch, match="context"):
        limpet.load(save({"w": with_context([1])}), into={"w": with_context([True])})


def test_other_contexts_and_classes_are_refused_by_name():
    with pytest.raises(Unsupported, match=r"'w/~context/0' is a .*function.* a .*WithContext must"):
        save({"w": with_context([print])})

    class Plain(torch.Tensor):
        pass

    with pytest.raises(Unsupported, match="without __tensor_flatten__"):
        save({"w": torch.ones(2).as_subclass(Plain)})


def test_inner_tensors_that_are_none_are_refused():
    t = scaled(0)
    t.scale = None
    with pytest.raises((Unsupported, MemberFailed)):
        save({"w": t})


def test_a_failing_class_names_the_member():
    class Failing(WithContext):
        def __tensor_flatten__(self):
            raise ZeroDivisionError

    with pytest.raises(MemberFailed, match="__tensor_flatten__") as e:
        save({"w": Failing(scaled(0).codes, scaled(0).scale)})
    assert e.value.member == "w"


def test_a_tensor_in_the_state_of_an_object_is_refused():
    class Average:
        def state_dict(self):
            return {"shadow": [scaled(0)]}

        def load_state_dict(self, state): ...

    with pytest.raises(Unsupported, match=r"average/shadow/0.*load_state_dict\(\) of the object"):
        save({"average": Average()})


def test_ranks_store_equal_tensors_once_and_refuse_different_ones():
    url = unused_url()
    with FakeGroup(2) as group:
        group.run(lambda r: limpet.save(url, {"w": scaled(1), "own": limpet.PerRank(scaled(r))}))
        states = [{"w": scaled(9), "own": limpet.PerRank(scaled(9))} for _ in range(2)]
        group.run(lambda r: limpet.load(url, into=states[r]))
        for r, state in enumerate(states):
            assert inner(state["w"]) == inner(scaled(1))
            assert inner(state["own"].value) == inner(scaled(r))
        url = unused_url()
        for error in group.outcomes(lambda r: limpet.save(url, {"w": scaled(r)})):
            assert isinstance(error, LimpetError)
            assert "w/codes" in str(error)


def test_a_savepoint_has_the_values_of_its_step(tmp_path):
    """An exception after a step is followed by a save of the state at the end of that step."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"m": model, "o": optimizer, "w": scaled(0), "progress": limpet.Progress()}
    policy = limpet.EverySteps(100) | limpet.OnException()
    with (
        pytest.raises(ZeroDivisionError),
        limpet.Checkpointer(str(tmp_path), state, save=policy) as ckpt,
    ):
        for step in range(3):
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            state["w"].codes.fill_(step + 1)
            ckpt.step()
        state["w"].codes.fill_(99)
        raise ZeroDivisionError
    (snapshot,) = limpet.Run(str(tmp_path)).snapshots()
    assert snapshot.step == 3
    assert snapshot["w/codes"].read().unique().tolist() == [3]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_with_incremental_versions(tmp_path, overlap):
    big = Scaled(torch.zeros(2, 400_000, dtype=torch.int8), torch.ones(2, 1))
    state = {"w": big, "progress": limpet.Progress()}
    options: dict[str, Any] = {"incremental": True, "overlap": overlap}
    with limpet.Checkpointer(str(tmp_path), state, save=limpet.EverySteps(1), **options) as ckpt:
        for step in range(3):
            big.scale.fill_(step)
            ckpt.step()
            ckpt.wait()
    last = limpet.Run(str(tmp_path)).snapshots()[-1]
    assert last.chain == 2
    assert last["w/scale"].read().tolist() == [[2.0], [2.0]]
    assert last.verify().ok


def test_rename_keys_and_exports(tmp_path):
    url = str(tmp_path / "version_1")
    limpet.save(url, {"m": {"w": scaled(1), "x": torch.ones(2)}})
    live = {"m": {"new": scaled(5), "x": torch.zeros(2)}}
    limpet.load(url, into=live, rename={"m/w": "m/new"})
    assert inner(live["m"]["new"]) == inner(scaled(1))
    assert limpet.load(url, keys="m/x")["m"]["x"].tolist() == [1, 1]
    for to in ("torch", "safetensors"):
        with pytest.raises(Unsupported, match=r"of class tests.golden.make.Scaled"):
            limpet.export(url, str(tmp_path / to), to=to)


def subclass(**changes):
    body = {
        "class": "os.system",
        "dtype": "float32",
        "shape": [2],
        "context": None,
        "parts": {"a": {"tensor": ["float32", [0]]}},
    }
    return {"subclass": {**body, **changes}}


def deep(levels):
    node: Json = subclass()
    for _ in range(levels):
        node = subclass(parts={"a": node})
    return node


@pytest.mark.parametrize(
    "node",
    [
        subclass(parts={}),
        subclass(parts={"a": 1}),
        subclass(parts={"a": {"dict": {}}}),
        subclass(parts=[]),
        subclass(context={"tensor": ["float32", [0]]}),
        subclass(context={"nothing": 1}),
        subclass(context=subclass()),
        subclass(dtype="os.system"),
        subclass(shape=[1.5]),
        subclass(shape=None),
        subclass(more=1),
        {"subclass": {"class": 1}},
        subclass(**{"class": 1}),
        {"set": [subclass()]},
        deep(101),
        deep(150),
    ],
    ids=lambda n: json.dumps(n)[:60],
)
def test_a_malformed_node_is_refused(node):
    files = save_to_files({"x": torch.float32, "a": np.ones(1)})
    key = manifest_key(files)
    content = sealed_content(files[key])
    content["tree"]["dict"]["x"] = node
    files[key] = seal(content)
    with pytest.raises(ManifestInvalid):
        limpet.open(store_of(files).at(key.partition("/")[0]))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("in_module", [False, True])
def test_a_distributed_tensor_of_such_a_class_is_refused(mesh, placement, in_module):
    local = Viewable(scaled(1).codes, scaled(1).scale)
    tensor: Any = DTensor.from_local(local, mesh, [placement], run_check=False)
    live = {"m": {"weight": tensor}, "n": 1}
    if in_module:
        live["m"] = nn.Linear(3, 2, bias=False)
        live["m"].weight = nn.Parameter(tensor, requires_grad=False)
    described = (
        r"local tensor of 'm/weight'\. Expected a dense tensor on a real device, found a Viewable,"
        r" which consists of inner tensors\. Save its inner tensors \(codes, scale\), each as a"
    )
    url = unused_url()
    with pytest.raises(Unsupported, match=described):
        limpet.save(url, live)
    with pytest.raises(NotFound):
        limpet.open(url)
    dense = DTensor.from_local(torch.ones(2, 3), mesh, [placement])
    limpet.save(url, {"m": {"weight": dense}, "n": 2})
    with pytest.raises(Unsupported, match=described):
        limpet.load(url, into=live)
    assert live["n"] == 1
    assert inner(local) == inner(scaled(1))
    parts = {name: DTensor.from_local(t, mesh, [placement]) for name, t in vars(local).items()
             if name != "bits"}  # fmt: skip
    limpet.save(unused_url(), {"m": parts})  # as advised
