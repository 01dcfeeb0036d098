"""Modules with loading code of their own: hooks, overridden methods, versions of the code."""

import threading
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import limpet
from limpet.errors import InexactResume, LimpetError, MissingLeaf, ShapeMismatch
from tests.states import save_state, unused_url


class Scale(nn.Module):
    """Version 1 has the logarithm of what version 2 has."""

    def __init__(self, value=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), float(value)))
        self.bias = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if self._version == 2 and (metadata.get("version") or 1) < 2 and prefix + "scale" in state:
            state[prefix + "scale"] = state[prefix + "scale"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Scale2(Scale):
    _version = 2


def nested(module):
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))


WRAPPERS = {
    "root": lambda m: m,
    "nested": nested,
    "DataParallel": lambda m: nn.DataParallel(nested(m)),
    "compile": lambda m: torch.compile(nested(m), backend="eager"),
    "checkpoint": lambda m: nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Sequential(m))),
}


def by_torch(source, live):
    live.load_state_dict(source.state_dict())


def by_load(source, live, **options):
    return limpet.load(save_state({"m": source}), into={"m": live}, **options)


def by_resume(source, live):
    url = unused_url().removesuffix("/version_1")
    with limpet.Checkpointer(url, {"m": source}, save=limpet.EverySteps(1), quiet=True) as ckpt:
        ckpt.step()
    with limpet.Checkpointer(url, {"m": live}, quiet=True) as ckpt:
        ckpt.resume()


def by_saved_state_dict(source, live):
    by_load(source.state_dict(), live)


def by_plain_load(source, live):
    live.load_state_dict(limpet.load(save_state({"m": source}), keys="m/**")["m"])


def by_export(source, live, tmp_path):
    folder = tmp_path / f"export-{len([*tmp_path.iterdir()])}"
    limpet.export(save_state({"m": source}), folder, to="torch")
    state = torch.load(folder / "model.pt")
    live.load_state_dict(state.get("m", state))


def by_import(source, live, tmp_path):
    torch.save({"m": source.state_dict()}, tmp_path / "x.pt")
    url = limpet.import_checkpoint(tmp_path / "x.pt", unused_url()).url
    limpet.load(url, into={"m": live})


WAYS = (by_torch, by_load, by_resume, by_saved_state_dict, by_plain_load, by_export, by_import)


def bring(way, source, live, tmp_path):
    way(source, live, tmp_path) if way in (by_export, by_import) else way(source, live)


WAYS_AND_WRAPPERS = [(way, "nested") for way in WAYS]
WAYS_AND_WRAPPERS += [(by_load, wrapper) for wrapper in WRAPPERS if wrapper != "nested"]


@pytest.mark.parametrize(("way", "wrapper"), WAYS_AND_WRAPPERS)
def test_old_values_are_converted_and_new_ones_are_not(way, wrapper, tmp_path):
    for source, value in ((Scale(1), torch.e), (Scale2(3), 3.0)):
        live = WRAPPERS[wrapper](Scale2())
        bring(way, source if wrapper == "root" else nested(source), live, tmp_path)
        found = next(m.scale for m in live.modules() if isinstance(m, Scale))
        assert torch.allclose(found, torch.tensor(value)), (value, found)


def test_every_way_brings_the_versions_that_pytorch_has(tmp_path):
    seen = []

    class Seen(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            seen.append((prefix, dict(metadata)))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    class Container(nn.Sequential):
        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            seen.append((prefix, dict(metadata)))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    def add(module, state, prefix, metadata):
        metadata["mine"] = {"rows": [1, 2]}

    def make():
        m = nn.Sequential(Container(Seen(2, 2)), Seen(2, 2))
        m[1]._register_state_dict_hook(add)
        return m

    def passed(way):
        seen.clear()
        bring(way, make(), make(), tmp_path)
        return dict(seen)  # a trial, if any, sees the same

    expected = passed(by_torch)
    assert expected["1."] == {"version": 7, "mine": {"rows": [1, 2]}}
    for way in (by_load, by_resume, by_saved_state_dict, by_import):
        assert passed(way) == expected, way
    for way in (by_plain_load, by_export):  # a container without members has no entry there
        assert passed(way) == {**expected, "0.": {}}, way


@pytest.mark.parametrize(("options", "loaded"), [
    ({"keys": "m/1.0.bias"}, ["bias"]), ({"keys": "m/1.0.scale"}, ["scale"]),
    ({"keys": "m/0.*"}, []), ({"missing": "keep"}, ["bias"]),
    ({"rename": {"m/1.0": "m/1.0"}}, ["bias", "scale"]), ({"cast": True}, ["bias", "scale"]),
], ids=str)  # fmt: skip
def test_live_values_are_never_converted(options, loaded):
    source, live = nested(Scale(1)), nested(Scale2(5))
    nn.init.constant_(source[1][0].bias, 4)
    if "missing" in options:
        del source[1][0].scale
    by_load(source.double() if "cast" in options else source, live, **options)
    assert live[1][0].scale[0].item() == pytest.approx(torch.e if "scale" in loaded else 5)
    assert live[1][0].bias[0].item() == (4 if "bias" in loaded else 0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_change_neither_names_nor_versions(wrapper):
    source, live = WRAPPERS[wrapper](Scale2(3)), WRAPPERS[wrapper](Scale2())
    del next(m for m in source.modules() if isinstance(m, Scale)).bias
    report = by_load(source, live, missing="keep")  # of the same version: nothing is left out
    assert [key.rpartition(".")[2] for key in report.kept] == [
        "m/bias" if wrapper == "root" else "bias"
    ]
    assert next(m for m in live.modules() if isinstance(m, Scale)).scale.tolist() == [3, 3]


def test_renames_apply_to_the_versions_too():
    url = save_state({"m": nn.ModuleDict({"old": nested(Scale2(3))})})
    live = nn.ModuleDict({"new": nested(Scale2())})
    limpet.load(url, into={"m": live}, rename={"m/old": "m/new"})
    assert live["new"][1][0].scale.tolist() == [3, 3]
    assert limpet.load(url)["m"]._metadata["old.1.0"] == {"version": 2}


def test_a_save_at_an_exception_keeps_the_versions():
    url = unused_url().removesuffix("/version_1")
    source, live = nested(Scale2(3)), nested(Scale2())
    opt = optim.SGD(source.parameters(), 0.1)
    with (
        pytest.raises(ZeroDivisionError),
        limpet.Checkpointer(url, {"m": source, "o": opt}, save=limpet.OnException()) as ckpt,
    ):
        ckpt.step()
        ckpt.step(1 / 0)
    limpet.load(f"{url}@latest", into={"m": live}, keys="m/**")
    assert live[1][0].scale.tolist() == [3, 3]


def test_metadata_that_cannot_be_saved_is_refused():
    m = nn.Linear(2, 2)
    m._register_state_dict_hook(lambda _, s, p, metadata: metadata.update(bad=object()))
    with pytest.raises(limpet.errors.Unsupported, match="~metadata"):
        save_state({"m": m})


def test_most_modules_cost_the_manifest_nothing(tmp_path):
    def size(state, name):
        limpet.save(tmp_path / name, state)
        return (tmp_path / name / "manifest.json").stat().st_size

    m = nn.Sequential(*[nn.Linear(1, 1) for _ in range(100)])
    assert size({"m": m}, "module") - size({"m": dict(m.state_dict())}, "dict") < 150


# -- code that loads other names and shapes -------------------------------------------------------


class Bank(nn.Module):
    """A buffer that is None until the first step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", None)
        self.w = nn.Parameter(torch.zeros(2))
        self.lock = threading.Lock()  # cannot be copied

    def _load_from_state_dict(self, state, prefix, *rest):
        if prefix + "bank" in state:
            self.bank = torch.empty_like(state[prefix + "bank"])
        super()._load_from_state_dict(state, prefix, *rest)


def used_bank():
    m = Bank()
    m.bank = torch.arange(3.0)
    return m


class Names(nn.Module):
    def __init__(self, *names):
        super().__init__()
        for n, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(torch.full((2,), float(n))))
        self.new = nn.Parameter(torch.full((2,), -1.0)) if not names else None


class Renamed(Names):
    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    def _rename(self, _, state, prefix, *rest):
        if prefix + "old" in state:
            state[prefix + "new"] = state.pop(prefix + "old")


class RenamedByVersion(Names):
    """Only its version says that the name is an old one."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") == 1:
            state[prefix + "new"] = state.pop(prefix + "old")
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def load_state_dict(self, state, strict=True):  # of a nested module, nothing calls it
        return super().load_state_dict(state, strict)


class Fused(Names):
    """Two parameters become one, by a hook that knows the module only through a closure."""

    def __init__(self):
        super().__init__()
        self.new = nn.Parameter(torch.zeros(4))

        def fuse(state, prefix, *rest):
            if prefix + "q" in state:
                parts = [state.pop(prefix + n) for n in "qk"]
                state[prefix + "new"] = torch.cat(parts).reshape(self.new.shape)

        self._register_load_state_dict_pre_hook(fuse)


class Positions(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.pos = nn.Parameter(torch.arange(float(n)))

    def _load_from_state_dict(self, state, prefix, *rest):
        saved = state[prefix + "pos"]
        if saved.shape != self.pos.shape:
            values = [float(saved[0].item()), *saved.tolist()[1:]]  # needs the elements
            resized = nn.functional.interpolate(
                torch.tensor(values)[None, None], size=len(self.pos)
            )
            state[prefix + "pos"] = resized[0, 0]
        super()._load_from_state_dict(state, prefix, *rest)


class Wrapper(nn.Module):
    """Has the names of the module that it wraps."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def state_dict(self, **options):
        return self.inner.state_dict(**options)

    def load_state_dict(self, state):
        self.calls += 1
        state = {k.replace("weight_old", "weight"): v for k, v in state.items()}
        return self.inner.load_state_dict(state)


class Counter(nn.Module):
    """Extra state that new code has in another form."""

    def __init__(self, count=0):
        super().__init__()
        self.count = count

    def get_extra_state(self):
        return {"count": self.count, str(self.count): torch.full((self.count,), 2.0)}

    def set_extra_state(self, state):
        self.count = state["count"]
        assert state[str(self.count)].tolist() == [2.0] * self.count


class Forgiving(nn.Module):
    """Keeps its start value if a snapshot is older than its new parameter."""

    def __init__(self, is_new=True):
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), float(not is_new)))
        if is_new:
            self.extra = nn.Parameter(torch.full((2,), 7.0))
        self.register_load_state_dict_post_hook(
            lambda _, keys: keys.missing_keys.remove(
                next(k for k in keys.missing_keys if k.endswith("extra"))
            )
        )


class Dequantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state, prefix, *rest):
        if prefix + "scale" in state:
            state[prefix + "w"] = state[prefix + "w"] * state.pop(prefix + "scale")
        super()._load_from_state_dict(state, prefix, *rest)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.tensor([1, -2], dtype=torch.int8))
        self.register_buffer("scale", torch.tensor(0.5))


class Rotated(nn.Module):
    """Its hook makes views of what it gets, which must not be the memory that they fill."""

    def __init__(self, start=0):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((2, 2), float(start + i))) for i in (1, 2))
        with torch.no_grad():
            self.a[0, 1] = start
        self._register_state_dict_hook(self._exchange)
        self._register_load_state_dict_pre_hook(self._exchange)

    @staticmethod
    def _exchange(*args):
        state, prefix = [a for a in args if not isinstance(a, nn.Module)][:2]
        a, b = state[prefix + "a"], state[prefix + "b"]
        state[prefix + "a"], state[prefix + "b"] = b.t(), a.t()


def assigned():
    """The code of one object, not of its class."""
    m = Names()
    load = m._load_from_state_dict
    m._load_from_state_dict = lambda state, prefix, *rest: load(
        {k.replace("old", "new"): v for k, v in state.items()}, prefix, *rest
    )
    return m


def spectral():
    return nn.utils.spectral_norm(nn.Linear(2, 2))


CONVERSIONS = {
    "a buffer that was None": (used_bank, Bank),
    "a renaming hook": (lambda: Names("old"), Renamed),
    "a renaming version": (lambda: Names("old"), RenamedByVersion),
    "code of one object": (lambda: Names("old"), assigned),
    "two names become one": (lambda: Names("q", "k"), Fused),
    "interpolated": (lambda: Positions(4), lambda: Positions(8)),
    "extra state that grows": (lambda: Counter(3), lambda: Counter(1)),
    "a post hook accepts that a name is missing": (lambda: Forgiving(False), Forgiving),
    "another dtype": (Quantized, Dequantized),
    "views": (lambda: Rotated(5), Rotated),
    "weight_norm of today": (
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    ),
    "spectral_norm": (spectral, spectral),
}


def make_pair(name, wrap=nested):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        source, live, twin = (wrap(CONVERSIONS[name][i]()) for i in (0, 1, 1))
    twin.load_state_dict(source.state_dict())  # PyTorch does it
    return source, live, twin


def assert_equal_states(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value == b[name] if isinstance(value, str) else repr(value) == repr(b[name]), name


@pytest.mark.filterwarnings("error::limpet.errors.InexactResume")
@pytest.mark.parametrize(("way", "wrapper"), WAYS_AND_WRAPPERS[1:4] + WAYS_AND_WRAPPERS[6:])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_module_loads_what_its_own_code_loads(name, way, wrapper, tmp_path):
    if way in (by_saved_state_dict, by_import) and name == "extra state that grows":
        pytest.skip("imports and dicts of tensors have no dicts")
    source, live, twin = make_pair(name, WRAPPERS[wrapper])
    source = getattr(source, "module", source)
    bring(way, source, live, tmp_path)
    assert_equal_states(live, twin)


def test_a_wrapper_with_both_methods_loads_by_them():
    source, live = Wrapper(nn.Linear(2, 2)), Wrapper(nn.Linear(2, 2))
    by_load(source, live)
    assert live.calls == 1
    assert_equal_states(live, source)
    old = OrderedDict((f"{k}_old" if k == "weight" else k, v * 2) for k, v in
                      source.state_dict().items())  # fmt: skip
    by_load(old, live)
    assert live.calls == 2  # a trial of a copy does not count
    assert torch.equal(live.inner.weight, source.inner.weight * 2)


def test_an_overridden_method_does_not_hide_what_is_missing():
    class Lenient(nn.Linear):
        def load_state_dict(self, state, strict=True):
            return super().load_state_dict(state, False)

    source, live = nn.Linear(2, 2, bias=False), Lenient(2, 2)
    before = live.bias.clone()
    with pytest.raises(MissingLeaf, match="m/bias"):
        by_load(source, live)
    assert [*by_load(source, live, missing="keep").kept] == ["m/bias"]
    assert torch.equal(live.bias, before)
    assert torch.equal(live.weight, source.weight)


def test_an_overridden_method_that_is_strict_gets_the_values_that_are_kept():
    class Strict(nn.Linear):
        def load_state_dict(self, state):
            return super().load_state_dict(state)

    live = Strict(2, 3)
    before = live.weight.clone()
    report = by_load(Strict(2, 5), live, mismatched="keep")
    assert [*report.kept] == ["m/weight", "m/bias"]
    assert torch.equal(live.weight, before)


class Stuck(nn.Module):
    """Its code refuses, raises, or ignores what has another shape."""

    def __init__(self, n, failure):
        super().__init__()
        self.register_buffer("b", torch.zeros(n))
        self.failure = failure

    def _load_from_state_dict(self, state, prefix, *rest):
        if self.failure == "raises":
            raise ValueError(self.failure)
        if self.failure == "pops":
            state.pop(prefix + "b")
        if self.failure != "ignores":
            super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("failure", ["refuses", "raises", "ignores", "pops"])
def test_what_the_code_does_not_load_is_an_error_before_anything_is_changed(failure):
    live = {"first": torch.zeros(2), "m": nested(Stuck(2, failure))}
    before = live["m"][0].weight.clone()
    url = save_state({"first": torch.ones(2), "m": nested(Stuck(3, ""))})
    with pytest.raises(ShapeMismatch, match=r"m/1\.0\.b"):
        limpet.load(url, into=live)
    assert torch.equal(live["m"][0].weight, before)
    assert live["first"].tolist() == [0, 0]
    if failure in ("raises", "pops"):  # it does so in each load
        with pytest.raises(limpet.errors.MemberFailed):
            limpet.load(url, into=live, mismatched="keep")
    else:
        report = limpet.load(url, into=live, mismatched="keep")
        assert [*report.kept] == ["m/1.0.b"]
        assert not torch.equal(live["m"][0].weight, before)


def test_names_that_no_code_loads_are_reported_as_without_code():
    class Head(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.body, self.head = Renamed(), nn.Linear(2, n)
            self.register_load_state_dict_post_hook(lambda *_: None)

    source = nn.ModuleDict({"body": Names("old"), "tail": nn.Linear(2, 2)})
    with pytest.raises(LimpetError) as e:
        by_load(source, Head(2))
    assert e.value.missing == ("m/head.weight", "m/head.bias")
    assert e.value.unexpected == ("m/tail.weight", "m/tail.bias")
    live = Head(2)
    report = by_load(source, live, missing="keep", unexpected="ignore")
    assert live.body.new.tolist() == [0, 0]
    assert [*report.kept] == ["m/head.weight", "m/head.bias"]
    assert [*report.ignored] == ["m/tail.weight", "m/tail.bias"]
    live = Head(2)
    by_load(source, live, rename={"m/tail": "m/head"})
    assert torch.equal(live.head.weight, source["tail"].weight)


@pytest.mark.parametrize("is_root", [False, True])
def test_a_new_head_is_kept_and_the_positions_are_converted(is_root):
    class Net(Positions if is_root else nn.Module):
        def __init__(self, n, classes):
            super().__init__(*[n] * is_root)
            self.body, self.head = Positions(n), nn.Linear(2, classes)

    url, live = save_state({"m": Net(4, 3)}), Net(8, 5)
    with pytest.raises(ShapeMismatch) as e:
        limpet.load(url, into={"m": live})
    head = ("m/head.weight", "m/head.bias")
    assert e.value.mismatched == head
    before = live.head.weight.clone()
    assert (*limpet.load(url, into={"m": live}, mismatched="keep").kept,) == head
    assert live.body.pos.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.equal(live.head.weight, before)


def test_slots_of_a_resized_parameter_are_refused_or_kept():
    def state(n):
        m = Positions(n)
        o = optim.AdamW(m.parameters())
        m.pos.grad = torch.ones(n)
        o.step()
        return {"o": o, "m": m}

    for fresh in (False, True):
        live = state(8)
        if fresh:
            live["o"].state.clear()
        with pytest.raises(ShapeMismatch, match=r"\[4\], live \[8\]"):
            limpet.load(save_state(state(4)), into=live)
        report = limpet.load(save_state(state(4)), into=live, mismatched="keep")
        assert all("o/state" in key for key in report.kept)
        assert live["m"].pos[0] != 0
        live["o"].step()


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_weights_behind_own_code(is_tied):
    def make(seed):
        torch.manual_seed(seed)
        m = nested(Scale2())
        m[1][0].add_module("a", nn.Linear(2, 2))
        m[1][0].add_module("b", nn.Linear(2, 2))
        return m

    source, live = make(0), make(1)
    for m in (source, live) if is_tied else (live,):
        m[1][0].b.weight = m[1][0].a.weight
    if is_tied:
        by_load(source, live)
        assert_equal_states(source, live)
        assert live[1][0].b.weight is live[1][0].a.weight
    else:
        with pytest.raises(limpet.errors.PlanError, match="share memory"):
            by_load(source, live)


@pytest.mark.parametrize("where", ["nested", "root"])
def test_code_that_does_not_load_what_was_saved_is_reported(where):
    class Lossy(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *rest):
            state.pop(prefix + "bias", None)
            super()._load_from_state_dict(state, prefix, *rest)
            rest[-3].clear()

        def load_state_dict(self, state, strict=True):
            if where == "root":
                super().load_state_dict({k: v for k, v in state.items() if k != "bias"}, False)

    wrap = nested if where == "nested" else lambda m: m
    source, live = wrap(Lossy(2, 2)), wrap(Lossy(2, 2))
    with pytest.warns(InexactResume, match="bias"):
        by_load(source, live)


def test_modules_without_own_code_are_filled_in_place():
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.own = nn.Linear(2, 2), Scale2(1)
            self.norm = nn.BatchNorm1d(2)

    filled = []
    torch_empty_like = torch.empty_like
    live = Big()
    try:
        torch.empty_like = lambda t, *a, **k: filled.append(t.shape) or torch_empty_like(t, *a, **k)
        by_load(Big(), live)
    finally:
        torch.empty_like = torch_empty_like
    assert len(filled) == 2  # of the module with code
