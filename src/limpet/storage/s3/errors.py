"""Converts the errors of boto3 to those of a ``Store``."""

from __future__ import annotations

import email.utils
import json
import re
import time
from typing import Any

from limpet.errors import Denied, NoSpace, NotFound, StoreError, Unavailable
from limpet.storage.store import replaced_error
from limpet.text import hide_secrets

_THROTTLED = {
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
    "TooManyRequestsException", "ServiceUnavailable", "503", "429",
}  # fmt: skip
"""The codes with which a server asks for fewer requests. It has done nothing, except for "503"."""

_TRY_AGAIN = {
    "InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "Busy",
    "BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody", "InvalidDigest",
    "XAmzContentSHA256Mismatch", "408", "409", "500", "502", "504",
}  # fmt: skip
"""The codes of failures that may be gone at the next try."""

_DENIED = {
    "InvalidAccessKeyId": "The server does not know the access key: check the credentials",
    "SignatureDoesNotMatch": "Check the secret key of the credentials, and the endpoint",
    "ExpiredToken": "The credentials have expired: renew them",
    "ExpiredTokenException": "The credentials have expired: renew them",
    "InvalidToken": "The session token is invalid: renew the credentials",
    "RequestTimeTooSkewed": "The clock of this machine is wrong: synchronize it (NTP)",
    "AccessDenied": "Allow s3:GetObject, PutObject, DeleteObject, ListBucket,"
    " AbortMultipartUpload, and ListBucketMultipartUploads; without ListBucket, S3 also denies"
    " access to objects that do not exist",
}

_CREDENTIALS = (
    "Tried: the options access_key_id and profile of limpet.open_store, the variables"
    " AWS_ACCESS_KEY_ID, AWS_PROFILE, and AWS_WEB_IDENTITY_TOKEN_FILE, the files ~/.aws/config and"
    " ~/.aws/credentials, and the metadata services of ECS and EC2."
    " For a public bucket, use limpet.open_store(url, anonymous=True)"
)


_NO_TLS = re.compile(
    "WRONG_VERSION_NUMBER|CERTIFICATE_VERIFY_FAILED|UNKNOWN_CA|UNSUPPORTED_PROTOCOL|HANDSHAKE_FAILURE"
)
"""The reasons of OpenSSL that are not gone at the next try."""


_BAD_HEADER, _BAD_ENDPOINT = "Invalid header value", "Invalid endpoint"
_BAD_PROXY, _NO_PROXY = "Failed to parse: ", "Failed to connect to proxy"


def shows_credentials(error: Exception) -> bool:
    """Return True if the text of an error of boto3 may contain a header or a password."""
    text = str(error)
    return any(words in text for words in (_BAD_HEADER, _BAD_ENDPOINT, _BAD_PROXY, _NO_PROXY))


def translate(error: Exception, action: str, key: str, url: str, server: str) -> StoreError:
    """Return the error of the store for an error of boto3, or of reading a reply.

    ``action``: "read", for the message; ``server``: the URL of the endpoint. Messages contain no
    credentials.
    """
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    what = f"Cannot {action} {key or 'the bucket'} in {url}"
    fields: dict[str, Any] = {"key": key, "store": url}
    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if action == "read" and status == 412:
            return replaced_error(key, url)
        return _translate_reply(error, what, server, fields)
    if isinstance(error, json.JSONDecodeError):
        todo = "Check credential_process in the configuration of AWS"
        return Denied(
            f"{what}: the program for credentials has not printed JSON", todo=todo, **fields
        )
    if isinstance(error, boto.SSOError):
        return Denied(f"{what}: {error}", todo="Log in again: aws sso login", **fields)
    if isinstance(error, boto.NoCredentialsError | boto.CredentialRetrievalError):
        return Denied(f"{what}: there are no credentials", todo=_CREDENTIALS, **fields)
    if isinstance(
        error, boto.PartialCredentialsError | boto.ProfileNotFound | boto.TokenRetrievalError
    ):
        return Denied(f"{what}: {error}", todo=_CREDENTIALS, **fields)
    if isinstance(error, ResponseParserError):
        todo = "Check the endpoint"
        return StoreError(f"{what}: {server} does not answer as S3 does", todo=todo, **fields)
    return _translate_unanswered(error, what, server, fields)


def _translate_unanswered(
    error: Exception, what: str, server: str, fields: dict[str, Any]
) -> StoreError:
    """Return the error for a request without a reply, or with one that ended early."""
    from botocore import exceptions as boto

    text = hide_secrets(str(error).strip())
    if _BAD_ENDPOINT in text:
        return StoreError(f"{what}: the endpoint is not http://HOST or https://HOST", **fields)
    if _BAD_HEADER in text:
        what = f"{what}: the session token or the access key contains a line break"
        return Denied(what, todo="Remove it from the variable or the file", **fields)
    if _BAD_PROXY in text:  # urllib3 has split the URL in the middle of the password
        todo = 'Check HTTP_PROXY and HTTPS_PROXY: write "/" as %2F and "#" as %23 in a password'
        return StoreError(f"{what}: the URL of the proxy is invalid", todo=todo, **fields)
    if _NO_PROXY in text:
        todo = "Check HTTP_PROXY, HTTPS_PROXY, and NO_PROXY"
        return Unavailable(f"{what}: the proxy cannot be reached", todo=todo, **fields)
    if isinstance(error, boto.SSLError) and _NO_TLS.search(text):
        todo = f"Check the endpoint, {server}, and the certificate (AWS_CA_BUNDLE)"
        return StoreError(f"{what}: {text}", todo=todo, **fields)
    if isinstance(error, boto.InvalidRegionError):
        todo = "Check AWS_DEFAULT_REGION, or region="
        return StoreError(f"{what}: {text}", todo=todo, **fields)
    if isinstance(error, boto.ParamValidationError | ValueError | UnicodeError):
        todo = "Check the URL, and the endpoint (http://HOST or https://HOST)"
        return StoreError(f"{what}: {text}", todo=todo, **fields)
    broken = boto.ConnectionError | boto.HTTPClientError | boto.IncompleteReadError | OSError
    if isinstance(error, broken | boto.ResponseStreamingError):
        is_unsent = isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError)
        if not is_unsent:
            fields["outcome"] = "unknown"
        return Unavailable(f"{what}: {text}", **fields)
    if isinstance(error, KeyError):
        return Unavailable(f"{what}: the reply lacks {error}", outcome="unknown", **fields)
    return StoreError(f"{what}: {type(error).__name__}: {error}", **fields)


def _translate_reply(error: Any, what: str, server: str, fields: dict[str, Any]) -> StoreError:
    """Return the error for a reply with an error code."""
    metadata = error.response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    status = metadata.get("HTTPStatusCode", 0)
    details = error.response.get("Error", {})
    code = str(details.get("Code", status))
    fields |= {"code": code, "status": status}
    message = details.get("Message") or code
    what = f"{what}: {code}" if message in (code, "Unknown") else f"{what}: {code}: {message}"
    if code in _THROTTLED or status in (429, 503):
        pause = _seconds(headers.get("retry-after"), headers.get("date"))
        if code == "503":  # not of S3, but of a proxy, which may have passed the request on
            fields["outcome"] = "unknown"
        return Unavailable(what, throttled=True, retry_after=pause, **fields)
    if code in _TRY_AGAIN or status >= 500:
        if status == 501:
            return StoreError(what, todo="The server lacks what Limpet needs", **fields)
        return Unavailable(what, outcome="unknown", **fields)
    if code == "NoSuchBucket":
        todo = f"Create the bucket, or check its name and the endpoint, {server}"
        return StoreError(what, todo=todo, **fields)
    if code in ("NoSuchKey", "NotFound", "404", "NoSuchUpload"):
        return NotFound(f"There is no {fields['key']} in {fields['store']}", **fields)
    if code in _DENIED or status in (401, 403):
        return Denied(what, todo=_DENIED.get(code, _DENIED["AccessDenied"]), **fields)
    if region := headers.get("x-amz-bucket-region") or details.get("Region"):
        todo = f"The bucket is in the region {region}: set AWS_DEFAULT_REGION, or region="
        return StoreError(what, todo=todo, **fields)
    if code in ("QuotaExceeded", "EntityTooLarge"):
        return NoSpace(what, todo="Raise the quota, or save elsewhere", **fields)
    return StoreError(what, todo=f"Check the endpoint, {server}", **fields)


def _seconds(retry_after: str | None, date: str | None) -> float | None:
    """Return the pause of a Retry-After header, which holds seconds or a date; None without one.

    ``date``: the time of the reply. The clock of this machine may differ from that of the server.
    """
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    parse = email.utils.parsedate_to_datetime
    try:
        now = parse(date).timestamp() if date else time.time()
        return max(0.0, parse(retry_after).timestamp() - now)
    except (TypeError, ValueError):
        return None


def no_tag_error(key: str, url: str) -> Unavailable:
    """Return the error for a reply without the tag of what was written.

    A server or a proxy may report success before it finds an error, which it then writes to the
    body of the reply.
    """
    return Unavailable(
        f"The reply to the write of {key} to {url} lacks the entity tag",
        outcome="unknown",
        key=key,
        store=url,
    )


def stated_md5(reply: Any) -> str:
    """Return the MD5 of an object, as its entity tag says, or "".

    The tag of an object that was written by one PUT is its MD5, unless it is encrypted with a key
    of KMS or of the customer. Some servers use tags that only look like it.
    """
    tag = str(reply.get("ETag", "")).strip('"')
    is_md5 = re.fullmatch("[0-9a-f]{32}", tag) is not None
    encryption = (reply.get("ServerSideEncryption") or "AES256", reply.get("SSECustomerAlgorithm"))
    return tag if is_md5 and encryption == ("AES256", None) else ""
