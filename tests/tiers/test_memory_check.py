"""The memory check against small trees of ``/proc`` and ``/sys``."""

import os
from types import SimpleNamespace

import pytest

from limpet.errors import LimpetError, NoSpace
from limpet.tiers import memory_check
from limpet.tiers.memory_check import TierCost, check_memory, find_limits

MIB, GIB = 1 << 20, 1 << 30
MOUNTS = """\
21 1 0:1 / / rw - ext4 /dev/vda rw
22 21 0:2 / /proc rw - proc proc rw
23 21 0:3 / /dev rw - tmpfs tmpfs rw
24 23 0:4 / /dev/shm rw - tmpfs tmpfs rw,size=65536k
25 21 0:5 / /mnt/my\\040disk rw - xfs /dev/vdb rw
"""
V2 = "30 21 0:9 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "31 21 0:9 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "32 21 0:9 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


class Host:
    """A fake host: files below ``root``, and the size of the file system."""

    def __init__(self, root, *, shm=64 * GIB, free=64 * GIB, mounts=V2, group="0::/pod/box\n"):
        self.root = root
        self.shm, self.shm_used = shm, 0
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {free // 1024} kB\n")
        self.write("proc/self/mountinfo", MOUNTS + mounts)
        self.write("proc/self/cgroup", group)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if not text.endswith("\n") else text)

    def set_group(self, path="", limit="max", used=0, high="max", cached=0):
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", str(limit))
        self.write(f"{folder}/memory.high", str(high))
        self.write(f"{folder}/memory.current", str(used))
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {cached}\nactive_file 7")

    def set_group_v1(self, path="", limit=0x7FFFFFFFFFFFF000, used=0, cached=0):
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", str(limit))
        self.write(f"{folder}/memory.usage_in_bytes", str(used))
        self.write(f"{folder}/memory.stat", f"cache 5\ntotal_inactive_file {cached}")

    def check(self, held, folder="/dev/shm/run", **cost):
        def statvfs(path):
            free = (self.shm - self.shm_used) // 4096
            return SimpleNamespace(f_frsize=4096, f_blocks=self.shm // 4096, f_bavail=free)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory_check, "_ROOT", self.root)
            patch.setattr(os, "statvfs", statvfs)
            return check_memory(folder, TierCost(held, **cost))


def test_the_default_size_of_a_container(tmp_path):
    with pytest.raises(NoSpace) as caught:
        Host(tmp_path, shm=64 * MIB).check(4 * GIB)
    message = str(caught.value)
    assert "12.0 GiB (2 snapshots of 4.00 GiB, and one more while it is staged)" in message
    assert "found 64.0 MiB in the file system at /dev/shm." in message
    assert "docker run --shm-size=12g" in message
    assert "emptyDir: {medium: Memory, sizeLimit: 12Gi} mounted at /dev/shm" in message
    assert "mount -o remount,size=12g /dev/shm" in message
    assert (caught.value.needed, caught.value.available) == (12 * GIB, 64 * MIB)


def test_what_others_use_is_added_to_what_to_set(tmp_path):
    host = Host(tmp_path, shm=4 * GIB)
    host.shm_used = 2 * GIB
    with pytest.raises(NoSpace, match=r"--shm-size=5g"):
        host.check(GIB)
    host.set_group("pod/box", limit=4 * GIB, used=3 * GIB)
    host.shm_used = 0
    with pytest.raises(NoSpace, match=r"found 1.00 GiB in the control group.* to 6Gi"):
        host.check(GIB)


def test_what_an_earlier_process_left_counts_as_available(tmp_path):
    host = Host(tmp_path, shm=3 * GIB, free=GIB)
    host.shm_used = 2 * GIB
    host.set_group("pod/box", limit=4 * GIB, used=3 * GIB)
    with pytest.raises(NoSpace):
        host.check(GIB)
    assert {limit.available for limit in host.check(GIB, present_bytes=2 * GIB)} == {3 * GIB}


def test_one_error_names_all_limits(tmp_path):
    host = Host(tmp_path, shm=64 * MIB, free=2 * GIB)
    host.set_group("pod/box", limit=GIB)
    with pytest.raises(NoSpace) as caught:
        host.check(GIB)
    message = str(caught.value)
    for part in (
        "64.0 MiB in the file",
        "1.00 GiB in the control",
        "2.00 GiB in the free memory",
        "--shm-size=3g",
        "resources.limits.memory",
        "--memory=3g",
        "3Gi of free",
    ):
        assert part in message


@pytest.mark.parametrize("level", ["", "pod", "pod/box"])
@pytest.mark.parametrize("name", ["limit", "high"])
def test_every_level_of_the_hierarchy_limits(tmp_path, level, name):
    host = Host(tmp_path)
    for group in ("", "pod", "pod/box"):
        host.set_group(group, **({name: 2 * GIB} if group == level else {}))
    with pytest.raises(NoSpace, match=rf"cgroup/{level + '/' if level else ''}memory"):
        host.check(GIB)
    host.set_group(level)
    assert len(host.check(GIB)) == 2


def test_the_cache_of_files_does_not_count_as_used(tmp_path):
    host = Host(tmp_path)
    host.set_group("pod/box", limit=4 * GIB, used=4 * GIB, cached=3 * GIB)
    assert host.check(GIB)[0].available == 3 * GIB


def test_version_1(tmp_path):
    group = "9:cpu,cpuacct:/other\n4:memory:/docker/box\n0::/elsewhere\n"
    host = Host(tmp_path, mounts=V1_CPU + V1, group=group)
    host.set_group_v1("docker", used=9 * GIB)
    host.set_group_v1("docker/box", limit=5 * GIB, used=3 * GIB, cached=GIB)
    host.set_group_v1("other", limit=1)
    assert host.check(GIB)[0].available == 3 * GIB
    host.set_group_v1("docker", limit=2 * GIB)
    with pytest.raises(NoSpace, match=r"docker/memory.limit_in_bytes"):
        host.check(GIB)


@pytest.mark.parametrize("root", ["/docker/box", "/another"])
def test_version_1_in_a_container_that_sees_the_path_of_the_host(tmp_path, root):
    mount = V1.replace(" / ", f" {root} ", 1)
    host = Host(tmp_path, mounts=mount, group="4:memory:/docker/box\n")
    host.set_group_v1("", limit=2 * GIB)
    with pytest.raises(NoSpace, match=r"cgroup/memory/memory.limit_in_bytes"):
        host.check(GIB)


def test_a_path_above_the_root_of_the_namespace(tmp_path):
    host = Host(tmp_path, group="0::/../../other\n")
    host.set_group("", limit=2 * GIB)
    with pytest.raises(NoSpace, match=r"cgroup/memory.max"):
        host.check(GIB)


def test_both_versions_at_once(tmp_path):
    host = Host(
        tmp_path,
        mounts=V1 + V2.replace("cgroup rw", "cgroup/unified rw"),
        group="4:memory:/box\n0::/box\n",
    )
    host.set_group_v1("box", limit=7 * GIB)
    assert host.check(GIB)[0].available == 7 * GIB


@pytest.mark.parametrize("kind", ["meminfo", "self/mountinfo", "self/cgroup"])
def test_a_missing_or_strange_file_is_no_limit(tmp_path, kind):
    host = Host(tmp_path)
    host.set_group("pod/box", limit="strange")
    for content in (b"", b"\xff\xfe", b"a\nb c d\n: - \n", None):
        file = host.root / "proc" / kind
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert host.check(GIB)


def test_a_file_system_without_a_size(tmp_path):
    host = Host(tmp_path, shm=0)
    assert [limit.name for limit in host.check(GIB)] == [
        "the free memory of the machine (MemAvailable)"
    ]


def test_the_last_mount_at_a_point_counts(tmp_path):
    host = Host(tmp_path, mounts="40 24 0:8 / /dev/shm rw - ext4 /dev/vdc rw\n")
    with pytest.raises(LimpetError, match=r"found ext4"):
        host.check(GIB)


def test_this_machine():
    limits = list(find_limits("/dev/shm"))
    assert limits
    assert all(limit.available > 0 for limit in limits)
    assert check_memory("/dev/shm", TierCost(1))
    with pytest.raises(NoSpace):
        check_memory("/dev/shm", TierCost(1 << 60))
