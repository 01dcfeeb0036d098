"""Helpers for the text of messages."""

from __future__ import annotations

from collections.abc import Sequence


def with_article(noun: str) -> str:
    """Return the noun with its indefinite article: ``a dict``, ``an int``."""
    return f"{'an' if noun[:1] in tuple('aeioAEIO') else 'a'} {noun}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text: ``rank 3``, ``ranks 0, 1, 2``. At most 8 ranks are listed."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(r) for r in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
