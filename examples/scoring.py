"""Score the versions of ``train.py`` on text that is not used for training.

    limpet evaluate runs/docs --with scoring --data scoring:held_out --keys "model/**" --follow

Each worker process of the evaluation imports this module. A batch is one item of the data.
"""

from typing import Any

import torch
from torch.nn import functional
from train import Model, read_text

WINDOW = 64
"""The number of bytes that a model of ``train.py`` reads at once by default."""


def build(parameters: dict[str, torch.Tensor]) -> Model:
    """Return a model of the size that these parameters have."""
    length, width = parameters["position_embedding.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in parameters if name.startswith("layers."))
    model = Model(width, layers, length)
    model.load_state_dict(parameters)
    return model.eval()


def setup(state: dict[str, Any]) -> Model:
    return build(state["model"])


def evaluate(model: Model, windows: torch.Tensor) -> dict[str, tuple[float, int]]:
    """``windows``: batch x (length + 1) bytes. Returns the sum of losses, and their number."""
    windows = windows[:, : len(model.position_embedding.weight) + 1].long()
    logits, targets = model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    right = (logits.argmax(1) == targets).sum()
    return {"val/loss": (loss.item(), len(targets)), "val/accuracy": (right.item(), len(targets))}


def held_out() -> torch.Tensor:
    """Return the text as windows that do not overlap: count x (length + 1) bytes."""
    text = read_text()
    text = text[: len(text) // 10]
    return text[: len(text) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)


def generate(model: Model, prompt: str, count: int) -> str:
    """Return ``count`` bytes of text that follow the prompt, drawn with a temperature of 0.7."""
    length = len(model.position_embedding.weight)
    text = list(prompt.encode())
    for _ in range(count):
        window = torch.tensor([text[-length:]])
        padded = functional.pad(window, (0, length - window.shape[1]))
        logits = model(padded)[0, window.shape[1] - 1]
        text.append(int(torch.multinomial((logits / 0.7).softmax(0), 1)))
    return bytes(text).decode(errors="replace")
