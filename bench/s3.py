"""Topic: S3. The client's own cost on a server that discards, and the speed of a real server."""

from __future__ import annotations

from bench import fresh_process, s3_prices
from bench.report import Options, Section, judge
from bench.s3_server import BUCKET, connection_to, real_server
from bench.s3_sink import running_sink
from bench.transfers import COLUMNS, compare, rows

_MIB = 1 << 20


def _call(name: str, **arguments: object) -> dict[str, list[float]]:
    return fresh_process.call(f"bench.s3_transfer:{name}", timeout=400, **arguments)


_METHOD = (
    " boto3 alone moves the same bytes with 8 threads and parts of 16 MiB, from and to the memory"
    " of the state, computes one XXH3-128 pass over them, and sends the CRC-32C of each part."
    " The two take turns in one process."
    " The CPU time is that of the client's process."
)


def _transfers_on_sink(options: Options, endpoint: str) -> Section:
    size, rounds = options.medium, 1 if options.quick else 11
    connection = connection_to(endpoint)
    title = f"S3: the client's own cost, {size // _MIB} MiB"
    text = (
        "The server is a loopback server in another process. It discards the parts of uploads in"
        " the kernel, and returns them from memory for downloads. It accepts CRC-32C, as AWS does."
        f"{_METHOD}"
    )
    found: dict[str, list[float]] = {}
    missing = []
    for bucket, names in (("discard", ("save", "upload")), ("keep", ("load", "download"))):
        try:
            taken = _call(
                "measure_transfers",
                connection=connection,
                bucket=bucket,
                size=size,
                rounds=rounds,
                load=bucket == "keep",
            )
        except fresh_process.MeasurementFailed as failure:
            missing.append(f"{names[0]}: {failure}")
            continue
        found |= {k: v for k, v in taken.items() if k.partition(" ")[0] in names}
    verdicts = compare(found, "boto3", judged=True)
    peaks: dict[str, list[float]] = {"save": [], "load": []}
    for kind in ["save", "load"] * min(rounds, 3):
        try:
            peak: dict[str, float] = fresh_process.call(
                "bench.s3_transfer:measure_memory",
                connection=connection,
                bucket="keep",
                size=size,
                kind=kind,
            )
        except fresh_process.MeasurementFailed as failure:
            missing.append(f"memory of a {kind}: {failure}")
            break
        peaks[kind].append(peak["peak"] / _MIB)
    verdicts += [
        judge(f"{kind}: peak memory beyond the state", each, most=64, unit="MiB", digits=0)
        for kind, each in peaks.items()
    ]
    return Section(title, text, verdicts, COLUMNS, rows(found, size, "boto3"), missing)


def _transfers_on_ceph(options: Options) -> Section:
    size, rounds = options.medium // 4, 1 if options.quick else 5
    title = f"S3: Ceph on the same machine, {size // _MIB} MiB"
    text = (
        "Ceph 16 with its data in memory, on the same two cores, which limits the speed. It ignores"
        " CRC-32C, so Limpet has each part checked by MD5; the bare client has nothing checked."
        f"{_METHOD}"
    )
    try:
        with real_server("ceph") as connection:
            found = _call(
                "measure_transfers",
                connection=connection,
                bucket=BUCKET,
                size=size,
                rounds=rounds,
                load=True,
            )
    except Exception as failure:  # noqa: BLE001  (reported: Ceph is not installed, or failed)
        return Section(title, text, [], missing=[f"{type(failure).__name__}: {failure}"])
    verdicts = compare(found, "boto3", judged=False)
    return Section(title, text, verdicts, COLUMNS, rows(found, size, "boto3"))


def _requests(options: Options, endpoint: str) -> Section:
    title = f"S3: requests and their price, {options.medium // _MIB} MiB"
    text = (
        "Requests of a run with one rank, in parts of 16 MiB, by store.statistics()."
        f" {s3_prices.PRICES} The first save of a process also checks the server. Retention deletes"
        " one version: its row is the difference of the two rows above it."
    )
    connection = connection_to(endpoint)
    try:
        found: dict[str, dict[str, int]] = fresh_process.call(
            "bench.s3_transfer:count_requests",
            connection=connection,
            bucket=BUCKET,
            size=options.medium,
        )
    except fresh_process.MeasurementFailed as failure:
        return Section(title, text, [], missing=[str(failure)])
    both, alone = found["save with retention"], found["save"]
    retention = {name: n - alone.get(name, 0) for name, n in both.items() if n != alone.get(name)}
    names = ["first save", "save", "save with retention", "retention of one version", "load"]
    found["retention of one version"] = retention
    cells = [[name, *s3_prices.cells(found[name])] for name in names]
    return Section(title, text, [], ["", *s3_prices.COLUMNS], cells)


def sections(options: Options) -> list[Section]:
    with running_sink() as endpoint:
        found = [
            _transfers_on_sink(options, endpoint),
            _requests(options, endpoint),
        ]
    return [*found, _transfers_on_ceph(options)]
