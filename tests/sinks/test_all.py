"""Properties of all sinks."""

import io
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from limpet import sinks
from tests.sinks.sample_events import (
    EVENTS,
    FakeMlflowClient,
    FakeSummaryWriter,
    FakeWandbRun,
    RecordingStream,
    make_mlflow_sink,
    nested_odd_values,
    read_json_lines,
)


def make_all_sinks(folder, writer):
    from prometheus_client import CollectorRegistry

    return [
        sinks.Terminal(io.StringIO()),
        sinks.Terminal(RecordingStream(is_terminal=True, encoding="ascii")),
        sinks.Logging(),
        sinks.JsonLines(folder / "events.jsonl"),
        sinks.Prometheus(CollectorRegistry()),
        sinks.TensorBoard(writer),
        sinks.WandB(FakeWandbRun()),
        make_mlflow_sink(FakeMlflowClient()),
    ]


@pytest.fixture(scope="module")
def all_sinks(tmp_path_factory):
    return make_all_sinks(tmp_path_factory.mktemp("all"), FakeSummaryWriter())


FIELDS = sorted({field for fields in EVENTS.values() for field in fields} | {"time", "event"})


@given(
    st.sampled_from([*EVENTS, "unknown_event"]),
    st.dictionaries(st.sampled_from(FIELDS), nested_odd_values),
    st.booleans(),
)
@pytest.mark.slow
def test_no_sink_fails_for_missing_or_unexpected_fields(all_sinks, name, odd, known):
    for sink in all_sinks:
        sink(name, {**(EVENTS.get(name, {}) if known else {}), **odd})


FORK_PROGRAM = """
import os, sys, threading
import limpet
from limpet import events
from limpet import sinks

stream = open("lines", "w", buffering=1 << 20)
limpet.attach(sinks.Terminal(stream))
limpet.attach(sinks.JsonLines("events.jsonl"))
from limpet.sinks import terminal
inside, may_continue = threading.Event(), threading.Event()
flush = stream.flush
class SlowStream:  # a thread is between its write and its flush when the fork begins
    encoding = "utf-8"
    isatty = staticmethod(lambda: False)
    write = staticmethod(stream.write)
    def flush(self):
        inside.set()
        may_continue.wait(0.2)
        flush()
limpet.attach(sinks.Terminal(SlowStream()))
thread = threading.Thread(target=lambda: events.emit("saved", step=1))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    events.emit("saved", step=2)  # no lock is still held
    sys.exit()  # flushes all buffers
thread.join()
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_fork_duplicates_no_output(tmp_path):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_PROGRAM]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    steps = [line.split()[2] for line in (tmp_path / "lines").read_text().splitlines()]
    assert sorted(steps) == ["1", "1", "2", "2"]
    assert sorted(line["step"] for line in read_json_lines(tmp_path / "events.jsonl")) == [1, 2]


def test_sinks_import_neither_torch_nor_rich():
    code = (
        "import sys, logging, limpet\n"
        "limpet.sinks.Logging()('saved', {'step': 1})\n"
        "names = ('torch', 'rich', 'numpy', 'prometheus_client', 'tqdm')\n"
        "print([m for m in names if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
