"""Modes of modules, which are in no ``state_dict()``: ``requires_grad``, and ``training``."""

import warnings

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import InexactResume


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    return net


def unfreeze(net):
    net[0].requires_grad_(True)


def freeze_all_but_one(net):
    net.requires_grad_(False)
    net[3].bias.requires_grad_(True)


def stop_norm_and_dropout(net):
    net[1].eval()
    net[2].eval()


def modes(net):
    return [p.requires_grad for p in net.parameters()], [m.training for m in net.modules()]


def train(folder, net, change=None, steps=4, save=None, wrap=lambda m: m, **resume):
    """Train in the way of most scripts. Return the options that the resume has replaced."""
    torch.manual_seed(1)
    model = wrap(net)
    state = {"m": {"net": model}, "o": torch.optim.AdamW(net.parameters(), 0.1)}
    state |= {"p": limpet.Progress(), "rng": limpet.RNG()}
    found = []

    def sink(name, fields):
        if name == "options_replaced":
            found.extend(fields["options"])

    policy = save or limpet.EverySteps(1)
    with limpet.attach(sink), limpet.Checkpointer(folder, state, save=policy) as ckpt:
        ckpt.resume(**resume)
        while state["p"].step < steps:
            if state["p"].step == 2 and change:
                change(net)
            state["o"].zero_grad()
            model(torch.rand(4, 3)).square().mean().backward()
            state["o"].step()
            ckpt.step()
            if save is not None:
                raise KeyboardInterrupt
    return found


CHANGES = [unfreeze, freeze_all_but_one, stop_norm_and_dropout]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_resume_restores_modes_that_the_training_has_changed(change, is_wrapped, tmp_path):
    straight, killed, resumed = make(), make(), make()
    train(tmp_path / "a", straight, change, 6)
    train(tmp_path / "b", killed, change, 4, wrap=nn.DataParallel if is_wrapped else lambda m: m)
    found = train(tmp_path / "b", resumed, steps=6)
    assert modes(resumed) == modes(straight) != modes(make())
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert len(found) == 1
    mode = "training of 1, 2" if change is stop_norm_and_dropout else "requires_grad of "
    assert found[0].startswith(mode)
    assert found[0].endswith(" of m/net is that of the version")
    resumed = killed  # has the modes already
    assert train(tmp_path / "b", resumed, steps=6) == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_after_an_exception_has_the_modes(change, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, make(), save=limpet.OnException())
    net = make()
    change(net)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, net, lambda n: None, save=limpet.OnException() | limpet.EverySteps(100))
    resumed = make()
    train(tmp_path, resumed, steps=0)
    assert modes(resumed) == modes(make())  # the second training has resumed those of the first


def test_modes_are_left_where_they_do_not_fit(tmp_path):
    train(tmp_path / "a", make(), unfreeze)
    evaluated = make().eval()  # of a program that evaluates
    train(tmp_path / "a", evaluated, steps=0)
    assert modes(evaluated) == ([True] * 6, [False] * 5)
    started = make()  # by a new run
    train(tmp_path / "b", started, steps=0, start=str(tmp_path / "a@latest"))
    assert modes(started) == modes(make())
    for folder, wrap in {"c": lambda m: m, "d": nn.DataParallel}.items():
        validated = make()
        train(tmp_path / folder, validated.eval(), steps=2, wrap=wrap)
        resumed = make()
        assert train(tmp_path / folder, resumed, steps=0, wrap=wrap) == []
        assert modes(resumed) == modes(make())


def test_gradients_of_distributed_data_parallel_are_compared(tmp_path, monkeypatch):
    train(tmp_path, make(), unfreeze)
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", nn.DataParallel)
    resumed = make()
    with pytest.warns(InexactResume, match=r"requires_grad of module.0.bias, module.0.weight of m"):
        train(tmp_path, resumed, steps=0, wrap=nn.DataParallel)
    assert modes(resumed) == modes(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unfreeze(resumed)
        train(tmp_path, resumed, steps=0, wrap=nn.DataParallel)


@pytest.mark.parametrize("modes", [None, 3, [], {"m/net": 3}, {"m/net": {"names": 1}}, {"x": {}}])
def test_other_records_are_ignored(modes, tmp_path, monkeypatch):
    from limpet.training import state_check

    monkeypatch.setattr(state_check, "read_modes", lambda state: {state_check.MODES: modes})
    train(tmp_path, make(), unfreeze)
    monkeypatch.undo()
    assert train(tmp_path, make(), steps=0) == []
