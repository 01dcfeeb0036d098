"""Invalid references in format 2: to wrong files, overlapping, or beyond the end of a file."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet.buffers import shared_pool
from limpet.convert.copy import copy_snapshot
from limpet.errors import FormatError, ManifestInvalid, StoreError
from limpet.format.index import decode_index
from limpet.format.manifest import ShardReference, decode_manifest
from limpet.format.names import Version
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.run.run import Run
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.storage.memory import MemoryStore
from tests import forging
from tests.attacks.test_fuzz import change
from tests.attacks.test_invalid_files import WRONG_VALUES
from tests.forging import (
    Json,
    assert_names_file,
    files_of,
    get_at,
    index_key,
    json_paths,
    seal,
    sealed_content,
    set_at,
    store_of,
    values_equal,
)
from tests.format.test_schema import ANY, KINDS

HUGE = 1 << 62
MANIFEST = "version_2/manifest.json"

Change = Callable[[Json], object]


def state(step):
    """Return two leaves of several chunks. One element of each changes in every step."""
    a, b = np.arange(500.0), np.arange(1500, dtype=np.int16).reshape(30, 50)
    a[3], b[20, 7] = -step, -step
    return {"a": a, "b": b, "step": step}


@pytest.fixture(scope="module")
def files():
    """Return three versions, each based on the previous one. The last refers to both others."""
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("layout.shard_layout", "saving.image", "layout.read_plan"):
            patch.setattr(f"limpet.{module}.BLOCK_SIZE", 1024)
        patch.setattr("limpet.layout.shard_layout.SMALL_BOX_BYTES", 64)
        last = None
        for step in range(3):
            current_state = state(step)
            current_state["b"] = state(min(step, 1))["b"]
            location = Location(store, f"version_{step}")
            metadata = VersionMetadata(step=step)
            last = finish_save(
                begin_save(
                    location, current_state, metadata, shared_pool(), stage_now=False, base=last
                )
            )
    assert last is not None
    assert last.bases == {Version(0), Version(1)}
    return files_of(store)


def forge_last_version(files, manifest=None, index=None):
    """Change the manifest or index of the last version, and correct the digests."""
    return forging.forge(files, manifest, index, folder="version_2/")


def rejecting_uses(files):
    """Return the uses of the last version that reject it, each with a proper error."""
    store = store_of(files)
    found = []
    uses: dict[str, Callable[[], Any]] = {
        "load": lambda: load_snapshot(reader_of(Run(store).open(Version(2)))),
        "copy": lambda: copy_snapshot(
            reader_of(Run(store).open(Version(2))), Location(MemoryStore(), "x")
        ),
        "verify": lambda: Run(store).open(Version(2)).verify(),
    }
    for name, use in uses.items():
        try:
            made = use()
        except (FormatError, StoreError) as e:
            assert_names_file(e)
            found.append(name)
        else:
            problems = made.problems if name == "verify" else ()
            for problem in problems:
                assert_names_file(problem.error)
            found += ["verify"] if problems else []
    return found


ALL_USES = ["load", "copy", "verify"]


def test_the_unchanged_version_is_valid(files):
    assert rejecting_uses(forge_last_version(files)) == []
    expected = {**state(2), "b": state(1)["b"]}
    assert values_equal(load_snapshot(reader_of(Run(store_of(files)).open(Version(2)))), expected)
    assert forge_last_version(files)[MANIFEST] == files[MANIFEST]


def shard(m):
    return m["shards"][0]


def refer(number=0, /, **changes):
    return lambda m: shard(m)["refers"][number].update(changes)


def path_to(path):
    return refer(path=path)


NAME = "shard-00000-of-00001.000000000000.safetensors"
MANIFEST_EDITS: dict[str, Change] = {
    "chain-zero": lambda m: m.update(chain=0),
    "chain-huge": lambda m: m.update(chain=1 << 31),
    "chain-gone": lambda m: m.pop("chain"),
    "refers-gone": lambda m: shard(m).pop("refers"),
    "refers-none": lambda m: shard(m).update(refers=[]),
    "refers-twice": lambda m: shard(m)["refers"].append(copy.deepcopy(shard(m)["refers"][0])),
    "refers-fewer": lambda m: shard(m)["refers"].pop(),
    "refers-unused": lambda m: shard(m)["refers"].append(
        {"path": f"../version_9/{NAME}", "length": 10_000, "bytes": 1}
    ),
    "refers-swapped": lambda m: shard(m)["refers"].reverse(),
    "unknown-field": refer(digest="0" * 32),
    "path-own": lambda m: refer(path=f"../version_2/{shard(m)['path']}")(m),
    "path-absent": path_to(f"../version_9/{NAME}"),
    "path-up": path_to(f"../../version_0/{NAME}"),
    "path-out": path_to(f"../../../etc/{NAME}"),
    "path-here": path_to(NAME),
    "path-absolute": path_to(f"/version_0/{NAME}"),
    "path-manifest": path_to("../version_0/manifest.json"),
    "path-folder": path_to(f"../other/{NAME}"),
    "path-version": path_to(f"../version_01/{NAME}"),
    "path-nul": path_to(f"../version_0/{NAME}\0"),
    "length-shorter": lambda m: refer(length=shard(m)["refers"][0]["length"] - 1)(m),
    "length-longer": lambda m: refer(length=shard(m)["refers"][0]["length"] + 1)(m),
    "length-zero": refer(length=0),
    "length-huge": refer(length=HUGE),
    "bytes-zero": refer(bytes=0),
    "bytes-fewer": lambda m: refer(bytes=shard(m)["refers"][0]["bytes"] - 8)(m),
    "bytes-more": lambda m: refer(bytes=shard(m)["refers"][0]["bytes"] + 8)(m),
    "bytes-all": lambda m: refer(bytes=shard(m)["refers"][0]["length"] + 1)(m),
    "own-length": lambda m: shard(m).update(length=shard(m)["length"] + 1),
}


@pytest.mark.parametrize("name", MANIFEST_EDITS)
def test_an_invalid_manifest_is_rejected(files, name):
    assert rejecting_uses(forge_last_version(files, manifest=MANIFEST_EDITS[name])) == ALL_USES


def run(number, **changes):
    def edit(i):
        row = i["runs"][number]
        for field, by in changes.items():
            row[["chunk", "file", "at"].index(field)] += by

    return edit


def first_of(file):
    return lambda i: next(n for n, r in enumerate(i["runs"]) if r[1] == file)


def edit_first(file, field, to):
    def edit(i):
        row = i["runs"][first_of(file)(i)]
        row[field] = to(i, row)

    return edit


def overlap(i):
    """Make two runs read the same bytes of the base, so that a small base could fill any state."""
    base_runs = [n for n, r in enumerate(i["runs"]) if r[1] == 1]
    i["runs"][base_runs[1]][2] = i["runs"][base_runs[0]][2]


def grow(i):
    """Make the shard's data 2**62 bytes long."""
    i["cuts"][-1] = HUGE


INDEX_EDITS: dict[str, Change] = {
    "format-one": lambda i: i.update(format=1),
    "runs-gone": lambda i: i.pop("runs"),
    "runs-none": lambda i: i.update(runs=[]),
    "runs-short": lambda i: i["runs"].pop(),
    "runs-late": run(0, chunk=1),
    "runs-header": lambda i: i["runs"].insert(0, [0, 0, 0]),
    "runs-beyond": lambda i: i["runs"].append([len(i["cuts"]), 0, 0]),
    "runs-twice": lambda i: i["runs"].append(list(i["runs"][-1])),
    "runs-unordered": lambda i: i["runs"].reverse(),
    "run-two": lambda i: i["runs"][0].pop(),
    "file-negative": edit_first(1, 1, lambda i, r: -1),
    "file-beyond": edit_first(1, 1, lambda i, r: 3),
    "file-other": edit_first(1, 1, lambda i, r: 2),
    "file-own": edit_first(1, 1, lambda i, r: 0),
    "own-elsewhere": edit_first(0, 1, lambda i, r: 1),
    "own-later": edit_first(0, 2, lambda i, r: r[2] + 8),
    "own-in-the-header": edit_first(0, 2, lambda i, r: 0),
    "at-negative": edit_first(1, 2, lambda i, r: -1),
    "at-shifted": edit_first(1, 2, lambda i, r: r[2] + 8),
    "at-beyond": edit_first(1, 2, lambda i, r: 1 << 40),
    "at-63": edit_first(1, 2, lambda i, r: (1 << 63) - 1),
    "overlap": overlap,
    "whole-huge": grow,
    "length-whole": lambda i: i.update(length=i["cuts"][-1]),
    "header-digest": lambda i: i["digests"].__setitem__(0, "0" * 32),
    "digest-referred": lambda i: i["digests"].__setitem__(
        i["runs"][first_of(1)(i)][0], "0" * 32
    ),
    "leaf-renamed": lambda i: i["leaves"][0].update(key="c"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEX_EDITS)
def test_an_invalid_index_is_rejected(files, name):
    assert rejecting_uses(forge_last_version(files, index=INDEX_EDITS[name])) == ALL_USES


def test_a_full_version_has_no_chain_and_no_runs(files):
    full = sealed_content(files["version_0/manifest.json"])
    assert full["chain"] == 0
    with pytest.raises(ManifestInvalid, match="chain is not 0"):
        decode_manifest(seal({**full, "chain": 1}), "f")
    with pytest.raises(ManifestInvalid, match="boxes without gaps"):
        decode_index(files[index_key(files, "version_2/")], "f")
    index = json.loads(files[index_key(files, "version_0/")])
    assert index["runs"] == []
    with pytest.raises(ManifestInvalid, match="runs"):
        decode_index(json.dumps(index).encode(), "f", [ShardReference("../version_1/x", 9, 9)])


def test_a_small_base_cannot_fill_a_large_state(files):
    """Every chunk needs its own bytes, so a shape cannot exceed the size of the files."""

    def index(i):
        i["leaves"] = [
            {"key": "a", "dtype": "uint8", "shape": [1 << 24],
             "boxes": [{"offsets": [0], "sizes": [1 << 24], "at": 4096}]}
        ]  # fmt: skip
        i["cuts"] = [4096, *(4096 + (n << 10) for n in range(1, (1 << 14) + 1))]
        i["digests"] = ["0" * 32] * len(i["cuts"])
        i["runs"] = [[c, 1, 4096] for c in range(1, len(i["cuts"]))]
        i["length"] = 4096

    def manifest(m):
        m["tree"] = {"dict": {"a": {"tensor": ["uint8", [1 << 24]]}}}
        shard(m)["length"] = 4096

    assert rejecting_uses(forge_last_version(files, manifest, index)) == ALL_USES


UNDETECTABLE = {
    "refers-fewer", "refers-none", "refers-twice", "refers-unused", "refers-swapped", "path-own",
    "path-absent", "chain-zero", "length-shorter", "length-longer",
    "bytes-fewer", "runs-none",
    "bytes-more", "bytes-all", "own-length", "runs-late", "runs-short", "runs-beyond", "runs-twice",
    "runs-unordered", "file-beyond", "file-other", "file-own", "own-elsewhere",
    "own-later", "own-in-the-header", "at-shifted", "at-beyond", "overlap", "length-whole",
    "header-digest", "digest-referred", "leaf-renamed",
}  # fmt: skip
"""Invalid values that a schema cannot detect."""


def test_the_schema_accepts_valid_files_and_rejects_invalid_ones_where_it_can(files):
    key = index_key(files, "version_2/")
    for raw in (files[MANIFEST], files[key]):
        assert ANY.is_valid(json.loads(raw))
    for name, edit in MANIFEST_EDITS.items():
        is_valid = KINDS["manifest"].is_valid(
            json.loads(forge_last_version(files, manifest=edit)[MANIFEST])
        )
        assert is_valid == (name in UNDETECTABLE), name
    for name, edit in INDEX_EDITS.items():
        is_valid = KINDS["index"].is_valid(json.loads(forge_last_version(files, index=edit)[key]))
        assert is_valid == (name in UNDETECTABLE), name
    one = json.loads(files["version_0/manifest.json"])
    assert not KINDS["manifest"].is_valid({**one, "limpet": 2})


@pytest.mark.slow
@pytest.mark.parametrize("which", ["manifest", "index"])
def test_any_field_with_any_wrong_value(files, which):
    """All errors are expected ones. A load that succeeds returns what was saved."""
    expected = {**state(2), "b": state(1)["b"]}
    raw = files[MANIFEST] if which == "manifest" else files[index_key(files, "version_2/")]
    original = sealed_content(raw) if which == "manifest" else json.loads(raw)
    chosen = [
        p for p in json_paths(original) if p[0] in ("shards", "chain", "runs", "length", "header")
    ]
    for path in chosen:
        for wrong in WRONG_VALUES:
            if get_at(original, path) == wrong:
                continue
            edit = {which: lambda c: set_at(c, path, wrong)}  # noqa: B023
            forged = forge_last_version(files, **edit)
            if "load" not in rejecting_uses(forged):
                assert values_equal(
                    load_snapshot(reader_of(Run(store_of(forged)).open(Version(2)))), expected
                )


@pytest.mark.slow
@settings(
    derandomize=True, max_examples=100,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.sampled_from(["manifest", "index"]), st.data())
def test_random_changes(files, which, data):
    rejecting_uses(forge_last_version(files, **{which: lambda c: change(data, c)}))


@st.composite
def layouts(draw):
    """Draw runs, sizes of chunks, (length, bytes) of the files, and the shard's length.

    They are valid, except that at most one number may be slightly wrong.
    """
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    files = [draw(st.integers(0, 2)) for _ in sizes]
    ends, at, used = [8, 0, 0], [0] * len(sizes), [0, 0, 0]
    for chunk in draw(st.permutations(range(len(sizes)))):
        file = files[chunk]
        ends[file] += draw(st.integers(0, 2)) if file else 0
        at[chunk] = ends[file]
        ends[file] += sizes[chunk]
        used[file] += sizes[chunk]
    runs: list[list[int]] = []
    for c, (file, where) in enumerate(zip(files, at, strict=True)):
        joined = c > 0 and (file, where) == (files[c - 1], at[c - 1] + sizes[c - 1])
        if not joined or draw(st.booleans()):
            runs.append([c + 1, file, where])
    refers = [[ends[n] + draw(st.integers(0, 1)), used[n]] for n in (1, 2)]
    length = [ends[0]]
    if draw(st.integers(0, 3)):
        row = draw(st.sampled_from([*runs, *runs, *refers, length]))
        row[draw(st.integers(0, len(row) - 1))] += draw(st.sampled_from([-2, -1, 1, 2]))
    if refers[1][1] == 0:
        refers.pop()
    return runs, sizes, refers, length


@settings(derandomize=True, max_examples=400)
@given(layouts())
def test_runs_are_accepted_only_if_no_two_chunks_share_bytes(layout):
    """Compare with a slow and simple implementation of the rule."""
    runs, sizes, refers, (length,) = layout
    cuts = [8]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    total = cuts[-1] - 8
    document = {
        "limpet": 1, "shard": "s", "length": length, "header": 8,
        "leaves": [{"key": "a", "dtype": "uint8", "shape": [total],
                    "boxes": [{"offsets": [0], "sizes": [total], "at": 8}]}],
        "cuts": cuts, "digests": ["0" * 32] * len(cuts), "runs": runs,
    }  # fmt: skip
    files = [ShardReference(f"../version_{n}/x", *reference) for n, reference in enumerate(refers)]
    limits = [length, *(f.length for f in files)]
    used_bytes: dict[tuple[int, int], int] = {(0, at): 0 for at in range(8)}
    valid = bool(runs) and runs[0][0] == 1
    expected_refs = {}
    for n, (chunk, file, origin) in enumerate(runs):
        end = runs[n + 1][0] if n + 1 < len(runs) else len(cuts)
        valid &= 0 < chunk < end <= len(cuts) and 0 <= file < len(limits) and origin >= 0
        for c in range(chunk, end if valid else chunk):
            start = origin + cuts[c - 1] - cuts[chunk - 1]
            expected_refs[c] = (file, start)
            for byte in range(start, start + cuts[c] - cuts[c - 1]):
                valid &= (file, byte) not in used_bytes and byte < limits[file]
                used_bytes[file, byte] = c
    own = {byte for file, byte in used_bytes if file == 0}
    valid &= own == set(range(length))
    for n, reference in enumerate(files, 1):
        valid &= sum(file == n for file, _ in used_bytes) == reference.bytes
    try:
        index = decode_index(json.dumps(document).encode(), "f", files)
    except ManifestInvalid:
        assert not valid
    else:
        assert valid
        assert index.chunk_refs is not None
        for c, ref in expected_refs.items():
            assert (index.chunk_refs.files[c], index.chunk_refs.offsets[c]) == ref
