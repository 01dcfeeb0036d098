"""Any input gives a valid result or a ``FormatError``, in bounded memory.

``FUZZ_EXAMPLES=n`` tries n random examples of each property, different in each run.
"""

import json
import os
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import limpet
from limpet.errors import FormatError
from limpet.format import tree
from limpet.format.index import decode_index
from limpet.format.safetensors import build_header, parse_header
from limpet.format.tree import check_tree
from tests.forging import (
    FOLDER,
    Files,
    failing_uses,
    files_of,
    forge,
    get_at,
    index_key,
    json_paths,
    manifest_key,
    save_to_files,
    seal,
    seal_body,
    sealed_content,
    set_at,
    shard_key,
    small_state,
    store_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant"),
]

_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
fuzz = settings(
    derandomize=not _EXAMPLES,
    max_examples=_EXAMPLES or 150,
    database=None,
    suppress_health_check=list(HealthCheck),
)

FILES: Files = {}


def files():
    if not FILES:
        FILES.update(save_to_files(small_state()))
    return FILES


def parse_or_none(parse, raw):
    """Return the result, or None after a ``FormatError`` that names the file."""
    try:
        return parse(raw, "file")
    except FormatError as e:
        error = e
    assert error.fields["file"] == "file"
    assert len(str(error)) < 2000
    return None


numbers = st.one_of(
    st.integers(-2, 10), st.integers(), st.sampled_from([1 << n for n in (31, 32, 53, 62, 63, 64)])
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.sampled_from(["float32", "0" * 32, "<f4", "|O", "nan", "AA==", "dict"]),
)  # fmt: skip
TAGS = (
    "dict ordered items of metadata list tuple set frozenset int float complex bytes bytearray"
    " scalar tensor array blob tied sparse layout shape parts coalesced values indices"
)
tags = st.sampled_from(TAGS.split())
jsons = st.recursive(
    scalars,
    lambda j: st.one_of(
        st.lists(j, max_size=4),
        st.dictionaries(tags, j, max_size=2),
        st.dictionaries(st.text(max_size=4), j, max_size=3),
    ),
    max_leaves=15,
)


@fuzz
@given(jsons)
@example({"items": [[{"list": []}, 1]], "of": "dict"})
@example({"scalar": [["O"], ""]})
@example({"scalar": [[[]], ""]})
@example({"set": [{"set": []}]})
@example({"complex": [{"float": "nan"}, {"tensor": []}]})
@example({"dict": {"a": {"array": ["uint8", [], "|u1"]}}})
def test_random_trees(node):
    """A tree that passes validation can be walked and decoded without an error."""
    root = {"dict": {"x": node}}
    leaves = parse_or_none(lambda _, file: check_tree(root, file), b"")
    if leaves is None:
        with suppress(FormatError):
            tree.decode(root, "", lambda n, k: n)
        return
    tree.decode(root, "", lambda n, k: n)
    found = dict(tree.walk(root))
    assert leaves.keys() <= found.keys()


def change(data, content):
    """Make one to three changes in a JSON document."""
    for _ in range(data.draw(st.integers(1, 3))):
        paths = list(json_paths(content))
        path = paths[data.draw(st.integers(0, len(paths) - 1))]
        kind = data.draw(st.sampled_from(["put", "delete", "copy", "near", "more"]))
        parent = get_at(content, path[:-1])
        old = parent[path[-1]]
        if kind == "delete":
            del parent[path[-1]]
        elif kind == "copy":
            set_at(content, path, get_at(content, paths[data.draw(st.integers(0, len(paths) - 1))]))
        elif kind == "near" and type(old) is int:
            parent[path[-1]] = old + data.draw(st.sampled_from([-4096, -8, -1, 1, 8, 4096]))
        elif kind == "more" and isinstance(parent, list):
            parent.append(json.loads(json.dumps(old)))
        else:
            parent[path[-1]] = data.draw(jsons)


@fuzz
@given(st.data())
def test_changed_manifests(data):
    failing_uses(forge(files(), manifest=lambda m: change(data, m)))


@fuzz
@given(st.data())
def test_changed_indexes(data):
    failing_uses(forge(files(), index=lambda i: change(data, i)))


@fuzz
@given(st.data())
def test_changed_headers(data):
    """If ``parse_header`` accepts a header, the data has no gaps and ends with the file."""
    raw = files()[shard_key(files())]
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(data, header)
    text = json.dumps(header).encode()
    changed = len(text).to_bytes(8, "little") + text + raw[8 + size :]
    parsed = parse_or_none(lambda r, f: parse_header(r, len(r), f), changed)
    if parsed is not None:
        begin, entries = parsed
        assert begin + (entries[-1].stop if entries else 0) == len(changed)
        assert all(a.stop == b.start for a, b in pairwise(entries))


@fuzz
@given(st.sampled_from(["manifest", "index"]), st.data())
def test_changed_bytes_with_a_valid_seal(which, data):
    """The content is no longer JSON, or JSON with a different meaning."""
    file = manifest_key(files()) if which == "manifest" else index_key(files())
    raw = files()[file]
    raw = raw if which == "index" else seal(sealed_content(raw)).split(b'",', 1)[1]
    start = data.draw(st.integers(0, len(raw)))
    stop = min(len(raw), start + data.draw(st.integers(0, 8)))
    raw = raw[:start] + data.draw(st.binary(max_size=8)) + raw[stop:]
    if which == "manifest":
        store = store_of({**files(), file: seal_body(raw)}).at(FOLDER)
        with suppress(FormatError):
            limpet.load(store)
    else:
        parse_or_none(decode_index, raw)


def test_the_original_files_are_valid():
    assert failing_uses(files()) == []
    assert files_of(store_of(files())) == files()
    header = build_header([("a", "F32", (2,), 0, 8)])
    assert parse_header(header, len(header) + 8, "f")[1][0].stop == 8
