"""Python's own zip reader can read our archives in the format of ``torch.save``."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.format.torchzip import combine_crc32, plan_archive


def archive(records: list[tuple[str, bytes]]) -> bytes:
    plan = plan_archive((name, len(raw)) for name, raw in records)
    out = bytearray(b"\xff" * plan.length)
    checksums = [zlib.crc32(raw) for _, raw in records]
    pieces = [
        *plan.encode_headers(checksums),
        *zip((r.data_offset for r in plan.records), (raw for _, raw in records), strict=True),
    ]
    written = 0
    for at, raw in pieces:
        assert at + len(raw) <= plan.length
        out[at : at + len(raw)] = raw
        written += len(raw)
    assert written == plan.length
    return bytes(out)


names = st.text("abc/é日", min_size=1, max_size=9)


sizes = st.one_of(st.binary(max_size=200), st.just(bytes(70_000)))


@given(st.dictionaries(names, sizes, max_size=6))
def test_every_record_can_be_read(records: dict[str, bytes]) -> None:
    raw = archive(list(records.items()))
    with zipfile.ZipFile(io.BytesIO(raw)) as found:
        assert found.testzip() is None
        assert found.namelist() == [f"archive/{name}" for name in records]
        for name, data in records.items():
            assert found.read(f"archive/{name}") == data


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_records_are_aligned_and_the_file_is_deterministic(contents: list[bytes]) -> None:
    records = [(str(i), raw) for i, raw in enumerate(contents)]
    plan = plan_archive((name, len(raw)) for name, raw in records)
    assert not any(r.data_offset % 64 for r in plan.records)
    large = plan_archive(
        [*((name, len(raw)) for name, raw in records), ("large", 1 << 16), ("x", 1)]
    )
    assert large.records[-2].data_offset % 4096 == 0
    assert archive(records) == archive(records)


def test_a_wrong_checksum_is_detected() -> None:
    plan = plan_archive([("a", 3)])
    raw = bytearray(plan.length)
    for at, piece in [
        *plan.encode_headers([zlib.crc32(b"xyz") ^ 1]),
        (plan.records[0].data_offset, b"xyz"),
    ]:
        raw[at : at + len(piece)] = piece
    assert zipfile.ZipFile(io.BytesIO(bytes(raw))).testzip() == "archive/a"


@pytest.mark.parametrize("length", [2**32 - 2, 2**32 - 1, 2**32, 5 * 2**32])
def test_records_and_offsets_of_more_than_32_bits(tmp_path: Path, length: int) -> None:
    """Check the zip headers of a sparse file."""
    plan = plan_archive([("a", length), ("b", 5), ("c", 2**33), ("d", 1)])
    checksums = [1, zlib.crc32(b"hello"), 3, zlib.crc32(b"!")]
    path = tmp_path / "holes.pt"
    with path.open("wb") as out:
        out.truncate(plan.length)
        for at, raw in [
            *plan.encode_headers(checksums),
            (plan.records[1].data_offset, b"hello"),
            (plan.records[3].data_offset, b"!"),
        ]:
            out.seek(at)
            out.write(raw)
        assert out.seek(0, io.SEEK_END) == plan.length
    with zipfile.ZipFile(path) as found:
        assert [i.file_size for i in found.infolist()] == [length, 5, 2**33, 1]
        assert [i.CRC for i in found.infolist()] == checksums
        assert [i.header_offset for i in found.infolist()] == [
            r.header_offset for r in plan.records
        ]
        assert found.read("archive/b") == b"hello"
        assert found.read("archive/d") == b"!"


@pytest.mark.slow
def test_more_than_65535_records() -> None:
    raw = archive([(f"data/{i}", b"x") for i in range(70_000)])
    with zipfile.ZipFile(io.BytesIO(raw)) as found:
        assert len(found.namelist()) == 70_000
        assert found.read("archive/data/69999") == b"x"


@given(st.lists(st.binary(max_size=300)))
def test_checksums_of_parts_combine(parts: list[bytes]) -> None:
    assert combine_crc32((len(p), zlib.crc32(p)) for p in parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("length", [0, 1, 4 << 20, 2**40 + 3])
def test_checksums_of_long_parts_combine(length: int) -> None:
    """Combining in two steps gives the same result as in one, also for a long part."""
    a, b = length // 3, length - length // 3
    one = combine_crc32([(3, zlib.crc32(b"abc")), (length, 0)])
    assert one == combine_crc32([(3, zlib.crc32(b"abc")), (a, 0), (b, 0)])
    if length <= 4 << 20:
        zeros = zlib.crc32(bytes(length))
        assert combine_crc32([(3, zlib.crc32(b"abc")), (length, zeros)]) == zlib.crc32(
            b"abc" + bytes(length)
        )
