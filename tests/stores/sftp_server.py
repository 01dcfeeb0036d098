"""OpenSSH's server for SFTP on loopback, with a configuration, a key, and a user of its own."""

import os
import pwd
import socket
from pathlib import Path

from tests.stores.install import find_program, require
from tests.stores.servers import Daemons, free_port, run

_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
"""


class Sftp(Daemons):
    """A server that lets the user of this process in with ``options``.

    ``url``: of a folder on it. Each connection has processes of its own, which survive the server
    that accepted it: signals are sent to all of them.
    """

    def __init__(self, folder):
        super().__init__(folder)
        require("sftp")
        self.port = free_port()
        self.url = f"fsspec+sftp://127.0.0.1{folder}/data"
        self.options = {
            "port": self.port,
            "username": pwd.getpwuid(os.geteuid()).pw_name,
            "key_filename": str(folder / "user_key"),
            "look_for_keys": False,
            "allow_agent": False,
        }

    def start(self):
        (self.folder / "data").mkdir()
        (self.folder / "sshd_config").write_text(_CONFIG.format(port=self.port, folder=self.folder))
        for name in ("host_key", "user_key"):
            key = str(self.folder / name)
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", key)
        if os.geteuid() == 0:  # sshd changes to this folder when it drops its privileges
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.resume()

    def resume(self):
        """Start again on the same data."""
        program = find_program("sshd") or "sshd"  # a full path, as it demands
        self.spawn("sshd", program, "-D", "-e", "-f", str(self.folder / "sshd_config"))
        self.wait_until(self._greets)

    def pids(self, *names):
        """Return also the processes of the connections."""
        found = super().pids(*names)
        parents = _parents()
        for pid in found:  # which grows
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def _greets(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False


def _parents():
    """Return the parent of each process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(") ")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return parents
