"""``limpet run``: exit codes, signals, and that no process survives it."""

import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from limpet.notices.process_tree import read_process
from tests.cli.invoke import run_cli
from tests.cli.supervised import (
    RUN,
    WORKER,
    finish,
    is_alive,
    read_pid,
    run_to_end,
    started,
    wait_until,
)

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def sh(script, *arguments):
    return ["sh", "-c", script, "sh", *arguments]


def worker(folder, *actions):
    return [sys.executable, WORKER, folder, *actions]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 1), (75, 75), (93, 93), (255, 1)])
def test_exit_codes_of_the_command(code, expected):
    result = run_to_end("--", *sh(f"exit {code}"))
    assert result.code == expected
    again = "; run it again" if expected in (75, 76) else ""
    line = f"limpet: exit code {expected}: the command exited with {code}{again}\n"
    assert result.err == (line if code else "")
    assert result.out == ""


def test_a_command_that_a_signal_kills():
    result = run_to_end("--", *sh("kill -SEGV $$"))
    assert result.code == 1
    assert result.err == "limpet: exit code 1: the command was killed by SIGSEGV (11)\n"


def test_a_command_that_another_process_terminates_failed():
    assert run_to_end("--", *sh("kill -TERM $$")).code == 1


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_arguments_and_files_are_the_commands(dashes):
    result = run_to_end(
        "--grace", "9", *dashes, *sh('cat; echo "$@" >&2'), "--grace", "x", "--json", "--", "-h",
        input="from stdin",
    )  # fmt: skip
    assert result.code == 0
    assert result.out == "from stdin"
    assert result.err == "--grace x --json -- -h\n"


def test_json_is_all_that_is_on_the_standard_output():
    result = run_to_end("--json", "--", *sh("echo out; echo err >&2; exit 3"))
    assert result.code == 1
    assert result.json == {
        "exit": 1, "why": "the command exited with 3",
        "command": {"exit_code": 3, "killed_by": None}, "signals": [], "killed": 0, "statuses": [],
    }  # fmt: skip
    assert result.err.splitlines()[:2] == ["out", "err"]


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [("no-such-command", 127, "No such file"), ("/etc/passwd", 126, "Permission denied"),
     ("/etc/passwd/x", 127, "Not a directory"), ("/tmp", 126, "Permission denied")],
)  # fmt: skip
def test_commands_that_cannot_be_started(name, code, reason):
    result = run_cli("run", "--", name)
    assert result.code == code
    assert result.err.startswith(f"limpet: Cannot run '{name}': {reason}")
    assert result.err.count("\n") == 1
    document = run_cli("run", "--json", "--", name).json
    assert document["exit"] == code
    assert reason in document["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'COMMAND...'"),
        (["--"], "Missing argument 'COMMAND...'"),
        (["--grace", "0", "true"], "'0' is less than 1 s"),
        (["--grace", "soon", "true"], "'soon' is not a time"),
        (["--gracious", "true"], "No such option"),
    ],
)
def test_invalid_command_lines(arguments, words):
    result = run_cli("run", *arguments)
    assert result.code == 2
    assert words in result.err
    assert result.err.count("\n") == 1


def test_a_misspelled_variable_is_an_error_before_the_command_starts():
    result = run_to_end("--", "echo", "started", environment={"LIMPET_STATE": "x"})
    assert (result.code, result.out) == (1, "")
    assert "LIMPET_STATE" in result.err


def test_without_a_folder_for_temporary_files(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    result = run_cli("run", "--", "true")
    assert result.code == 1
    assert "Cannot create a folder for the statuses" in result.err
    assert "Set TMPDIR" in result.err


def test_the_folder_of_the_statuses_is_private_fresh_and_removed(tmp_path):
    show = sh('echo "$LIMPET_STATUS"; stat -c %a "$LIMPET_STATUS"; ls -A "$LIMPET_STATUS"')
    outside = {"TMPDIR": str(tmp_path), "LIMPET_STATUS": "/of/an/outer/run"}
    path, *rest = run_to_end("--", *show, environment=outside).out.split()
    assert Path(path).parent == tmp_path
    assert rest == ["700"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT", "USR2"])
def test_a_signal_reaches_the_command(name, tmp_path):
    script = 'trap "echo got {0}; exit 0" {0}; echo $$ > "$1"; while :; do sleep 0.01; done'
    with started("--", *sh(script.format(name), tmp_path / "up")) as process:
        read_pid(tmp_path / "up")
        process.send_signal(signal.Signals[f"SIG{name}"])
        result = finish(process)
    assert (result.code, result.out) == (0, f"got {name}\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_command_that_a_forwarded_signal_kills_has_not_saved(name, tmp_path):
    with started("--", *sh('echo $$ > "$1"; exec sleep 600', tmp_path / "up")) as process:
        pid = read_pid(tmp_path / "up")
        process.send_signal(signal.Signals[f"SIG{name}"])
        result = finish(process)
    assert result.code == 76
    assert f"killed by SIG{name}" in result.err
    assert not is_alive(pid)


@pytest.mark.parametrize("code", [75, 93, 1, 0])
def test_the_status_of_a_worker_decides(code, tmp_path):
    with started("--json", "--", *worker(tmp_path, str(code))) as process:
        read_pid(tmp_path / "0.0")
        process.send_signal(TERM)
        result = finish(process)
    assert result.code == code
    document = result.json
    assert document["command"] == {"exit_code": int(code == 1), "killed_by": None}
    assert document["signals"] == [TERM]
    (status,) = document["statuses"]
    assert (status["code"], status["step"], status["saved_step"]) == (code, 5, 4)
    assert status["why"] == "SIGTERM"


@pytest.mark.slow
def test_without_limpet_run_a_worker_exits_with_its_code(tmp_path):
    assert subprocess.run(worker(tmp_path, "now-75"), check=False).returncode == 75


@pytest.mark.slow
def test_a_script_that_goes_on_after_a_saved_training_must_run_again(tmp_path):
    script = 'a="$1"; shift; "$@" "$a" now-75 && "$@" "$a" end'
    result = run_to_end("--", *sh(script, tmp_path, sys.executable, WORKER))
    assert result.code == 75
    assert "rank 0 saved step 4 in runs/a: it was time; run it again" in result.err


@pytest.mark.slow
def test_a_worker_that_cannot_write_its_status_exits_with_its_code(tmp_path):
    script = 'rmdir "$LIMPET_STATUS" && "$@"'
    result = run_to_end("--", *sh(script, *worker(tmp_path, "now-75")))
    assert result.code == 75
    assert "cannot read the statuses" in result.err


@pytest.mark.slow
def test_a_nested_run_passes_its_code_on(tmp_path):
    with started("--", *RUN, "--", *worker(tmp_path, "75")) as process:
        read_pid(tmp_path / "0.0")
        process.send_signal(TERM)
        assert finish(process).code == 75


# A process with a session of its own, whose parent has ended. It ignores SIGTERM if asked to.
HIDE = """
import os, signal, sys, time
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + ".tmp", "w") as file:
            file.write(f"{os.getpid()}\\n")
        os.rename(sys.argv[1] + ".tmp", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
if "stay" in sys.argv:
    time.sleep(600)
"""


def hide(file, *words):
    return [sys.executable, "-S", "-c", HIDE, file, *words]


@pytest.mark.slow
def test_what_the_command_leaves_running_is_asked_to_stop(tmp_path):
    result = run_to_end("--", *hide(tmp_path / "up"))
    assert result.code == 0
    assert not is_alive(read_pid(tmp_path / "up"))
    assert "left 1 processes running" in result.err


@pytest.mark.slow
def test_what_the_command_leaves_running_is_killed(tmp_path):
    result = run_to_end("--grace", "1", "--json", "--", *hide(tmp_path / "up", "ignore"))
    assert (result.code, result.json["killed"]) == (0, 1)
    assert not is_alive(read_pid(tmp_path / "up"))


@pytest.mark.slow
def test_after_the_grace_all_processes_are_killed(tmp_path):
    command = hide(tmp_path / "up", "ignore", "stay")
    with started("--grace", "1", "--json", "--", *command) as process:
        pid = read_pid(tmp_path / "up")
        process.send_signal(TERM)
        result = finish(process)
    assert result.code == 76
    assert result.json["killed"] == 2
    assert result.json["command"]["killed_by"] == signal.SIGKILL
    assert "SIGTERM (15): the command has 1 s to stop" in result.err
    assert not is_alive(pid)


@pytest.mark.slow
def test_a_worker_of_a_shell_that_dies_of_the_signal_still_saves(tmp_path):
    """A shell does not pass SIGTERM on. Its child becomes that of ``limpet run``."""
    with started("--", *sh('"$@"; true', *worker(tmp_path, "75"))) as process:
        read_pid(tmp_path / "0.0")
        process.send_signal(TERM)
        assert finish(process).code == 75


# Leaves a process behind whose child reports SIGTERM. The process ends its child with SIGUSR1.
FAMILY = """
import os, signal, sys, time
def leave(number, frame):
    with open(sys.argv[1] + ".got", "a") as file:
        file.write(f"{signal.Signals(number).name}\\n")
    os._exit(0)
def end_child(number, frame):
    os.kill(child, signal.SIGUSR1)
    os.wait()
    os._exit(0)
if os.fork() == 0:
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        for each in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, leave)
        os.write(write, b"x")
        time.sleep(600)
    signal.signal(signal.SIGTERM, end_child)
    os.read(ready, 1)
    open(sys.argv[1], "w").close()
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
"""


@pytest.mark.slow
def test_what_is_left_ends_its_own_children(tmp_path):
    """A worker of a data loader that gets SIGTERM could make the training fail while it saves."""
    assert run_to_end("--", sys.executable, "-S", "-c", FAMILY, tmp_path / "up").code == 0
    assert (tmp_path / "up.got").read_text() == "SIGUSR1\n"


COUNT = (
    'n=0; trap "n=\\$((n+1)); echo \\$n > $1" TERM INT; echo $$ > "$2";'
    " while :; do sleep 0.01; done"
)
"""A script that counts signals in its first file, after it wrote its process id to the second."""


@pytest.mark.slow
def test_a_second_sigterm_is_not_passed_on(tmp_path):
    """torchrun would leave its workers behind at the third."""
    with started("--grace", "2", "--", *sh(COUNT, tmp_path / "n", tmp_path / "up")) as process:
        read_pid(tmp_path / "up")
        process.send_signal(TERM)
        wait_until((tmp_path / "n").exists)
        process.send_signal(TERM)
        result = finish(process)
    assert (tmp_path / "n").read_text() == "1\n"
    assert result.code == 76
    assert "SIGTERM (15): the command has 2 s left" in result.err


@pytest.mark.slow
def test_a_second_interrupt_kills_at_once(tmp_path):
    with started("--grace", "1h", "--", *sh(COUNT, tmp_path / "n", tmp_path / "up")) as process:
        pid = read_pid(tmp_path / "up")
        process.send_signal(INT)
        wait_until((tmp_path / "n").exists)
        process.send_signal(INT)
        result = finish(process)
    assert result.code == 76
    assert not is_alive(pid)


@pytest.mark.slow
def test_ctrl_c_reaches_the_command_once(tmp_path):
    """The terminal sends it to the whole foreground group, so it is not passed on."""
    master, slave = pty.openpty()
    script = f"{COUNT.replace('while :;', 'while [ ! -e $3 ];')}; exit 75"
    command = sh(script, tmp_path / "n", tmp_path / "up", tmp_path / "end")
    with started("--", *command, prefix=["setsid", "--ctty"], stdin=slave) as process:
        read_pid(tmp_path / "up")
        os.write(master, b"\x03")
        wait_until((tmp_path / "n").exists)
        assert "SIGINT (2): the command has 25 s" in process.stderr.readline()
        (tmp_path / "end").touch()
        assert finish(process).code == 75
    assert (tmp_path / "n").read_text() == "1\n"
    os.close(master)
    os.close(slave)


@pytest.mark.slow
def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path):
    """As ``nohup limpet run ...`` does."""
    ignore = ["env", "--ignore-signal=HUP"]
    with started("--", *worker(tmp_path, "75"), prefix=ignore) as process:
        pid = read_pid(tmp_path / "0.0")
        process.send_signal(HUP)
        os.kill(pid, HUP)
        process.send_signal(TERM)
        result = finish(process)
    assert result.code == 75
    assert "SIGHUP" not in result.err


@pytest.mark.slow
def test_exit_codes_arrive_if_the_caller_ignores_its_children():
    assert run_to_end("--", *sh("exit 93"), prefix=["env", "--ignore-signal=CHLD"]).code == 93


@pytest.mark.slow
def test_the_command_starts_with_the_signals_of_the_caller():
    show = "grep -E 'SigBlk|SigIgn' /proc/self/status"
    direct = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True)

    def signals(shown):
        # glibc's posix_spawn ignores signals 32 and 33, which it reserves for its threads
        lines = (line.split() for line in shown.splitlines())
        return {name: int(mask, 16) & ~0x180000000 for name, mask in lines}

    assert signals(run_to_end("--", *sh(show)).out) == signals(direct.stdout)


@pytest.mark.slow
def test_orphans_that_end_do_not_remain_as_zombies(tmp_path):
    script = '(sh -c "exit 0" & echo $! > "$1.tmp"; mv "$1.tmp" "$1"); sleep 600'
    with started("--", *sh(script, tmp_path / "up")) as process:
        orphan = read_pid(tmp_path / "up")
        wait_until(lambda: not Path(f"/proc/{orphan}").exists())
        assert process.poll() is None
        process.send_signal(TERM)
        assert finish(process).code == 76


@pytest.mark.slow
def test_the_exit_code_survives_when_nobody_reads_the_messages():
    script = f'{sys.executable} -m limpet run --json -- sh -c "exit 75" 2>&1 | true'
    done = subprocess.run(
        ["bash", "-c", script + '; echo "${PIPESTATUS[0]}"'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "75\n"


# A thread in which signals are not blocked, as a library may start one.
THREADED = """
import sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
from limpet.cli import cli
cli.main(["run", "--", *sys.argv[1:]], prog_name="limpet")
"""


@pytest.mark.slow
def test_signals_arrive_although_another_thread_does_not_block_them(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", THREADED, *worker(tmp_path, "75")], stderr=subprocess.PIPE
    ) as process:
        try:
            read_pid(tmp_path / "0.0")
            process.send_signal(TERM)
            assert process.wait(60) == 75
        finally:
            process.kill()


@pytest.mark.slow
def test_no_thread_is_started_before_the_command():
    script = "ls /proc/$PPID/task | wc -l"
    assert run_to_end("--json", "--", *sh(script)).err.strip() == "1"


UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
CAN_UNSHARE = os.geteuid() == 0 and subprocess.run([*UNSHARE, "true"], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(not CAN_UNSHARE, reason="needs root and PID namespaces")
@pytest.mark.parametrize("command", ["worker", "sleep", "hidden"])
def test_as_process_1_of_a_container(command, tmp_path):
    """The kernel drops signals to process 1 that it does not handle."""
    commands: dict[str, tuple[list[str | Path], int]] = {
        "worker": (worker(tmp_path, "75"), 75),
        "sleep": (sh('echo $$ > "$1"; exec sleep 600', tmp_path / "0.0"), 76),
        "hidden": (hide(tmp_path / "0.0", "ignore", "stay"), 76),
    }
    arguments, expected = commands[command]
    with subprocess.Popen(
        [*UNSHARE, *RUN, "--grace", "1", "--", *arguments], stderr=subprocess.PIPE, text=True
    ) as outer:
        try:
            assert read_pid(tmp_path / "0.0") > 1
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            (wrapper,) = (int(pid) for pid in children if read_process(int(pid)))
            os.kill(wrapper, TERM)
            assert outer.wait(60) == expected
        finally:
            outer.kill()
