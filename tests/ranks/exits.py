"""Processes that end while a call of the TCPStore is in progress.

``python -m tests.ranks.exits`` imports torch once and forks, for each round, a process that hosts
a store and one that uses it. The latter ends as a script does, so that its interpreter is
finalized, and in the meantime the host continues or dies. Prints the exit codes as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from limpet.errors import RankFailed
from limpet.ranks.group import _interrupter_of_own
from limpet.ranks.kv import KVClient, Timeouts

ROUNDS = [
    f"blocked {end} {kind}"
    for end in ("continues", "dies")
    for kind in ("connection", "no connection")
] + [f"random {n}" for n in range(8)]
SIGNALS = {"continues": signal.SIGCONT, "dies": signal.SIGKILL}


class LateFinalizer:
    """Sends a signal when the interpreter deletes it, which is the last thing that it does."""

    def __init__(self, pid, number):
        self.target = pid, number

    def __del__(self, kill=os.kill, sleep=time.sleep):
        kill(*self.target)
        sleep(0.3)  # a thread may now return from the store


def host_store(pipe):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(pipe, f"{store.port}\n".encode())
    time.sleep(120)


def use_store(name, port, host):
    """Use the store of the process ``host``, and stop that process, or let it end at any time."""
    state, end, *kind = name.split(" ", 2)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    own = dist.PrefixStore("own", store.clone())
    silent = 2.0 if kind == ["no connection"] else 0.5
    kv = KVClient(own, 0, 2, Timeouts(silent, 60))
    if kind != ["no connection"]:
        kv.interrupt = _interrupter_of_own(own, store)
    kv.has_all(["a"])
    if state == "random":
        draw = random.Random(int(end))
        kv._heartbeat_interval = 0.0
        if os.fork() == 0:
            time.sleep(draw.random() * 0.05)
            os.kill(host, draw.choice((signal.SIGKILL, signal.SIGSTOP)))
            time.sleep(draw.random() * 0.05)
            os.kill(host, draw.choice((signal.SIGKILL, signal.SIGCONT)))
            os._exit(0)
        time.sleep(draw.random() * 0.05)
        return
    os.kill(host, signal.SIGSTOP)
    with suppress(RankFailed):
        kv.has_all(["a"])
    if kind == ["connection"]:
        vars(sys)["late_finalizer"] = LateFinalizer(host, SIGNALS[end])
    elif os.fork() == 0:  # the host responds after two seconds, but before the limit
        time.sleep(2.2)
        os.kill(host, SIGNALS[end])
        os._exit(0)


def main():
    hosts, clients = [], {}
    for name in ROUNDS:
        read_end, write_end = os.pipe()
        if (host := os.fork()) == 0:
            host_store(write_end)
            os._exit(0)
        hosts.append(host)
        port = int(os.read(read_end, 10))
        sys.stdout.flush()
        if (client := os.fork()) == 0:
            use_store(name, port, host)
            return  # the interpreter ends regularly
        clients[client] = name
        os.close(read_end)
        os.close(write_end)
    codes = {}
    for client, name in clients.items():
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(client, 0)[1])
    for host in hosts:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
    print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
