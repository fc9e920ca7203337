"""S3's dialect: what is asked, what is answered, and which StoreError a refusal is.

Pure: values to bytes and back. Owns the codes: which say that there are too many requests, that
the credentials are no good, or that the same may succeed later. The text of an error is the
store's, cut and without what is hidden; what else its XML repeats of a request, a signature for
instance, is never shown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tiering.tiers.obj.store import (
    CredentialsError,
    Listed,
    NotNowError,
    Page,
    StoreError,
    ThrottledError,
)

_TEXT_MAX = 200

THROTTLED = frozenset(
    {"BandwidthLimitExceeded", "RequestLimitExceeded", "RequestThrottled", "ServiceUnavailable"}
    | {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
)
LATER = frozenset({"InternalError", "OperationAborted", "RequestTimeout", "TemporaryRedirect"})
# Those that others may mend; the request is signed anew, once.
STALE = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken"}
    | {"RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired"}
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Names of `headers` are in lower case. `body` is empty where it went elsewhere."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def fault(self) -> Fault:
        """What it says is wrong."""
        root = _parsed(self.body)
        found = {} if root is None or _tag(root) != "Error" else _texts(root)
        return Fault(found.get("Code", ""), found.get("Message", ""), found.get("Region", ""))

    @property
    def is_stale(self) -> bool:
        """Whether other credentials, or the same ones with a new signature, may help."""
        return self.status in (400, 401, 403) and self.fault.code in STALE

    @property
    def region(self) -> str:
        """Where the bucket is, if the answer says that it is elsewhere."""
        return self.headers.get("x-amz-bucket-region", "") or self.fault.region

    @property
    def retry_after_seconds(self) -> float | None:
        """Both forms; a date counts from the store's own Date."""
        text = self.headers.get("retry-after", "")
        try:
            seconds = float(text)
        except ValueError:
            until, now = _date(text), _date(self.headers.get("date", ""))
            seconds = (until - now).total_seconds() if until and now else math.nan
        return max(seconds, 0.0) if math.isfinite(seconds) else None

    def date(self) -> float | None:
        """The store's clock, in seconds since the epoch."""
        found = _date(self.headers.get("date", ""))
        return None if found is None else found.timestamp()


@dataclass(frozen=True, slots=True)
class Fault:
    """Of an error in XML; empty where there is none."""

    code: str
    message: str
    region: str


def refusal(asked: str, answer: Answer, hidden: Collection[str] = ()) -> StoreError:
    """The error that `answer` to `asked`, such as "GET a/b", is. Nothing of `hidden` is told."""
    fault = answer.fault
    told = f"{asked}: {answer.status} {fault.code}".rstrip()
    text = shown(fault.message, hidden)
    message = f"{told}: {text}" if text else told
    match answer.status:
        case _ if fault.code in STALE or answer.status == 401:
            return CredentialsError(f"{message}; the credentials are expired, revoked or wrong")
        case 429 | 503:
            return ThrottledError(message, answer.retry_after_seconds)
        case _ if fault.code in THROTTLED:
            return ThrottledError(message, answer.retry_after_seconds)
        case 307 | 408 | 409 | 425 | 500 | 502 | 504:
            return NotNowError(message, answer.retry_after_seconds)
        case _ if fault.code in LATER:
            return NotNowError(message, answer.retry_after_seconds)
        case 403 if fault.code == "RequestTimeTooSkewed":
            return StoreError(f"{message}; set this machine's clock, for instance with NTP")
        case 403:
            return StoreError(f"{message}; allow it in the policy of the bucket or the user")
        case 404:
            return StoreError(f"{message}; is the bucket still there?")
        case 501:
            return StoreError(f"{message}; the store does not know this kind of request")
        case _:
            return StoreError(message)


def shown(text: str, hidden: Collection[str] = ()) -> str:
    """A store's text in one short line, without what is hidden."""
    for secret in hidden:
        if secret:
            text = text.replace(secret, "(hidden)")
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]}..."


def list_query(prefix: str, *, token: str | None, after: str, limit: int) -> list[tuple[str, str]]:
    """ListObjectsV2. The token says all but the prefix."""
    query = [
        ("list-type", "2"),
        ("encoding-type", "url"),
        ("max-keys", str(limit)),
        ("prefix", prefix),
    ]
    if token is not None:
        query.append(("continuation-token", token))
    elif after:
        query.append(("start-after", after))
    return query


def listing(body: bytes) -> Page:
    """A page of ListObjectsV2. StoreError where it is none."""
    root = _parsed(body)
    if root is None or _tag(root) != "ListBucketResult":
        raise StoreError("the answer to a LIST is no listing; is this an S3 store?")
    is_quoted = root.findtext("{*}EncodingType") == "url"
    objects: list[Listed] = []
    try:
        for entry in root.iterfind("{*}Contents"):
            name = entry.findtext("{*}Key") or ""
            modified = datetime.fromisoformat(entry.findtext("{*}LastModified") or "").timestamp()
            size_bytes = int(entry.findtext("{*}Size") or "")
            objects.append(Listed(unquote_plus(name) if is_quoted else name, size_bytes, modified))
    except (ValueError, OverflowError) as error:
        raise StoreError(f"a listing has an entry that makes no sense: {error}") from error
    if root.findtext("{*}IsTruncated") != "true":
        return Page(objects, None)
    token = root.findtext("{*}NextContinuationToken")
    if not token:
        # Taken for the last page, it would say of all others' chunks that they are gone.
        raise StoreError("a listing is cut and does not tell how it goes on: no ListObjectsV2?")
    return Page(objects, token)


def delete_request(names: Sequence[str]) -> bytes:
    """The body of DeleteObjects, which is to tell of failures only."""
    objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f"{head}<Delete {space}><Quiet>true</Quiet>{objects}</Delete>".encode()


def not_deleted(body: bytes) -> list[str]:
    """The names that an answer to DeleteObjects says are still there."""
    root = _parsed(body)
    if root is None or _tag(root) == "Error":
        raise StoreError("the answer to a DELETE of several makes no sense")
    return [
        error.findtext("{*}Key") or ""
        for error in root.iterfind("{*}Error")
        if error.findtext("{*}Code") != "NoSuchKey"
    ]


def upload_id(body: bytes) -> str:
    """Of the answer to CreateMultipartUpload."""
    root = _parsed(body)
    # What is around it has different names in different stores.
    if root is not None and (found := _texts(root).get("UploadId")):
        return found
    raise StoreError("the answer to the start of an upload in parts has no id")


@dataclass(frozen=True, slots=True)
class Part:
    """One that was uploaded: its ETag, and its CRC32 as S3 writes it, empty where none was sent."""

    etag: str
    crc32: str = ""

    @property
    def told(self) -> str:
        crc32 = f"<ChecksumCRC32>{self.crc32}</ChecksumCRC32>" if self.crc32 else ""
        return f"<ETag>{escape(self.etag)}</ETag>{crc32}"


def complete_request(uploaded: Sequence[Part]) -> bytes:
    """The body of CompleteMultipartUpload, for parts from 1 on."""
    parts = "".join(
        f"<Part><PartNumber>{at}</PartNumber>{part.told}</Part>"
        for at, part in enumerate(uploaded, 1)
    )
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f"<CompleteMultipartUpload {space}>{parts}</CompleteMultipartUpload>".encode()


def is_completed(body: bytes) -> bool:
    """Whether an upload was: such an answer may have status 200 and be an error."""
    root = _parsed(body)
    return root is not None and _tag(root) != "Error"


def _parsed(body: bytes) -> ElementTree.Element | None:
    try:
        return ElementTree.fromstring(body) if body else None
    except (ElementTree.ParseError, LookupError, ValueError):
        # The last two are of encodings that the parser does not know, as in pages of gateways.
        return None


def _tag(element: ElementTree.Element) -> str:
    """Its name, in whatever XML namespace."""
    return element.tag.rpartition("}")[2]


def _texts(element: ElementTree.Element) -> dict[str, str]:
    return {_tag(child): (child.text or "").strip() for child in element}


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    # Without a zone it could not be compared.
    return found if found.tzinfo is not None else None
