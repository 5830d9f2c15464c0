"""Turns what happened on a rank into Chrome trace events: text only, no files and no threads."""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import Mapping

from crossover.telemetry.clock import ClockOffset
from crossover.telemetry.files import to_json

Args = Mapping[str, object]
Item = (
    tuple[str, str, str, int, int, Args | None]  # "X", track, name, start, end, args
    | tuple[str, str, str, int, Args | None]  # "i", track, name, at, args
    | tuple[str, str, int, dict[str, float]]  # "C", name, at, values
    | tuple[str, ClockOffset]  # "clock", offset
)

TRACK_ORDER = ("step", "compute", "forward", "backward", "exposed", "communication", "gate", "turn")
"""Tracks from top to bottom; others follow as they appear. ``communication nccl`` sorts by its first word."""

_LANES_PER_TRACK = 32
_NAMES_KEPT = 4096


class _Lane:
    """One row of a track. Spans on a row must nest or follow each other, or viewers draw them wrongly."""

    __slots__ = ("latest", "spans", "tid")

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.latest = -1
        self.spans: deque[tuple[int, int]] = deque(maxlen=16)

    def takes(self, start: int, end: int) -> bool:
        if start < self.latest:
            for left, right in reversed(self.spans):
                if left < start < right < end or start < left < end < right:
                    return False
        self.spans.append((start, end))
        self.latest = max(self.latest, end)
        return True


class Encoder:
    """Encodes items of one rank as JSON objects; names, rows and their order are declared when first seen."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._offset_ns = 0
        self._tracks: dict[str, list[_Lane]] = {}
        self._names: dict[str, str] = {}
        self._rows = 0

    def header(self, clock: ClockOffset) -> list[str]:
        """The process's name, host and place, and its clock."""
        return [
            self._metadata("process_name", {"name": f"rank {self._rank}"}),
            self._metadata("process_labels", {"labels": socket.gethostname()}),
            self._metadata("process_sort_index", {"sort_index": self._rank}),
            *self.encode(("clock", clock)),
        ]

    def encode(self, item: Item) -> list[str]:
        """The events of ``item``, most often one."""
        match item:
            case ("X", str(track), str(name), int(start), int(end), args):
                return self._span(track, name, start, max(end, start), args)
            case ("i", str(track), str(name), int(at), args):
                lanes, declared = self._lanes(track)
                head = f'{{"ph":"i","s":"t","pid":{self._rank},"tid":{lanes[0].tid},"ts":{self._time(at)}'
                return [*declared, f'{head},"name":{self._name(name)}{_args(args)}}}']
            case ("C", str(name), int(at), dict(values)):
                head = f'{{"ph":"C","pid":{self._rank},"tid":0,"ts":{self._time(at)}'
                return [f'{head},"name":{self._name(name)}{_args(dict(values))}}}']
            case ("clock", ClockOffset() as clock):
                self._offset_ns = clock.offset_ns
                told = {"offset_ns": clock.offset_ns, "error_ns": clock.error_ns, "method": clock.method}
                return [self._metadata("crossover_clock", told)]
        raise TypeError(f"not a timeline item: {item!r}")

    def notice(self, name: str, at: int, args: Args) -> str:
        """An instant over the whole trace, about the trace itself."""
        head = f'{{"ph":"i","s":"g","pid":{self._rank},"tid":0,"ts":{self._time(at)}'
        return f'{head},"name":{to_json(name)}{_args(args)}}}'

    def _span(self, track: str, name: str, start: int, end: int, args: object) -> list[str]:
        lanes, declared = self._lanes(track)
        lane = next((lane for lane in lanes if lane.takes(start, end)), None)
        if lane is None and len(lanes) < _LANES_PER_TRACK:
            lane, more = self._new_lane(track, lanes)
            lane.takes(start, end)
            declared = declared + more
        tid = (lane or lanes[-1]).tid
        head = f'{{"ph":"X","pid":{self._rank},"tid":{tid},"ts":{self._time(start)},"dur":{_microseconds(end - start)}'
        return [*declared, f'{head},"name":{self._name(name)}{_args(args)}}}']

    def _lanes(self, track: str) -> tuple[list[_Lane], list[str]]:
        lanes = self._tracks.get(track)
        if lanes is not None:
            return lanes, []
        lanes = self._tracks[track] = []
        return lanes, self._new_lane(track, lanes)[1]

    def _new_lane(self, track: str, lanes: list[_Lane]) -> tuple[_Lane, list[str]]:
        self._rows += 1  # row 0 carries counters and notices
        lane = _Lane(self._rows)
        lanes.append(lane)
        first_word = re.split(r"[\s.:/]", track, maxsplit=1)[0]
        place = TRACK_ORDER.index(first_word) if first_word in TRACK_ORDER else len(TRACK_ORDER)
        place = place * 10_000 + list(self._tracks).index(track) * 100 + len(lanes)
        label = track if len(lanes) == 1 else f"{track} ({len(lanes)})"
        return lane, [
            self._metadata("thread_name", {"name": label}, lane.tid),
            self._metadata("thread_sort_index", {"sort_index": place}, lane.tid),
        ]

    def _metadata(self, name: str, args: Args, tid: int = 0) -> str:
        return f'{{"ph":"M","pid":{self._rank},"tid":{tid},"name":"{name}"{_args(args)}}}'

    def _time(self, at_ns: int) -> str:
        return _microseconds(at_ns + self._offset_ns)

    def _name(self, name: str) -> str:
        text = self._names.get(name)
        if text is None:
            text = to_json(name)
            if len(self._names) < _NAMES_KEPT:
                self._names[name] = text
        return text


def _microseconds(nanoseconds: int) -> str:
    if nanoseconds < 0:
        return "-" + _microseconds(-nanoseconds)
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _args(args: object) -> str:
    return f',"args":{to_json(args)}' if args else ""
