"""Whether the verdicts on a version allow to continue from it. ``find_distrust`` is the whole rule.

Terms: a version is *distrusted* if the newest verdict of any author is negative, or if a verdict on
it cannot be read. It is *attested* if it is not distrusted and has a positive verdict.
"""

from __future__ import annotations

from typing import Literal, get_args

from limpet.errors import LimpetError, NotTrusted
from limpet.format.records import MAX_TEXT, Verdict
from limpet.run.evaluations.reader import VersionEvaluations
from limpet.text import format_list, to_repr

Trust = Literal["not-distrusted", "attested"]
"""Which versions are accepted: all but the distrusted ones, or only the attested ones."""

NOT_DISTRUSTED: Trust = "not-distrusted"

_MAX_AUTHORS = 4
_MAX_NOTE = 200


def trust_of(evaluations: VersionEvaluations) -> Literal["attested", "distrusted"] | None:
    """Return what the verdicts on a version say. None: it has no verdict."""
    if find_distrust(evaluations) is not None:
        return "distrusted"
    return "attested" if evaluations.verdicts() else None


def find_distrust(
    evaluations: VersionEvaluations, trust: Trust = NOT_DISTRUSTED
) -> NotTrusted | None:
    """Return why a version is not accepted, or None if it is.

    A verdict that cannot be read counts as negative, whatever its author says elsewhere: it is not
    known what it says, nor which verdict of this author is the newest.
    """
    verdicts = evaluations.verdicts().values()
    negative = [describe_verdict(verdict) for verdict in verdicts if not verdict.ok]
    if negative:
        return NotTrusted(
            format_list(negative, _MAX_AUTHORS, "; "),
            todo="If that is wrong, its author can record a new verdict: `limpet attest --ok`",
        )
    if evaluations.unreadable:
        keys = [unreadable.key for unreadable in evaluations.unreadable]
        authors = sorted({unreadable.name for unreadable in evaluations.unreadable})
        return NotTrusted(
            f"A verdict of {format_list(authors, _MAX_AUTHORS)} on it cannot be read"
            f" ({format_list(keys, _MAX_AUTHORS)})",
            todo="It may be a negative one. Record the verdict again with `limpet attest`, then"
            " delete that file",
        )
    if trust == "attested" and not verdicts:
        return NotTrusted("It has no verdict", todo="`limpet attest` records one")
    return None


def describe_verdict(verdict: Verdict) -> str:
    """Return ``sdc-replay does not trust it: step 118 differs``, on one line."""
    note = "".join(c if c.isprintable() else "?" for c in " ".join(verdict.note.split()))
    note = note if len(note) <= _MAX_NOTE else f"{note[:_MAX_NOTE]}..."
    says = "trusts it" if verdict.ok else "does not trust it"
    return f"{verdict.name} {says}{note and ': '}{note}"


def check_trust(trust: object) -> None:
    """Raise ``LimpetError`` unless ``trust`` is one of the values of ``Trust``."""
    if trust not in get_args(Trust):
        raise LimpetError(
            "Invalid value for trust=",
            expected='"not-distrusted", for all versions without a negative verdict, or "attested",'
            " for those with a positive one only",
            found=to_repr(trust)[:80],
        )


def check_verdict(ok: object, note: object) -> None:
    """Raise ``LimpetError`` unless these are the result of a check, and a text about it."""
    if type(ok) is not bool:
        raise LimpetError(
            "Invalid value for ok=",
            expected="True if the version can be trusted, or False",
            found=to_repr(ok)[:80],
        )
    if not isinstance(note, str) or len(note) > MAX_TEXT or not _is_unicode(note):
        raise LimpetError(
            "Invalid value for note=",
            expected=f"a text of at most {MAX_TEXT:,} characters",
            found=f"{len(note):,} characters" if isinstance(note, str) else to_repr(note)[:80],
        )


def _is_unicode(text: str) -> bool:
    try:
        return text.encode() is not None
    except UnicodeEncodeError:  # an unpaired surrogate
        return False
