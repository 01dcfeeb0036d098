"""Forks during a save: the saved bytes are correct, and the child does not affect the save."""

import numpy as np
import pytest

import limpet
from limpet.run.run import Run
from tests.saving.child_scripts import SAVE, STEP, run_script

SAVE_VERSION_0 = """
import warnings
warnings.simplefilter("ignore")
limpet.save(f"{root}/version_0", {"x": np.arange(200_000), "y": np.ones(10)})
"""

LOAD_IN_FORKED_CHILD = """
pid = os.fork()
if pid == 0:
    state["x"][:] = -1
    other = limpet.load(f"{root}/version_0")
    other["x"].sum()
    sys.exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print("child", code)
"""


@pytest.mark.parametrize("start", [SAVE, STEP], ids=["save_async", "checkpointer"])
@pytest.mark.slow
def test_a_fork_during_a_save_does_not_affect_the_save(tmp_path, start):
    start = start.replace("ckpt.step()", "ckpt.resume(); ckpt.step()") if start is STEP else start
    save_0 = SAVE_VERSION_0.replace('{"x": np.arange(200_000), "y": np.ones(10)}', "state")
    done = run_script(tmp_path, save_0 + start + LOAD_IN_FORKED_CHILD)
    assert (done.returncode, done.stdout) == (0, "child 0\n")
    lines = ["resumed step 0 from"] if "resume()" in start else []
    assert [line for line in lines if line in done.stderr] == lines
    assert done.stderr.count("\n") == len(lines), "no line of the child"
    snapshot = limpet.open(tmp_path / "run" / "version_1")
    assert snapshot.verify().ok
    assert np.array_equal(snapshot["x"].read(), np.arange(500_000))


@pytest.mark.slow
def test_a_child_does_not_report_a_save_that_failed_in_its_parent(tmp_path):
    done = run_script(
        tmp_path,
        SAVE_VERSION_0 + f"break_writer()\n{SAVE}time.sleep(0.3)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    sys.exit(0)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n",
    )
    assert done.stdout == "child 0\n"
    assert done.returncode == 1
    assert done.stderr.count("limpet: the save to") == 1


@pytest.mark.slow
def test_a_checkpointer_refuses_to_work_in_a_forked_child(tmp_path):
    done = run_script(
        tmp_path,
        """
import warnings
warnings.simplefilter("ignore")
with limpet.Checkpointer(root, state, save=EverySteps(1)) as ckpt:
    ckpt.step()
    pid = os.fork()
    if pid == 0:
        for call in (ckpt.step, ckpt.save, ckpt.wait, ckpt.resume):
            try:
                call()
            except limpet.errors.LimpetError as e:
                assert "forked" in str(e), e
            else:
                sys.exit(5)
        sys.exit(0)  # leaves the block
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    ckpt.step()
""",
    )
    assert (done.returncode, done.stdout) == (0, "child 0\n")
    assert "finished: saved step 2 to" in done.stderr
    assert done.stderr.count("\n") == 1, "no line of the child"
    assert [s.step for s in Run(tmp_path / "run").snapshots()] == [1, 2]


def test_a_child_never_writes_into_the_buffers_of_its_parent(tmp_path):
    """Buffers are shared memory. A child that used the buffers of its parent would change the bytes
    of the parent's files after the digests were computed."""
    done = run_script(
        tmp_path,
        SAVE_VERSION_0
        + """
from limpet.buffers import shared_pool
held = shared_pool().acquire()
held.view[:5] = b"paren"
shared_pool().release(held)
pid = os.fork()
if pid == 0:
    mine = shared_pool().acquire()
    mine.view[:5] = b"child"
    os._exit(0)
os.waitpid(pid, 0)
print(bytes(held.view[:5]))
""",
    )
    assert (done.stdout, done.stderr) == ("b'paren'\n", "")


LOAD_IN_FORKED_POOL = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
def work(n):
    return int(limpet.load(f"{root}/version_0")["x"].sum()) * n
ckpt_state = {"x": np.arange(500_000)}
if __name__ == "__main__":
    limpet.save(f"{root}/version_0", ckpt_state)
    for step in range(1, 6):
        pending = limpet.save_async(f"{root}/version_{step}", ckpt_state)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(work, [1, 2]) == [sum(range(500_000)), 2 * sum(range(500_000))]
        limpet.save(f"{root}/version_{step + 10}", ckpt_state)
        pending.wait()
    print("done")
"""


@pytest.mark.slow
def test_forked_workers_can_load_while_their_parent_saves(tmp_path):
    done = run_script(tmp_path, LOAD_IN_FORKED_POOL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    for step in (1, 2, 3, 4, 5, 11, 12, 13, 14, 15):
        assert limpet.open(tmp_path / "run" / f"version_{step}").verify().ok
