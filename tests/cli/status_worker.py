"""A worker of a training that does what a file name says. Usage: FOLDER ACTION...

The action is that of this rank, or the last one. The worker writes its process id to
``FOLDER/RANK.RESTART`` once it is ready, and then:

- ``75``, ``76``, ``93``, ``1``, ``0``: waits for a signal, and leaves with that code;
- ``now-75`` and so on: leaves at once;
- ``end``: ends at once, without a word;
- ``fail``: exits with 3 at once;
- ``ignore``: ignores SIGTERM;
- ``A/B``: does A in the first attempt and B after a restart.
"""

import os
import signal
import sys
import time
from pathlib import Path

from limpet.notices.exit_status import Status, announce_worker, leave_code


def leave(code, why):
    sys.exit(leave_code(Status(code, rank, step=5, saved_step=4, run="runs/a", why=why)))


def on_signal(number, _):
    leave(int(action), signal.Signals(number).name)


folder, *actions = sys.argv[1:]
rank = int(os.environ.get("RANK", "0"))
restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
choices = actions[min(rank, len(actions) - 1)].split("/")
action = choices[min(restart, len(choices) - 1)]

if action == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif action.isdecimal():
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(each, on_signal)
announce_worker()
ready = Path(folder, f"{rank}.{restart}")
ready.with_suffix(".tmp").write_text(f"{os.getpid()}\n")
ready.with_suffix(".tmp").rename(ready)
if action.startswith("now-"):
    leave(int(action.removeprefix("now-")), "it was time")
if action == "fail":
    # the others are ready first, so that torchrun stops them
    while len(list(Path(folder).glob(f"*.{restart}"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.005)
    sys.exit(3)
if action != "end":
    time.sleep(600)
