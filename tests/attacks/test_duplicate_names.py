"""Every JSON file with two members of one name, in any of its objects, is rejected."""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import limpet
from limpet.buffers import shared_pool
from limpet.convert.import_ import read_foreign_checkpoint
from limpet.errors import FormatError, ManifestInvalid
from limpet.format.index import decode_index
from limpet.format.manifest import decode_manifest
from limpet.format.names import Version
from limpet.format.records import (
    decode_about_version,
    decode_branch,
    decode_lasting_pin,
    decode_pin,
)
from limpet.format.safetensors import build_header, decode_entries, parse_header
from limpet.format.strict_json import DECODE_ERRORS, StrictDecoder
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.run.save_request import put_request, read_request
from limpet.run.writer_lock import WriterLock
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_location
from limpet.storage.memory import MemoryStore
from tests.forging import files_of, index_key, seal_body, small_state
from tests.trainings import train, training

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant")

Json = Any
DUPLICATES = "two members"


class Member(str):
    """A name that is unequal to the same name, so that a dict can have both."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return self is other


def with_duplicates(text):
    """Yield the text once for each object in it, with the object's first member twice.

    The added member comes last and has the same value, so that a lenient reader sees no difference.
    """
    value = json.loads(text)
    for path, node in objects(value):
        if node:
            name = next(iter(node))
            again = Member(name)
            node[again] = node[name]
            yield f"{path}/{name}", json.dumps(value, separators=(",", ":")).encode()
            del node[again]


def objects(value, path=""):
    if isinstance(value, dict):
        yield path, value
        for name, member in list(value.items()):
            yield from objects(member, f"{path}/{name}")
    elif isinstance(value, list):
        for i, member in enumerate(value):
            yield from objects(member, f"{path}/{i}")


def body_of(sealed):
    """Return the content of a sealed file without format and digest, and its format."""
    head = re.match(rb'\{"limpet":([0-9]+),"digest":"[0-9a-f]{32}",', sealed)
    assert head is not None
    return b"{" + sealed[head.end() :], int(head[1])


def edited(sealed, pattern, replacement):
    """Return a sealed file with one change of its text and a correct digest."""
    body, number = body_of(sealed)
    assert re.search(pattern, body)
    return seal_body(re.sub(pattern, replacement, body, count=1)[1:], number)


def sealed_with_duplicates(sealed):
    """Yield a sealed file once for each object in it, with its first member twice."""
    body, number = body_of(sealed)
    for _, changed in with_duplicates(body):
        yield seal_body(changed[1:], number)


@pytest.fixture(scope="module")
def files():
    """The files of a run that has every kind of file."""
    store = MemoryStore()
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 3)
    with training(store, EverySteps(1)) as (state, ckpt):
        ckpt.resume(at=2)
        train(state, ckpt, 3)
    run = Run(store)
    run.pin(2)
    run.add_metrics(2, {"accuracy": float("nan"), "loss": 1})
    WriterLock(store).acquire()
    put_request(store, "0c9d1e2f3a4b")
    limpet.save(store.at("version_9"), small_state(), step=9, note={"a": {"b": 1}})
    return files_of(store)


def first(files, pattern):
    return next(raw for key, raw in files.items() if re.fullmatch(pattern, key))


SEALED: dict[str, tuple[str, Callable[[bytes, str], object], int]] = {
    "branch": (r"branch-1\.json", decode_branch, 1),
    "lasting pin": (r"pin-version_2\.json", decode_lasting_pin, 1),
    "writer": (r"writer\.json", decode_pin, 1),
    "evaluation": (r"version_2/eval-.*\.json", decode_about_version, 3),
    "manifest": (r"version_9/manifest\.json", decode_manifest, 40),
}


@pytest.mark.parametrize("kind", SEALED)
def test_sealed_files(files, kind):
    pattern, decode, least = SEALED[kind]
    text = first(files, pattern)
    decode(text, "file")
    changes = list(sealed_with_duplicates(text))
    assert len(changes) >= least
    for changed in changes:
        with pytest.raises(ManifestInvalid, match=DUPLICATES) as caught:
            decode(changed, "file")
        assert caught.value.file == "file"


def test_an_incremental_manifest_and_its_index():
    store = MemoryStore()
    state = {"a": np.arange(1 << 20)}
    limpet.save(store.at("version_1"), state, step=1)
    state["a"][0] = 7
    job = begin_save(
        Location(store, "version_2"), state, VersionMetadata(2), shared_pool(), stage_now=False,
        base=open_location(Location(store, "version_1")),
    )  # fmt: skip
    assert finish_save(job).bases == {Version(1)}
    files = files_of(store)
    manifest = files["version_2/manifest.json"]
    for changed in sealed_with_duplicates(manifest):
        with pytest.raises(ManifestInvalid, match=DUPLICATES):
            decode_manifest(changed, "file")
    raw = files[index_key(files, "version_2")]
    refers = decode_manifest(manifest, "file")[0].shards[0].refers
    decode_index(raw, "file", refers)
    for _, changed in with_duplicates(raw):
        with pytest.raises(ManifestInvalid, match=DUPLICATES):
            decode_index(changed, "file", refers)


def test_an_index(files):
    raw = files[index_key(files, "version_9")]
    changes = list(with_duplicates(raw))
    assert len(changes) > 20
    for _, changed in changes:
        with pytest.raises(ManifestInvalid, match=DUPLICATES):
            decode_index(changed, "file")


def test_a_header_of_safetensors():
    raw = build_header([('a:"b', "F32", (2,), 0, 8), ("c", "U8", (), 8, 9)])
    text = raw[8:].rstrip(b" ")
    length = len(raw) + 9
    parse_header(raw, length, "file")
    changes = list(with_duplicates(text))
    assert len(changes) == 4
    for _, changed in changes:
        header = (len(raw) - 8).to_bytes(8, "little") + changed.ljust(len(raw) - 8)
        with pytest.raises(ManifestInvalid, match=DUPLICATES):
            parse_header(header, length, "file")
        with pytest.raises(DECODE_ERRORS):
            decode_entries(changed)


def test_a_save_request_with_a_duplicate_has_no_valid_id(files):
    text = files["request-save.json"]
    changed = edited(text, rb"\}$", b',"id":"0c9d1e2f3a4b"}')
    for raw, has_id in ((text, True), (changed, False)):
        store = MemoryStore()
        store.put_if_absent("request-save.json", raw)
        assert (read_request(store) == "0c9d1e2f3a4b") is has_id


def test_foreign_files(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    part = tmp_path / "model-00001-of-00001.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    save_file(tensors, part, {"format": "pt"})
    document = {"metadata": {"total_size": 20}, "weight_map": dict.fromkeys(tensors, part.name)}
    text = json.dumps(document, indent=2).encode()
    index.write_bytes(text)
    assert set(read_foreign_checkpoint(str(tmp_path)).value) == {"a", "b"}
    for path, changed in with_duplicates(text):
        index.write_bytes(changed)
        with pytest.raises(FormatError, match=DUPLICATES):
            read_foreign_checkpoint(str(tmp_path))
        assert path
    index.write_bytes(text)
    raw = part.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    for _, changed in with_duplicates(raw[8 : 8 + size].rstrip()):
        part.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + size :])
        with pytest.raises(FormatError, match=DUPLICATES):
            read_foreign_checkpoint(str(part))


ANY: StrictDecoder[Any] = StrictDecoder(msgspec.json.Decoder(Any))
NAMES = st.text(st.sampled_from('a:",\\{}é '), max_size=3)
VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_valid_text_is_accepted_however_it_is_written(value, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert ANY.decode(text.encode()) == json.loads(text)
    for _, changed in with_duplicates(text.encode()):
        with pytest.raises(msgspec.ValidationError, match="two members"):
            ANY.decode(changed)


def test_a_duplicate_is_found_beside_a_huge_number():
    with pytest.raises(msgspec.ValidationError, match="two members"):
        ANY.decode(b'{"a":{"b":1,"b":' + b"9" * 4000 + b"}}")


def test_structs_of_files_have_no_optional_fields():
    """Otherwise a missing field could hide a duplicate of another one from the count."""
    from limpet.format import index, manifest, records, safetensors
    from limpet.run import save_request

    structs = [
        t
        for module in (index, manifest, records, safetensors, save_request)
        for t in vars(module).values()
        if isinstance(t, type) and issubclass(t, msgspec.Struct) and t is not Version
    ]  # files contain the names of versions as text
    assert len(structs) > 12
    for struct in structs:
        assert all(field.required for field in msgspec.structs.fields(struct)), struct
        assert struct.__struct_config__.forbid_unknown_fields, struct
