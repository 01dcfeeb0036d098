"""Install storage servers for the tests: ``python -m tests.stores.install [NAME ...]``.

Debian packages are installed if this runs as root. The rest goes to ``.servers`` in the checkout,
which git ignores, and is kept for the next time. A server that cannot be installed is one line of
output: its tests are skipped. This needs nothing but Python.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parents[2] / ".servers"


class Missing(Exception):
    """A program of a server is not installed, or cannot be."""


@dataclass(frozen=True)
class Recipe:
    """What a server needs.

    ``programs``: of the Debian ``packages``. ``fill``: puts the rest into the folder of the server.
    ``version`` names the contents of the folder; another one is installed again.
    """

    programs: tuple[str, ...]
    packages: tuple[str, ...]
    version: str = ""
    fill: Callable[[Path], None] | None = None


def run(*command, seconds=900, **env):
    """Run a command. Raises ``Missing`` with the end of its output if it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Missing(str(e)) from e
    if done.returncode:
        lines = done.stdout.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        raise Missing(f"`{Path(command[0]).name}` failed: {last.strip()[:200]}")


_PYSPARK = "pyspark==2.4.8"
"""The last release whose jars have the server classes of HDFS (Hadoop 2.7.3), not only a client."""

_JARS = (
    *("hadoop-common", "hadoop-auth", "hadoop-annotations", "hadoop-hdfs", "commons-", "guava"),
    *("htrace-core-3", "jackson-core-asl", "jackson-mapper-asl", "jetty-6", "jetty-util-6"),
    *("jsp-api", "leveldbjni-all", "log4j-1", "slf4j-api", "slf4j-log4j12", "netty-3", "netty-all"),
    *("protobuf-java", "xercesImpl", "xmlenc", "javax.servlet-api", "javax.ws.rs-api"),
)


def _fill_hdfs(folder):
    with TemporaryDirectory(dir=FOLDER, prefix="download-") as name:
        download = Path(name)
        run(sys.executable, "-m", "venv", download / "venv")
        pip = download / "venv" / "bin" / "pip"
        run(pip, "install", "--quiet", "setuptools<70", "wheel")
        # pip compares the archive with the hash of the package index
        run(
            *(pip, "download", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--no-binary", ":all:", "--dest", download, _PYSPARK),
        )
        (archive,) = download.glob("pyspark-*.tar.gz")
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                jar = Path(member.name)
                if jar.parent.name == "jars" and jar.name.startswith(_JARS):
                    source = members.extractfile(member)
                    assert source is not None
                    with (folder / jar.name).open("wb") as out:
                        shutil.copyfileobj(source, out)


_AZURITE = "azurite@3.35.0"
"""The last release that runs on the Node.js 18 of Debian 12."""

_LOCALSTACK = (
    "localstack-core[runtime]==4.7.0",
    *("cbor2<5.8", "pyopenssl<25", "cryptography<45", "service_identity<25", "joserfc<1.7"),
)
"""An emulator that needs no account, and its dependencies where newer ones break it."""


def _fill_azurite(folder):
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    run("npm", "install", *quiet, "--prefix", folder, _AZURITE)


def _fill_localstack(folder):
    run(sys.executable, "-m", "venv", folder / "venv")
    run(folder / "venv" / "bin" / "pip", "install", "--quiet", *_LOCALSTACK)


RECIPES = {
    "ceph": Recipe(
        ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph"),
        ("radosgw", "ceph-mon", "ceph-osd", "ceph-common"),
    ),
    "hdfs": Recipe(
        ("java",), ("openjdk-17-jre-headless",), f"{_PYSPARK}: {' '.join(_JARS)}", _fill_hdfs
    ),
    "azurite": Recipe(("node", "npm"), ("nodejs", "npm"), _AZURITE, _fill_azurite),
    "localstack": Recipe((), (), " ".join(_LOCALSTACK), _fill_localstack),
    "sftp": Recipe(("sshd", "ssh-keygen"), ("openssh-server",)),
}


def find_program(name):
    """Return the path of a program. Only root has the folders of servers in its PATH."""
    return shutil.which(
        name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    )


def missing_programs(name):
    return [p for p in RECIPES[name].programs if find_program(p) is None]


def is_filled(name):
    recipe, mark = RECIPES[name], FOLDER / name / ".complete"
    return recipe.fill is None or (mark.exists() and mark.read_text() == recipe.version)


def require(name):
    """Return the folder of an installed server. Raises ``Missing``."""
    if programs := missing_programs(name):
        packages = " ".join(RECIPES[name].packages)
        raise Missing(f"{', '.join(programs)} is not installed (Debian: {packages})")
    if not is_filled(name):
        raise Missing(f"{name} is not installed: run `make servers`")
    return FOLDER / name


def _install_packages(names):
    """Install the Debian packages of servers whose programs are missing."""
    if not names or os.geteuid() or shutil.which("apt-get") is None:
        return
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run("apt-get", "update", "-qq", **quiet)
        with _services_refused():
            for name in names:
                packages = ("--no-install-recommends", *RECIPES[name].packages)
                run("apt-get", "install", "-y", "-qq", *packages, **quiet)
    except Missing as e:
        print(e)


_POLICY = Path("/usr/sbin/policy-rc.d")


@contextmanager
def _services_refused():
    """Let no package start a service of the system, such as sshd on port 22.

    Debian's scripts ask this program whether they may. A container usually has one that refuses.
    """
    try:
        with _POLICY.open("x") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        _POLICY.chmod(0o755)
        yield
    finally:
        with suppress(FileNotFoundError):
            _POLICY.unlink()


def install(name):
    """Complete the folder of a server. Raises ``Missing``."""
    recipe, folder = RECIPES[name], FOLDER / name
    if recipe.fill is not None and not missing_programs(name) and not is_filled(name):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        recipe.fill(folder)
        (folder / ".complete").write_text(recipe.version)  # last: an interrupted one is repeated
    require(name)


def main(names):
    names = names or [*RECIPES]
    _install_packages([name for name in names if missing_programs(name)])
    for name in names:
        try:
            install(name)
        except Missing as e:
            print(f"Without {name}, whose tests are skipped: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])
