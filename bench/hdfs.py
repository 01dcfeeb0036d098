"""Topic: HDFS. Saves and loads on a real server, next to hdfs-native alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_128_hexdigest

from bench import fresh_process, transfers
from bench.report import Options, Section

PART = 4 << 20
THREADS = 8


class BareClient:
    """hdfs-native alone. It can only append, so an upload has one stream."""

    def __init__(self, url: str) -> None:
        from hdfs_native import Client

        self._client = Client(url)

    def upload(self, key: str, data: memoryview) -> list[str]:
        found = []
        with self._client.create(f"/{key}") as writer:
            for at in range(0, len(data), PART):
                view = data[at : at + PART]
                found.append(xxh3_128_hexdigest(view))
                writer.write(bytes(view))  # ten times as fast as a view
            writer.hsync()
        return found

    def download(self, key: str, into: memoryview) -> list[str]:
        reader = self._client.read(f"/{key}")

        def read(at: int) -> str:
            view = into[at : at + PART]
            view[:] = reader.read_range(at, len(view))
            return xxh3_128_hexdigest(view)

        with ThreadPoolExecutor(THREADS) as threads:
            return [*threads.map(read, range(0, len(into), PART))]

    def delete(self, key: str) -> None:
        self._client.delete(f"/{key}")


def measure_transfers(url: str, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds and CPU seconds of each round, of Limpet and of the bare client."""
    import limpet

    store = limpet.open_store(f"{url}/bench")
    return transfers.take_turns(store, BareClient(url), size, rounds, load=True, pause=1.0)


def sections(options: Options) -> list[Section]:
    from tests.stores.hdfs_server import Hdfs
    from tests.stores.servers import running

    size, rounds = options.medium // 2, 1 if options.quick else 5
    title = f"HDFS on the same machine, {size >> 20} MiB"
    text = (
        "HDFS 2.7 with one NameNode and one DataNode, on the same two cores and the local disk,"
        " which limit the speed. hdfs-native alone moves the same bytes from and to the memory of"
        " the state: one stream with hsync for the upload, 8 threads that read 4 MiB at a time for"
        " the download, and one XXH3-128 pass over the bytes. The two take turns in one process."
        " The CPU time is that of the client's process. A save also creates its folder, renames"
        " its files, and checks their lengths."
    )
    try:
        with running(Hdfs) as server:
            found: dict[str, list[float]] = fresh_process.call(
                "bench.hdfs:measure_transfers",
                timeout=400,
                url=server.url,
                size=size,
                rounds=rounds,
            )
    except Exception as failure:  # noqa: BLE001  (reported: HDFS is not installed, or failed)
        return [Section(title, text, [], missing=[f"{type(failure).__name__}: {failure}"])]
    verdicts = transfers.compare(found, "hdfs-native", judged=False)
    cells = transfers.rows(found, size, "hdfs-native")
    return [Section(title, text, verdicts, transfers.COLUMNS, cells)]
