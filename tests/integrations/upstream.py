"""Run PyTorch's own tests of ``torch.distributed.checkpoint`` with Limpet's writer and reader.

    python tests/integrations/upstream.py PYTORCH_CHECKOUT [FILE ...]

The tests are in PyTorch's repository (``test/distributed/checkpoint``), not in its wheels. This
script copies them to a temporary folder, replaces ``cuda`` with ``cpu`` and ``nccl`` with ``gloo``,
and runs them file by file. In the test processes, stand-ins replace ``FileSystemWriter`` and
``FileSystemReader``, both where the tests name them and where DCP chooses them for a
``checkpoint_id``. No test is skipped. ``KNOWN`` lists the tests that are known to fail, with the
reasons. The script prints a table. A test passed if it reported so and its teardown ended: one that
was interrupted, or took its process along, failed. The exit code is 1 if any other test failed, or
if a test of ``KNOWN`` passed. The tests need ``pip install expecttest``.

The stand-ins add two things to Limpet's classes. They accept the arguments of the classes that
they replace. If a test saves to the same folder again, they delete the first snapshot, because DCP
would overwrite it.
"""

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
FILE_TIMEOUT = 1800
"""Time limit for one test file, in seconds."""

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
    # CUDA generates the same random numbers on all ranks, and a test depends on this
    (
        r"torch\.rand\(tensor_size, device=\"cpu\"\)",
        "torch.rand(tensor_size, generator=torch.Generator().manual_seed(0))",
    ),
)

KNOWN = {
    r"test_e2e_save_and_load\.py::TestNoCPU\.": "it expects DCP to refuse a group without"
    " a CPU backend",
    r"test_fsdp_ep\.py::TestFSDPWithEP\.": "from torch 2.6: it calls a private method of meshes"
    " that later versions of torch lack",
    r"test_pipeline\.py::TestPipeline\.": "from torch 2.6, where get_state_dict dropped tensors on"
    " the meta device. Later versions do not drop them, they cannot be saved, and PyTorch has"
    " removed the test",
    r"test_checkpoint\.py::TestDistributedFailure\.test_load_error_handling": "from torch 2.6,"
    " with its own readers: it expects ValueError, but later versions of DCP raise AssertionError",
    r"test_fsdp_dsd\.py::.*test_save_with_fsdp1_and_load_with_fsdp2$": "the model and the"
    " optimizer are loaded correctly, but for the comparison FSDP1 gathers its state with"
    " cpu_offload, and on the CPU it returns a buffer that it reuses",
    r"test_state_dict_utils\.py::.*create_cpu_state_dict": "it needs pinned memory; it saves"
    " nothing",
    r"test_utils\.py::.*test_dcp_logger": "from torch 2.6: later versions configure loggers"
    " differently; it saves nothing",
}
"""Tests that also fail with DCP's own writer: a regular expression of file and name, and why."""

REFUSED = {
    r"test_file_system_checkpoint_cpu\.py::.*(Rot13|ZStandard)\.": "Limpet refuses _extensions"
}
"""Tests of what Limpet refuses by name, in the same form."""

REPORTER = """
import json, os

def _write(*fields):
    with open(os.environ["UPSTREAM_REPORT"], "a") as file:
        file.write(json.dumps(fields) + "\\n")

def pytest_runtest_logstart(nodeid, location):
    _write(nodeid, "start", "", "")

def pytest_runtest_logreport(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = crash.message if crash else str(report.longrepr or "")
    _write(report.nodeid, report.when, report.outcome, reason)

def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, "collect", "failed", str(report.longrepr))
"""
"""The ``conftest.py`` of the tests: one line for every phase of a test, written as it ends."""


def install(use_dcp_classes=False):
    """Patch modules when the tests import them.

    With ``use_dcp_classes``, keep DCP's own writer and reader.
    """
    if use_dcp_classes:
        del _PATCHES["torch.distributed.checkpoint"]
    sys.meta_path.insert(0, _Hook())


class _Hook:
    """Import hook that patches a module after its normal import."""

    def find_spec(self, name, path, target=None):
        patch = _PATCHES.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def _patch_dcp(module):
    writer, reader = _stand_ins(module)
    for name in ("", ".filesystem", "._storage_utils", ".format_utils"):
        submodule = importlib.import_module(module.__name__ + name)
        if hasattr(submodule, "FileSystemWriter"):
            submodule.FileSystemWriter = writer
        if hasattr(submodule, "FileSystemReader"):
            submodule.FileSystemReader = reader


def _stand_ins(module):
    from limpet.errors import StoreError
    from limpet.integrations.dcp import StorageReader, StorageWriter

    def accepts_path(cls, checkpoint_id):
        # like FileSystemWriter, accept only paths, not URLs with a scheme
        return "://" not in str(checkpoint_id) and StorageWriter.validate_checkpoint_id(
            checkpoint_id
        )

    class FileSystemWriter(StorageWriter):
        validate_checkpoint_id = classmethod(accepts_path)

        def __init__(self, path, *args, overwrite=True, _extensions=None, **kwargs):
            super().__init__(path, _extensions=_extensions)
            self.overwrite = overwrite

        def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
            if is_coordinator and self.overwrite and Path(self.url, "manifest.json").exists():
                shutil.rmtree(self.url)
            try:
                super().set_up_storage_writer(is_coordinator, *args, **kwargs)
            except StoreError as e:
                raise RuntimeError(f"Checkpoint already exists: {e}") from e

    class FileSystemReader(StorageReader):
        validate_checkpoint_id = classmethod(accepts_path)

        def __init__(self, path, *args, **kwargs):
            super().__init__(path)

    for stand_in in (FileSystemWriter, FileSystemReader):
        # pickle must find the classes for the process that saves in the background
        stand_in.__module__, stand_in.__qualname__ = (
            "torch.distributed.checkpoint",
            stand_in.__name__,
        )
    return FileSystemWriter, FileSystemReader


def _patch_distributed(module):
    def skip_nothing(*args, **kwargs):
        return lambda function: function

    module.torch.accelerator.current_device_index = lambda: "cpu"  # used to compare shards
    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        if hasattr(module, name):
            setattr(module, name, skip_nothing)


def _patch_sharded(module):
    module.with_comms.__defaults__ = (None, False, "gloo")


def _patch_fsdp(module):
    """Pass the CPU to FSDP1, which otherwise requires an accelerator."""
    handle = module._init_device_handle

    def on_cpu(state, inner, ignored, device_id):
        import torch

        return handle(state, inner, ignored, torch.device("cpu"))

    module._init_device_handle = on_cpu


def _patch_flat_param(module):
    """Disable the move of gathered parameters to the CPU.

    FSDP1 frees the source after the move. Here the source and the target are the same memory, so
    FSDP1 would read freed memory.
    """
    module.FlatParamHandle.to_cpu = lambda self: contextlib.nullcontext()


def _patch_fsdp_tests(module):
    """Report eight devices to ``FSDPTest``, which checks the count before each test."""
    module.torch.accelerator.device_count = lambda: 8


_PATCHES = {
    "torch.testing._internal.common_fsdp": _patch_fsdp_tests,
    "torch.distributed.fsdp._init_utils": _patch_fsdp,
    "torch.distributed.fsdp._flat_param": _patch_flat_param,
    "torch.distributed.checkpoint": _patch_dcp,
    "torch.testing._internal.common_distributed": _patch_distributed,
    "torch.testing._internal.distributed._shard.sharded_tensor": _patch_sharded,
}


def copy_tests(checkout, folder, use_dcp_classes):
    """Copy the tests to ``folder``, adapted to the CPU, and return the folder of the copies."""
    source = checkout / "test" / "distributed" / "checkpoint"
    if not source.is_dir():
        sys.exit(f"{checkout} is not a PyTorch checkout: {source} does not exist")
    target = folder / "checkpoint"
    shutil.copytree(source, target)
    for file in target.rglob("*.py"):
        text = file.read_text()
        for pattern, replacement in TO_CPU:
            text = re.sub(pattern, replacement, text)
        file.write_text(text)
    (folder / "conftest.py").write_text(REPORTER)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(HERE)!r})\n"
        f"import upstream\nupstream.install({use_dcp_classes})\n"
    )
    return target


def run_file(file, folder):
    """Run a test file, and return the name, outcome, and reason of each of its tests."""
    report = folder / "report.jsonl"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-W", "ignore", "--rootdir", str(folder), str(file)]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "UPSTREAM_REPORT": str(report)}
    end = ""
    with (folder / f"{file.stem}.log").open("w") as log:
        try:
            done = subprocess.run(
                command,
                env=env,
                cwd=folder,
                stdout=log,
                stderr=log,
                timeout=FILE_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            end = f"not finished within {FILE_TIMEOUT} s"
        else:
            if done.returncode not in (0, 1, 5):  # all passed, some failed, there are none
                end = f"pytest ended with exit code {done.returncode}; see the log"
    found = read_report(report)
    if end:
        found.append(("(all)", "failed", end))
    return found


def read_report(report):
    """Return the name, outcome, and reason of each test of a report of ``REPORTER``.

    A test whose teardown has not ended was interrupted, and failed.
    """
    phases: dict[str, dict[str, tuple[str, str]]] = {}
    for line in report.read_text().splitlines() if report.exists() else ():
        test, phase, outcome, reason = json.loads(line)
        name = ".".join(test.split("::")[1:]) or "(collection)"
        phases.setdefault(name, {})[phase] = outcome, (reason.strip().splitlines() or [""])[0][:200]
    found = []
    for name, by_phase in phases.items():
        outcomes = [by_phase[p] for p in ("collect", "setup", "call", "teardown") if p in by_phase]
        failed = [reason for outcome, reason in outcomes if outcome == "failed"]
        skipped = [reason for outcome, reason in outcomes if outcome == "skipped"]
        if failed:
            found.append((name, "failed", failed[0]))
        elif "teardown" not in by_phase:
            found.append((name, "failed", "interrupted"))
        elif skipped:
            found.append((name, "skipped", skipped[0]))
        else:
            found.append((name, "passed", ""))
    return found


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "files", nargs="*", help="test files, such as test_planner.py (default: all)"
    )
    parser.add_argument(
        "--theirs", action="store_true", help="use DCP's own classes, for comparison"
    )
    parser.add_argument("--keep", type=Path, help="folder for the copies and the logs")
    options = parser.parse_intermixed_args()
    if importlib.util.find_spec("expecttest") is None:
        sys.exit("The tests need expecttest. Install it: pip install expecttest")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="upstream-"))
    folder.mkdir(parents=True, exist_ok=True)
    tests = copy_tests(options.checkout, folder, options.theirs)
    total: Counter[str] = Counter()
    for file in sorted(tests.rglob("test_*.py")):
        name = str(file.relative_to(tests))
        if options.files and name not in options.files:
            continue
        count: Counter[str] = Counter()
        reports = []
        for test, outcome, reason in run_file(file, folder):
            reasons = KNOWN if options.theirs else {**KNOWN, **REFUSED}
            known = next((reasons[k] for k in reasons if re.search(k, f"{name}::{test}")), None)
            if outcome == "failed" and known is not None:
                outcome, reason = "known", known
            elif outcome == "passed" and known is not None:
                outcome, reason = "failed", f"it passes, but KNOWN lists it as failing: {known}"
            count[outcome] += 1
            if outcome != "passed":
                reports.append(f"    {outcome:8}{test}: {reason}")
        total += count
        print(f"{name:50}", ", ".join(f"{n} {k}" for k, n in sorted(count.items())), flush=True)
        print(*reports, sep="\n", end="\n" if reports else "", flush=True)
    print("total:", ", ".join(f"{n} {k}" for k, n in sorted(total.items())))
    print(f"logs: {folder}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
