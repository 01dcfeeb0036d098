"""Run one measurement in a fresh process: a function by name, with JSON input and output."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any, NoReturn

_RESULT_PREFIX = "BENCH-RESULT "


class MeasurementFailed(Exception):
    """A measurement failed. The report prints the text of this exception."""


def call(function: str, timeout: float = 180, **arguments: Any) -> dict[str, Any]:
    """Run ``bench.<module>:<name>`` with ``arguments`` in a new process.

    Raises ``MeasurementFailed`` with the last line of the error output, or after ``timeout``
    seconds.
    """
    command = [sys.executable, "-m", "bench.fresh_process", function, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"no result in {timeout:.0f} s") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_RESULT_PREFIX):
            result: dict[str, Any] = json.loads(line.removeprefix(_RESULT_PREFIX))
            return result
    raise MeasurementFailed(_reason(done.stderr, done.returncode))


def _reason(errors: str, code: int) -> str:
    """Return the line of the exception. Libraries print more, indented lines below it."""
    lines = [line for line in errors.splitlines() if line and not line[0].isspace()]
    traces = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
    if traces and traces[-1] + 1 < len(lines):
        return lines[traces[-1] + 1][:160]
    return lines[-1][:160] if lines else f"exit status {code}"


def reply_and_die(result: dict[str, Any]) -> NoReturn:
    """Print the result of a measurement, and end the process as SIGKILL does: nothing is closed."""
    print(_RESULT_PREFIX + json.dumps(result), flush=True)
    os._exit(0)


def main() -> None:
    module, name = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    print(_RESULT_PREFIX + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
