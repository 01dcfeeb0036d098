"""Names of files and leaves: how to build them and how to recognize them."""

from __future__ import annotations

import re
import secrets
from functools import partial
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from limpet.format.digest import digest

MANIFEST = "manifest.json"
MAX_STEP = 10**18 - 1  # 18 digits
SAVE_REQUEST = "request-save.json"
WRITER_LOCK = "writer.json"
RUN_ID = "run-id.json"
NOTICES = "deleting"
METRICS_LOG = "metrics-log"

_VERSION = re.compile(r"version_(0|[1-9][0-9]{0,17})(?:\.([1-9][0-9]{0,8}))?")
_SHARD = re.compile(r"shard-([0-9]{5,})-of-([0-9]{5,})\.([0-9a-f]{12})\.safetensors")
_INDEX = re.compile(r"shard-([0-9]{5,})-of-([0-9]{5,})\.([0-9a-f]{12})\.index\.json")
_SPREAD_FOLDER = re.compile(r"spread-[0-9a-f]{2}")
_REFERENCE = re.compile(
    rf"\.\./(?:{_SPREAD_FOLDER.pattern}/)?{_VERSION.pattern}/({_SHARD.pattern})"
)
_BRANCH = re.compile(r"branch-([1-9][0-9]{0,8})\.json")
_LASTING_PIN = re.compile(r"pin-(version_[0-9.]+)\.json")
_EVALUATION_NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
_EVALUATION = re.compile(
    rf"eval-({_EVALUATION_NAME})\.([0-9a-f]{{12}})(?:\.(failed|ended|inexact|best|verified))?\.json"
)
_LEASE = re.compile(rf"lease-({_EVALUATION_NAME})\.([1-9][0-9]{{0,17}})\.json")
_METRICS = re.compile(r"(0|[1-9][0-9]{0,8})\.([1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,17})\.json")
_ADDRESS = re.compile(r"(.+)@(latest|best|(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,9})?)", re.DOTALL)
_BEST_ADDRESS = re.compile(r"(.+)@(best:.+)", re.DOTALL)

# The types of fields that msgspec checks. \Z, because $ also matches before a last newline.
Attempt = Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}\Z")]
VersionName = Annotated[str, Meta(pattern=rf"\A{_VERSION.pattern}\Z")]
ShardPath = Annotated[
    str, Meta(pattern=rf"\A(\.\./{_SPREAD_FOLDER.pattern}/{_VERSION.pattern}/)?{_SHARD.pattern}\Z")
]
EvaluationName = Annotated[str, Meta(pattern=rf"\A{_EVALUATION_NAME}\Z")]


random_id = partial(secrets.token_hex, 6)
"""Returns 12 random hexadecimal digits: the id of an attempt, a pin, or a request."""


def is_attempt(text: str) -> bool:
    return len(text) == 12 and not text.strip("0123456789abcdef")


def _matches(pattern: str | re.Pattern[str], name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


is_shard_name = partial(_matches, _SHARD)
is_spread_folder = partial(_matches, _SPREAD_FOLDER)
is_pin_name = partial(_matches, r"pin-[0-9a-f]{12}\.json")
is_notice_name = partial(_matches, rf"{NOTICES}/[0-9a-f]{{12}}\.json")
is_restart_name = partial(_matches, r"restart-[0-2]-[0-9a-f]{12}\.json")
is_objective_name = partial(_matches, r"objective-[0-9a-f]{32}\.json")


class Version(Struct, frozen=True, order=True, gc=False):
    """The name of a version: the step after which it was saved, and its branch (0: the first)."""

    step: int
    branch: int = 0

    def __str__(self) -> str:
        return f"version_{self.name}"

    @property
    def name(self) -> str:
        """What follows the ``@`` in an address."""
        return f"{self.step}" + (f".{self.branch}" if self.branch else "")


def parse_version(folder: str) -> Version | None:
    """Parse ``version_120`` or ``version_120.2``. Return None for any other name."""
    match = _VERSION.fullmatch(folder)
    return None if match is None else Version(int(match[1]), int(match[2] or 0))


def split_address(text: str, *, by_metric: bool = True) -> tuple[str, str | None]:
    """Split ``RUN@120`` into the run and the text after ``@``, or None. With ``by_metric``, a name
    ``RUN@best:METRIC`` is split at ``@best:``: a metric may contain ``@``, ``/``, and ``:``."""
    match = (_BEST_ADDRESS.fullmatch(text) if by_metric else None) or _ADDRESS.fullmatch(text)
    return (text, None) if match is None else (match[1], match[2])


def shard_name(rank: int, world_size: int, attempt: str) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.{attempt}.safetensors"


def index_name(rank: int, world_size: int, attempt: str) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.{attempt}.index.json"


def parse_attempt(name: str) -> str | None:
    """Return the attempt in the name of a shard or an index, or None for any other name."""
    match = _SHARD.fullmatch(name) or _INDEX.fullmatch(name)
    return None if match is None else match[3]


def spread_folder(number: int) -> str:
    """Return the name of a folder over which a run spreads its shards and indexes."""
    return f"spread-{number:02x}"


def spread_path(folder: str, name: str, count: int) -> str:
    """Return the path, from a version's folder, of a file in one of ``count`` folders: the ranks of
    a version are spread evenly, from a folder that depends on a hash."""
    match = _SHARD.fullmatch(name) or _INDEX.fullmatch(name)
    number = int(digest(folder.encode()), 16) + (0 if match is None else int(match[1]))
    return f"../{spread_folder(number % count)}/{folder}/{name}"


def version_of_key(key: str) -> Version | None:
    """Return the version that has a file with this key in the run: ``version_1/manifest.json`` or
    ``spread-0e/version_1/shard-...``. Return None for any other key."""
    first, _, rest = key.partition("/")
    return parse_version(rest.partition("/")[0] if is_spread_folder(first) else first)


def reference_path(folder: str, path: str) -> str:
    """Return the path from the folder of one version to a shard of the version ``folder``, whose
    path from the folder of that version is ``path``."""
    return path if path.startswith("../") else f"../{folder}/{path}"


def parse_reference(path: str) -> tuple[Version, str] | None:
    """Return the version and the shard name in ``../version_100/shard-...`` or
    ``../spread-0e/version_100/shard-...``. Any other path is None, so that none leaves the run."""
    match = _REFERENCE.fullmatch(path)
    return None if match is None else (Version(int(match[1]), int(match[2] or 0)), match[3])


def branch_name(number: int) -> str:
    return f"branch-{number}.json"


def parse_branch(name: str) -> int | None:
    match = _BRANCH.fullmatch(name)
    return None if match is None else int(match[1])


def pin_name(pin: str) -> str:
    return f"pin-{pin}.json"


def notice_name(notice: str) -> str:
    """Return the key of the notice of a process that deletes files. A folder of their own makes
    listing them cost the same in a run of any length."""
    return f"{NOTICES}/{notice}.json"


def restart_name(rung: int, restart: str) -> str:
    """Return the name of the record of a restart. The rung is in it, so that a reader who reads a
    bounded number of records knows which ones count most."""
    return f"restart-{rung}-{restart}.json"


def parse_lasting_pin(name: str) -> Version | None:
    """Return the version in the file name of a lasting pin, or None for any other name."""
    match = _LASTING_PIN.fullmatch(name)
    return None if match is None else parse_version(match[1])


class EvaluationFile(NamedTuple):
    """The name of a file about a version; ``kind``: "", or what is before ``.json``."""

    name: str
    attempt: str
    kind: str = ""

    def __str__(self) -> str:
        return f"eval-{self.name}.{self.attempt}{self.kind and '.'}{self.kind}.json"


def parse_evaluation(file: str) -> EvaluationFile | None:
    """Parse the name of a file about a version. Return None for any other name."""
    match = _EVALUATION.fullmatch(file)
    return None if match is None else EvaluationFile(match[1], match[2], match[3] or "")


def lease_name(name: str, number: int) -> str:
    """Return the key, relative to the run, of a renewal of the lease of an evaluation."""
    return f"lease-{name}.{number}.json"


def parse_lease(file: str) -> tuple[str, int] | None:
    match = _LEASE.fullmatch(file)
    return None if match is None else (match[1], int(match[2]))


class MetricsFile(NamedTuple):
    """The name of a file of the metrics log: the branch, the number of the start of the training,
    and the first step. Files sort in the order in which they were written on a branch."""

    branch: int
    start: int
    first: int

    @property
    def key(self) -> str:
        """The key in the run. A folder of its own, which no listing of versions reads."""
        return f"{METRICS_LOG}/{self.branch}.{self.start}.{self.first}.json"


def parse_metrics_file(file: str) -> MetricsFile | None:
    """Parse the name of a file of the metrics log. Return None for any other name."""
    match = _METRICS.fullmatch(file)
    return None if match is None else MetricsFile(*map(int, match.groups()))


def objective_name(digest: str) -> str:
    return f"objective-{digest}.json"


def escape_level(level: str) -> str:
    """Escape one level of a key: ``~`` and ``/`` as in JSON Pointer (RFC 6901). The empty name
    becomes ``~``, so that no level is empty."""
    if "~" in level or "/" in level:
        return level.replace("~", "~0").replace("/", "~1")
    return level or "~"


def to_dotted(key: str) -> str:
    """Return a key with dots between its levels, as PyTorch writes the name of a parameter."""
    dotted = key.replace("/", ".")
    return dotted.replace("~1", "/").replace("~0", "~") if "~" in key else dotted


def join_key(parent: str, level: str) -> str:
    """Return the key of a child: the parent's key (empty at the top), then the child's level."""
    return f"{parent}/{level}" if parent else level
