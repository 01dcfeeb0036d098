"""A training of NumPy arrays where torch cannot be imported: ``python -m tests.without_torch DIR``.

``tests/test_without_torch.py`` runs it, and ``make test-python`` where torch is not installed.
"""

import contextlib
import io
import json
import sys

import numpy as np

import limpet
from limpet.cli import cli

sys.modules["torch"] = None  # an import of it raises ImportError


def initial_state():
    return {
        "weights": {"w": np.zeros((64, 8), np.float32), "b": np.zeros(8)},
        "rng": limpet.RNG(),
        "progress": limpet.Progress(),
        "history": [],
    }


def train(state, ckpt, last_step):
    while state["progress"].step < last_step:
        noise = np.random.standard_normal((64, 8))
        state["weights"]["w"] += noise.astype(np.float32)
        state["weights"]["b"] += state["weights"]["w"].sum(0)
        loss = float(state["weights"]["b"][0])
        state["history"] = [*state["history"][-3:], loss]
        ckpt.step({"loss": loss})


def call(*arguments):
    """Return the JSON document that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main([*arguments, "--json"], standalone_mode=False) or 0
    if code != 0:
        raise SystemExit(f"limpet {' '.join(arguments)}: exit code {code}")
    return json.loads(out.getvalue())


def main(folder):
    np.random.seed(7)
    expected, run = initial_state(), f"{folder}/a"
    with limpet.Checkpointer(f"{folder}/whole", expected, save=limpet.AtEnd()) as ckpt:
        train(expected, ckpt, 8)

    np.random.seed(7)
    for last_step in (5, 8):  # 5 is not saved: the second training repeats it
        state, save = initial_state(), limpet.EverySteps(2)
        with (
            contextlib.suppress(ConnectionError),
            limpet.Checkpointer(run, state, save=save, incremental=True) as ckpt,
        ):
            resumed = ckpt.resume()
            assert (resumed and resumed.step) == (None if last_step == 5 else 4)
            train(state, ckpt, last_step)
            if last_step == 5:
                raise ConnectionError("the machine is lost")
    assert state["history"] == expected["history"]
    assert all(np.array_equal(expected["weights"][k], v) for k, v in state["weights"].items())

    assert [v["step"] for v in call("ls", run)["versions"]] == [2, 4, 6, 8]
    assert call("verify", run)["ok"]
    assert "weights/w" in [leaf["key"] for leaf in call("show", f"{run}@8")["leaves"]]
    assert call("pin", run, "2")["pinned"]
    assert len(call("copy", run, f"{folder}/b")["copied"]) == 4
    assert not call("diff", f"{run}@8", f"{folder}/b@8").get("changed")
    assert call("rm", run, "4")["deleted"] == ["version_4"]
    assert call("sweep", run, "--grace", "0")["removed"] == []
    assert call("export", f"{run}@latest", "--to", "safetensors", f"{folder}/w.safetensors")
    limpet.save(f"{folder}/one", {"w": np.arange(9.0), "note": "one"})
    loaded = limpet.load(f"{folder}/one")
    assert loaded["w"].tolist() == [*range(9)]
    assert loaded["note"] == "one"
    with limpet.Run(f"{folder}/c").writer(keep=limpet.KeepLast(1)) as writer:
        for step in (1, 2):
            version = writer.save({"w": np.full(9, step)}, step=step)
    assert limpet.load(version.url)["w"].sum() == 18
    assert [s.step for s in limpet.Run(f"{folder}/c").snapshots()] == [2]


if __name__ == "__main__":
    main(sys.argv[1])
    print("passed without torch")
