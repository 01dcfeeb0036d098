"""torch.distributed is destroyed and initialized again in the same processes, on the same port."""

import gc
import json
import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import limpet
from limpet.errors import LimpetError, RankFailed
from limpet.ranks.group import current_group
from tests.ranks.world import TIMEOUT, run_ranks

pytestmark = pytest.mark.slow

CYCLES = 4


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def make_state(value):
    return {"w": torch.full((1000,), value), "rank": limpet.PerRank(dist.get_rank())}


def save_once(url, cycle):
    limpet.save(f"{url}/{cycle}", make_state(cycle))


def save_in_background(url, cycle):
    """The save is in progress when the group is destroyed."""
    return limpet.save_async(f"{url}/{cycle}", make_state(cycle))


def save_in_subgroups(url, cycle):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    limpet.save(f"{url}/pair{number}-{cycle}", make_state(cycle), group=pairs[number])
    limpet.save(f"{url}/{cycle}", make_state(cycle))


def train(url, cycle):
    state = {**make_state(cycle), "progress": limpet.Progress()}
    with limpet.Checkpointer(f"{url}/run", state, save=limpet.EverySteps(2)) as ckpt:
        resumed = ckpt.resume()
        assert (resumed.step if resumed else 0) == 4 * cycle
        assert int(state["w"][0]) == max(cycle - 1, 0)
        state["w"].fill_(cycle)
        for _ in range(4):
            ckpt.step()


def list_descriptors(at_most):
    """Return what the open ones refer to. PyTorch closes some of its own a little later, so wait
    for it for 10 seconds if there are more than expected. Also return True if a garbage collection
    was needed: an error that was retried may have left a cycle, but no usual call may."""
    began, is_collected = time.monotonic(), False
    while len(found := os.listdir("/proc/self/fd")) > at_most > 0:
        waited = time.monotonic() - began
        if waited > 10:
            break
        if waited > 5 and not is_collected:
            gc.collect()
            is_collected = True
        time.sleep(0.01)
    return sorted(read_link(f"/proc/self/fd/{number}") for number in found), is_collected


def read_link(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:  # of the listing itself
        return "closed"


def run_cycles(use, master_port, size, rank, port, folder):
    """Use Limpet in several initializations. A second store keeps the ranks together between
    these, because PyTorch's own could connect to the store that is about to end."""
    outer = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
    gc.disable()
    fds: list[list[str]] = []
    seconds, collections = [], 0
    for cycle in range(CYCLES):
        began = time.monotonic()
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{master_port}", timedelta(seconds=15), size, rank
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == size
        pending = use(str(folder), cycle)
        dist.destroy_process_group()
        if pending is not None:  # its thread is at its end once the group is closed
            assert pending.wait().verify().ok
            for thread in threading.enumerate():
                if thread.name == "limpet-save":
                    thread.join(10)
        threads = [thread.name for thread in threading.enumerate() if "limpet" in thread.name]
        assert not threads, threads
        seconds.append(time.monotonic() - began)
        found, is_collected = list_descriptors(at_most=min(map(len, fds[1:]), default=0))
        fds.append(found)
        collections += is_collected
        outer.add(f"{cycle}", 1)
        while outer.add(f"{cycle}", 0) < size:
            time.sleep(0.005)
    (folder / f"{rank}.json").write_text(
        json.dumps({"fds": fds, "seconds": seconds, "collections": collections})
    )


@pytest.mark.parametrize(
    ("size", "use"), [(1, train), (2, save_in_background), (4, save_in_subgroups), (4, train)]
)
def test_each_initialization_on_the_same_port_saves(tmp_path, size, use):
    run_rank = partial(run_cycles, use, free_port(), size)
    for result in run_ranks(run_rank, tmp_path, (0,) * size, timeout=60):
        fds = result["fds"]
        assert len(fds[-1]) <= min(map(len, fds[1:])), f"a socket is left: {fds}"
        assert result["collections"] <= 1, "sockets are in cycles of objects"
        assert max(result["seconds"][1:]) < 12, "a wait has run into its limit"
    if use is not train:
        for cycle in range(CYCLES):
            assert limpet.load(str(tmp_path / str(cycle)))["w"][0] == cycle


def use_old_objects(rank, port, folder):
    for cycle in range(2):
        store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
        dist.init_process_group("gloo", None, TIMEOUT, 2, rank, dist.PrefixStore(f"{cycle}", store))
        if cycle == 0:
            options = {"save": limpet.EverySteps(1), "at_end": False}
            old = limpet.Checkpointer(folder / "old", make_state(0), **options)
            old.step()
            old.wait()
            old_group = current_group()
        else:
            began = time.monotonic()
            with pytest.raises(RankFailed, match="has left the group") as e:
                old.step()
            assert "new Checkpointer" in str(e.value)
            with pytest.raises(LimpetError):
                old.save()
            assert time.monotonic() - began < 5
            assert current_group() is not old_group
            save_once(str(folder), cycle)
            old.close()
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text("{}")


def test_a_checkpointer_of_an_earlier_initialization_raises_at_once(tmp_path):
    run_ranks(use_old_objects, tmp_path, (0, 0), timeout=60)
