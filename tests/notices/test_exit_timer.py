"""The end of a process that does not leave by itself."""

import os
import subprocess
import sys
import time
from contextlib import suppress

PROGRAM = """
import threading, time
from limpet.notices.exit_timer import end_process
def wait_in_a_call(): time.sleep(60)
threading.Thread(target=wait_in_a_call, daemon=True).start()
end_process(75, "it ends now")
"""


def run(output):
    """Return the exit code of the program and its seconds."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=output, stderr=output)
    try:
        return process.wait(30), time.monotonic() - began
    finally:
        process.kill()


def test_the_message_and_the_stacks_are_shown():
    reader, writer = os.pipe()
    try:
        assert run(writer)[0] == 75
        os.close(writer)
        text = os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
    assert "it ends now" in text
    assert "wait_in_a_call" in text


def test_a_pipe_that_nobody_reads_does_not_keep_the_process():
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        code, seconds = run(writer)
        assert code == 75
        assert seconds < 20
    finally:
        os.close(reader)
        os.close(writer)
