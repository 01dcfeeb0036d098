"""A server on loopback with as much of the API of S3 as Limpet uses, for faults that no real
server has. ``hook(method, path, handler)`` may answer a request; it then returns True."""

import hashlib
import os
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

import limpet

BUCKET = "bucket"
DATE, WHEN = "Wed, 25 Nov 2026 03:00:00 GMT", "2026-11-25T03:00:00.000Z"


def tag(data):
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class FakeS3:
    """``objects``: by name. ``uploads``: by id, each with its name and its parts."""

    def __init__(self):
        self.objects, self.uploads, self.hook = {}, {}, None
        self.lock = threading.Lock()
        self.log = []
        fake = self

        class Handler(_Handler):
            s3 = fake

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 256

            def handle_error(self, *arguments):
                pass  # the client has closed the connection

        self.server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        if "Content_Length" not in headers:
            headers["Content_Length"] = str(len(body))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status, code, **headers):
        body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
        self.answer(status, body, **headers)

    def lose_reply(self):
        """Serve the request, and close the connection without a reply."""
        self.answer = lambda *arguments, **headers: None
        self.serve()
        self.connection.close()
        self.close_connection = True

    def serve_any(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.s3.log.append((self.command, self.path))
        if not (self.s3.hook and self.s3.hook(self.command, self.path, self)):
            self.serve()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve_any  # noqa: N815

    def serve(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, True).items()}
        name = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        with self.s3.lock:
            if "uploads" in query or "uploadId" in query:
                self.serve_upload(name, query)
            elif self.command == "GET" and "list-type" in query:
                self.serve_list(query)
            else:
                self.serve_object(name)

    def serve_upload(self, name, query):
        uploads, objects, upload_id = self.s3.uploads, self.s3.objects, query.get("uploadId")
        if upload_id is None and self.command == "POST":
            upload_id = f"id-{time.time_ns()}"
            uploads[upload_id] = (name, {})
            algorithm = self.headers.get("x-amz-checksum-algorithm", "")
            body = f"<R><UploadId>{upload_id}</UploadId></R>".encode()
            self.answer(200, body, x_amz_checksum_algorithm=algorithm)
        elif upload_id is None:
            found = "".join(
                f"<Upload><Key>{key}</Key><UploadId>{i}</UploadId>"
                f"<Initiated>{WHEN}</Initiated></Upload>"
                for i, (key, _) in uploads.items()
                if key.startswith(query.get("prefix", ""))
            )
            self.answer(200, f"<R><IsTruncated>false</IsTruncated>{found}</R>".encode())
        elif upload_id not in uploads:
            self.fail(404, "NoSuchUpload")
        elif self.command == "PUT":
            uploads[upload_id][1][int(query["partNumber"])] = self.body
            crc = self.headers.get("x-amz-checksum-crc32c", "")
            self.answer(200, ETag=tag(self.body), x_amz_checksum_crc32c=crc)
        elif self.command == "DELETE":
            del uploads[upload_id]
            self.answer(204)
        elif name in objects:
            self.fail(412, "PreconditionFailed")
        else:
            parts = uploads.pop(upload_id)[1]
            objects[name] = b"".join(parts[number] for number in sorted(parts))
            self.answer(200, b'<R><ETag>"x-1"</ETag></R>')

    def serve_list(self, query):
        prefix, is_level = query.get("prefix", ""), query.get("delimiter") == "/"
        objects, folders, found = self.s3.objects, set(), ""
        for name in sorted(n for n in objects if n.startswith(prefix)):
            folder, slash, _ = name[len(prefix) :].partition("/")
            if is_level and slash:
                folders.add(f"{prefix}{folder}/")
            else:
                found += f"<Contents><Key>{name}</Key><Size>{len(objects[name])}</Size>"
                found += f"<LastModified>{WHEN}</LastModified></Contents>"
        for folder in sorted(folders):
            found += f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
        self.answer(200, f"<R><IsTruncated>false</IsTruncated>{found}</R>".encode())

    def serve_object(self, name):
        objects = self.s3.objects
        if self.command == "PUT":
            if self.headers.get("If-None-Match") and name in objects:
                self.fail(412, "PreconditionFailed")
                return
            objects[name] = self.body
            self.answer(200, ETag=tag(self.body))
        elif self.command == "DELETE":
            objects.pop(name, None)
            self.answer(204)
        elif name not in objects:
            self.fail(404, "NoSuchKey")
        else:
            data, asked = objects[name], self.headers.get("Range")
            headers = {"ETag": tag(data), "Last_Modified": DATE}
            if self.command == "HEAD":
                self.answer(200, Content_Length=str(len(data)), **headers)
            elif asked:
                first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
                part = data[first : last + 1]
                where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
                self.answer(206, part, Content_Range=where, **headers)
            else:
                self.answer(200, data, **headers)


@contextmanager
def running_fake_s3():
    fake = FakeS3()
    try:
        yield fake
    finally:
        fake.stop()


def open_run(s3, **options):
    return limpet.open_store("s3://bucket/run", endpoint=s3.endpoint, **{"timeout": 5, **options})


@pytest.fixture
def s3(monkeypatch):
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with running_fake_s3() as fake:
        yield fake
