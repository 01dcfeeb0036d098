"""dtypes, devices, and sizes of PyTorch are plain values, in manifests of format 3."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import limpet
from limpet.errors import DTypeMismatch, LimpetError, ManifestInvalid, PlanError, Unsupported
from limpet.format import torch_types
from tests.fakegroup import FakeGroup
from tests.forging import manifest_key, save_to_files, seal, sealed_content, store_of
from tests.states import unused_url

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
STATE: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "devices": [torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
    "nested": {"size": (torch.Size([2, 3]), torch.Size([]))},
}


def save(state):
    return limpet.save(unused_url(), state)


def test_they_are_restored_with_their_types():
    snapshot = save(STATE)
    assert limpet.load(snapshot.url) == STATE
    loaded = limpet.load(snapshot.url)["nested"]["size"][0]
    assert type(loaded) is torch.Size
    opened = limpet.open(snapshot.url)
    assert opened["dtype"] is torch.bfloat16
    assert opened["devices/1"] == torch.device("cuda:1")
    assert opened.verify().ok


def test_every_dtype_of_pytorch_is_restored():
    assert limpet.load(save({"d": list(DTYPES)}).url)["d"] == DTYPES
    assert len(DTYPES) > 30


@given(st.lists(st.integers(0, 2**63 - 1), max_size=5), st.integers(0, 127))
def test_any_size_and_device(sizes, index):
    state = {"size": torch.Size(sizes), "device": torch.device("cuda", index)}
    assert limpet.load(save(state).url) == state


def test_they_replace_live_values():
    live = {
        "dtype": torch.float64,
        "devices": [torch.device("cpu")] * 3,
        "nested": {"size": (torch.Size([9]), None)},
    }
    limpet.load(save(STATE).url, into=live)
    assert live == STATE
    with pytest.raises(DTypeMismatch, match=r"size/0 size, live tuple"):
        limpet.load(save({"size": (torch.Size([1]), 1)}).url, into={"size": ((9,), torch.ones(1))})


def test_they_are_not_members_of_sets_or_names():
    for value in ({torch.float32}, {torch.float32: 1}):
        with pytest.raises(Unsupported, match=r"Save str\(value\)"):
            save({"x": value})
    with pytest.raises(Unsupported):
        limpet.save(unused_url(), {}, note={"d": torch.float32})


def test_dicts_that_look_like_their_nodes_are_dicts():
    misleading = {"dict": {"dtype": "float32"}, "device": "cpu", "size": [1]}
    assert limpet.load(save(misleading).url) == misleading


def test_several_ranks_must_agree():
    url = unused_url()
    with FakeGroup(2) as group:
        group.run(lambda r: limpet.save(url, STATE))
        assert limpet.load(url) == STATE
        devices = [{"d": torch.device("cuda", r)} for r in range(2)]
        other = unused_url()
        for error in group.outcomes(lambda r: limpet.save(other, devices[r])):
            assert isinstance(error, PlanError)
            assert "d: device" in str(error)
        own = [{"d": limpet.PerRank(d["d"])} for d in devices]
        url = unused_url()
        group.run(lambda r: limpet.save(url, own[r]))
    assert limpet.load(url) == {"d": {"0": torch.device("cuda:0"), "1": torch.device("cuda:1")}}


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of torch raises
import limpet
from limpet.cli import main
url = sys.argv[1]
for args in ("show",), ("show", "--json"), ("verify",), ("diff", url):
    sys.argv = ["limpet", *args, url]
    try:
        main()
    except SystemExit as e:
        assert not e.code, args
    print("---")
try:
    limpet.load(url)
except limpet.errors.LimpetError as e:
    print(e)
del sys.modules["torch"]
print(limpet.load(url)["dtype"])
"""


@pytest.mark.slow
def test_no_command_imports_torch_and_a_load_does_or_says_that_it_needs_it(tmp_path):
    url = str(tmp_path / "version_1")
    limpet.save(url, STATE)
    command = [sys.executable, "-c", WITHOUT_TORCH, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown, as_json, _, _, loads = done.stdout.split("---")
    assert "torch.bfloat16" in shown
    values = json.loads(as_json)["values"]
    assert {"key": "dtype", "value": "torch.bfloat16"} in values
    devices = ["torch.device('cpu')", "torch.device('cuda:1')", "torch.device('meta')"]
    assert {"key": "devices", "value": devices} in values
    assert 'Install it: pip install "limpet[torch]"' in loads
    assert loads.endswith("torch.bfloat16\n")


def forged(node, where="tree"):
    files = save_to_files({"x": torch.float32})
    key = manifest_key(files)
    content = sealed_content(files[key])
    content[where]["dict"]["x" if where == "tree" else "note"] = node
    return {**files, key: seal(content)}


def open_files(files):
    return limpet.open(store_of(files).at(next(iter(files)).partition("/")[0]))


@pytest.mark.parametrize(
    "node",
    [
        {"dtype": "os.system"},
        {"dtype": "__dict__"},
        {"dtype": "Float32"},
        {"dtype": ["float32"]},
        {"dtype": "float32", "more": 1},
        {"device": "cuda:"},
        {"device": "cuda:01"},
        {"device": "cuda:9999"},
        {"device": "cuda:-1"},
        {"device": "../x"},
        {"device": 0},
        {"size": 3},
        {"size": [1.0]},
        {"size": [True]},
        {"size": [1 << 63]},
        {"size": {"list": [1]}},
        {"set": [{"dtype": "float32"}]},
        {"items": [[{"dtype": "float32"}, 1]], "of": "dict"},
        {"ordered": {}, "metadata": {"dtype": "float32"}},
        {"tensor": [{"dtype": "float32"}, [0]]},
    ],
    ids=str,
)
def test_a_malformed_node_is_refused(node):
    with pytest.raises(ManifestInvalid):
        open_files(forged(node))


def test_metadata_has_no_such_nodes():
    assert open_files(forged({"dtype": "float16"}))["x"] is torch.float16
    with pytest.raises(ManifestInvalid):
        open_files(forged({"dict": {"a": {"dtype": "float16"}}}, where="metadata"))


@pytest.mark.parametrize(
    "node", [{"dtype": "onnx"}, {"dtype": "load"}, {"dtype": "float99"}, {"device": "abacus:0"}]
)
def test_a_name_that_is_no_dtype_or_device_is_never_used(node):
    files = forged(node)
    with pytest.raises(LimpetError, match="does not know"):
        _ = open_files(files)["x"]
    with pytest.raises(LimpetError, match="does not know"):
        limpet.load(store_of(files).at(next(iter(files)).partition("/")[0]))


def test_the_text_of_a_node():
    for value in (torch.int8, torch.Size([1])):
        node = torch_types.encode(value)
        assert torch_types.describe(node) == repr(value)
