"""``limpet export``."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click import BadParameter
from safetensors.numpy import load_file

import limpet as hf
from limpet.cli.output import parse_size
from tests.cli.invoke import check_error_line, run_cli


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, with a run ``runs/a`` of versions 1 and 2."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        model = {"w": np.full((2, 3), step, "f4"), "b": np.arange(4)}
        hf.save(
            f"runs/a/version_{step}", {"model": model, "rng": np.ones(3), "epoch": 1, "lr": 0.1}
        )
    return tmp_path


def test_a_model(folder):
    result = run_cli("export", "runs/a@latest", "--to", "safetensors", "out")
    assert (result.code, result.err) == (0, "")
    assert "out/model.safetensors" in result.out
    assert "2 tensors below model, 56 B, all checked" in result.out
    assert load_file("out/model.safetensors")["w"].tolist() == [[2.0] * 3] * 2
    assert sorted(os.listdir("out")) == ["model.safetensors", "model.safetensors.limpet.json"]


@pytest.mark.parametrize("to", ["runs/a@latest", "runs/a@2", "runs/a@best:x"])
def test_the_address_of_a_version_is_no_folder_to_export_to(folder, to):
    """A folder of that name would hide the version."""
    result = run_cli("export", "runs/a@1", "--to", "hf", to)
    check_error_line(result, 8, "is the address of a version")
    assert not Path(to).exists()


def test_omitted_values_are_reported(folder):
    result = run_cli("export", "runs/a@1", "out", "--to", "safetensors", "--root", "/")
    check_error_line(result, 0, "2 plain values omitted: safetensors files contain only tensors")
    assert sorted(load_file("out/model.safetensors")) == ["model/b", "model/w", "rng"]


def test_json_keys_are_stable(folder):
    result = run_cli("export", "runs/a@1", "--to", "hf", "out", "--max-shard-size", "30B", "--json")
    assert result.err == ""
    report = result.json
    assert list(report) == [
        "snapshot", "step", "to", "root", "files", "tensors", "left_out", "bytes",
        "seconds",
    ]  # fmt: skip
    assert [report[k] for k in ("step", "to", "root", "tensors", "left_out", "bytes")] == [
        1, "hf", "model", 2, 0, 56,
    ]  # fmt: skip
    assert [list(f) for f in report["files"]] == [["file", "bytes"]] * 4
    for file in report["files"]:
        assert os.path.getsize(file["file"]) == file["bytes"]
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 56
    report = run_cli("export", "runs/a@1", "--to", "hf", "all", "--root", "/", "--json").json
    assert (report["left_out"], report["tensors"]) == (2, 3)


def test_invalid_arguments(folder):
    def export(*arguments):
        return run_cli("export", *arguments)

    def usage_error(*arguments):
        result = export(*arguments)
        assert result.code == 2
        return result.err

    assert "Missing option '--to'" in usage_error("runs/a@1", "out")
    assert "'gguf' is not one of" in usage_error("runs/a@1", "--to", "gguf", "out")
    assert "is not a size" in usage_error(
        "runs/a@1", "--to", "hf", "out", "--max-shard-size", "big"
    )
    check_error_line(export("runs/a@7", "--to", "hf", "out"), 4)
    check_error_line(export("zzz", "--to", "hf", "out"), 4, "found nothing")
    check_error_line(
        export("runs/a@1", "--to", "hf", "out", "--root", "modle"), 6, "nothing below modle"
    )
    check_error_line(
        export("runs/a@1", "--to", "hf", "out", "--keys", "x/*"), 6, "selection contains nothing"
    )
    check_error_line(export("runs/a@1", "--to", "hf", ""), 5, "does not name a folder")
    check_error_line(export("runs/a@1", "--to", "hf", "runs/a"), 8, "a version, or a run")
    check_error_line(
        export("runs/a@1", "--to", "hf", "ftp://bucket/x"), 5, "Unsupported kind of store"
    )
    assert not Path("out").exists()
    assert export("runs/a@1", "--to", "hf", "out").code == 0
    Path("out/model.safetensors").write_bytes(b"other")
    check_error_line(
        export("runs/a@1", "--to", "hf", "out"), 8, "already another file model.safetensors in out"
    )
    report = run_cli("export", "runs/a@1", "--to", "hf", "out", "--json")
    assert report.code == report.json["exit"] == 8
    assert report.json["error"]["kind"] == "AlreadyExists"


SIZES = {
    "5GB": 5 * 10**9, "500MB": 5 * 10**8, "1.5 GB": 15 * 10**8, "4GiB": 4 << 30, "64MiB": 64 << 20,
    "10kb": 10**4, "1TB": 10**12, "2TiB": 2 << 40, "7": 7, "7B": 7, "1G": 10**9,
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SIZES.items())
def test_sizes(text, expected):
    assert parse_size(None, None, text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-1GB", "GB", "5XB", "5iB", "1e9", "0.5B", "5GBB", "5 0GB"]
)
def test_invalid_sizes(text):
    with pytest.raises(BadParameter, match="is not a size"):
        parse_size(None, None, text)
