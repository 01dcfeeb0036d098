"""``docs/format.md`` agrees with the code: its examples can be read and its tables are correct."""

import json
import re
from pathlib import Path

import torch
from jsonschema import Draft202012Validator

import limpet
from limpet.format import names, torch_types
from limpet.format.digest import digest
from limpet.format.index import MAX_CHUNK, decode_index
from limpet.format.manifest import MAX_MANIFEST, decode_manifest
from limpet.format.records import (
    Objective,
    decode_about_version,
    decode_branch,
    decode_lasting_pin,
    decode_lease,
    decode_objective,
    decode_pin,
    decode_step_metrics,
)
from limpet.format.safetensors import MAX_HEADER, build_header
from limpet.format.sealed import FORMAT
from limpet.format.tree import MAX_DEPTH, MAX_DIMENSIONS, check_tree, decode
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.types import ALIGNMENT, DTYPES, MIB
from tests.forging import store_of, values_equal

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "format.md").read_text()


def blocks(text):
    found = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [json.loads(block) for block in found]


MANIFEST, BRANCH, PIN, LASTING, NODES, INDEX, MANIFEST_2, INDEX_2 = blocks(TEXT)
RECORDS = blocks((DOCS / "saving.md").read_text())
EVALUATION, FAILURE, ENDED, INEXACT, BEST, VERIFIED, LEASE, OBJECTIVE, METRICS = RECORDS


def raw(document):
    """Return the document as the bytes of a file, on one line."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def test_the_schema_accepts_the_examples():
    schema = json.loads((DOCS / "format.schema.json").read_text())
    for kind, document in (
        ("manifest", MANIFEST), ("branch", BRANCH), ("pin", PIN), ("index", INDEX),
        ("lasting", LASTING), ("evaluation", EVALUATION),
        ("failure", FAILURE), ("ended", ENDED), ("lease", LEASE),
        ("inexact", INEXACT), ("best", BEST), ("objective", OBJECTIVE), ("verified", VERIFIED),
        ("metrics", METRICS), ("manifest", MANIFEST_2), ("index", INDEX_2),
    ):  # fmt: skip
        validator = Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})
        validator.validate(document)
    tree = {**MANIFEST, "tree": {"dict": NODES}}
    Draft202012Validator(schema).validate(tree)


def test_the_decoders_read_the_examples():
    assert decode_manifest(raw(MANIFEST), "f")[0].step == 120
    assert decode_branch(raw(BRANCH), "f").number == 1
    assert decode_pin(raw(PIN), "f").host == "node-3"
    assert decode_lasting_pin(raw(LASTING), "f").version == "version_120"
    assert decode_about_version(raw(EVALUATION), "f").decoded_metrics()["perplexity"] == float(
        "inf"
    )
    assert decode_about_version(raw(FAILURE), "f", "failed").cause.endswith("ZeroDivisionError")
    assert decode_about_version(raw(ENDED), "f", "ended").reason == "finished"
    assert decode_about_version(raw(INEXACT), "f", "inexact").last_step == 127
    assert decode_about_version(raw(BEST), "f", "best").metric == "val_loss"
    assert "bytes 4096" in decode_about_version(raw(VERIFIED), "f", "verified").damage
    assert decode_lease(raw(LEASE), "f").versions == ["version_120"]
    assert decode_objective(raw(OBJECTIVE), "f") == Objective("val_loss", "min")
    name = "metrics-log/1.3.121.json"
    assert [step for step, _ in decode_step_metrics(raw(METRICS), name).rows] == [121, 122]
    assert decode_index(raw(INDEX), "f").length == 4120


def test_the_examples_form_one_snapshot():
    """With the data that the text describes, the snapshot can be loaded."""
    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    header = build_header([("model/weight", "F32", (2, 3), 0, 24)])
    shard = MANIFEST["shards"][0]
    files = {
        "version_120.1/manifest.json": raw(MANIFEST),
        "version_120.1/" + shard["path"]: header + weight.numpy().tobytes(),
        "version_120.1/" + shard["index"]["name"]: raw(INDEX),
        "branch-1.json": raw(BRANCH),
    }
    store = store_of(files)
    assert limpet.Run(store).open(names.Version(120, 1)).verify().ok
    state = limpet.load(store.at("version_120.1"))
    expected = {"model": {"weight": weight, "tied": weight}, "epoch": 3, "betas": (0.9, 0.999)}
    assert values_equal(state, expected)
    assert state["model"]["tied"] is state["model"]["weight"]


def test_the_incremental_example_refers_to_the_full_one():
    weight, bias = torch.arange(6, dtype=torch.float32).view(2, 3), torch.tensor([0.5])
    header = build_header([("model/weight", "F32", (2, 3), 0, 24)])
    own_header = build_header([("model/bias", "F32", (1,), 0, 4)])
    base_name, shard_name = MANIFEST["shards"][0]["path"], MANIFEST_2["shards"][0]["path"]
    store = store_of(
        {
            f"version_120.1/{base_name}": header + weight.numpy().tobytes(),
            "version_130.1/manifest.json": raw(MANIFEST_2),
            f"version_130.1/{shard_name}": own_header + bias.numpy().tobytes(),
            "version_130.1/" + MANIFEST_2["shards"][0]["index"]["name"]: raw(INDEX_2),
        }
    )
    snapshot = limpet.Run(store).open(names.Version(130, 1))
    assert snapshot.bases == {names.Version(120, 1)}
    assert (snapshot.chain, snapshot.nbytes, snapshot.referred_bytes) == (1, 4100, 24)
    assert snapshot.verify().ok
    assert values_equal(
        load_snapshot(reader_of(snapshot)), {"model": {"weight": weight, "bias": bias}}
    )


def test_the_examples_include_every_kind_of_node():
    leaves = check_tree({"dict": NODES}, "f")
    assert leaves.keys() == {
        "tensor", "array", "structured", "blob", "sparse/indices", "sparse/values", "subclass/codes"
    }  # fmt: skip
    plain = {
        n: v
        for n, v in NODES.items()
        if n not in leaves and n not in ("tied", "sparse", "subclass")
    }
    decoded = decode({"dict": plain}, "", torch_types.decode)
    for name, value in decoded.items():
        if name not in ("ordered", "items", "counter", "scalar"):
            assert type(value).__name__.lower() == name
    assert decoded["int"] == -(1 << 64)
    assert decoded["complex"] == complex(1, float("-inf"))
    assert decoded["scalar"] == 1.5
    assert decoded["items"] == {1: "one", "1": "text", (1, 2): None}
    assert decoded["counter"] == {"a": 2}
    types = torch.bfloat16, torch.device("cuda:0"), torch.Size([2, 3])
    assert (decoded["dtype"], decoded["device"], decoded["size"]) == types


def test_the_table_of_dtypes():
    table = TEXT[TEXT.index("\nbool ") : TEXT.index('"F16, 2"')]
    rows = re.findall(r"([a-z]\w+) +(\d+)  ([A-Z]\w+)(?:, (\d))?", table)
    documented = {name: (int(size), stored, int(per or 1)) for name, size, stored, per in rows}
    assert documented == {
        d.name: (d.itemsize, d.stored_dtype, d.stored_per_element) for d in DTYPES.values()
    }


def test_names_and_numbers_in_the_text():
    assert f"number {FORMAT}" in TEXT.splitlines()[0]
    tree = re.search(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^\s+(\S+)", tree[1], re.MULTILINE)
    assert [names.version_of_key(w) for w in entries if w.endswith("/")] == [
        names.Version(120), names.Version(120, 1), names.Version(240)
    ]  # fmt: skip
    assert sum(names.is_shard_name(w) for w in entries) == 1
    assert sum(names.parse_attempt(w) is not None for w in entries) == 2
    assert any(names.parse_branch(w) for w in entries)
    assert any(names.is_pin_name(w) for w in entries)
    assert any(names.parse_lasting_pin(w) for w in entries)
    assert any(names.parse_evaluation(w) for w in entries)
    assert any(names.is_spread_folder(w.partition("/")[0]) for w in entries)
    flat = " ".join(TEXT.split())
    for phrase in (
        f"{MAX_DEPTH} levels of nodes and {MAX_DIMENSIONS} dimensions",
        f"header at most {MAX_HEADER:,} bytes",
        f"longer than {MAX_CHUNK // MIB} MiB",
        f"multiple of {ALIGNMENT:,}",
    ):
        assert phrase in flat, phrase
    assert MAX_MANIFEST == 1 << 30
    assert digest(b"") == "99aa06d3014798d86001c324468d497f", "XXH3-128 of nothing, canonical"
