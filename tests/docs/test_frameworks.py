"""The scripts of the pages about frameworks resume exactly after a kill."""

import signal
from importlib.util import find_spec

import pytest

import limpet
from tests.docs.forked import run_forked
from tests.docs.test_docs import ROOT, blocks

PAGES = [ROOT / "docs" / "import-export.md", *(ROOT / "docs" / "frameworks").glob("*.md")]
SCRIPTS = {b.file: b.code for page in PAGES for b in blocks(page) if b.language == "python"}

KILLED = """
import os, runpy, sys, time
import limpet

count = limpet.Checkpointer.step

def step(ckpt, *args, **kwargs):
    if ckpt.current_step == int(sys.argv[2]):
        ckpt.wait()  # for the newest version that is due
        os.kill(os.getpid(), int(sys.argv[3]))
    if ckpt.current_step >= int(sys.argv[2]):
        time.sleep(0.05)  # so that a notice is seen before the last step
    return count(ckpt, *args, **kwargs)

limpet.Checkpointer.step = step
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs a script, which gets a signal in the step after a given one."""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["lightning", "accelerate", "fabric", "transformers"])
def test_a_training_that_is_killed_resumes_exactly(library, tmp_path):
    """In the middle of an epoch, at the end of one (step 32), and after SIGTERM."""
    module = {"fabric": "lightning", "transformers": "transformers.trainer"}.get(library, library)
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    script = f"train_{library}.py"
    (tmp_path / script).write_text(SCRIPTS[script])
    (tmp_path / "killed.py").write_text(KILLED)
    kills = [(20, signal.SIGKILL), (33, signal.SIGKILL), (50, signal.SIGTERM)]
    ended, errors = run_forked(
        [module, "limpet"],
        [
            (tmp_path, [script], {"RUN": "whole"}),
            *(
                (tmp_path, ["killed.py", script, step, int(number)], {"RUN": "parts"})
                for step, number in kills
            ),
            (tmp_path, [script], {"RUN": "parts"}),
        ],
    )
    assert [code for code, _ in ended] == [0, -9, -9, 75, 0], errors
    assert any(
        s.metadata["reason"] == "preemption" for s in limpet.Run(tmp_path / "parts").snapshots()
    )
    whole, parts = (limpet.open(tmp_path / run / "version_64") for run in ("whole", "parts"))
    keys = {*whole.keys()} - {"trainer/seconds"}  # of the trainer of Transformers
    assert len(keys) > 40
    assert {key: content(whole, key) for key in keys} == {key: content(parts, key) for key in keys}


def content(snapshot, key):
    """Return the numbers of a tensor or an array, or a value."""
    leaf = snapshot[key]
    return leaf[...].tolist() if isinstance(leaf, limpet.LeafView) else leaf
