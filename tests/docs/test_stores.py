"""The store of docs/stores.md is complete, and shorter than 60 lines of code."""

from pathlib import Path

import pytest

import limpet.storage.open
from limpet.testing import StoreContract
from tests.docs.test_docs import ROOT, blocks

CODE = [b.code for b in blocks(ROOT / "docs" / "stores.md") if b.language == "python"]
STORE = [code for code in CODE if "class SQLite" in code]


def load_example(names):
    namespace = {"__name__": "example"}
    for code in STORE:
        exec(compile(code, "docs/stores.md", "exec"), namespace)
    return [namespace[name] for name in names]


def test_the_store_is_short():
    (code,) = (code for code in STORE if "class SQLiteStore" in code)
    store = code[code.index("class SQLiteStore") :]
    assert len([line for line in store.splitlines() if line.strip()]) < 60


class TestSQLite(StoreContract):
    partials_are_listed = False

    def make_store(self, folder):
        (store,) = load_example(["SQLiteStore"])
        return store(folder / "objects.db")


@pytest.fixture(autouse=True)
def forget_registered_stores(monkeypatch):
    functions = {**limpet.storage.open._functions}
    monkeypatch.setattr(limpet.storage.open, "_functions", functions)


def test_a_training_uses_it(tmp_path):
    (store,) = load_example(["SQLiteStore"])
    state = {"n": 0}
    for _ in range(2):
        with limpet.Checkpointer(store(Path(tmp_path, "r.db")), state) as checkpointer:
            checkpointer.resume()
            state["n"] += 1
            checkpointer.step()
    run = limpet.Run(store(tmp_path / "r.db"))
    assert [s.step for s in run.snapshots()] == [1, 2]
    assert run.latest().verify().ok
