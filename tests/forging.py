"""Build damaged and malicious snapshots for tests: files as bytes, changed and sealed again."""

import json
from collections import Counter, OrderedDict
from math import inf, nan
from typing import Any

import numpy as np
import torch

import limpet
from limpet.errors import FormatError, PlanError, StoreError
from limpet.format.digest import digest
from limpet.format.names import MANIFEST
from limpet.storage.memory import MemoryStore
from tests.states import assert_same

Files = dict[str, bytes]
Json = Any

FOLDER = "version_7"


def small_state():
    """Return a state with every kind of node that is small enough for thousands of loads."""
    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    return {
        "weight": weight,
        "tied": weight,
        "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "sparse": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
        "csr": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(),
        "array": np.arange(3, dtype=np.int16),
        "big-endian": np.arange(2, dtype=">u2"),
        "structured": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8", (1,))]),
        "blob": bytes(range(256)) * 16,
        "plain": plain_values(),
    }


def plain_values():
    """Return every kind of plain value."""
    return {
        "none": None,
        "yes": True,
        "int": -3,
        "long": 1 << 70,
        "float": 0.1,
        "zero": -0.0,
        "nan": nan,
        "inf": [inf, -inf],
        "text": "ü/~\0",
        "complex": complex(1, -inf),
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"x"),
        "numpy": np.float32(1.5),
        "date": np.datetime64("2026-01-02", "s"),
        "list": [1, "two", [3.0]],
        "ints": [1, 2, 3],
        "tuple": (1, ("x",)),
        "set": {1, "a"},
        "frozenset": frozenset({2}),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "keys": {1: "int", "1": "text", (1, 2): "tuple", None: 0, b"k": 1, 2.5: 2},
        "": {"": 1},
    }


def files_of(store):
    return {s.key: store.get(s.key, 1 << 30) for s in store.list("")}


def store_of(files):
    store = MemoryStore("forged")
    for key, data in files.items():
        store.put_if_absent(key, data)
    return store


def save_to_files(state, folder=FOLDER):
    """Save ``state`` and return the files of the snapshot."""
    store = MemoryStore()
    limpet.save(store.at(folder), state, step=7, note={"by": "test"})
    return files_of(store)


def seal(content, format_number=1):
    """Return a sealed file with a correct digest. The content can be invalid."""
    body = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return seal_body(body.encode()[1:], format_number)


def seal_body(body, format_number=1):
    head = b'{"limpet":%d,"digest":"' % format_number
    body_digest = digest(head + b"0" * 32 + b'",' + body)
    return head + body_digest.encode() + b'",' + body


def sealed_content(raw):
    content = json.loads(raw)
    del content["limpet"], content["digest"]
    return content


def manifest_key(files, folder=""):
    return next(k for k in files if k.startswith(folder) and k.endswith(MANIFEST))


def index_key(files, folder=""):
    return next(k for k in files if k.startswith(folder) and k.endswith(".index.json"))


def shard_key(files):
    return next(k for k in files if k.endswith(".safetensors"))


def forge(files, manifest=None, index=None, *, folder="", format_number=1):
    """Return the files with a changed manifest or index and with all digests recomputed.

    ``folder`` selects the version. ``format_number`` is the format number of its new manifest.
    """
    files = dict(files)
    content = sealed_content(files[manifest_key(files, folder)])
    if index is not None:
        key = index_key(files, folder)
        changed = json.loads(files[key])
        index(changed)
        files[key] = json.dumps(changed).encode()
        entry = content["shards"][0]["index"]
        entry["length"], entry["digest"] = len(files[key]), digest(files[key])
    if manifest is not None:
        manifest(content)
    files[manifest_key(files, folder)] = seal(content, format_number)
    return files


def json_paths(value, path=()):
    """Yield the paths of all parts of a JSON value."""
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for k, v in pairs:
        yield (*path, k)
        yield from json_paths(v, (*path, k))


def get_at(value, path):
    for k in path:
        value = value[k]
    return value


def set_at(value, path, new):
    get_at(value, path[:-1])[path[-1]] = json.loads(json.dumps(new))


def failing_uses(files, into=None):
    """Use a snapshot in every way, and return the uses that refuse it with a proper error.

    The uses are ``load``, ``verify`` and, if ``into`` is given, ``into``. ``verify`` counts as
    refused if its report is not ok.
    """
    store = store_of(files)
    location = store.at(next(iter(files)).partition("/")[0])
    refused = []
    try:
        limpet.load(location)
    except (FormatError, StoreError) as e:
        assert_names_file(e)
        refused.append("load")
    try:
        snapshot = limpet.open(location)
        _ = snapshot.metadata, snapshot.keys()
        report = snapshot.verify()
    except (FormatError, StoreError) as e:
        assert_names_file(e)
        refused.append("verify")
    else:
        for problem in report.problems:
            assert_names_file(problem.error)
        refused += [] if report.ok else ["verify"]
    if into is not None:
        try:
            limpet.load(location, into=into)
        except (FormatError, StoreError) as e:
            assert_names_file(e)
            refused.append("into")
        except PlanError:
            refused.append("into")
    return refused


def assert_names_file(error):
    """Assert that an error about bytes names the file that contains them."""
    assert isinstance(error, FormatError | StoreError)
    file = error.fields.get("file") or error.fields.get("key")
    assert file, error
    assert len(str(error)) < 2000, error


def values_equal(a, b):
    """Return True if two values have the same type and are equal bit for bit."""
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True
