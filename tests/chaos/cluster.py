"""The hosts of the training, their memory, disks, and metadata servers, and the disk of the run."""

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.chaos.clouds import Clouds

HOSTS = {4: "aabb", 3: "aab", 2: "ab"}
"""The host of each rank, by the number of ranks."""

DISK_BYTES = 64 << 20


class Cluster:
    """Two hosts with their memory, disks, and metadata servers, and the disk with the run."""

    def __init__(self, folder):
        self.folder = folder
        self.run = str(folder / "disk" / "run")
        self.closing = ExitStack()
        self.has_mounts = False
        self.memory: dict[str, str] = {}
        self.disks: dict[str, str] = {}
        self.clouds: dict[str, Clouds] = {}

    def __enter__(self):
        disk = self.folder / "disk"
        disk.mkdir(parents=True)
        folders = [disk]
        for host in "ab":
            memory = tempfile.mkdtemp(prefix=f"limpet-chaos-{host}-", dir="/dev/shm")
            self.closing.callback(shutil.rmtree, memory, ignore_errors=True)
            self.memory[host] = memory
            self.disks[host] = str(self.folder / f"nvme-{host}")
            os.makedirs(self.disks[host])
            folders.append(Path(memory))
            self.renew_clouds(host)
        if os.getuid() == 0:
            self.has_mounts = all(self._mount(folder) for folder in folders)
        return self

    def __exit__(self, *_):
        self.closing.close()

    def _mount(self, folder):
        """Mount a file system of its own, which can be filled. Return False if that is refused."""
        options = ["-o", f"size={DISK_BYTES}", "limpet-chaos", str(folder)]
        command = ["mount", "-t", "tmpfs", *options]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            self.closing.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
        return done.returncode == 0

    def renew_clouds(self, host):
        """A machine that was announced to be stopped is replaced by another one."""
        self.clouds[host] = self.closing.enter_context(Clouds())

    def lose(self, host):
        """Delete the memory and the disk of a host. Another host takes its place."""
        self.reboot(host)
        _empty(self.disks[host])

    def reboot(self, host):
        """Delete the memory of a host."""
        _empty(self.memory[host])

    @contextmanager
    def full(self, folder):
        """Fill the file system of a folder, for the time of a block."""
        path = folder / "ballast"
        try:
            with path.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            yield
        finally:
            path.unlink(missing_ok=True)

    def shards(self, folder):
        """The shards below a folder, those of the newest version first."""
        found = [
            p for p in Path(folder).rglob("shard-*.safetensors") if p.parent.name[:8] == "version_"
        ]
        return sorted(found, key=lambda p: (-_step_of(p.parent), p.name))


def _empty(folder):
    for path in Path(folder).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _step_of(version):
    return int(version.name.removeprefix("version_").partition(".")[0])


def flip_bit(path, rng):
    """Flip one bit of a file in place."""
    length = path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        offset = rng.randrange(length)
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 1 << rng.randrange(8)]))
