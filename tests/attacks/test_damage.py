"""Every damage to the files of a snapshot is told, with file, offset and leaf; none loads wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import DigestMismatch, FormatError, NotFound, StoreError
from holdfast.format.names import Version
from tests.forging import (
    FOLDER,
    Files,
    assert_named,
    index_key,
    manifest_key,
    same,
    saved,
    shard_key,
    store_of,
)

STEP = 23
"""The fast tests try every byte whose offset is a multiple of it; the slow ones try all."""


def tiny() -> dict[str, Any]:
    return {"w": torch.arange(8, dtype=torch.float32), "b": np.arange(3, dtype=np.int8), "n": 1}


def live() -> dict[str, Any]:
    return {"w": torch.full((8,), -1.0), "b": np.full(3, -1, np.int8), "n": -1}


@pytest.fixture(scope="module")
def files() -> Files:
    return saved(tiny())


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


def each(files: Files) -> Iterator[str]:
    yield from (manifest_key(files), index_key(files), shard_key(files))


def outcome(files: Files) -> tuple[Exception | None, list[Exception]]:
    """What ``load`` raised, if it did, and what ``verify`` told. What is loaded must be right."""
    place = store_of(files).at(FOLDER)
    raised = None
    try:
        assert same(holdfast.load(place), tiny()), "loaded silently wrong"
    except (FormatError, StoreError) as e:
        assert_named(e)
        raised = e
    try:
        told: list[Exception] = [p.error for p in holdfast.open(place).verify().problems]
    except (FormatError, StoreError) as e:
        told = [e]
    for error in told:
        assert_named(error)
    return raised, told


def check_flip(files: Files, file: str, at: int) -> None:
    raised, told = outcome({**files, file: flipped(files[file], at)})
    assert told, f"verify does not see byte {at} of {file}"
    if file == shard_key(files) and at < 4096:
        # no load reads the header of a shard; the values are right, and verify tells
        assert raised is None
    else:
        assert raised is not None, f"load does not see byte {at} of {file}"
    for error in (raised, *told):
        if error is not None and isinstance(error, DigestMismatch):
            assert error.fields["file"] == file.partition("/")[2]
            assert 0 <= error.fields["offset"] <= at
    if file == shard_key(files) and at >= 4096:
        assert isinstance(raised, DigestMismatch)
        assert set(raised.fields["leaves"]) == {"w", "b"}
        assert raised.fields["leaf"] in str(raised)


def test_a_flipped_bit_is_told(files: Files) -> None:
    for file in each(files):
        start = 4096 if file == shard_key(files) else 0
        for at in range(start, len(files[file]), STEP):
            check_flip(files, file, at)


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_is_told(files: Files) -> None:
    for file in each(files):
        for at in range(len(files[file])):
            check_flip(files, file, at)


def check_refused(files: Files) -> None:
    raised, told = outcome(files)
    assert raised is not None
    assert told


def test_a_file_cut_short_is_told(files: Files) -> None:
    for file in each(files):
        length = len(files[file])
        for cut in {*range(0, length, length // 20), 1, length - 1}:
            check_refused({**files, file: files[file][:cut]})


@pytest.mark.slow
def test_a_file_cut_at_any_length_is_told(files: Files) -> None:
    for file in each(files):
        for cut in range(len(files[file])):
            check_refused({**files, file: files[file][:cut]})


def test_a_file_that_is_missing_longer_doubled_or_zeros_is_told(files: Files) -> None:
    for file in each(files):
        data = files[file]
        for other in (data + data, data + b"\0", b"\0" + data, bytes(len(data)), b""):
            check_refused({**files, file: other})
        check_refused({k: v for k, v in files.items() if k != file})


def test_a_missing_manifest_is_no_snapshot(files: Files) -> None:
    place = store_of({k: v for k, v in files.items() if k != manifest_key(files)}).at(FOLDER)
    with pytest.raises(NotFound, match="never committed"):
        holdfast.load(place)


def test_zeros_for_any_part_are_told(files: Files) -> None:
    """What a power cut leaves of pages that were never written."""
    for file in each(files):
        data = files[file]
        for start in range(0, len(data), 256):
            stop = min(start + 256, len(data))
            holed = data[:start] + bytes(stop - start) + data[stop:]
            if holed != data:
                assert outcome({**files, file: holed})[1], (file, start)


def test_a_file_of_another_version_is_told(files: Files) -> None:
    state = tiny()
    state["w"] = state["w"] + 1
    other = saved(state)
    for ours, theirs in zip(each(files), each(other), strict=True):
        if ours != manifest_key(files):
            assert len(files[ours]) == len(other[theirs]), "the same in all but content"
        check_refused({**files, ours: other[theirs]})


def test_every_file_of_another_version_is_told_by_the_run(files: Files) -> None:
    moved = {k.replace(FOLDER, "version_8"): v for k, v in files.items()}
    with pytest.raises(FormatError, match="not where it was saved"):
        holdfast.Run(store_of(moved)).open(Version(8))


def test_a_load_into_live_state_says_that_it_is_not_valid(files: Files) -> None:
    for file in each(files):
        data = files[file]
        damaged = store_of({**files, file: flipped(data, len(data) - 5)}).at(FOLDER)
        state = live()
        with pytest.raises(FormatError) as e:
            holdfast.load(damaged, into=state)
        assert_named(e.value)
        if file == shard_key(files):
            assert e.value.fields["live_state"] == "not valid"
        else:
            assert same(state, live()), "nothing was touched"


def test_no_byte_that_failed_its_check_is_copied(files: Files) -> None:
    data = files[shard_key(files)]
    damaged = store_of({**files, shard_key(files): flipped(data, len(data) - 5)}).at(FOLDER)
    state = live()
    with pytest.raises(DigestMismatch):
        holdfast.load(damaged, into=state)
    assert same(state, live())


def test_a_part_can_be_loaded_beside_damage_and_verify_tells() -> None:
    state = {"a": torch.arange(1 << 15), "b": torch.arange(1 << 15)}
    files = saved(state)
    shard = shard_key(files)
    snapshot = holdfast.open(store_of(files).at(FOLDER))
    box = next(leaf for leaf in snapshot.indexes()[0].leaves if leaf.key == "b").boxes[0]
    place = store_of({**files, shard: flipped(files[shard], box.at + 77)}).at(FOLDER)
    assert same(holdfast.load(place, keys="a"), {"a": state["a"]})
    assert same(holdfast.open(place)["a"][5:7], state["a"][5:7])
    with pytest.raises(DigestMismatch) as e:
        holdfast.load(place, keys="b")
    assert (e.value.fields["leaf"], e.value.fields["offset"]) == ("b", box.at)
    (problem,) = holdfast.open(place).verify().problems
    assert (problem.file, problem.offset, problem.leaves) == (shard[10:], box.at, ("b",))


def test_verify_names_every_damage() -> None:
    files = saved({n: torch.full((1 << 15,), i) for i, n in enumerate("abcd")})
    shard = shard_key(files)
    data = files[shard]
    boxes = {x.key: x.boxes[0].at for i in _indexes(files) for x in i.leaves}
    for name in "ac":
        data = flipped(data, boxes[name] + 1)
    report = holdfast.open(store_of({**files, shard: data}).at(FOLDER)).verify()
    assert [p.leaves for p in report.problems] == [("a",), ("c",)]
    assert report.nbytes == len(data) + len(files[index_key(files)])


def _indexes(files: Files) -> Any:
    return holdfast.open(store_of(files).at(FOLDER)).indexes()


def test_the_same_on_a_disk(files: Files, tmp_path: Path) -> None:
    for number, file in enumerate(each(files)):
        for how in ("flip", "cut", "gone", "twice"):
            folder = tmp_path / f"{number}-{how}"
            for name, data in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            data = files[file]
            path = folder / file
            if how == "gone":
                path.unlink()
            else:
                changed = {"flip": flipped(data, len(data) - 9), "cut": data[:-9]}
                path.write_bytes(changed.get(how, data + data))
            with pytest.raises((FormatError, StoreError)) as e:
                holdfast.load(str(folder / FOLDER))
            assert_named(e.value)


def test_a_damaged_file_is_not_taken_for_a_store_that_failed(files: Files) -> None:
    """So that ``resume`` steps over the version."""
    for file in each(files):
        gone = {k: v for k, v in files.items() if k != file}
        error = NotFound if file == manifest_key(files) else FormatError
        with pytest.raises(error):
            holdfast.load(store_of(gone).at(FOLDER))
