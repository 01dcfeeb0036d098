"""msgspec decoders are created when their module is imported, never by two threads at a time.

``msgspec`` builds its description of a type at its first use. If two threads do so at the same
time, the process can crash (SIGSEGV).
"""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import limpet

ROOT = Path(limpet.__file__).parent
SAFE = {
    # one thread at a time
    ("ranks/collective.py", "_decoder_of")
}


def calls_in(tree, function=""):
    """Yield every call with the name of the function that it is in, or an empty string."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inner = getattr(node, "name", "lambda") if is_function else function
        if isinstance(node, ast.Call):
            yield function, node
        yield from calls_in(node, inner)


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda f: f.stem)
def test_decoders_are_created_at_import(file):
    name = file.relative_to(ROOT).as_posix()
    for function, call in calls_in(ast.parse(file.read_text())):
        called = ast.unparse(call.func)
        where = f"{name}:{call.lineno}: {called}"
        assert called not in ("msgspec.json.decode", "msgspec.msgpack.decode"), where
        assert called != "msgspec.convert", f"{where} has no decoder that could be kept"
        if "Decoder" in called.split("[")[0].rpartition(".")[2]:
            assert not function or (name, function) in SAFE, where


SCRIPT = """
import importlib, pkgutil, sys, threading
import msgspec
import limpet
names = "accelerate lightning ray_train torchtitan transformers".split()
FRAMEWORKS = [f"limpet.integrations.{name}" for name in names]  # which may not be installed
from limpet.ranks.collective import _decoder_of
from limpet.format.strict_json import StrictDecoder

modules = [
    importlib.import_module(m.name)
    for m in pkgutil.walk_packages(limpet.__path__, "limpet.")
    if "testing" not in m.name and not m.name.endswith("__main__")
    and m.name not in FRAMEWORKS
]
members = {id(v): v for m in modules for v in vars(m).values()}.values()
decoders = [
    v for v in members
    if isinstance(v, StrictDecoder | msgspec.json.Decoder | msgspec.msgpack.Decoder)
]
types = [v for v in members if isinstance(v, type) and issubclass(v, msgspec.Struct)]
types += [list[t] for t in types] + [str, bytes, bool, int, tuple[int, str], list[int]]
assert len(decoders) >= 15 and len(types) > 40, (len(decoders), len(types))
texts = (b"{}", b"[]", b'{"leaves":[{"boxes":[{}]}],"shards":[{}],"metrics":{"a":{"float":"x"}}}')

def use():
    for decoder in decoders:
        for text in texts:
            try:
                decoder.decode(text)
            except ValueError:
                pass
    for value_type in types:
        for raw in (b"\\x80", b"\\x90", b"\\xa1x", b"\\x91\\x80"):
            try:
                _decoder_of(value_type).decode(raw)
            except ValueError:
                pass
    return limpet.load(sys.argv[1])

sys.setswitchinterval(1e-5)
barrier, loaded = threading.Barrier(8), []

def run():
    barrier.wait()
    loaded.append(use())

threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(loaded) == 8, loaded
print("all decoded")
"""


@pytest.mark.slow
def test_several_threads_decode_every_type_first(tmp_path):
    limpet.save(tmp_path / "version_1", {"a": np.ones(10), "b": {1: 2}}, step=1)
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "version_1")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, (result.returncode, result.stderr[-3000:])
    assert result.stdout.strip() == "all decoded"
