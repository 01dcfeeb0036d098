"""What a user does with a local folder: save, load, train, resume, and the commands."""

import os
import sys
from pathlib import Path

import numpy as np
import torch

import limpet
from limpet.cli import main

root = Path(os.environ["TEST_FOLDER"])
large = torch.arange(3_000_000, dtype=torch.float32)  # larger than a direct read
state = {"large": large, "array": np.arange(9), "note": "line\r\nline\x1a", "bytes": b"a\r\nb\x1ac"}
limpet.save(root / "one" / "version_1", state, step=1)
loaded = limpet.load(root / "one" / "version_1")
assert loaded["large"].equal(large)
assert loaded["array"].tolist() == [*range(9)]
assert (loaded["note"], loaded["bytes"]) == (state["note"], state["bytes"])
pending = limpet.save_async(root / "one" / "version_2", state, step=2)
assert pending.wait().verify().ok
into = {"large": torch.zeros_like(large), "array": np.zeros(9, int), "note": "", "bytes": b""}
limpet.load(root / "one" / "version_2", into=into)
assert into["large"].equal(large)
try:
    limpet.save(root / "one" / "version_2", state, step=2)
except limpet.errors.AlreadyExists:
    pass
else:
    raise AssertionError("a snapshot was replaced")


def train(steps):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    loader = limpet.DataLoader(range(1000), batch_size=4, shuffle=True)
    progress = limpet.Progress()
    members = {"model": model, "optimizer": optimizer, "progress": progress, "loader": loader}
    policies = {
        "save": limpet.EverySteps(2) | limpet.OnException() | limpet.AtEnd(),
        "keep": limpet.KeepLast(2),
    }
    with limpet.Checkpointer(root / "run", members, **policies) as ckpt:
        ckpt.resume()
        began = progress.step
        for _, _ in zip(range(steps), loader, strict=False):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            ckpt.step({"loss": 1.0})
        return began


assert train(5) == 0
assert train(4) == 5
run = limpet.Run(root / "run")
assert run.latest().step == 9
assert run.sweep(grace=0).removed is not None

for command in (
    ["ls", f"{root / 'run'}"],
    ["show", f"{root / 'run'}@latest"],
    ["verify", f"{root / 'run'}"],
    ["diff", f"{root / 'one' / 'version_1'}", f"{root / 'one' / 'version_2'}"],
    ["copy", f"{root / 'run'}@latest", f"{root / 'copied' / 'version_9'}"],
    ["sweep", f"{root / 'run'}"],
    ["export", f"{root / 'run'}@latest", f"{root / 'x.safetensors'}", "--to", "safetensors"],
    ["export", f"{root / 'run'}@latest", f"{root / 'x.pt'}", "--to", "torch"],
    ["import", f"{root / 'x.safetensors'}", f"{root / 'imported_1'}", "--step", "9"],
    ["import", f"{root / 'x.pt'}", f"{root / 'imported_2'}", "--step", "9"],
):
    sys.argv = ["limpet", *command]
    code: object = None
    try:
        main()
    except SystemExit as e:
        code = e.code
    assert not code, (command, code)
for imported in ("imported_1", "imported_2"):
    assert "weight" in str(limpet.Run(root / imported).latest().keys())

limpet.save("memory://store/version_1", state, step=1)
assert limpet.load("memory://store/version_1")["large"].equal(large)
print("done")
