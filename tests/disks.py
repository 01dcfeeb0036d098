"""Real ext4 and xfs file systems on loop devices, whose power a test can cut."""

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

GOING_DOWN = 0x8004587D  # FS_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
WITHOUT_FLUSHING_THE_LOG = struct.pack("I", 2)
KINDS = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}  # with the Debian package of each


class Disk:
    """A file system in its own image, on a loop device."""

    def __init__(self, kind, folder):
        self.image, self.mount_point = folder / "image", folder / "mounted"
        self.mount_point.mkdir()
        with self.image.open("wb") as image:
            image.truncate(400 << 20)
        force = "-F" if kind == "ext4" else "-f"
        run(f"mkfs.{kind}", "-q", force, str(self.image))
        self.mount()

    def mount(self):
        run("mount", "-o", "loop", str(self.image), str(self.mount_point))

    def cut_power(self):
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, GOING_DOWN, WITHOUT_FLUSHING_THE_LOG)
        finally:
            os.close(fd)

    def unmount(self):
        run("umount", str(self.mount_point))


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def new_disk(kind):
    """Yield a new, mounted ``Disk``. Skips the test where that is impossible."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    if not shutil.which(f"mkfs.{kind}"):
        if not shutil.which("apt-get"):
            pytest.skip(f"mkfs.{kind} is not installed")
        install = ["apt-get", "install", "-y", "-q", KINDS[kind]]
        if subprocess.run(install, capture_output=True, check=False).returncode:
            pytest.skip(f"{KINDS[kind]} cannot be installed")
    folder = Path(tempfile.mkdtemp(prefix="limpet-disk-", dir="/var/tmp"))
    try:
        try:
            disk = Disk(kind, folder)
        except RuntimeError as error:
            pytest.skip(f"loop mounts are not permitted: {error}")
        try:
            yield disk
        finally:
            disk.unmount()
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=KINDS)
def disk(request):
    with new_disk(request.param) as disk:
        yield disk
