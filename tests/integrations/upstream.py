"""Runs PyTorch's own tests of ``torch.distributed.checkpoint`` over our writer and reader.

    python tests/integrations/upstream.py PYTORCH_CHECKOUT [FILE ...]

The tests are in PyTorch's repository (``test/distributed/checkpoint``), not in its wheels. They are
copied to a temporary folder, with ``cuda`` written ``cpu`` and ``nccl`` written ``gloo``, and run
file by file, in processes in which ``FileSystemWriter`` and ``FileSystemReader`` are ours, as named
by the tests and as chosen by DCP for a ``checkpoint_id``. No test is left out: what is known to
fail is listed in ``KNOWN`` with its reason. Prints a table; exit code 1 if any other test failed,
or one of these passed.
Needs ``pip install expecttest``, as the tests do.

What the stand-ins add to our classes: they take the arguments of those that they stand for; where
a test saves to a folder a second time, the first snapshot is deleted, as DCP would overwrite it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 1800
"""Seconds for one file."""

TO_CPU = (
    (r"cpu:gloo,cuda:nccl", "gloo"),
    (r"f\"cuda:\{[^\"]*\}\"", '"cpu"'),
    (r"/cuda:(\{[^}]*\}|\d)", "/cpu"),
    (r"([\"'])cuda(:\d)?\1", r"\1cpu\1"),
    (r"([\"'])nccl\1", r"\1gloo\1"),
    (r"device=(dist\.get_rank\(\)|self\.rank)", 'device="cpu"'),
    (r"\.cuda\([^()]*(\(\))?\)", ".cpu()"),
    (r"torch\.cuda\.set_device\([^()]*(\([^()]*\))?[^()]*\)", "None"),
    (r"torch\.cuda\.device_count\(\)", "8"),
    (r"torch\.cuda\.current_device\(\)", "torch.device('cpu')"),
    (r"(assertTrue\([^()]*\.)is_cuda", r"\1is_cpu"),
    # CUDA draws the same numbers on all ranks, and a test counts on that
    (
        r"torch\.rand\(tensor_size, device=\"cpu\"\)",
        "torch.rand(tensor_size, generator=torch.Generator().manual_seed(0))",
    ),
)

KNOWN = {
    r"test_e2e_save_and_load\.py::TestNoCPU\.": "it wants a group without a backend for the CPU, to"
    " see DCP refuse it",
    r"test_fsdp_ep\.py::TestFSDPWithEP\.": "of torch 2.6: it calls a private method of meshes that"
    " later torch lacks",
    r"test_pipeline\.py::TestPipeline\.": "of torch 2.6: get_state_dict then dropped tensors on the"
    " meta device, later torch does not, and PyTorch has removed the test: nothing can save them",
    r"test_checkpoint\.py::TestDistributedFailure\.test_load_error_handling": "of torch 2.6, with"
    " readers of its own: it expects ValueError where later DCP raises AssertionError",
    r"test_fsdp_dsd\.py::.*test_save_with_fsdp1_and_load_with_fsdp2$": "the model comes back, and"
    " the optimizer; but to compare, FSDP1 gathers its state with cpu_offload, and gives, on the"
    " CPU, a buffer that it uses again",
    r"test_state_dict_utils\.py::.*create_cpu_state_dict": "it asks for pinned memory; it saves"
    " nothing",
    r"test_utils\.py::.*test_dcp_logger": "of torch 2.6: later torch configures loggers otherwise;"
    " it saves nothing",
}
"""Tests that fail, with DCP's own writer too, by file and name (a regular expression), and why."""


# -- in the processes of the tests ---------------------------------------------------------------


def install(theirs: bool = False) -> None:
    """Patch what the tests import, as soon as they do; ``theirs``: but for DCP's own classes."""
    if theirs:
        del _PATCHES["torch.distributed.checkpoint"]
    sys.meta_path.insert(0, _Hook())


class _Hook:
    """Lets a module be imported as usual, then patches it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        patch = _PATCHES.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_dcp(module: Any) -> None:
    writer, reader = _stand_ins(module)
    for name in ("", ".filesystem", "._storage_utils", ".format_utils"):
        place = importlib.import_module(module.__name__ + name)
        if hasattr(place, "FileSystemWriter"):
            place.FileSystemWriter = writer  # type: ignore[attr-defined]
        if hasattr(place, "FileSystemReader"):
            place.FileSystemReader = reader  # type: ignore[attr-defined]


def _stand_ins(module: Any) -> tuple[type, type]:
    from holdfast.errors import StoreError
    from holdfast.integrations.dcp.reading import StorageReader
    from holdfast.integrations.dcp.writing import StorageWriter

    def place(cls: Any, checkpoint_id: Any) -> bool:
        # as FileSystemWriter: a path, not what names another scheme
        return "://" not in str(checkpoint_id) and StorageWriter.validate_checkpoint_id(
            checkpoint_id
        )

    class FileSystemWriter(StorageWriter):
        validate_checkpoint_id = classmethod(place)  # type: ignore[assignment]

        def __init__(self, path: Any, *args: Any, overwrite: bool = True, **kwargs: Any) -> None:
            super().__init__(path)
            self.overwrite = overwrite

        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            if is_coordinator and self.overwrite and Path(self.url, "manifest.json").exists():
                shutil.rmtree(self.url)
            try:
                super().set_up_storage_writer(is_coordinator, *args, **kwargs)
            except StoreError as e:
                raise RuntimeError(f"Checkpoint already exists: {e}") from e

    class FileSystemReader(StorageReader):
        validate_checkpoint_id = classmethod(place)  # type: ignore[assignment]

        def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(path)

    for made in (FileSystemWriter, FileSystemReader):
        # so that pickle, for a process that saves in the background, finds them
        made.__module__, made.__qualname__ = "torch.distributed.checkpoint", made.__name__
    return FileSystemWriter, FileSystemReader


def _patch_distributed(module: Any) -> None:
    def unneeded(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    module.torch.accelerator.current_device_index = lambda: "cpu"  # asked to compare shards
    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        if hasattr(module, name):
            setattr(module, name, unneeded)


def _patch_sharded(module: Any) -> None:
    module.with_comms.__defaults__ = (None, False, "gloo")


def _patch_fsdp(module: Any) -> None:
    """FSDP1 asks for an accelerator unless it is told where to compute."""
    handle = module._init_device_handle

    def on_cpu(state: Any, inner: Any, ignored: Any, device_id: Any) -> Any:
        import torch

        return handle(state, inner, ignored, torch.device("cpu"))

    module._init_device_handle = on_cpu


def _patch_flat_param(module: Any) -> None:
    """FSDP1 moves what it gathered to the CPU and frees it where it was: here that is one place,
    and it would read what it has freed."""
    module.FlatParamHandle.to_cpu = lambda self: contextlib.nullcontext()


def _patch_fsdp_tests(module: Any) -> None:
    """``FSDPTest`` counts devices before each test."""
    module.torch.accelerator.device_count = lambda: 8


_PATCHES = {
    "torch.testing._internal.common_fsdp": _patch_fsdp_tests,
    "torch.distributed.fsdp._init_utils": _patch_fsdp,
    "torch.distributed.fsdp._flat_param": _patch_flat_param,
    "torch.distributed.checkpoint": _patch_dcp,
    "torch.testing._internal.common_distributed": _patch_distributed,
    "torch.testing._internal.distributed._shard.sharded_tensor": _patch_sharded,
}


# -- in the process that runs them ---------------------------------------------------------------


def copy_tests(checkout: Path, folder: Path, theirs: bool) -> Path:
    """The tests as they are to be run here."""
    source = checkout / "test" / "distributed" / "checkpoint"
    if not source.is_dir():
        sys.exit(f"{checkout} is no checkout of PyTorch: there is no {source}")
    target = folder / "checkpoint"
    shutil.copytree(source, target)
    for file in target.rglob("*.py"):
        text = file.read_text()
        for pattern, replacement in TO_CPU:
            text = re.sub(pattern, replacement, text)
        file.write_text(text)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(HERE)!r})\nimport upstream\nupstream.install({theirs})\n"
    )
    return target


def run_file(file: Path, folder: Path) -> list[tuple[str, str, str]]:
    """Name, outcome and reason of each test of a file."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-W", "ignore", "--rootdir", str(folder), f"--junitxml={report}", str(file)]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / f"{file.stem}.log").open("w") as log:
        try:
            subprocess.run(
                command, env=env, cwd=folder, stdout=log, stderr=log, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return [("(all)", "failed", f"not done in {LIMIT} s")]
    if not report.exists():
        return [("(all)", "failed", "no report: see its log")]
    found = []
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = (child.get("message") or "").strip().splitlines()[:1] or [""]
                reason = reason[0][:200]
        found.append((name, outcome, reason))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", help="such as test_planner.py; all if none is given")
    parser.add_argument("--theirs", action="store_true", help="over DCP's own classes, to compare")
    parser.add_argument("--keep", type=Path, help="a folder for the copies and the logs")
    asked = parser.parse_intermixed_args()
    if importlib.util.find_spec("expecttest") is None:
        sys.exit("The tests need expecttest: pip install expecttest")
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="upstream-"))
    folder.mkdir(parents=True, exist_ok=True)
    tests = copy_tests(asked.checkout, folder, asked.theirs)
    total: Counter[str] = Counter()
    for file in sorted(tests.rglob("test_*.py")):
        name = str(file.relative_to(tests))
        if asked.files and name not in asked.files:
            continue
        count: Counter[str] = Counter()
        told = []
        for test, outcome, reason in run_file(file, folder):
            known = next((KNOWN[k] for k in KNOWN if re.search(k, f"{name}::{test}")), None)
            if outcome == "failed" and known is not None:
                outcome, reason = "known", known
            elif outcome == "passed" and known is not None:
                outcome, reason = "failed", f"it passes, and KNOWN says that it does not: {known}"
            count[outcome] += 1
            if outcome != "passed":
                told.append(f"    {outcome:8}{test}: {reason}")
        total += count
        print(f"{name:50}", ", ".join(f"{n} {k}" for k, n in sorted(count.items())), flush=True)
        print(*told, sep="\n", end="\n" if told else "", flush=True)
    print("in all:", ", ".join(f"{n} {k}" for k, n in sorted(total.items())))
    print(f"logs: {folder}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
