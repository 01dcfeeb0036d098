"""Requests to S3 by operation, and their price."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

_PRICE_WRITE, _PRICE_READ = 0.005 / 1000, 0.0004 / 1000

PRICES = (
    "AWS S3 Standard, us-east-1 list price of November 2026: 0.005 USD per 1,000 writes and lists,"
    " 0.0004 USD per 1,000 reads; deletions and aborts are free. Storage and transfer are not"
    " included."
)

COLUMNS = ["writes, lists", "reads", "free", "USD each", "USD per 1,000", "by operation"]


def cells(requests: dict[str, int]) -> list[str]:
    """Return the cells of ``COLUMNS`` for the number of requests by operation."""
    free = sum(n for name, n in requests.items() if name.startswith(("Delete", "Abort")))
    reads = sum(n for name, n in requests.items() if name.startswith(("Get", "Head")))
    writes = sum(requests.values()) - free - reads
    price = writes * _PRICE_WRITE + reads * _PRICE_READ
    names = ", ".join(f"{name} {count}" for name, count in sorted(requests.items()))
    return [str(writes), str(reads), str(free), f"{price:.6f}", f"{1000 * price:.2f}", names]


def name_request(method: str, target: str) -> str:
    """Return the operation of S3. The copy of an object counts as PutObject, at the same price."""
    url = urlsplit(target)
    query, is_bucket = parse_qs(url.query, keep_blank_values=True), url.path.count("/") == 1
    kind = "Bucket" if is_bucket else "Object"
    if method == "POST":
        if "delete" in query:
            return "DeleteObjects"
        return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
    if method == "PUT":
        return "UploadPart" if "partNumber" in query else f"Put{kind}"
    if method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else f"Delete{kind}"
    if is_bucket and "uploads" in query:
        return "ListMultipartUploads"
    if is_bucket and method == "GET" and ("list-type" in query or not query):
        return "ListObjects"
    return f"{method.capitalize()}{kind}"
