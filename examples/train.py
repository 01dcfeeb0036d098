"""Train a small byte-level transformer on Python's own documentation, and survive being stopped.

    python examples/train.py --run runs/docs

Stop it however you like (Ctrl-C, kill -9, a power cut) and start it again with the same command:
it goes on from the newest intact version, and ends with the very bits that it would have had.

The lines that make it so are those with ``holdfast``, ``progress`` and ``ckpt`` in them.
"""

import argparse
import random
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import holdfast


class Model(nn.Module):
    """Reads bytes, and after each says how likely every byte is to come next."""

    def __init__(self, width: int, layers: int, length: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                width // 32,
                4 * width,
                dropout,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """``text``: batch x length bytes as int64. Returns batch x length x 256 logits."""
        x = self.byte_embedding(text) + self.position_embedding.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def draw_batch(text: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """``batch`` windows of ``length + 1`` bytes each, from random places of the text.

    The places come from PyTorch's global generator. ``holdfast.RNG`` saves and restores it, so
    after a resume the batches are those that would have followed.
    """
    starts = torch.randint(len(text) - length, (batch,))
    return text[starts[:, None] + torch.arange(length + 1)].long()


def train(options: argparse.Namespace) -> None:
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    model = Model(options.width, options.layers, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # A function of the step is not in the version, unlike OneCycleLR's total_steps: so a run that
    # is done can be started again with more --steps, and follows the longer schedule from there.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1 - step / options.steps)
    )
    progress = holdfast.Progress()

    # All that decides how training goes on. Whatever is not in here starts anew after a stop.
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": progress,
        "rng": holdfast.RNG(),
    }
    with holdfast.Checkpointer(
        options.run,
        state,
        save=holdfast.EverySteps(options.every),
        keep=holdfast.KeepLast(options.keep),
    ) as ckpt:
        found = ckpt.resume()  # fills the state in place; None if there is nothing yet
        print(f"going on from {found.url}" if found else "starting afresh", flush=True)

        while progress.step < options.steps:
            window = draw_batch(text, options.batch, options.length)
            logits = model(window[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress.samples += options.batch

            # Last in the loop, when the state is whole: counts the step, and saves when due.
            # Only the copying is done here; writing goes on beside the steps that follow.
            ckpt.step({"loss": loss})
            if progress.step % options.log == 0:
                print(f"step {progress.step:5}  loss {loss.item():.4f}", flush=True)

        ckpt.save()  # the last state too, wherever the cadence stands
        done = ckpt.statistics()
        if done["saves"]:
            print(
                f"{done['saves']:.0f} saves of {done['bytes'] / done['saves'] / 1e6:.1f} MB;"
                f" each held training up for {done['blocked_seconds'] / done['saves'] * 1e3:.1f} ms"
                f" and took {done['background_seconds'] / done['saves'] * 1e3:.0f} ms beside it"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", required=True, help="folder for the versions of this run")
    parser.add_argument("--steps", type=int, default=2000, help="train so many steps")
    parser.add_argument("--every", type=int, default=100, help="save every so many steps")
    parser.add_argument("--keep", type=int, default=3, help="keep so many versions")
    parser.add_argument("--log", type=int, default=10, help="print the loss every so many steps")
    parser.add_argument("--batch", type=int, default=4, help="windows in a batch")
    parser.add_argument("--length", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=3, help="layers of the model")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    options = parser.parse_args()

    # Floating-point sums depend on their order: bit-equal runs need the same number of threads
    # and algorithms that do not race. Resuming needs neither.
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    train(options)


if __name__ == "__main__":
    main()
