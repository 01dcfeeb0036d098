"""Builds the package, installs it where nothing else is, and uses it as a user does.

``make release-check`` calls it. ``TAG=v0.1.0``: also that a release of this tag may be made.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from itertools import pairwise
from pathlib import Path
from sysconfig import get_path

from limpet import __version__
from tests.docs.test_docs import blocks, sides_of_diff

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "release"
TOOLS = ROOT / ".venv-release" / "bin"
USER = WORK / "env" / "bin"
SCHEMAS = {  # of check-jsonschema, for the files that a code host reads
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "citation-file-format": "CITATION.cff",
}
USER_FILE = """import limpet
import numpy as np

state = {"w": np.zeros(3), "progress": limpet.Progress()}
with limpet.Checkpointer("runs/a", state, save=limpet.EverySteps(2)) as ckpt:
    for epoch in ckpt.epochs(3):
        ckpt.step({"loss": float(epoch)})
snapshot: limpet.Snapshot = limpet.open("runs/a@latest")
step: int | None = snapshot.step
limpet.Checkpointer("runs/a", state, keep=3)  # type: ignore[arg-type]
"""
"""In strict mode without the types of the package, the import and the last line are errors."""


def require(condition, message):
    if not condition:
        raise SystemExit(f"release check: {message}")


def call(*command, cwd=WORK):
    """Run a command that must succeed, and that sees no source tree. Return what it prints."""
    command, environment = [*map(str, command)], {**os.environ, "PYTHONPATH": ""}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=cwd, env=environment, check=False, **out)
    require(done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}")
    return done.stdout


def check_tag(tag, version, changelog, fragments):
    """Exit unless the tag is that of the version, whose changes are in the changelog."""
    require(tag == f"v{version}", f"{tag} is not the tag of version {version}")
    dated = re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE)
    require(dated, f"CHANGELOG.md has no section '## {version} (DATE)'")
    require(not fragments, f"not in CHANGELOG.md (make changelog): {', '.join(fragments)}")


def check_contents(sdist, wheel, tracked):
    """Exit if the sdist lacks a file of git, or if the wheel has what does not belong there."""
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(WORK, filter="data")
    require(not (missing := {*tracked} - packed), f"the sdist lacks {missing}")
    with zipfile.ZipFile(wheel) as archive:
        others = [n for n in archive.namelist() if not re.match(r"limpet(-[^/]+\.dist-info)?/", n)]
        readme = archive.read(f"limpet-{__version__}.dist-info/METADATA").decode()
    require(not others, f"the wheel has files outside limpet/: {others}")
    require(re.match(r"Metadata-Version: 2\.[1-4]\n", readme), f"a new format: {readme[:22]}")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    tag = f"https://github.com/limpet-checkpoints/limpet/blob/v{__version__}/"
    lost = [x for x in links if not (ROOT / x.removeprefix(tag).partition("#")[0]).exists()]
    require(len(links) > 20 and not lost, f"links without a target on an index: {lost}")
    for file, limit in ((wheel, 1_000_000), (sdist, 3_000_000)):
        print(f"{file.name}: {(size := file.stat().st_size):,} bytes of {limit:,}")
        require(size <= limit, f"{file.name} is too large")


def cpu_seconds(*command):
    """Return the CPU time of the shortest of five calls, which depends little on other work."""
    used = []
    for _ in range(6):
        used.append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))  # user and system
        call(*command)
    return min(after - before for before, after in pairwise(used))


def check_without_torch(tree):
    call(USER / "python", "-W", "error", "-m", "tests.without_torch", WORK, cwd=tree)
    require(" 3 versions" in call(USER / "limpet", "ls", WORK / "a"), "limpet ls finds no version")
    started, imported = (cpu_seconds(USER / "python", "-c", c) for c in ("", "import limpet"))
    helped = cpu_seconds(USER / "limpet", "--help")
    print(f"import limpet: {(imported - started) * 1e3:.0f} ms; limpet --help: {helped:.2f} s")
    require(imported - started <= 0.030 and helped <= 0.4, "the limits are 30 ms and 0.4 s")
    (WORK / "user.py").write_text(USER_FILE)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", USER / "python")
    call(*mypy, "user.py")


def check_with_torch():
    """Run the script of the README, kill it, and run it again, with the torch of this Python."""
    (pure,) = (WORK / "env").glob("lib/*/site-packages")
    (pure / "torch.pth").write_text(get_path("purelib"))
    (diff,) = (b.code for b in blocks(ROOT / "README.md") if b.language == "diff")
    (WORK / "train.py").write_text(sides_of_diff(diff)[1])
    command, quiet = [USER / "python", "train.py"], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=WORK, stdout=quiet, stderr=quiet) as training:
        end = time.monotonic() + 120
        while not [*WORK.glob("runs/a/version_*/manifest.json")] and time.monotonic() < end:
            time.sleep(0.01)
        training.send_signal(signal.SIGKILL)
    require(training.returncode == -signal.SIGKILL, f"train.py returned {training.returncode}")
    output = call(*command)
    require("resumed step" in output and "saved step 1000 to runs/a" in output, output)


def main(tag):
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    if tag:
        fragments = sorted(p.name for p in (ROOT / "changes").glob("*.*.md"))
        check_tag(tag, __version__, (ROOT / "CHANGELOG.md").read_text(), fragments)
    for schema, files in SCHEMAS.items():
        call(TOOLS / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *ROOT.glob(files))
    call(TOOLS / "python", "-m", "build", "--outdir", WORK / "dist", cwd=ROOT)  # from the sdist
    (sdist,), (wheel,) = (WORK / "dist").glob("*.gz"), (WORK / "dist").glob("*.whl")
    call(TOOLS / "twine", "check", "--strict", sdist, wheel)
    call(TOOLS / "check-wheel-contents", wheel)
    tracked = call("git", "ls-files", cwd=ROOT).splitlines() if (ROOT / ".git").exists() else []
    check_contents(sdist, wheel, tracked)
    call(sys.executable, "-m", "venv", "--without-pip", WORK / "env")
    pip = (TOOLS / "python", "-m", "pip", "--quiet", "--python", USER / "python", "install")
    call(*pip, "-c", ROOT / "constraints.txt", wheel)
    check_without_torch(WORK / f"limpet-{__version__}")
    check_with_torch()


if __name__ == "__main__":
    main(os.environ.get("TAG"))
    print("release check: passed")
