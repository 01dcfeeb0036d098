"""torchao: training goes on with the same bits after a load into new objects."""

import copy

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import DTypeMismatch
from tests.states import unused_url

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CONFIGS = [
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
]


@pytest.fixture(scope="module", autouse=True)
def eager():
    """Do not compile: a compilation of an optimizer's step takes half a minute."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


def bits(value, key=""):
    """Return the bytes of all tensors in a state, and all other values, by key."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            value = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
        else:
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            return {key: (value.dtype, value.shape, raw.tolist())}
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for n, member in items for k, v in bits(member, f"{key}/{n}").items()}
    return {key: value}


def training(name):
    import torchao.optim

    torch.manual_seed(0)
    model = nn.Linear(64, 128)
    return model, getattr(torchao.optim, name)(model.parameters(), lr=1e-2)


def step(model, optimizer, number):
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


def test_slots_that_exist_are_filled_in_place():
    model, optimizer = training("AdamW8bit")
    step(model, optimizer, 0)
    url = unused_url()
    limpet.save(url, {"model": model, "optimizer": optimizer})
    expected = bits(optimizer.state_dict())
    step(model, optimizer, 1)
    slot = optimizer.state[model.weight]["exp_avg"]
    codes = slot.codes
    limpet.load(url, into={"model": model, "optimizer": optimizer})
    assert optimizer.state[model.weight]["exp_avg"] is slot
    assert slot.codes is codes
    assert bits(optimizer.state_dict()) == expected


def test_another_optimizer_is_refused():
    model, optimizer = training("AdamW8bit")
    step(model, optimizer, 0)
    url = unused_url()
    limpet.save(url, {"model": model, "optimizer": optimizer})
    others = [training("AdamW4bit"), (model, torch.optim.AdamW(model.parameters(), lr=1e-2))]
    for other_model, other in others:
        with pytest.raises(DTypeMismatch, match=r"no tensor of the class .*OptimState8bit"):
            limpet.load(url, into={"model": other_model, "optimizer": other})
        assert not other.state


def test_a_run_that_ends_with_an_exception(tmp_path):
    """The savepoint has the slots of the last step, not those of the one that was interrupted."""
    model, optimizer = training("AdamW8bit")
    state = {"model": model, "optimizer": optimizer, "progress": limpet.Progress()}
    policy = limpet.EverySteps(100) | limpet.OnException()
    with (
        pytest.raises(ZeroDivisionError),
        limpet.Checkpointer(str(tmp_path), state, save=policy) as ckpt,
    ):
        for number in range(3):
            step(model, optimizer, number)
            ckpt.step()
        expected = bits([model.state_dict(), optimizer.state_dict()])
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[model.weight][name].codes.add_(1)
        raise ZeroDivisionError
    new_model, new_optimizer = training("AdamW8bit")
    state = {"model": new_model, "optimizer": new_optimizer, "progress": limpet.Progress()}
    with limpet.Checkpointer(str(tmp_path), state) as ckpt:
        resumed = ckpt.resume()
    assert resumed.step == 3
    assert bits([new_model.state_dict(), new_optimizer.state_dict()]) == expected


@pytest.mark.parametrize("config", CONFIGS)
def test_quantized_weights(config):
    from torchao import quantization

    quantized, live = [], nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    for model in (copy.deepcopy(live), live):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2 if quantized else 1)
        quantization.quantize_(model, getattr(quantization, config)())
        quantized.append(model)
    saved, live = quantized
    url = unused_url()
    limpet.save(url, {"model": saved})
    weight, x = live[0].weight, torch.randn(4, 64)
    assert bits(live.state_dict()) != bits(saved.state_dict())
    limpet.load(url, into={"model": live})
    assert live[0].weight is weight
    assert bits(live.state_dict()) == bits(saved.state_dict())
    assert torch.equal(live(x), saved(x))
    with pytest.raises(DTypeMismatch, match=r"model/0.weight"):
        limpet.load(
            url, into={"model": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))}
        )
