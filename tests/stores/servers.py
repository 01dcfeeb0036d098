"""Start, kill, and stop real storage servers on loopback, each with a folder of its own."""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

from tests.stores.install import require


def free_port():
    """Return a port below those that Linux gives to connections, which could take it before the
    server starts, or while it is down."""
    while True:
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", random.randrange(10_000, 32_768)))
            return int(s.getsockname()[1])


def answers_http(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
    except urllib.error.HTTPError:
        return True  # any answer
    except OSError:
        return False
    return True


def is_stopped(pid):
    """Return True if a signal has stopped every thread of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(") ")[2].startswith("T") for task in tasks)


@contextmanager
def server_folder(name):
    folder = Path(mkdtemp(prefix=f"limpet-{name}-", dir="/var/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Daemons:
    """The processes of one server, by name. Each is stopped by its process id.

    The constructor raises ``Missing`` if a program is not installed. ``start`` may fail halfway, so
    ``stop`` follows it in any case: see ``running``.
    """

    def __init__(self, folder):
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self):
        raise NotImplementedError

    def spawn(self, name, *command, **env):
        with (self.folder / f"{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def pids(self, *names):
        """Return the processes to which ``send`` sends a signal: of these names, or all."""
        found = (self.processes[name] for name in names or self.processes)
        return [process.pid for process in found if process.poll() is None]

    def send(self, number, *names):
        for pid in self.pids(*names):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def pause(self, *names):
        """Stop processes with SIGSTOP, and return when none of their threads runs any more.

        The signal alone returns earlier: on a busy machine, a server may still answer after it.
        """
        self.send(signal.SIGSTOP, *names)
        pids = self.pids(*names)
        self.wait_until(lambda: all(map(is_stopped, pids)))

    def kill(self, *names):
        self.send(signal.SIGKILL, *names)
        for name in names or [*self.processes]:
            self.processes.pop(name).wait(30)

    def stop(self):
        self.send(signal.SIGCONT)
        self.kill()

    def wait_until(self, is_up, seconds=90):
        end = time.monotonic() + seconds
        while not is_up():
            dead = [n for n, p in self.processes.items() if p.poll() is not None]
            if dead or time.monotonic() > end:
                text = "".join(f.read_text()[-2000:] for f in sorted(self.folder.glob("*.out")))
                raise RuntimeError(f"not up after {seconds} s; ended: {dead}\n{text}")
            time.sleep(0.1)


def run(*command, seconds=60):
    done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout.decode()}{done.stderr.decode()}")


Server = TypeVar("Server", bound=Daemons)


@contextmanager
def running(kind, *arguments):
    """Start a server in a folder of its own. At the end, neither it nor the folder is left."""
    with server_folder(kind.__name__.lower()) as folder:
        server = kind(folder, *arguments)
        try:
            server.start()
            yield server
        finally:
            server.stop()


class S3Server(Daemons):
    """A server with the API of S3 on a free port."""

    key, secret = "test", "testtest"

    def __init__(self, folder):
        super().__init__(folder)
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def environment(self):
        """Return the environment variables with which the AWS tools use this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class Ceph(S3Server):
    """Ceph's S3 gateway with one monitor and one storage daemon.

    ``objectstore``: "memstore" (fast), or "bluestore" (survives ``kill``).
    """

    def __init__(self, folder, objectstore="memstore"):
        super().__init__(folder)
        require("ceph")
        self.objectstore = objectstore
        self.configuration = str(folder / "ceph.conf")

    def start(self):
        folder = self.folder
        cluster, mon = str(uuid.uuid4()), f"v2:127.0.0.1:{free_port()}"
        for name in ("mon", "osd", "rgw", "run", "log"):
            (folder / name).mkdir()
        text = _CEPH_CONF.format(
            folder=folder, fsid=cluster, mon=mon, port=self.port, objectstore=self.objectstore
        )
        Path(self.configuration).write_text(text)
        monmap = str(folder / "monmap")
        run("monmaptool", "--create", "--addv", "a", f"[{mon}]", "--fsid", cluster, monmap)
        run("ceph-mon", "-i", "a", "-c", self.configuration, "--mkfs", "--monmap", monmap)
        self._spawn_ceph("mon", "ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        run("ceph", "-c", self.configuration, "osd", "new", osd)
        run("ceph-osd", "-i", "0", "-c", self.configuration, "--mkfs", "--osd-uuid", osd)
        self._spawn_ceph("osd", "ceph-osd", "-i", "0")
        run(
            *("radosgw-admin", "-c", self.configuration, "-n", "client.rgw", "user", "create"),
            *("--uid=test", "--display-name=test", f"--access-key={self.key}"),
            f"--secret={self.secret}",
        )
        self._spawn_ceph("rgw", "radosgw", "-n", "client.rgw")
        self.wait_until(lambda: answers_http(self.port))

    def _spawn_ceph(self, name, program, *arguments):
        self.spawn(name, program, "-f", *arguments, "-c", self.configuration)

    def resume(self):
        """Start the daemons again on the same data."""
        self._spawn_ceph("mon", "ceph-mon", "-i", "a")
        self._spawn_ceph("osd", "ceph-osd", "-i", "0")
        self._spawn_ceph("rgw", "radosgw", "-n", "client.rgw")
        self.wait_until(lambda: answers_http(self.port))


_CEPH_CONF = """[global]
 fsid = {fsid}
 mon_host = [{mon}]
 public_network = 127.0.0.0/8
 ms_bind_ipv4 = true
 auth_cluster_required = none
 auth_service_required = none
 auth_client_required = none
 osd_pool_default_size = 1
 osd_pool_default_min_size = 1
 mon_allow_pool_size_one = true
 osd_pool_default_pg_num = 8
 osd_pool_default_pgp_num = 8
 osd_pool_default_pg_autoscale_mode = off
 osd_crush_chooseleaf_type = 0
 mon_max_pg_per_osd = 1000
 ms_mon_client_mode = crc
 mon_data_avail_warn = 1
 mon_data_avail_crit = 0
 auth_allow_insecure_global_id_reclaim = false
 run_dir = {folder}/run
 admin_socket = {folder}/run/$name.asok
 pid_file = {folder}/run/$name.pid
 log_file = {folder}/log/$name.log
 crash_dir = {folder}/log
[mon.a]
 mon_data = {folder}/mon
 mon_warn_on_pool_no_redundancy = false
[osd.0]
 osd_data = {folder}/osd
 osd_objectstore = {objectstore}
 memstore_device_bytes = 8589934592
 bluestore_block_size = 21474836480
 osd_memory_target = 1073741824
 osd_class_dir = /usr/lib/x86_64-linux-gnu/rados-classes
[client.rgw]
 rgw_data = {folder}/rgw
 rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
 rgw_enable_usage_log = false
 rgw_thread_pool_size = 64
 rgw_gc_obj_min_wait = 5
 rgw_gc_processor_period = 10
 rgw_gc_processor_max_time = 10
"""
