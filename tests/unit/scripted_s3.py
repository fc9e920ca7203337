"""An S3 server on 127.0.0.1 that keeps objects in memory and fails as a test tells it to.

`ScriptedS3` runs in a thread of its own, so that a test may block or have any loop. It speaks GET,
PUT (with conditions), LIST of version 2, DELETE, DeleteObjects and multipart uploads, by path or by
virtual host, of one bucket. Signatures are not looked at; the access key is. `script` is called for
every request, in the server's thread, and says what is to go wrong with it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_BODY_PART = 64 << 10
_LET_IN_SECONDS_MAX = 1.0
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@dataclass(slots=True)
class Asked:
    """A request as it came. `verb`: get, put, list, delete, head or multipart. Times are by
    `time.monotonic`; `under_way`: how many there were when it began, itself included."""

    number: int
    verb: str
    name: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    began: float
    under_way: int
    ended: float | None = None
    status: int | None = None

    @property
    def access_key(self) -> str:
        """The id that it was signed with; empty where it was not."""
        _, _, rest = self.headers.get("authorization", "").partition("Credential=")
        return rest.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request, in this order; what is left out goes right."""

    delay_seconds: float = 0.0
    reset: bool = False
    status: int | None = None
    code: str = ""
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    etag: str | None = None
    # Of a body that is sent: how many bytes too many its header promises (or too few, below 0);
    # after how many bytes the connection closes, or nothing more comes until `let_go`.
    length_off: int = 0
    truncate_after: int | None = None
    stall_after: int | None = None


def slow_down(retry_after: str | None = None) -> Fault:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return Fault(status=503, code="SlowDown", headers=headers)


@dataclass(slots=True)
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def refusal(status: int, code: str, message: str = "", **headers: str) -> Reply:
    told = escape(message or f"scripted: {code}")
    about = f"<Error><Code>{code}</Code><Message>{told}</Message></Error>"
    found = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, about.encode(), {"Content-Type": "application/xml"} | found)


class ScriptedS3:
    """Used as a context. `objects` are the bytes by name; set `modified`, by name, to age one.
    `accepted`: the access keys that are; None for any."""

    def __init__(self, bucket: str = "bucket", tls: ssl.SSLContext | None = None) -> None:
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.asked: list[Asked] = []
        self.script: Callable[[Asked], Fault | None] = lambda asked: None
        self.accepted: set[str] | None = None
        self.knows_conditions = True
        self.knows_delete_objects = True
        self.refuses_checksums = False
        self.clock_off_seconds = 0.0
        self.under_way = 0
        self.under_way_max = 0
        self.port = 0
        self._tls = tls
        self._next: deque[tuple[str | None, Fault]] = deque()
        self._uploads: dict[str, dict[int, bytes]] = {}
        # The checksums that each upload was started with, as AWS keeps to them.
        self._algorithms: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._let_go = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def endpoint(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def uploads(self) -> int:
        """Multipart uploads that were neither completed nor aborted."""
        return len(self._uploads)

    def count(self) -> Counter[str]:
        """Requests so far, by verb."""
        return Counter(asked.verb for asked in list(self.asked))

    def next(self, *faults: Fault, verb: str | None = None) -> None:
        """The next requests (of that verb) fail so, one each, before `script` is asked."""
        self._next += [(verb, fault) for fault in faults]

    def let_go(self) -> None:
        """End every stall, also those to come."""
        self._loop.call_soon_threadsafe(self._let_go.set)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *raised: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._came, "127.0.0.1", self.port, ssl=self._tls, limit=1 << 20
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        # Who is being let in by asyncio: cancelled before it has begun, it would leave a socket.
        if others := asyncio.all_tasks() - {asyncio.current_task(), *self._serving}:
            await asyncio.wait(others, timeout=_LET_IN_SECONDS_MAX)
        self._let_go.set()
        serving = list(self._serving.items())
        for task, writer in serving:
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*(task for task, _ in serving), return_exceptions=True)
        await asyncio.sleep(0)  # for what they closed to be closed

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (asked := await self._read(reader, writer)) is not None:
                self.under_way += 1
                asked.under_way = self.under_way
                self.under_way_max = max(self.under_way_max, self.under_way)
                self.asked.append(asked)
                try:
                    goes_on = await self._answer(asked, writer)
                finally:
                    self.under_way -= 1
                    asked.ended = time.monotonic()
                if not goes_on:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Asked | None:
        first = await reader.readline()
        if not first:
            return None
        method, target, _ = first.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        began = time.monotonic()
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        parts = urlsplit(target)
        path = unquote(parts.path).lstrip("/")
        if not headers.get("host", "").startswith(f"{self.bucket}."):
            bucket, _, path = path.partition("/")
            path = path if bucket == self.bucket else f"{bucket}//no such bucket"
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        verb = _verb(method, query)
        return Asked(len(self.asked), verb, path, query, headers, body, began, 0)

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        fault = self._fault(asked)
        if fault.delay_seconds:
            await asyncio.sleep(fault.delay_seconds)
        if fault.reset:
            writer.transport.abort()
            return False
        if fault.status is not None:
            reply = refusal(fault.status, fault.code or "Scripted", fault.message)
            reply.headers |= fault.headers
        else:
            reply = self._checked(asked)
        asked.status = reply.status
        if fault.etag is not None:
            reply.headers["ETag"] = fault.etag
        body = reply.body
        length = len(body) + fault.length_off
        now = formatdate(time.time() + self.clock_off_seconds, usegmt=True)
        headers = {"Date": now, "x-amz-request-id": f"scripted{asked.number}"} | reply.headers
        if reply.status != 204:
            headers["Content-Length"] = str(length)
        text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {reply.status} Scripted\r\n{text}\r\n".encode("latin-1"))
        sent = body if asked.verb != "head" else b""
        stops = [at for at in (fault.truncate_after, fault.stall_after) if at is not None]
        for at in range(0, min([len(sent), *stops]), _BODY_PART):
            writer.write(sent[at : min([at + _BODY_PART, len(sent), *stops])])
            await writer.drain()
        if fault.stall_after is not None:
            await self._let_go.wait()
            writer.write(sent[fault.stall_after :])
            await writer.drain()
        return fault.truncate_after is None and fault.length_off == 0

    def _fault(self, asked: Asked) -> Fault:
        for at, (verb, fault) in enumerate(self._next):
            if verb in (None, asked.verb):
                del self._next[at]
                return fault
        return self.script(asked) or Fault()

    def _checked(self, asked: Asked) -> Reply:
        if asked.name.endswith("//no such bucket"):
            return refusal(404, "NoSuchBucket")
        if self.accepted is not None and asked.access_key not in self.accepted:
            return refusal(403, "InvalidAccessKeyId")
        has_checksum = any(name.startswith("x-amz-checksum-") for name in asked.headers)
        if self.refuses_checksums and (has_checksum or "x-amz-trailer" in asked.headers):
            return refusal(501, "NotImplemented")
        crc32 = asked.headers.get("x-amz-checksum-crc32")
        if crc32 is not None and crc32 != _crc32(asked.body):
            return refusal(400, "BadDigest")
        return _OPERATIONS[asked.verb](self, asked)

    def _get(self, asked: Asked) -> Reply:
        body = self.objects.get(asked.name)
        if body is None:
            return refusal(404, "NoSuchKey")
        return Reply(200, body, {"ETag": _etag(body)})

    def _put(self, asked: Asked) -> Reply:
        if "uploadId" in asked.query:
            parts = self._uploads.get(asked.query["uploadId"])
            if parts is None:
                return refusal(404, "NoSuchUpload")
            algorithm = self._algorithms[asked.query["uploadId"]]
            if ("x-amz-checksum-crc32" in asked.headers) != (algorithm == "CRC32"):
                return refusal(400, "InvalidRequest", "Checksum Type mismatch occurred")
            parts[int(asked.query["partNumber"])] = asked.body
            return Reply(200, b"", {"ETag": _etag(asked.body)})
        there = self.objects.get(asked.name)
        if self.knows_conditions:
            wanted = asked.headers.get("if-match")
            if wanted is not None and (there is None or _etag(there) != wanted):
                return refusal(412, "PreconditionFailed")
            if asked.headers.get("if-none-match") == "*" and there is not None:
                return refusal(412, "PreconditionFailed")
        self._keep(asked.name, asked.body)
        return Reply(200, b"", {"ETag": _etag(asked.body)})

    def _keep(self, name: str, body: bytes) -> None:
        self.objects[name] = body
        self.modified[name] = time.time() + self.clock_off_seconds

    def _list(self, asked: Asked) -> Reply:
        prefix, limit = asked.query.get("prefix", ""), int(asked.query.get("max-keys", "1000"))
        after = asked.query.get("continuation-token", asked.query.get("start-after", ""))
        names = sorted(
            (name for name in self.objects if name.startswith(prefix) and name > after),
            key=str.encode,
        )
        page = names[:limit]
        entries = "".join(self._entry(name) for name in page)
        more = len(names) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult {_NAMESPACE}><Name>{self.bucket}</Name><KeyCount>{len(page)}"
            f"</KeyCount><MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{entries}</ListBucketResult>"
        )
        return Reply(200, text.encode(), {"Content-Type": "application/xml"})

    def _entry(self, name: str) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.modified.get(name, 0.0)))
        return (
            f"<Contents><Key>{escape(name)}</Key><LastModified>{stamp}</LastModified>"
            f"<ETag>{escape(_etag(self.objects[name]))}</ETag><Size>{len(self.objects[name])}"
            "</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )

    def _delete(self, asked: Asked) -> Reply:
        if "uploadId" in asked.query:
            self._uploads.pop(asked.query["uploadId"], None)
            return Reply(204)
        if "delete" not in asked.query:
            self.objects.pop(asked.name, None)
            return Reply(204)
        if not self.knows_delete_objects:
            return refusal(501, "NotImplemented")
        digest = asked.headers.get("content-md5")
        has_checksum = any(name.startswith("x-amz-checksum-") for name in asked.headers)
        if digest is None and not has_checksum:
            return refusal(400, "InvalidRequest")
        if digest is not None and digest != _md5(asked.body):
            return refusal(400, "BadDigest")
        tree = ElementTree.fromstring(asked.body)
        for key in tree.iterfind(".//{*}Key"):
            self.objects.pop(key.text or "", None)
        return Reply(200, f"<DeleteResult {_NAMESPACE}></DeleteResult>".encode())

    def _multipart(self, asked: Asked) -> Reply:
        if "uploads" in asked.query:
            upload = f"upload{asked.number}"
            self._uploads[upload] = {}
            self._algorithms[upload] = asked.headers.get("x-amz-checksum-algorithm", "")
            text = (
                f"<InitiateMultipartUploadResult {_NAMESPACE}><Bucket>{self.bucket}</Bucket><Key>"
                f"{escape(asked.name)}</Key><UploadId>{upload}</UploadId>"
                "</InitiateMultipartUploadResult>"
            )
            return Reply(200, text.encode())
        parts = self._uploads.pop(asked.query["uploadId"], None)
        if parts is None:
            return refusal(404, "NoSuchUpload")
        listed = list(ElementTree.fromstring(asked.body).iterfind(".//{*}Part"))
        numbers = [int(part.findtext("{*}PartNumber") or "0") for part in listed]
        sums = [part.findtext("{*}ChecksumCRC32") for part in listed]
        if self._algorithms[asked.query["uploadId"]] and sums != [
            _crc32(parts[number]) for number in numbers
        ]:
            return refusal(400, "InvalidRequest", "must include the checksum for each part")
        self._keep(asked.name, b"".join(parts[number] for number in numbers))
        text = (
            f"<CompleteMultipartUploadResult {_NAMESPACE}><Key>{escape(asked.name)}</Key>"
            f"<ETag>{escape(_etag(self.objects[asked.name]))}</ETag>"
            "</CompleteMultipartUploadResult>"
        )
        return Reply(200, text.encode())

    def _head(self, asked: Asked) -> Reply:
        return self._get(asked)


_OPERATIONS: dict[str, Callable[[ScriptedS3, Asked], Reply]] = {
    "get": ScriptedS3._get,
    "put": ScriptedS3._put,
    "list": ScriptedS3._list,
    "delete": ScriptedS3._delete,
    "multipart": ScriptedS3._multipart,
    "head": ScriptedS3._head,
}


def _verb(method: str, query: Mapping[str, str]) -> str:
    """What a request is counted as. The parts of an upload are puts."""
    if method == "GET" and "list-type" in query:
        return "list"
    if method == "POST":
        return "delete" if "delete" in query else "multipart"
    return method.lower()


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _crc32(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body).digest()).decode()
