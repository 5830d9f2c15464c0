"""What jobs and the arbiter say to each other: one datagram a message, fixed layouts, hard limits on every size.

A message is a header (magic, protocol version, kind, serial number, epoch) and the fields of its kind; text is UTF-8 of
bounded length. Nothing is unpickled or evaluated. The *epoch* counts the turns that an arbiter has granted; a release
that names another epoch than the present one is of a turn that is over, and is ignored.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from .messages import (
    MAX_STATUS_BYTES,
    Bye,
    Evicted,
    Grant,
    Hello,
    Message,
    Pause,
    Recall,
    Refused,
    Release,
    Report,
    Request,
    Status,
    Welcome,
)

MAGIC = b"XOVR"
VERSION = 1
MAX_BYTES = 4096
_HEADER = struct.Struct("<4sHHIQ")
_HUGE = 1 << 62


class ProtocolError(ValueError):
    """A datagram that is no message of this protocol."""


class VersionError(ProtocolError):
    """A message of another version of this protocol.

    Attributes:
        version: the other side's.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"protocol version {version}, and this is {VERSION}")


_TYPES: dict[int, type[Message]] = {
    kind.kind: kind
    for kind in (Hello, Request, Release, Pause, Bye, Status, Welcome, Refused, Grant, Recall, Evicted, Report)
}
_AnyMessage = TypeVar("_AnyMessage", bound=Message)


def _body_fields(kind: type[Message]) -> list[str]:
    return [f.name for f in fields(kind) if f.name not in ("serial", "epoch", kind.text)]


_BODY = {kind: _body_fields(kind) for kind in _TYPES.values()}


def encode(message: Message) -> bytes:
    """The datagram of a message.

    Example:
        >>> decode(encode(Release(epoch=7, again=1)))
        Release(serial=0, epoch=7, again=1, used_s=0.0)

    Raises:
        ValueError: a field does not fit.
    """
    kind = type(message)
    try:
        head = _HEADER.pack(MAGIC, VERSION, kind.kind, message.serial, message.epoch)
        body = kind.layout.pack(*(getattr(message, name) for name in _BODY[kind]))
    except struct.error as error:
        raise ValueError(f"{kind.__name__.lower()}: {error}: {message}") from error
    words = b"" if kind.text is None else getattr(message, kind.text).encode()
    if len(words) > kind.longest:
        raise ValueError(f"{kind.text}: is {len(words)} bytes long; at most {kind.longest} can be sent")
    return head + body + words


def decode(datagram: bytes) -> Message:
    """The message of a datagram.

    Raises:
        VersionError: it is of another version.
        ProtocolError: it is nothing that :func:`encode` makes.
    """
    if len(datagram) < _HEADER.size:
        raise ProtocolError(f"{len(datagram)} bytes are no message")
    magic, version, number, serial, epoch = _HEADER.unpack_from(datagram)
    if magic != MAGIC:
        raise ProtocolError(f"starts with {magic!r}")
    if version != VERSION:
        raise VersionError(version)
    kind = _TYPES.get(number)
    if kind is None:
        raise ProtocolError(f"kind {number} is not known")
    return _decode_body(kind, datagram, serial, epoch)


def _decode_body(kind: type[_AnyMessage], datagram: bytes, serial: int, epoch: int) -> _AnyMessage:
    end = _HEADER.size + kind.layout.size
    words = datagram[end:]
    if len(datagram) < end or len(words) > kind.longest:
        raise ProtocolError(f"{len(datagram)} bytes are no {kind.__name__.lower()}")
    make: Callable[..., _AnyMessage] = kind
    values = kind.layout.unpack_from(datagram, _HEADER.size)
    if kind.text is None:
        message = make(serial, epoch, *values)
    else:
        try:
            message = make(serial, epoch, *values, words.decode())  # text is each kind's last field
        except UnicodeDecodeError as error:
            raise ProtocolError(f"{kind.text}: is no UTF-8") from error
    if isinstance(message, Hello):
        _check_hello(message)
    if isinstance(message, Release) and not 0 <= message.used_s < math.inf:
        raise ProtocolError(f"used_s: is {message.used_s}; it has to be a number of seconds")
    return message


def _check_hello(hello: Hello) -> None:
    """Refuse what would spoil the arithmetic of others."""
    if not (math.isfinite(hello.weight) and 1e-3 <= hello.weight <= 1e3):
        raise ProtocolError(f"weight: is {hello.weight}; it has to be from 0.001 to 1000")
    if not (0 <= hello.rank < hello.size and -100 <= hello.priority <= 100):
        raise ProtocolError(f"rank, size, priority: are {hello.rank}, {hello.size}, {hello.priority}")
    if not hello.job.strip() or not hello.job.isprintable():
        raise ProtocolError(f"job: is {hello.job!r}; give a name of printable characters")
    if hello.peak_bytes > _HUGE or hello.capacity_bytes > _HUGE:
        raise ProtocolError("peak_bytes, capacity_bytes: are no amounts of memory")


def report(facts: dict[str, Any]) -> Report:
    """``facts`` as a report; where they are too long, without the jobs."""
    document = json.dumps(facts)
    if len(document.encode()) > MAX_STATUS_BYTES:
        document = json.dumps({**facts, "jobs": [], "cut": True})
    return Report(document=document)
