"""Train a small byte-level transformer on Python's own documentation, and survive interruptions.

    python examples/train.py --run runs/docs

Stop the training in any way (Ctrl-C, kill -9, a power cut) and start it again with the same
command. It resumes from the newest intact version, and the final state is equal, bit for bit, to
that of an uninterrupted run.

The lines that provide this contain ``limpet``, ``state``, or ``ckpt``.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

import limpet


class Model(nn.Module):
    """A byte-level language model: after each byte, predict the next one."""

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


def read_text() -> torch.Tensor:
    """Return Python's documentation as bytes (uint8)."""
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


class Windows(Dataset):
    """Consecutive windows of ``length + 1`` bytes of a text, which overlap by one byte."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.rows = text.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i].long()


def compute_loss(model: Model, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def evaluate(model: Model, loader: DataLoader) -> float:
    """Return the mean loss over the batches of a loader, which all have the same size."""
    model.eval()
    with torch.no_grad():
        losses = [compute_loss(model, windows).item() for windows in loader]
    model.train()
    return sum(losses) / len(losses)


def train(options: argparse.Namespace) -> None:
    text = read_text()
    held_out, text = text[: len(text) // 10], text[len(text) // 10 :]
    windows: Dataset = Windows(text, options.length)
    if options.windows:
        windows = Subset(windows, range(options.windows))
    loader = limpet.DataLoader(windows, batch_size=options.batch, shuffle=True, drop_last=True)
    validation = DataLoader(Subset(Windows(held_out, options.length), range(64)), batch_size=16)

    model = Model(options.width, options.layers, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # LambdaLR does not save its function, unlike OneCycleLR, which saves total_steps. A finished
    # run can therefore resume with more --epochs, and follows the longer schedule from there.
    steps = options.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1 - step / steps)
    )

    # Everything that training needs to resume. Anything else is reset when the process restarts.
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    keep, stop = limpet.KeepLast(options.keep), None
    if options.patience:  # `limpet evaluate --with scoring` provides the scores, in its own time
        keep |= limpet.KeepBest(1, "val/loss")
        stop = limpet.StopWhen("val/loss", options.patience)
    save = limpet.EverySteps(options.every)
    with limpet.Checkpointer(options.run, state, save=save, keep=keep, stop=stop) as ckpt:
        snapshot = ckpt.resume()  # loads into the state in place; None if there is no version
        print(f"resuming from {snapshot.url}" if snapshot else "starting from scratch", flush=True)

        for epoch in ckpt.epochs(options.epochs):  # those that remain
            for batch in loader:  # after a resume, the rest of the epoch
                loss = compute_loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()

                # Last in the loop, when the state is complete: counts the step, and saves when due.
                # Only the copy of the state blocks; a background thread writes it.
                ckpt.step({"loss": loss})
                if ckpt.current_step % options.log == 0:
                    print(f"step {ckpt.current_step:5}  loss {loss.item():.4f}", flush=True)
            score = evaluate(model, validation)
            print(f"epoch {epoch}: held out {score:.4f}", flush=True)
            ckpt.metrics({"held_out": score})  # of this epoch

    statistics = ckpt.statistics()
    saves = statistics["saves"]
    if saves:
        print(
            f"{saves:.0f} saves of {statistics['bytes'] / saves / 1e6:.1f} MB; each blocked"
            f" training for {statistics['blocked_seconds'] / saves * 1e3:.1f} ms and took"
            f" {statistics['background_seconds'] / saves * 1e3:.0f} ms in the background"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", required=True, help="folder for the versions of this run")
    parser.add_argument("--epochs", type=int, default=2, help="number of epochs")
    parser.add_argument("--every", type=int, default=100, help="steps between saves")
    parser.add_argument("--keep", type=int, default=3, help="number of versions to keep")
    parser.add_argument("--patience", type=int, help="worse scores before training stops early")
    parser.add_argument(
        "--windows", type=int, help="windows of an epoch; the whole text by default"
    )
    parser.add_argument("--log", type=int, default=10, help="steps between lines of output")
    parser.add_argument("--batch", type=int, default=4, help="windows per batch")
    parser.add_argument("--length", type=int, default=64, help="bytes per window")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=3, help="number of layers")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    options = parser.parse_args()

    # Floating-point sums depend on the order of addition. Runs that are equal bit for bit need the
    # same number of threads and deterministic algorithms; resuming needs neither.
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    train(options)


if __name__ == "__main__":
    main()
