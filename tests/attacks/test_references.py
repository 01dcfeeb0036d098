"""Lies of number 2: references that lead astray, overlap, or claim what is not there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.buffers import shared_pool
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location
from holdfast.engine.transform.copy import copy_snapshot
from holdfast.errors import FormatError, ManifestInvalid, StoreError
from holdfast.format.index import decode_index
from holdfast.format.manifest import ShardReference, decode_manifest
from holdfast.format.names import Version
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from tests import forging
from tests.attacks.test_fuzz import change
from tests.attacks.test_lies import WRONG
from tests.forging import (
    Files,
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


def state(step: int) -> dict[str, Any]:
    """Two leaves of several chunks; one element of each changes at a step."""
    a, b = np.arange(500.0), np.arange(1500, dtype=np.int16).reshape(30, 50)
    a[3], b[20, 7] = -step, -step
    return {"a": a, "b": b, "step": step}


@pytest.fixture(scope="module")
def files() -> Files:
    """Three versions, each the base of the next: the last refers to files of both others."""
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("planning.shard_layout", "saving.image", "planning.read_plan"):
            patch.setattr(f"holdfast.engine.{module}.BLOCK_SIZE", 1024)
        patch.setattr("holdfast.engine.planning.shard_layout.SMALL_BOX_BYTES", 64)
        last = None
        for step in range(3):
            held = state(step)
            held["b"] = state(min(step, 1))["b"]
            place = Location(store, f"version_{step}")
            label = VersionMetadata(step=step)
            last = finish_save(
                begin_save(place, held, label, shared_pool(), stage_now=False, base=last)
            )
    assert last is not None
    assert last.bases == {Version(0), Version(1)}
    return files_of(store)


def lie(files: Files, manifest: Change | None = None, index: Change | None = None) -> Files:
    """The run with a changed manifest or index of its last version; the digests are right again."""
    return forging.forge(files, manifest, index, folder="version_2/", format_number=2)


def refused(files: Files) -> list[str]:
    """The ways of using the last version that refuse it, each with a proper error."""
    store = store_of(files)
    found = []
    ways: dict[str, Callable[[], Any]] = {
        "load": lambda: load_snapshot(Run(store).open(Version(2))),
        "copy": lambda: copy_snapshot(Run(store).open(Version(2)), Location(MemoryStore(), "x")),
        "verify": lambda: Run(store).open(Version(2)).verify(),
    }
    for name, use in ways.items():
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


ALL = ["load", "copy", "verify"]


def test_unchanged_it_is_sound(files: Files) -> None:
    assert refused(lie(files)) == []
    wanted = {**state(2), "b": state(1)["b"]}
    assert values_equal(load_snapshot(Run(store_of(files)).open(Version(2))), wanted)
    assert lie(files)[MANIFEST] == files[MANIFEST]


def shard(m: Json) -> Json:
    return m["shards"][0]


def refer(number: int = 0, /, **changes: Json) -> Change:
    return lambda m: shard(m)["refers"][number].update(changes)


def path_to(path: str) -> Change:
    return refer(path=path)


NAME = "shard-00000-of-00001.000000000000.safetensors"
MANIFEST_LIES: dict[str, Change] = {
    "chain-zero": lambda m: m.update(chain=0),
    "chain-negative": lambda m: m.update(chain=-1),
    "chain-huge": lambda m: m.update(chain=1 << 31),
    "chain-float": lambda m: m.update(chain=1.0),
    "chain-gone": lambda m: m.pop("chain"),
    "refers-gone": lambda m: shard(m).pop("refers"),
    "refers-null": lambda m: shard(m).update(refers=None),
    "refers-none": lambda m: shard(m).update(refers=[]),
    "refers-twice": lambda m: shard(m)["refers"].append(copy.deepcopy(shard(m)["refers"][0])),
    "refers-fewer": lambda m: shard(m)["refers"].pop(),
    "refers-unused": lambda m: shard(m)["refers"].append(
        {"path": f"../version_9/{NAME}", "length": 10_000, "bytes": 1}
    ),
    "refers-swapped": lambda m: shard(m)["refers"].reverse(),
    "unknown-field": refer(digest="0" * 32),
    "path-own": lambda m: refer(path=f"../version_2/{shard(m)['name']}")(m),
    "path-absent": path_to(f"../version_9/{NAME}"),
    "path-up": path_to(f"../../version_0/{NAME}"),
    "path-out": path_to(f"../../../etc/{NAME}"),
    "path-here": path_to(NAME),
    "path-dot": path_to(f"../version_0/./{NAME}"),
    "path-absolute": path_to(f"/version_0/{NAME}"),
    "path-bare": path_to(f"version_0/{NAME}"),
    "path-manifest": path_to("../version_0/manifest.json"),
    "path-index": path_to("../version_0/shard-00000-of-00001.000000000000.index.json"),
    "path-folder": path_to(f"../other/{NAME}"),
    "path-version": path_to(f"../version_01/{NAME}"),
    "path-below": path_to(f"../version_0/x/{NAME}"),
    "path-nul": path_to(f"../version_0/{NAME}\0"),
    "path-newline": path_to(f"../version_0/{NAME}\n"),
    "path-empty": path_to(""),
    "length-shorter": lambda m: refer(length=shard(m)["refers"][0]["length"] - 1)(m),
    "length-longer": lambda m: refer(length=shard(m)["refers"][0]["length"] + 1)(m),
    "length-zero": refer(length=0),
    "length-huge": refer(length=HUGE),
    "length-63": refer(length=1 << 63),
    "bytes-zero": refer(bytes=0),
    "bytes-fewer": lambda m: refer(bytes=shard(m)["refers"][0]["bytes"] - 8)(m),
    "bytes-more": lambda m: refer(bytes=shard(m)["refers"][0]["bytes"] + 8)(m),
    "bytes-all": lambda m: refer(bytes=shard(m)["refers"][0]["length"] + 1)(m),
    "bytes-64": refer(bytes=1 << 64),
    "own-length": lambda m: shard(m).update(length=shard(m)["length"] + 1),
}


@pytest.mark.parametrize("name", MANIFEST_LIES)
def test_a_lie_in_the_manifest_is_refused(files: Files, name: str) -> None:
    assert refused(lie(files, manifest=MANIFEST_LIES[name])) == ALL


def run(number: int, **changes: int) -> Change:
    def edit(i: Json) -> None:
        row = i["runs"][number]
        for field, by in changes.items():
            row[["chunk", "file", "at"].index(field)] += by

    return edit


def first_of(file: int) -> Callable[[Json], int]:
    return lambda i: next(n for n, r in enumerate(i["runs"]) if r[1] == file)


def edit_first(file: int, field: int, to: Callable[[Json, Json], int]) -> Change:
    def edit(i: Json) -> None:
        row = i["runs"][first_of(file)(i)]
        row[field] = to(i, row)

    return edit


def overlap(i: Json) -> None:
    """Two runs read the same bytes of the base: so could a small base back a state of any size."""
    mine = [n for n, r in enumerate(i["runs"]) if r[1] == 1]
    i["runs"][mine[1]][2] = i["runs"][mine[0]][2]


def grow(i: Json) -> None:
    """A whole of 2**62 bytes."""
    i["cuts"][-1] = HUGE


INDEX_LIES: dict[str, Change] = {
    "format-one": lambda i: i.update(format=1),
    "format-three": lambda i: i.update(format=3),
    "runs-gone": lambda i: i.pop("runs"),
    "runs-none": lambda i: i.update(runs=[]),
    "runs-null": lambda i: i.update(runs=None),
    "runs-short": lambda i: i["runs"].pop(),
    "runs-late": run(0, chunk=1),
    "runs-header": lambda i: i["runs"].insert(0, [0, 0, 0]),
    "runs-beyond": lambda i: i["runs"].append([len(i["cuts"]), 0, 0]),
    "runs-twice": lambda i: i["runs"].append(list(i["runs"][-1])),
    "runs-unordered": lambda i: i["runs"].reverse(),
    "run-two": lambda i: i["runs"][0].pop(),
    "run-four": lambda i: i["runs"][0].append(0),
    "file-negative": edit_first(1, 1, lambda i, r: -1),
    "file-beyond": edit_first(1, 1, lambda i, r: 3),
    "file-huge": edit_first(1, 1, lambda i, r: 1 << 63),
    "file-other": edit_first(1, 1, lambda i, r: 2),
    "file-own": edit_first(1, 1, lambda i, r: 0),
    "own-elsewhere": edit_first(0, 1, lambda i, r: 1),
    "own-later": edit_first(0, 2, lambda i, r: r[2] + 8),
    "own-in-the-header": edit_first(0, 2, lambda i, r: 0),
    "at-negative": edit_first(1, 2, lambda i, r: -1),
    "at-shifted": edit_first(1, 2, lambda i, r: r[2] + 8),
    "at-beyond": edit_first(1, 2, lambda i, r: 1 << 40),
    "at-62": edit_first(1, 2, lambda i, r: HUGE),
    "at-63": edit_first(1, 2, lambda i, r: (1 << 63) - 1),
    "at-64": edit_first(1, 2, lambda i, r: 1 << 64),
    "overlap": overlap,
    "whole-huge": grow,
    "whole-63": lambda i: i["cuts"].__setitem__(-1, 1 << 63),
    "length-whole": lambda i: i.update(length=i["cuts"][-1]),
    "header-digest": lambda i: i["digests"].__setitem__(0, "0" * 32),
    "digest-referred": lambda i: i["digests"].__setitem__(
        i["runs"][first_of(1)(i)][0], "0" * 32
    ),
    "leaf-renamed": lambda i: i["leaves"][0].update(key="c"),
}  # fmt: skip
UNREAD = {"header-digest": ["copy", "verify"]}


@pytest.mark.parametrize("name", INDEX_LIES)
def test_a_lie_in_an_index_is_refused(files: Files, name: str) -> None:
    assert refused(lie(files, index=INDEX_LIES[name])) == UNREAD.get(name, ALL)


def test_the_fields_of_a_number_go_with_it(files: Files) -> None:
    one = sealed_content(files["version_0/manifest.json"])
    with pytest.raises(ManifestInvalid, match="refers"):
        decode_manifest(seal(one, 2), "f")
    with pytest.raises(ManifestInvalid, match=r"chain|refers"):
        decode_manifest(seal(sealed_content(files[MANIFEST]), 1), "f")
    one["chain"] = 0
    with pytest.raises(ManifestInvalid, match="chain"):
        decode_manifest(seal(one, 1), "f")
    with pytest.raises(ManifestInvalid, match="runs"):
        decode_index(files[index_key(files, "version_2/")], "f")


def test_a_small_base_backs_no_large_state(files: Files) -> None:
    """Every chunk has bytes of its own behind it, so a shape asks for no more than there are."""

    def index(i: Json) -> None:
        i["leaves"] = [
            {"key": "a", "dtype": "uint8", "shape": [1 << 24],
             "boxes": [{"offsets": [0], "sizes": [1 << 24], "at": 4096}]}
        ]  # fmt: skip
        i["cuts"] = [4096, *(4096 + (n << 10) for n in range(1, (1 << 14) + 1))]
        i["digests"] = ["0" * 32] * len(i["cuts"])
        i["runs"] = [[c, 1, 4096] for c in range(1, len(i["cuts"]))]
        i["length"] = 4096

    def manifest(m: Json) -> None:
        m["tree"] = {"dict": {"a": {"tensor": ["uint8", [1 << 24]]}}}
        shard(m)["length"] = 4096

    assert refused(lie(files, manifest, index)) == ALL


# -- the schema ----------------------------------------------------------------------------------

BEYOND = {
    "refers-fewer", "refers-none", "refers-twice", "refers-unused", "refers-swapped", "path-own",
    "path-absent", "path-newline", "chain-float", "length-shorter", "length-longer", "bytes-fewer",
    "bytes-more", "bytes-all", "own-length", "runs-late", "runs-short", "runs-beyond", "runs-twice",
    "runs-unordered", "file-beyond", "file-huge", "file-other", "file-own", "own-elsewhere",
    "own-later", "own-in-the-header", "at-shifted", "at-beyond", "overlap", "length-whole",
    "header-digest", "digest-referred", "leaf-renamed",
}  # fmt: skip
"""Lies that a schema cannot tell."""


def test_the_schema_takes_what_we_write_and_refuses_the_lies_that_it_can(files: Files) -> None:
    key = index_key(files, "version_2/")
    for raw in (files[MANIFEST], files[key]):
        assert ANY.is_valid(json.loads(raw))
    for name, edit in MANIFEST_LIES.items():
        good = KINDS["manifest"].is_valid(json.loads(lie(files, manifest=edit)[MANIFEST]))
        assert good == (name in BEYOND), name
    for name, edit in INDEX_LIES.items():
        good = KINDS["index"].is_valid(json.loads(lie(files, index=edit)[key]))
        assert good == (name in BEYOND), name
    one = json.loads(files["version_0/manifest.json"])
    assert not KINDS["manifest"].is_valid({**one, "chain": 1})
    assert not KINDS["manifest"].is_valid({**one, "format": 2})


# -- every field, every wrong value --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("which", ["manifest", "index"])
def test_any_field_with_any_wrong_value(files: Files, which: str) -> None:
    """Nothing but proper errors; what is loaded nevertheless is what was saved."""
    wanted = {**state(2), "b": state(1)["b"]}
    raw = files[MANIFEST] if which == "manifest" else files[index_key(files, "version_2/")]
    original = sealed_content(raw) if which == "manifest" else json.loads(raw)
    chosen = [
        p for p in json_paths(original) if p[0] in ("shards", "chain", "runs", "length", "header")
    ]
    for path in chosen:
        for wrong in WRONG:
            if get_at(original, path) == wrong:
                continue
            edit = {which: lambda c: set_at(c, path, wrong)}  # noqa: B023
            forged = lie(files, **edit)
            if "load" not in refused(forged):
                assert values_equal(load_snapshot(Run(store_of(forged)).open(Version(2))), wanted)


@pytest.mark.slow
@settings(
    derandomize=True, max_examples=100, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.sampled_from(["manifest", "index"]), st.data())
def test_what_was_changed_anywhere(files: Files, which: str, data: st.DataObject) -> None:
    refused(lie(files, **{which: lambda c: change(data, c)}))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[list[int]], list[int]]:
    """Runs, sizes of chunks, (length, bytes) of the files, and the shard's length: sound, but for
    at most one number that is off by a little."""
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


@settings(derandomize=True, max_examples=400, deadline=None)
@given(layouts())
def test_runs_are_taken_only_if_every_chunk_has_a_place_of_its_own(
    layout: tuple[list[list[int]], list[int], list[list[int]], list[int]],
) -> None:
    """Against the rule in slow and plain words."""
    runs, sizes, refers, (length,) = layout
    cuts = [8]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    total = cuts[-1] - 8
    document = {
        "format": 2, "shard": "s", "length": length, "header": 8,
        "leaves": [{"key": "a", "dtype": "uint8", "shape": [total],
                    "boxes": [{"offsets": [0], "sizes": [total], "at": 8}]}],
        "cuts": cuts, "digests": ["0" * 32] * len(cuts), "runs": runs,
    }  # fmt: skip
    files = [ShardReference(f"../version_{n}/x", *told) for n, told in enumerate(refers)]
    limits = [length, *(f.length for f in files)]
    wanted: dict[tuple[int, int], int] = {(0, at): 0 for at in range(8)}
    sound = bool(runs) and runs[0][0] == 1
    places = {}
    for n, (chunk, file, origin) in enumerate(runs):
        end = runs[n + 1][0] if n + 1 < len(runs) else len(cuts)
        sound &= 0 < chunk < end <= len(cuts) and 0 <= file < len(limits) and origin >= 0
        for c in range(chunk, end if sound else chunk):
            start = origin + cuts[c - 1] - cuts[chunk - 1]
            places[c] = (file, start)
            for byte in range(start, start + cuts[c] - cuts[c - 1]):
                sound &= (file, byte) not in wanted and byte < limits[file]
                wanted[file, byte] = c
    own = {byte for file, byte in wanted if file == 0}
    sound &= own == set(range(length))
    for n, told in enumerate(files, 1):
        sound &= sum(file == n for file, _ in wanted) == told.bytes
    try:
        index = decode_index(json.dumps(document).encode(), "f", files)
    except ManifestInvalid:
        assert not sound
    else:
        assert sound
        assert index.chunk_refs is not None
        for c, place in places.items():
            assert (index.chunk_refs.files[c], index.chunk_refs.offsets[c]) == place
