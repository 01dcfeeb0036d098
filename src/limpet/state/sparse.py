"""Sparse tensors: the parts of each layout."""

from __future__ import annotations

from typing import Any

from limpet.format.rejected import unsupported

_ROWS = {"crow": "crow_indices", "col": "col_indices", "values": "values"}
_COLUMNS = {"ccol": "ccol_indices", "row": "row_indices", "values": "values"}
PARTS = {
    "sparse_coo": {"indices": "_indices", "values": "_values"},
    "sparse_csr": _ROWS,
    "sparse_bsr": _ROWS,
    "sparse_csc": _COLUMNS,
    "sparse_bsc": _COLUMNS,
}
"""The parts of a sparse tensor by its layout, each with the method that returns the part."""


def check(t: Any, layout: str, key: str) -> None:
    """Raise ``Unsupported`` for a tensor that is not strided, unless it is sparse."""
    problems = (
        (t.is_meta, "a meta tensor has no data", "Materialize it before the save"),
        (t.is_quantized, "it is a quantized tensor", "Save its int_repr(), scale, and zero point"),
        (t.is_nested, "it is a nested tensor", "Save its values() and offsets()"),
        (layout not in PARTS, f"its layout {t.layout} is opaque", "Save to_dense()"),
    )
    for is_present, why, advice in problems:
        if is_present:
            raise unsupported(t, key, why, advice)
