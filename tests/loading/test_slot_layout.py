"""A load allocates slots with the strides that the optimizer's first step gives them.

Fused steps go through the memory of a parameter and its slots at once: with other strides, each
element would get the moments of another one.
"""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import limpet
from tests.state.test_sharding_torch import simulated_rank
from tests.states import assert_same, save_state


def conv(kind, dims, **options):
    return kind(4, 8, 3, **options).to(memory_format=getattr(torch, f"channels_last{dims}"))


def linear_of(weight):
    made = nn.Linear(6, 4)
    made.weight = nn.Parameter(weight)
    return made


MODELS = {
    "channels_last": lambda: conv(nn.Conv2d, ""),
    "channels_last_3d": lambda: conv(nn.Conv3d, "_3d"),
    "depthwise": lambda: conv(nn.Conv2d, "", groups=4),
    "transposed": lambda: linear_of(torch.randn(6, 4).t()),
    "every second column": lambda: linear_of(torch.randn(4, 12)[:, ::2]),
    "columns of a transposed matrix": lambda: linear_of(torch.randn(12, 4)[::2].t()),
}


def hooked(params, fused):
    """Its ``load_state_dict`` gets the loaded slots."""
    made = optim.AdamW(params, lr=0.05, fused=fused)
    made.register_state_dict_post_hook(lambda o, state: state)
    return made


OPTIMIZERS = {
    "hooked": hooked,
    "adamw": partial(optim.AdamW, lr=0.05),
    "amsgrad": partial(optim.Adam, lr=0.05, amsgrad=True),
    "sgd": partial(optim.SGD, lr=0.05, momentum=0.9),
    "adagrad": partial(optim.Adagrad, lr=0.05),
}


def make(model, optimizer, fused=True, dtype=torch.float32):
    made = MODELS[model]().to(dtype)
    return {"model": made, "optimizer": OPTIMIZERS[optimizer](made.parameters(), fused=fused)}


def train(state, *steps):
    for i in steps:
        torch.manual_seed(i)
        for p in state["model"].parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape))
        state["optimizer"].step()
    return state


def through_load(saved, live):
    limpet.save("a", saved)
    limpet.load("a", into=live)


def through_resume(saved, live):
    options = {"save": limpet.EverySteps(1), "quiet": True}
    with limpet.Checkpointer("a", saved, **options) as ckpt:
        ckpt.step()
    with limpet.Checkpointer("a", live, **options) as ckpt:
        ckpt.resume()


def through_import(saved, live):
    torch.save({key: value.state_dict() for key, value in saved.items()}, "a.pt")
    limpet.import_checkpoint("a.pt", "a")
    limpet.load("a", into=live)


def through_export(saved, live):
    limpet.save("a", saved)
    limpet.export("a", "a.pt", to="torch")
    for key, value in torch.load("a.pt").items():
        live[key].load_state_dict(value)


CASES = [(through_load, optimizer) for optimizer in OPTIMIZERS]
for way in (through_resume, through_import, through_export):
    CASES += [(way, "hooked"), (way, "amsgrad")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("way", "optimizer"), CASES)
@pytest.mark.parametrize("steps", [(), (7,)])
def test_fused_steps_continue_exactly(model, optimizer, way, steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = train(make(model, optimizer), 1, 2, 3)
    live = train(make(model, optimizer), *steps)
    way(saved, live)
    for p in live["model"].parameters():
        for slot in live["optimizer"].state[p].values():
            if slot.shape == p.shape:
                expected = torch.zeros_like(p, memory_format=torch.preserve_format)
                # an export has the order of the dimensions, which is all that a step goes by
                assert slot.stride() == expected.stride() or way is through_export
    for state in (saved, live):
        train(state, 4, 5, 6)
    for name, p in saved["model"].named_parameters():
        assert_same(p.detach(), live["model"].get_parameter(name).detach())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("saved_options", ["amsgrad", "float64", "no slots yet"])
def test_new_slots_beside_live_ones_have_the_strides_too(model, saved_options):
    """The saved options decide which slots there are; ``cast=True`` converts them."""
    dtype = torch.float64 if saved_options == "float64" else torch.float32
    kind = "amsgrad" if saved_options == "amsgrad" else "adamw"
    saved = train(make(model, kind, fused=False, dtype=dtype), 1, 2)
    live = make(model, "adamw", fused=False)
    if saved_options == "amsgrad":
        train(live, 1)
    limpet.load(save_state(saved), into=live, cast=True)
    for p, q in zip(live["model"].parameters(), saved["model"].parameters(), strict=True):
        slots, expected = live["optimizer"].state[p], saved["optimizer"].state[q]
        assert slots.keys() == expected.keys()
        for name, slot in slots.items():
            assert_same(expected[name].float(), slot)
            assert slot.shape != p.shape or slot.stride() == torch.zeros_like(p).stride()


class Factored(optim.SGD):
    """Slots of other shapes and dtypes, nested and tied ones: they have the saved strides."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            slots = self.state[p]
            slots["row"], slots["code"] = p.detach().sum(-1), p.detach().to(torch.int8)
            slots["nested"] = {"moments": [p.detach().clone(), p.detach().flatten()]}
            slots["wide"] = torch.stack([p.detach()] * 2, -1).transpose(0, 1)
            slots["tied"] = slots["nested"]["moments"][0]
            # as an eigendecomposition returns it
            columns = torch.empty_permuted(p.shape, [*reversed(range(p.ndim))])
            slots["eigenvectors"] = columns.copy_(p.detach())


@pytest.mark.parametrize("model", MODELS)
def test_slots_of_other_shapes_nested_and_tied_ones(model):
    made = [MODELS[model]() for _ in range(2)]
    saved, live = ({"model": m, "optimizer": Factored(m.parameters(), 0.1)} for m in made)
    saved["optimizer"].step()
    limpet.load(save_state(saved), into=live)
    for p, q in zip(live["model"].parameters(), saved["model"].parameters(), strict=True):
        slots, expected = live["optimizer"].state[p], saved["optimizer"].state[q]
        assert_same(expected, slots)
        for of_parameter in (slots["code"], slots["nested"]["moments"][0]):
            assert of_parameter.stride() == torch.zeros_like(p).stride()
        for name in ("wide", "eigenvectors"):
            made, kept = slots[name], torch.empty_like(expected[name])
            dims = [d for d, n in enumerate(made.shape) if n > 1]
            assert [made.stride(d) for d in dims] == [kept.stride(d) for d in dims]
        assert slots["tied"] is slots["nested"]["moments"][0]


def test_a_new_state_has_the_saved_order_of_dimensions():
    """As with ``torch.load``, whose tensors a program may assign to a module."""
    state = {
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(5, 3).t(),
        "sliced": torch.randn(4, 6)[:, ::2],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "contiguous": torch.randn(2, 3),
        "sparse": torch.randn(4, 3).t().to_sparse(),
        "list": [torch.randn(3, 2, 4).permute(2, 0, 1)],
    }
    url = save_state(state)
    for loaded in (limpet.load(url), limpet.load(url, device="cpu")):
        assert_same(state, loaded)
        assert loaded["image"].is_contiguous(memory_format=torch.channels_last)
        assert loaded["transposed"].stride() == (1, 3)
        assert loaded["sliced"].is_contiguous()
        assert loaded["expanded"].is_contiguous()
        assert loaded["list"][0].stride() == state["list"][0].stride()
    assert_same(state["image"][:, 1:2, 2], limpet.open(url)["image"][:, 1:2, 2])


@pytest.mark.parametrize("kind", ["adamw", "hooked"])
def test_distributed_slots_have_the_strides_of_their_parameter(kind, tmp_path):
    def distributed():
        with simulated_rank(0, 1):
            mesh = init_device_mesh("cpu", (1,))
            weight = DTensor.from_local(torch.randn(6, 4).t(), mesh, [Shard(0)], run_check=False)
            made = linear_of(weight)
            return {"model": made, "optimizer": OPTIMIZERS[kind]([made.weight], fused=False)}

    saved, live = distributed(), distributed()
    with simulated_rank(0, 1):
        saved["model"].weight.grad = torch.ones_like(saved["model"].weight)
        saved["optimizer"].step()
        url = save_state(saved)
        limpet.load(url, into=live)
    slot = live["optimizer"].state[live["model"].weight]["exp_avg"]
    assert slot.to_local().stride() == (1, 4)
    limpet.export(url, tmp_path / "a.pt", to="torch")
    state = torch.load(tmp_path / "a.pt")["optimizer"]["state"]
    assert state[0]["exp_avg"].stride() == (1, 4)
