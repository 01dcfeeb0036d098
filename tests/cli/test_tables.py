"""Commands that meet embedding tables."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import limpet
from limpet import tables
from limpet.cli.exit_codes import DIFFERS
from limpet.convert import windows
from limpet.errors import MissingLeaf
from limpet.tables.view import StoredTable
from tests.cli.invoke import check_error_line, run_cli
from tests.tables.trainings import Training

WORDS = tables.Table("words", 4, optimizer=tables.SGD(lr=1.0, momentum=0.5))
URLS = tables.Table("urls", 3, optimizer=tables.SGD(lr=1.0), dtype="bfloat16", admit_after=2)


@pytest.fixture
def training(tmp_path):
    """A run with versions 1 to 4 of two tables, of which the last ones have increments."""
    torch.set_num_threads(1)
    made = Training(str(tmp_path / "run"), WORDS, URLS, count=2)
    made.servers.fill("words", np.arange(1, 200), torch.ones(199, 4))
    made.rows["words"] = {i: torch.ones(4) for i in range(1, 200)}
    with made.saving(incremental=True):
        for _ in range(4):
            made.servers.fill("urls", np.arange(1, 200), torch.ones(199, 3))
            made.rows["urls"].update(
                {i: torch.ones(3, dtype=torch.bfloat16) for i in range(1, 200)}
            )
            made.update("words", [1, 2, 500 + made.step], 2.0)
            made.evict("words", [10 + made.step])
            made.update("urls", [-5, 600])
            made.save()
    return made


def show(training, *options):
    return run_cli("show", f"{training.run.url}@4", *options)


def test_show_has_a_line_for_each_table(training):
    out = show(training).out
    segments = len(training.run.latest().tree["tables"]["words"]["segments"])
    assert segments > 1
    [words] = [line for line in out.splitlines() if "words" in line]
    rows = len(training.rows["words"])
    assert f"table, {rows:,} rows of 4 float32, {segments} segments" in words
    assert "KiB" in words
    page = run_cli("report", training.run.url).out
    assert f"table, {rows:,} rows of 4 float32" in page
    assert "rows_per_bucket" not in out
    assert "words" not in show(training, "--depth", 1).out
    assert "words" in show(training, "--depth", 2).out
    assert "rows_per_bucket" in show(training, "--layout").out
    assert "rows_per_bucket" in show(training, "--keys", "tables/words").out


def test_show_json_has_the_tables(training):
    document = show(training, "--json").json
    words, urls = document["tables"]
    assert {k: words[k] for k in ("key", "rows", "dim", "dtype")} == {
        "key": "tables/words",
        "rows": len(training.rows["words"]),
        "dim": 4,
        "dtype": "float32",
    }
    segments = training.run.latest().tree["tables"]["words"]["segments"]
    assert words["segments"] == len(segments)
    leaves = [each for s in segments.values() for each in (*s["slots"].values(), *s.values())]
    assert words["bytes"] == sum(each.nbytes for each in leaves if not isinstance(each, dict))
    assert urls["dtype"] == "bfloat16"
    assert document["leaves"] == []
    assert document["values"] == []
    assert show(training, "--json", "--keys", "tables/words").json["tables"] == []


def export(training, to, *options):
    return run_cli("export", f"{training.run.url}@4", "--to", "safetensors", to, *options)


def setup(snapshot):
    return tables.open(snapshot)["words"]


def evaluate(words, batch):
    return {"rows": (len(words), len(batch))}


def dataset():
    return range(8)


def export_best(training, to):
    names = ["--with", __name__, "--data", f"{__name__}:dataset", "--workers", "0"]
    more = ["--metric", "rows", "--mode", "max", "--export-best", to, "--to", "safetensors"]
    return run_cli("evaluate", training.run.url, *names, *more)


def export_in_python(training, to):
    return limpet.export(training.run.latest(), to, "safetensors")


@pytest.mark.parametrize("write", [export, export_best, export_in_python])
def test_export_merges_the_segments(training, tmp_path, write):
    write(training, tmp_path / "out")
    folder = tmp_path / "out" / ("step_4" if write is export_best else "")
    found = load_file(folder / "model.safetensors")
    assert sorted(found) == [
        f"tables/{t}/{n}" for t in ("urls", "words") for n in ("ids", "values")
    ]
    for spec in (WORDS, URLS):
        rows = training.rows[spec.name]
        ids, values = (found[f"tables/{spec.name}/{n}"] for n in ("ids", "values"))
        assert ids.tolist() == sorted(rows)
        assert values.dtype == spec.dtype
        assert torch.equal(values, training.servers.lookup(spec.name, ids))
    assert export(training, folder).code == 0, "an equal file is kept"
    assert run_cli("verify", folder).code == 0


def test_export_of_a_part(training, tmp_path):
    export(training, tmp_path / "root", "--root", "tables")
    assert "words/ids" in load_file(tmp_path / "root" / "model.safetensors")
    export(training, tmp_path / "keys", "--keys", "tables/urls")
    assert sorted(load_file(tmp_path / "keys" / "model.safetensors")) == [
        "tables/urls/ids",
        "tables/urls/values",
    ]
    export(training, tmp_path / "one", "--root", "tables/words")
    assert sorted(load_file(tmp_path / "one" / "model.safetensors")) == ["ids", "values"]
    hf = run_cli(
        "export", f"{training.run.url}@4", "--to", "hf", tmp_path / "hf", "--max-shard-size", "1KB"
    )
    assert hf.code == 0
    parts = [load_file(path) for path in sorted((tmp_path / "hf").glob("*.safetensors"))]
    assert sum(len(part) for part in parts) == 4


def test_export_with_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1 << 20)
    servers = tables.Servers([WORDS], 2)
    servers.fill("words", np.arange(100_000), torch.arange(100_000.0)[:, None].expand(-1, 4))
    model = torch.nn.Linear(3000, 1000)
    limpet.save(str(tmp_path / "v"), {"model": model, "tables": servers})
    to = tmp_path / "out.safetensors"
    assert run_cli("export", tmp_path / "v", "--to", "safetensors", to).code == 0
    assert sorted(load_file(to)) == ["bias", "weight"]
    to = tmp_path / "all.safetensors"
    assert run_cli("export", tmp_path / "v", "--to", "safetensors", to, "--root", "/").code == 0
    found = load_file(to)
    assert torch.equal(found["model/weight"], model.weight)
    assert torch.equal(found["tables/words/ids"], torch.arange(100_000))
    assert torch.equal(found["tables/words/values"][:, 3], torch.arange(100_000.0))


def test_export_has_one_table_at_a_time_in_memory(training, tmp_path, monkeypatch):
    alive, counts, read = weakref.WeakSet(), [], StoredTable.read

    def count_and_read(stored):
        gc.collect()
        counts.append(len(alive))
        shard = read(stored)
        alive.add(shard)
        return shard

    monkeypatch.setattr(StoredTable, "read", count_and_read)
    export(training, tmp_path / "out")
    assert len(counts) > 1
    assert not any(counts)


def test_export_of_an_empty_table(tmp_path):
    limpet.save(str(tmp_path / "v"), {"tables": tables.Servers([WORDS])})
    to = tmp_path / "out.safetensors"
    assert run_cli("export", tmp_path / "v", "--to", "safetensors", to).code == 0
    assert load_file(to)["tables/words/values"].shape == (0, 4)


def diff(training, a, b, *options):
    return run_cli("diff", f"{training.run.url}@{a}", f"{training.run.url}@{b}", *options)


def test_diff_says_that_it_needs_torch(training, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it raises ImportError
    result = run_cli("diff", f"{training.run.url}@3", f"{training.run.url}@4")
    check_error_line(result, 1, "needs PyTorch", 'pip install "limpet[torch]"')


def test_diff_compares_rows_by_id(training):
    result = diff(training, 3, 4, "--json")
    assert result.code == DIFFERS
    changes = {(c["key"], c["what"]): c for c in result.json["changed"]}
    words = changes["tables/words", "rows"]
    names = ("a", "b", "elements", "differing", "differing_slots")
    both = len(training.rows["words"]) - 1
    assert tuple(words[name] for name in names) == (1, 1, both, 2, 2)
    assert not any("segments" in key or "first_buckets" in key for key, _ in changes)
    text = diff(training, 3, 4).out
    assert f"rows: 1 only in A, 1 only in B, 2 of {both:,} differ, 2 in slots or counts" in text
    only_urls = diff(training, 3, 4, "--json", "--keys", "tables/urls").json
    assert all(c["key"].startswith("tables/urls") for c in only_urls["changed"])


def test_rows_in_other_segments_of_other_servers_are_identical(training, tmp_path):
    version = training.run.latest()
    assert len(version.tree["tables"]["words"]["segments"]) > 1
    for count in (1, 3):
        servers = tables.Servers([WORDS, URLS], count)
        version.load({"tables": servers})
        limpet.save(str(tmp_path / f"copy{count}"), {"tables": servers})
        result = run_cli("diff", f"{training.run.url}@4", tmp_path / f"copy{count}")
        assert result.code == 0, result.out
        assert "Identical" in result.out
    servers.servers[0].shards["words"].rows.column("slot/momentum")[5] += 1
    limpet.save(str(tmp_path / "slot"), {"tables": servers})
    result = run_cli("diff", tmp_path / "copy1", tmp_path / "slot", "--json")
    assert result.code == DIFFERS
    [change] = result.json["changed"]
    assert (change["differing"], change["differing_slots"]) == (0, 1)


def test_two_tables_of_one_name(tmp_path):
    state = {"a": tables.Servers([WORDS]), "b/c": tables.Servers([WORDS], 2)}
    state["a"].fill("words", [1], torch.ones(1, 4))
    limpet.save(str(tmp_path / "v"), state)
    state["b/c"].fill("words", [2, 3], torch.ones(2, 4))
    limpet.save(str(tmp_path / "w"), state)
    changed = run_cli("diff", tmp_path / "v", tmp_path / "w", "--json").json["changed"]
    assert [(c["key"], c["b"]) for c in changed if c["what"] == "rows"] == [("b~1c/words", 2)]
    assert len(run_cli("show", tmp_path / "w", "--json").json["tables"]) == 2
    to = tmp_path / "out.safetensors"
    assert run_cli("export", tmp_path / "w", "--to", "safetensors", to).code == 0
    found = load_file(to)
    assert found["a/words/ids"].tolist() == [1]
    assert found["b/c/words/ids"].tolist() == [2, 3]
    with pytest.raises(MissingLeaf, match="two of one name"):
        tables.open(str(tmp_path / "w"))


def test_diff_of_candidates_and_of_another_dim(tmp_path):
    servers = tables.Servers([URLS])
    limpet.save(str(tmp_path / "a"), {"tables": servers})
    rows, _ = servers.client.look_up("urls", torch.tensor([1, 2]))
    rows.sum().backward()
    servers.step()
    limpet.save(str(tmp_path / "b"), {"tables": servers})
    [change] = [
        c
        for c in run_cli("diff", tmp_path / "a", tmp_path / "b", "--json").json["changed"]
        if c["what"] == "candidates"
    ]
    assert (change["a"], change["b"]) == (0, 2)
    for name, dim in (("c", 2), ("d", 3)):
        servers = tables.Servers([tables.Table("urls", dim, optimizer=tables.SGD(1.0))])
        servers.fill("urls", [1, 2, 3], torch.ones(3, dim))
        limpet.save(str(tmp_path / name), {"tables": servers})
    changes = run_cli("diff", tmp_path / "c", tmp_path / "d", "--json").json["changed"]
    [rows] = [c for c in changes if c["what"] == "rows"]
    assert (rows["elements"], rows["differing"]) == (3, 3)


def test_commands_that_meet_no_table_do_not_import_torch(tmp_path):
    limpet.save(str(tmp_path / "v"), {"n": np.arange(3)})
    script = (
        "import sys; from limpet.cli import cli;"
        "[cli(a, standalone_mode=False) for a in"
        " (['show', 'v'], ['diff', 'v', 'v'], ['export', 'v', '--to', 'safetensors', 'out'])];"
        "assert 'torch' not in sys.modules and 'limpet.tables.view' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
    )
