"""Hands what the training thread produces to something slow, without ever making the training thread wait."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

CLOSE_TIMEOUT_S = 5.0
"""How long an orderly end waits for a slow disk before the rest of the queue is given up."""

Item = TypeVar("Item")


class Background(Generic[Item]):
    """A bounded queue and the daemon thread that empties it.

    Nothing here communicates or waits for another rank. When the queue is full, items are dropped and counted. When
    ``consume`` raises, the error is kept in :attr:`failure` and everything from then on is discarded.

    Args:
        consume: takes a list of items, in order; runs in the thread.
        finish: runs in the thread after the last item, also after a failure.
        name: of the thread.
        capacity: items that may wait.
        interval_s: seconds between two looks at the queue, hence what a kill can lose.
        chunk: items given to ``consume`` at once. Small, so that the interpreter lock is never held for long.
    """

    def __init__(
        self,
        consume: Callable[[list[Item]], None],
        finish: Callable[[], None],
        *,
        name: str,
        capacity: int,
        interval_s: float,
        chunk: int = 128,
    ) -> None:
        self.dropped = 0
        self.failure: Exception | None = None
        self._consume = consume
        self._finish = finish
        self._capacity = capacity
        self._interval_s = interval_s
        self._chunk = chunk
        self._queue: deque[Item] = deque()
        self._count_lock = threading.Lock()
        self._wake = threading.Event()
        self._flushed: deque[threading.Event] = deque()
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, item: Item) -> None:
        """Queue ``item``, or count it as dropped. Never waits, from any thread."""
        queue = self._queue
        if self._closing or self.failure is not None:
            return
        if len(queue) >= self._capacity:
            with self._count_lock:
                self.dropped += 1
            return
        queue.append(item)
        if 2 * len(queue) == self._capacity:
            self._wake.set()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until what was queued before the call has been consumed. ``False`` if ``timeout_s`` passed first."""
        if self._pid != os.getpid() or not self._thread.is_alive():
            return False
        done = threading.Event()
        self._flushed.append(done)
        self._wake.set()
        return done.wait(timeout_s) and self.failure is None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Consume what is queued and end the thread. A second call, or one in a forked child, does nothing."""
        if self._pid != os.getpid() or self._closing:  # after a fork the queue's contents are the parent's to write
            return
        self._closing = True
        atexit.unregister(self.close)
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            closing = self._closing  # read before draining: what was put before close() is then surely seen
            waiting = [self._flushed.popleft() for _ in range(len(self._flushed))]
            self._guard(self._drain)
            for event in waiting:
                event.set()
        self._guard(self._finish)
        for event in self._flushed:
            event.set()

    def _drain(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._chunk))]
            self._consume(batch)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.failure = self.failure or error
            self._queue.clear()
