"""Save and load with Limpet, and move the same bytes with boto3 alone. Runs in a child process.

What boto3 does here is the least that a careful program with digests must do: 8 threads, parts of
16 MiB from and to the memory of the state, one XXH3-128 pass over the bytes, and a checksum that
the server checks. boto3 sends one by default. This one is CRC-32C by awscrt, which takes a tenth of
the time of the default.
"""

from __future__ import annotations

from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from awscrt.checksums import crc32c
from xxhash import xxh3_128_hexdigest

from bench import transfers

PART = 16 << 20
THREADS = 8
_BLOCK = 1 << 20

Connection = dict[str, str]
"""The options of ``limpet.open_store``: endpoint, access_key_id, secret_access_key, region."""


class _Body:
    """A part as a file whose blocks are views of memory. The bare client copies nothing."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def read(self, size: int = -1) -> memoryview | bytes:
        block = self._view[self._at : self._at + _BLOCK]
        self._at += len(block)
        return block or b""

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class BareClient:
    """boto3 with threads, without signatures of the payload, and with the cheapest checksum."""

    def __init__(self, connection: Connection, bucket: str) -> None:
        import boto3
        from botocore.config import Config

        self._bucket = bucket
        self.client = boto3.client(
            "s3",
            endpoint_url=connection["endpoint"],
            aws_access_key_id=connection["access_key_id"],
            aws_secret_access_key=connection["secret_access_key"],
            region_name=connection["region"],
            config=Config(
                max_pool_connections=THREADS,
                s3={"addressing_style": "path", "payload_signing_enabled": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def upload(self, key: str, data: memoryview) -> list[str]:
        """Upload in parts, and return the digests of the parts."""
        place = {"Bucket": self._bucket, "Key": key}
        upload_id = self.client.create_multipart_upload(**place, ChecksumAlgorithm="CRC32C")[
            "UploadId"
        ]

        def send(at: int) -> tuple[dict[str, Any], str]:
            view, number = data[at : at + PART], at // PART + 1
            found = xxh3_128_hexdigest(view)
            checksum = {"ChecksumCRC32C": b64encode(crc32c(view).to_bytes(4, "big")).decode()}
            reply = self.client.upload_part(
                **place, UploadId=upload_id, PartNumber=number, Body=_Body(view), **checksum
            )
            if reply.get("ChecksumCRC32C") is None:  # Ceph 16 ignores it
                checksum = {}
            return {"PartNumber": number, "ETag": reply["ETag"], **checksum}, found

        with ThreadPoolExecutor(THREADS) as threads:
            parts = [*threads.map(send, range(0, len(data), PART))]
        self.client.complete_multipart_upload(
            **place, UploadId=upload_id, MultipartUpload={"Parts": [part for part, _ in parts]}
        )
        return [found for _, found in parts]

    def download(self, key: str, into: memoryview) -> list[str]:
        """Download with one request per part, and return the digests of the parts."""

        def read(at: int) -> str:
            view = into[at : at + PART]
            reply = self.client.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes={at}-{at + len(view) - 1}"
            )
            with reply["Body"] as body:
                done = 0
                while done < len(view):
                    count = body.readinto(view[done : done + _BLOCK])
                    if not count:
                        raise OSError("the reply is incomplete")
                    done += count
            return xxh3_128_hexdigest(view)

        with ThreadPoolExecutor(THREADS) as threads:
            return [*threads.map(read, range(0, len(into), PART))]

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self._bucket, Key=key)


def measure_transfers(
    connection: Connection, bucket: str, size: int, rounds: int, load: bool
) -> dict[str, list[float]]:
    """Return the seconds and CPU seconds of each round, of Limpet and of the bare client."""
    import limpet

    store: Any = limpet.open_store(f"s3://{bucket}/bench", **connection)
    # Ceph removes deleted objects in the background
    pause = 1.0 if load and bucket != "discard" else 0.0
    client = BareClient(connection, bucket)
    return transfers.take_turns(store, client, size, rounds, load=load, pause=pause)


def measure_memory(connection: Connection, bucket: str, size: int, kind: str) -> dict[str, float]:
    """Return the peak memory, in bytes, of a save or load beyond the process with its state.

    The load reads what the save has written, and then deletes it.
    """
    import limpet
    from bench import resource_usage, states

    store: Any = limpet.open_store(f"s3://{bucket}/memory", **connection)
    state, tiny, place = states.large_state(size), store.at("tiny"), store.at("one")
    if kind == "save":
        limpet.save(tiny, states.small_state(2), step=1)
        with resource_usage.PeakMemory() as memory:
            limpet.save(place, state, step=1)
            return {"peak": memory.peak_bytes()}
    limpet.load(tiny, into=states.small_state(2))
    with resource_usage.PeakMemory() as memory:
        limpet.load(place, into=state)
        peak = memory.peak_bytes()
    for stat in list(store.list("")):
        store.delete(stat.key)
    return {"peak": peak}


def count_requests(connection: Connection, bucket: str, size: int) -> dict[str, dict[str, int]]:
    """Return the requests by operation of each operation on a run, in parts of ``PART`` bytes.

    The length is fixed because it would otherwise depend on the bandwidth that the saves before
    have reached.
    """
    import limpet
    from bench import states

    store: Any = limpet.open_store(f"s3://{bucket}/requests", part_size=PART, **connection)
    state = states.large_state(size)
    found: dict[str, dict[str, int]] = {}
    last: dict[str, int] = {}

    def note(name: str) -> None:
        now = store.statistics().requests
        found[name] = {k: n - last.get(k, 0) for k, n in now.items() if n > last.get(k, 0)}
        last.update(now)

    with limpet.Checkpointer(
        store, {"model": state}, save=limpet.Never(), keep=limpet.KeepLast(2)
    ) as checkpointer:
        for name in ("first save", "save", "save with retention"):
            checkpointer.step()
            note("")
            checkpointer.save()
            note(name)
    note("")
    limpet.load(store.at("version_3"), into={"model": state})
    note("load")
    found.pop("")
    return found
