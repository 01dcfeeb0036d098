"""Initial vectors: the same on every machine, for every batch."""

import numpy as np
import pytest
import torch

from limpet import tables
from limpet.errors import LimpetError
from tests.tables.ids import EXTREMES, unmix

KINDS = [
    tables.Constant(0.25),
    tables.Uniform(0.05),
    tables.Normal(0.5, 2.0),
    tables.TruncatedNormal(0.0, 0.1),
]


def a_table(initializer, name="words", dim=8, **options):
    return tables.Table(name, dim, optimizer=tables.SGD(0.1), initializer=initializer, **options)


def vectors(initializer, ids, **options):
    return a_table(initializer, **options).initial(np.asarray(ids))


def test_initial_vectors_never_change():
    """B 20."""
    uniform, normal, cut = (vectors(i, [7, -1], dim=2).flatten().tolist() for i in KINDS[1:])
    # computed once from the description, in plain Python
    assert uniform == [
        0.03408714383840561,
        0.0418425127863884,
        -0.0356106199324131,
        0.011488708667457104,
    ]
    assert normal == [
        -0.32015955448150635,
        0.0881199836730957,
        1.237795352935791,
        -1.9018406867980957,
    ]
    assert cut == [
        -0.039041727781295776,
        -0.01964452490210533,
        0.035138603299856186,
        -0.1115054115653038,
    ]


@pytest.mark.parametrize("initializer", KINDS, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 70_000])
def test_a_vector_does_not_depend_on_the_batch(initializer, dim):
    """B 16."""
    ids = np.array([*EXTREMES, *range(100, 120)])
    whole = vectors(initializer, ids, dim=dim)
    assert whole.shape == (len(ids), dim)
    for i in range(len(ids)):
        assert torch.equal(vectors(initializer, ids[i : i + 1], dim=dim), whole[i : i + 1])
    assert torch.equal(vectors(initializer, ids[::-1], dim=dim), whole.flip(0))
    assert vectors(initializer, ids[:0], dim=dim).shape == (0, dim)


def test_many_rows_equal_few():
    ids = np.arange(70_000)
    whole = vectors(KINDS[1], ids)
    assert torch.equal(whole[65_000:65_010], vectors(KINDS[1], ids[65_000:65_010]))


@pytest.mark.parametrize("initializer", KINDS[1:], ids=str)
def test_tables_and_seeds_differ(initializer):
    """B 16."""
    ids = np.arange(50)
    options = [{}, {"name": "other"}, {"seed": 1}, {"name": "other", "seed": 1}]
    found = [vectors(initializer, ids, **o) for o in options]
    for i in range(4):
        for j in range(i):
            assert (found[i] == found[j]).float().mean() < 0.01
    assert torch.equal(vectors(initializer, ids, dim=3), found[0][:, :3])


@pytest.mark.parametrize("ids", [np.arange(20_000), unmix(np.arange(20_000, dtype=np.uint64))])
def test_no_two_ids_share_a_row_and_elements_are_independent(ids):
    x = vectors(tables.Uniform(1.0), ids, dim=16).double().numpy()
    assert len(np.unique(x[:, :2].copy().view("V16"))) == len(ids)
    by_column = np.corrcoef(x.T) - np.eye(16)
    assert abs(by_column).max() < 0.04
    assert abs(np.corrcoef(x[:300]) - np.eye(300)).max() < 0.97
    assert abs((x[1:] * x[:-1]).mean()) < 0.005
    counts = np.histogram(x, 64, (-1, 1))[0]
    assert ((counts - x.size / 64) ** 2 / (x.size / 64)).sum() < 120  # chi-squared, 63 degrees


def test_the_distributions_are_as_named():
    """B 20."""
    ids = np.arange(50_000)
    assert (vectors(tables.Constant(0.25), ids) == 0.25).all()
    uniform = vectors(tables.Uniform(0.05), ids).double()
    assert 0.04999 < uniform.abs().max() < 0.05
    assert uniform.std().item() == pytest.approx(0.1 / 12**0.5, rel=0.01)
    normal = vectors(tables.Normal(0.5, 2.0), ids).double()
    assert normal.mean().item() == pytest.approx(0.5, abs=0.02)
    assert normal.std().item() == pytest.approx(2.0, rel=0.01)
    assert (normal - 0.5).abs().max() > 8
    cut = vectors(tables.TruncatedNormal(1.0, 0.1), ids).double()
    assert 0.199 < (cut - 1).abs().max() <= 0.2
    torch_cut = torch.nn.init.trunc_normal_(torch.empty(400_000, dtype=torch.float64))
    assert cut.std().item() == pytest.approx(torch_cut.std().item() * 0.1, rel=0.01)


def test_bfloat16_vectors_are_rounded_float32_vectors():
    exact = vectors(KINDS[1], np.arange(100))
    rounded = vectors(KINDS[1], np.arange(100), dtype="bfloat16")
    assert torch.equal(rounded, exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tables.Uniform(0),
        lambda: tables.Uniform(float("nan")),
        lambda: tables.Normal(0, -1),
        lambda: tables.Normal(float("inf"), 1),
        lambda: tables.Constant("1"),
        lambda: tables.TruncatedNormal(0, True),
    ],
)
def test_wrong_numbers_are_refused(make):
    with pytest.raises(LimpetError, match=r"^\w+ of \w+ must be a .*number.*, not "):
        make()
