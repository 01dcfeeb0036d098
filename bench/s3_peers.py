"""Topic: S3 libraries. Saves and loads on the same servers, requests, and flipped bits."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench import fresh_process, s3_prices, s3_training
from bench.report import Options, Section, Verdict, judge, spread
from bench.s3_server import (
    BUCKET,
    client_of,
    connection_to,
    empty_bucket,
    environment_of,
    real_server,
)
from bench.s3_sink import running_sink
from bench.s3_transfer import Connection

_MIB = 1 << 20
_OPERATIONS = ("save", "load")
_FLIP_STATE = 96 * _MIB
"""Large enough for every library to upload in parts."""


# -- in a child process ------------------------------------------------------------------------


def measure(
    operation: str, library: str, environment: dict[str, str], bucket: str, size: int
) -> dict[str, float]:
    """Return the seconds, CPU seconds, and peak memory beyond the state, of a save or load.

    A tiny save and load come first, so that no import is timed. The values of a load are compared.
    Raises ``ValueError`` if they differ.
    """
    from bench import resource_usage, s3_libraries, states

    one = _prepare(library, environment)
    tiny, url = states.small_state(2), f"s3://{bucket}/{library.replace(' ', '-')}"
    one.save(tiny, f"{url}-before-{operation}")
    one.load(states.blank_like(tiny), f"{url}-before-{operation}")
    make = states.large_state if operation == "save" else states.blank_large_state
    state = make(size)
    act: Callable[[s3_libraries.State, str], object] = getattr(one, operation)
    with resource_usage.PeakMemory() as memory:
        cpu, start = resource_usage.cpu_seconds(), time.perf_counter()
        act(state, url)
        seconds = time.perf_counter() - start
        used, peak = resource_usage.cpu_seconds() - cpu, memory.peak_bytes()
    if operation == "load" and (wrong := states.find_mismatches(state)):
        raise ValueError(f"{len(wrong)} of {len(state)} tensors have wrong values")
    return {"seconds": seconds, "cpu": used, "memory": peak}


def perform(
    operation: str, library: str, environment: dict[str, str], bucket: str, size: int
) -> dict[str, int]:
    """Save or load, and nothing else. Return the number of tensors with wrong values."""
    from bench import states

    one, url = _prepare(library, environment), f"s3://{bucket}/{library.replace(' ', '-')}"
    if operation == "save":
        one.save(states.large_state(size), url)
        return {"wrong": 0}
    state = states.blank_large_state(size)
    one.load(state, url)
    return {"wrong": len(states.find_mismatches(state))}


def _prepare(library: str, environment: dict[str, str]) -> Any:
    from bench.s3_libraries import S3_LIBRARIES

    warnings.simplefilter("ignore")
    os.environ |= environment
    return S3_LIBRARIES[library]


# -- speed, CPU time, and memory ---------------------------------------------------------------


@dataclass
class _Samples:
    """The measurements on one server, by operation and library."""

    found: dict[tuple[str, str], list[dict[str, float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def values(self, operation: str, library: str, what: str) -> list[float]:
        return [each[what] for each in self.found.get((operation, library), [])]


def _names() -> list[str]:
    from bench.s3_libraries import S3_LIBRARIES

    return list(S3_LIBRARIES)


def _take_samples(connection: Connection, bucket: str, size: int, rounds: int) -> _Samples:
    """Measure the libraries in turn, each save and load in a process of its own."""
    names, taken = _names(), _Samples()
    for number in range(rounds):
        for name in [*names[number:], *names[:number]]:
            if name in taken.missing:
                continue
            for operation in _OPERATIONS:
                try:
                    sample = fresh_process.call(
                        "bench.s3_peers:measure", operation=operation, library=name,
                        environment=environment_of(connection), bucket=bucket, size=size,
                    )  # fmt: skip
                except fresh_process.MeasurementFailed as failure:
                    taken.missing[name] = f"{name}, {operation}: {failure}"
                    break
                taken.found.setdefault((operation, name), []).append(sample)
            empty_bucket(connection, bucket)
    return taken


def _compare(taken: _Samples, operation: str) -> list[Verdict]:
    """Return the ratios of Limpet to the fastest other library, in each round."""
    ours, *others = _names()
    medians = {
        name: median(values)
        for name in others
        if (values := taken.values(operation, name, "seconds"))
    }
    if not medians:
        return []
    fastest = min(medians, key=lambda name: medians[name])

    def ratios(what: str) -> list[float]:
        pairs = zip(
            taken.values(operation, ours, what), taken.values(operation, fastest, what),
            strict=False,  # a library that failed in a later round has fewer
        )  # fmt: skip
        return [b / a if what == "seconds" else a / b for a, b in pairs]

    return [
        judge(f"{operation}: speed / fastest other library ({fastest})", ratios("seconds")),
        judge(f"{operation}: CPU time of the client / that of {fastest}", ratios("cpu")),
    ]


def _speed_section(
    where: str, text: str, connection: Connection, bucket: str, options: Options
) -> Section:
    size, rounds = options.medium // 2, options.rounds
    taken = _take_samples(connection, bucket, size, rounds)
    gib, rows = size / 2**30, []
    for operation in _OPERATIONS:
        found = {name: taken.values(operation, name, "seconds") for name in _names()}
        for name, seconds in sorted(found.items(), key=lambda item: median(item[1] or [0])):
            if not seconds:
                continue
            cpu = [each / gib for each in taken.values(operation, name, "cpu")]
            memory = [each / _MIB for each in taken.values(operation, name, "memory")]
            rows.append([
                operation, name, f"{median(seconds):.2f}", spread(seconds), str(len(seconds)),
                f"{gib / median(seconds):.2f}", f"{median(cpu):.2f}", spread(cpu),
                f"{median(memory):.0f}", spread(memory, 0),
            ])  # fmt: skip
    columns = [
        "", "library", "s", "range", "runs", "GiB/s", "client CPU s/GiB", "range", "memory, MiB",
        "range",
    ]  # fmt: skip
    verdicts = [verdict for operation in _OPERATIONS for verdict in _compare(taken, operation)]
    return Section(
        f"S3 libraries: {where}, {size // _MIB} MiB", f"{text} {_METHOD}", verdicts, columns, rows,
        [*taken.missing.values()],
    )  # fmt: skip


_METHOD = (
    "The libraries take turns; each save and each load runs in a process of its own, after a tiny"
    " one. A load ends when live tensors hold the values, which are then compared. Memory is the"
    " peak beyond the state. Only Limpet computes digests of the data, and checks them when it"
    " loads. With each part, s3fs sends a CRC-32 and, as this is plain HTTP, a SHA-256 in the"
    " signature; s3torchconnector sends neither."
)


# -- requests ----------------------------------------------------------------------------------


def _requests_section(connection: Connection, options: Options) -> Section:
    from tests.stores.fault_proxy import FaultProxy

    size, rows, missing = options.medium // 2, [], []
    proxy = FaultProxy(int(connection["endpoint"].rpartition(":")[2]))
    try:
        for name in _names():
            for operation in _OPERATIONS:
                proxy.inject()  # forgets the requests so far
                try:
                    _perform(operation, name, connection, proxy.endpoint, size)
                except fresh_process.MeasurementFailed as failure:
                    missing.append(f"{name}, {operation}: {failure}")
                    break
                counts = Counter(s3_prices.name_request(r.method, r.target) for r in proxy.log)
                rows.append([operation, name, *s3_prices.cells(counts)])
            empty_bucket(connection, BUCKET)
    finally:
        proxy.stop()
    rows.sort(key=lambda row: row[0] == "load")
    text = (
        "Requests that a proxy between the library and LocalStack counts, in a process that does"
        " nothing else. The length of a part is each library's default: 28 MiB (Limpet), 8 MiB"
        " (s3torchconnector), at least 50 MiB (s3fs). Only Limpet has retention: see the section"
        f" on its requests. {s3_prices.PRICES}"
    )
    title = f"S3 libraries: requests and their price, {size // _MIB} MiB"
    return Section(title, text, [], ["", "library", *s3_prices.COLUMNS], rows, missing)


def _perform(operation: str, library: str, connection: Connection, endpoint: str, size: int) -> int:
    environment = environment_of({**connection, "endpoint": endpoint})
    found = fresh_process.call(
        "bench.s3_peers:perform", operation=operation, library=library, environment=environment,
        bucket=BUCKET, size=size,
    )  # fmt: skip
    return int(found["wrong"])


# -- flipped bits ------------------------------------------------------------------------------


def _flips_section(connection: Connection) -> Section:
    rows, missing = [], []
    for name in _names():
        try:
            uploaded = _flip_upload(name, connection)
            empty_bucket(connection, BUCKET)
            rows.append([name, uploaded, _flip_stored(name, connection)])
        except fresh_process.MeasurementFailed as failure:
            missing.append(f"{name}: {failure}")
        empty_bucket(connection, BUCKET)
    columns = ["library", "flipped in the upload", "flipped in the bucket"]
    text = (
        "One bit of the data changes: in the first part of an upload, between the library and"
        " LocalStack (which checks the checksums that it gets, as AWS does), or in the stored"
        " object. The connection is plain HTTP; TLS would detect the first."
    )
    title = f"S3 libraries: a flipped bit, {_FLIP_STATE // _MIB} MiB"
    return Section(title, text, [], columns, rows, missing)


def _flip_upload(name: str, connection: Connection) -> str:
    from tests.stores.fault_proxy import Fault, FaultProxy

    proxy = FaultProxy(int(connection["endpoint"].rpartition(":")[2]))
    flip = Fault("flip", method="PUT", path="partNumber=1(&|$)", after=_MIB)
    proxy.inject(flip)
    try:
        _perform("save", name, connection, proxy.endpoint, _FLIP_STATE)
    except fresh_process.MeasurementFailed as failure:
        if not flip.hits:
            raise
        return f"the save fails: {failure}"
    finally:
        proxy.stop()
    if not flip.hits:
        raise fresh_process.MeasurementFailed("no part was uploaded")
    return _load(name, connection, "repaired by another upload")


def _flip_stored(name: str, connection: Connection) -> str:
    _perform("save", name, connection, connection["endpoint"], _FLIP_STATE)
    client = client_of(connection)
    listed = client.list_objects_v2(Bucket=BUCKET)["Contents"]
    place = {"Bucket": BUCKET, "Key": max(listed, key=lambda each: int(each["Size"]))["Key"]}
    data = bytearray(client.get_object(**place)["Body"].read())
    data[len(data) // 2] ^= 1
    client.put_object(**place, Body=bytes(data))
    return _load(name, connection, "no wrong value")


def _load(name: str, connection: Connection, right: str) -> str:
    """Return what a load says about the flipped bit; ``right`` if all values are right."""
    try:
        wrong = _perform("load", name, connection, connection["endpoint"], _FLIP_STATE)
    except fresh_process.MeasurementFailed as failure:
        return f"the load fails: {failure}"
    return f"not noticed: {wrong} tensor has a wrong value" if wrong else right


def sections(options: Options) -> list[Section]:
    with running_sink() as endpoint:
        text = (
            "The loopback server of the section on the client's own cost, which here keeps the"
            " objects in memory."
        )
        connection = connection_to(endpoint)
        found = [
            _speed_section("a server in memory", text, connection, "keep", options),
            s3_training.section(options, endpoint),
        ]
    servers = {"localstack": "LocalStack", "ceph": "Ceph"}
    for server, where in servers.items():
        text = f"{where}, on the same two cores, which limits the speed."
        try:
            with real_server(server) as connection:
                found.append(_speed_section(where, text, connection, BUCKET, options))
                if server == "localstack":
                    found += [_requests_section(connection, options), _flips_section(connection)]
        except Exception as failure:  # noqa: BLE001  (reported: not installed, or failed)
            title = f"S3 libraries: {where}, {options.medium // 2 // _MIB} MiB"
            missing = [f"{type(failure).__name__}: {failure}"]
            found.append(Section(title, text, [], missing=missing))
    return found
