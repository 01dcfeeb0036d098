"""Limpet without what only Linux has: see ``tests/other_systems/removed.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEMS = ("darwin", "win32")
pytestmark = pytest.mark.slow

EVERY_MODULE = """
import importlib, pkgutil
import limpet
for name in limpet.__all__:
    getattr(limpet, name)
others = "accelerate lightning ray_train torchtitan transformers".split()  # they import these
for module in pkgutil.walk_packages(limpet.__path__, "limpet."):
    package, _, name = module.name.rpartition(".")
    if name != "__main__" and (package, name in others) != ("limpet.integrations", True):
        importlib.import_module(module.name)
print("done")
"""

CRASH = """
import os, sys, numpy, limpet
state = {"x": numpy.zeros(3), "progress": limpet.Progress()}
root = os.environ["TEST_FOLDER"] + "/run"
ckpt = limpet.Checkpointer(root, state, save=limpet.EverySteps(1) | limpet.AtEnd())
ckpt.__enter__()
ckpt.resume()
ckpt.step()
ckpt.wait()
print("step", state["progress"].step, flush=True)
if os.environ["TEST_END"] == "crash":
    os._exit(0)
if os.environ["TEST_END"] == "wait":
    sys.stdin.read()
ckpt.__exit__(None, None, None)
"""

REFUSED = """
import os, sys, limpet
from limpet.cli import main
for name in ("MemoryTier", "LocalTier"):
    try:
        if name == "MemoryTier":
            limpet.MemoryTier(every=limpet.EverySteps(1))
        else:
            limpet.LocalTier(os.environ["TEST_FOLDER"])
    except limpet.errors.LimpetError as e:
        print(e)
sys.argv = ["limpet", "run", "true"]
try:
    main()
except SystemExit as e:
    print("exit code", e.code)
"""

LOCAL_TIER = """
import os, numpy, limpet
folder = os.environ["TEST_FOLDER"]
for expected in (0, 3):
    state = {"x": numpy.zeros(3), "progress": limpet.Progress()}
    tiers = [limpet.LocalTier(folder + "/disk")]
    save = limpet.EverySteps(1) | limpet.AtEnd()
    with limpet.Checkpointer(folder + "/run", state, save=save, tiers=tiers) as ckpt:
        ckpt.resume()
        assert state["progress"].step == expected
        for _ in range(3):
            ckpt.step()
assert limpet.Run(folder + "/run").latest().step == 6
print("done")
"""

NO_LINKS = """
import errno, os, limpet, numpy
def link(*args, **kwargs):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")
os.link = link
limpet.save(os.environ["TEST_FOLDER"] + "/version_1", {"x": numpy.zeros(3)})
"""


def start(system, script, folder, end=""):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.other_systems.removed", system, script],
        cwd=ROOT,
        env={**os.environ, "TEST_FOLDER": str(folder), "TEST_END": end},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(system, script, folder, end=""):
    """Return what a script prints to stdout and to stderr, without what the removed calls need."""
    process = start(system, script, folder, end)
    out, err = process.communicate(timeout=120)
    return out, err


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_is_imported(system, tmp_path):
    out, err = run(system, EVERY_MODULE, tmp_path)
    assert out.endswith("done\n"), err


@pytest.mark.parametrize("system", SYSTEMS)
def test_save_load_resume_and_the_commands(system, tmp_path):
    script = Path(__file__).with_name("training_script.py").read_text()
    out, err = run(system, script, tmp_path)
    assert out.endswith("done\n"), err


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_training_resumes_after_a_crash_and_linux_reads_what_it_wrote(system, tmp_path):
    import limpet

    for step, end in ((1, "crash"), (2, "end")):
        assert run(system, CRASH, tmp_path, end)[0] == f"step {step}\n"
    newest = limpet.Run(tmp_path / "run").latest()
    assert newest.step == 2
    assert newest.verify().ok


def test_macos_refuses_a_second_training(tmp_path):
    with start("darwin", CRASH, tmp_path, "wait") as first:
        try:
            line = first.stdout.readline()
            _, err = run("darwin", CRASH, tmp_path, "end")
        finally:
            first.communicate("", timeout=60)
    assert line == "step 1\n"
    assert f"process {first.pid}" in err
    assert run("darwin", CRASH, tmp_path, "end")[0] == "step 2\n"


def test_what_cannot_work_on_macos_says_what_is_missing(tmp_path):
    out, err = run("darwin", REFUSED, tmp_path)
    tier, code = out.splitlines()
    assert tier.startswith("A MemoryTier needs Linux: darwin lacks a file system in memory")
    assert "`limpet run` needs Linux: darwin lacks /proc" in err
    assert code == "exit code 1"


def test_what_cannot_work_on_windows_says_what_is_missing(tmp_path):
    out, err = run("win32", REFUSED, tmp_path)
    memory, local, _ = out.splitlines()
    assert memory.startswith("A MemoryTier needs Linux: win32 lacks a file system in memory")
    assert local.startswith("A LocalTier needs Linux or macOS: win32 lacks file locks by flock")
    assert "`limpet run` needs Linux: win32 lacks /proc" in err


def test_a_local_tier_works_on_macos(tmp_path):
    out, err = run("darwin", LOCAL_TIER, tmp_path)
    assert out.endswith("done\n"), err


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_system_without_links_is_refused(system, tmp_path):
    _, err = run(system, NO_LINKS, tmp_path)
    assert "a file system with hard links or renameat2(RENAME_NOREPLACE)" in err
    assert not [*tmp_path.rglob("manifest.json")]
