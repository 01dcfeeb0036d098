"""Run scripts in processes that are forked from one, because an import of PyTorch takes seconds."""

import json
import os
import subprocess
import sys

_PROGRAM = """
import importlib, json, os, runpy, sys

for name in sys.argv[1].split(","):
    importlib.import_module(name)
runs, ended = json.loads(sys.argv[2]), []
for folder, arguments, environment in runs:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.chdir(folder)
        os.environ |= environment
        os.dup2(writer, 1)
        os.close(reader)
        sys.argv = arguments
        sys.path[0] = folder
        runpy.run_path(arguments[0], run_name="__main__")
        sys.exit()
    os.close(writer)
    with open(reader) as output:
        lines = output.read().splitlines()
    ended.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), lines])
print(json.dumps(ended))
"""


def run_forked(imports, runs, *options):
    """Run each (folder, [script, *arguments], environment), one after the other. Return the exit
    codes and the lines on standard output, and what they wrote to standard error."""
    runs = [
        (str(folder), [*map(str, arguments)], {name: str(v) for name, v in environment.items()})
        for folder, arguments, environment in runs
    ]
    done = subprocess.run(
        [sys.executable, *options, "-c", _PROGRAM, ",".join(imports), json.dumps(runs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, lines) for code, lines in json.loads(done.stdout)], done.stderr
