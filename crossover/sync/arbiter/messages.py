"""What jobs and the arbiter have to say to each other, message by message."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import ClassVar

MAX_STATUS_BYTES = 65536
MAX_JOB_BYTES = 64
MAX_REASON_BYTES = 400


class Kind(enum.IntEnum):
    """What a message is. Below 32 from jobs, above from the arbiter."""

    HELLO = 1
    REQUEST = 2
    RELEASE = 3
    PAUSE = 4
    BYE = 5
    STATUS = 6
    WELCOME = 33
    REFUSED = 34
    GRANT = 35
    RECALL = 36
    EVICTED = 37
    REPORT = 38


@dataclass(frozen=True, slots=True)
class Message:
    """The header's part of every message.

    Attributes:
        serial: of a request, and of the grant that answers it.
        epoch: the turn that is meant.
    """

    kind: ClassVar[Kind]
    layout: ClassVar[struct.Struct] = struct.Struct("<")
    text: ClassVar[str | None] = None
    longest: ClassVar[int] = 0

    serial: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """A rank presents itself, once, before anything else.

    Attributes:
        rank: of the job, ``0 <= rank < size``.
        size: number of the job's ranks.
        priority: class, -100 to 100; a higher one goes first.
        weight: share against others, above 0.
        peak_bytes: device memory that it will use at most; 0 if not known.
        capacity_bytes: device memory that there is; 0 if not known.
        job: name, the same on all ranks.
    """

    kind: ClassVar[Kind] = Kind.HELLO
    layout: ClassVar[struct.Struct] = struct.Struct("<IIhdQQ")
    text: ClassVar[str | None] = "job"
    longest: ClassVar[int] = MAX_JOB_BYTES

    rank: int = 0
    size: int = 1
    priority: int = 0
    weight: float = 1.0
    peak_bytes: int = 0
    capacity_bytes: int = 0
    job: str = ""


@dataclass(frozen=True, slots=True)
class Request(Message):
    """Ask for a turn. Asking again with the same serial number changes nothing.

    Attributes:
        peak_bytes: the most device memory used so far.
    """

    kind: ClassVar[Kind] = Kind.REQUEST
    layout: ClassVar[struct.Struct] = struct.Struct("<Q")

    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Give the turn ``epoch`` back; with ``again``, ask for the next one in the same breath.

    Attributes:
        used_s: seconds of computing since the job last came from waiting for its network; for averages only.
    """

    kind: ClassVar[Kind] = Kind.RELEASE
    layout: ClassVar[struct.Struct] = struct.Struct("<Bd")

    again: int = 0
    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pause(Message):
    """Not competing for a while; ends with the next request."""

    kind: ClassVar[Kind] = Kind.PAUSE


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """An orderly end."""

    kind: ClassVar[Kind] = Kind.BYE


@dataclass(frozen=True, slots=True)
class Status(Message):
    """Ask for a report; needs no hello."""

    kind: ClassVar[Kind] = Kind.STATUS


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answer to hello.

    Attributes:
        boot: tells this arbiter from one that ran before.
        others: jobs that are here already.
        needed_bytes: sum of the known peaks, this job's included.
        fits: 0 where that is more than the device has.
    """

    kind: ClassVar[Kind] = Kind.WELCOME
    layout: ClassVar[struct.Struct] = struct.Struct("<QIQB")

    boot: int = 0
    others: int = 0
    needed_bytes: int = 0
    fits: int = 1


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """The arbiter will not serve this connection; ``reason`` is for people."""

    kind: ClassVar[Kind] = Kind.REFUSED
    text: ClassVar[str | None] = "reason"
    longest: ClassVar[int] = MAX_REASON_BYTES

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """The turn ``epoch`` is yours.

    Attributes:
        wanted: whether somebody waits for it already; else it may be kept until a recall.
        lease_s: seconds until others are served regardless, counted from when somebody waits.
    """

    kind: ClassVar[Kind] = Kind.GRANT
    layout: ClassVar[struct.Struct] = struct.Struct("<Bd")

    wanted: int = 0
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Recall(Message):
    """Somebody waits for the turn ``epoch``: give it back as soon as no work is under way."""

    kind: ClassVar[Kind] = Kind.RECALL


@dataclass(frozen=True, slots=True)
class Evicted(Message):
    """The lease of the turn ``epoch`` is over; others are served while its holder goes on."""

    kind: ClassVar[Kind] = Kind.EVICTED


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Answer to a status question: a JSON object."""

    kind: ClassVar[Kind] = Kind.REPORT
    text: ClassVar[str | None] = "document"
    longest: ClassVar[int] = MAX_STATUS_BYTES

    document: str = "{}"
