from __future__ import annotations

import os
import threading

from crossover.telemetry.background import Background


class Stuck:
    """Consumes only when told, as a disk that does not answer."""

    def __init__(self, capacity: int) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.seen: list[int] = []
        self.finished = False
        self.queue: Background[int] = Background(
            self.consume, self.finish, name="stuck", capacity=capacity, interval_s=0.01, chunk=1
        )

    def consume(self, batch: list[int]) -> None:
        self.entered.set()
        assert self.release.wait(30)
        self.seen += batch

    def finish(self) -> None:
        self.finished = True


def test_full_queue_drops_and_counts_and_put_never_waits() -> None:
    stuck = Stuck(capacity=5)
    stuck.queue.put(0)
    assert stuck.entered.wait(30)
    for item in range(1, 21):  # the consumer holds item 0 and takes nothing: waiting here would never end
        stuck.queue.put(item)
    assert stuck.queue.dropped == 15
    stuck.release.set()
    stuck.queue.close(30)
    assert stuck.seen == [0, 1, 2, 3, 4, 5]
    assert stuck.finished


def test_close_gives_up_on_a_disk_that_does_not_answer() -> None:
    stuck = Stuck(capacity=5)
    stuck.queue.put(0)
    assert stuck.entered.wait(30)
    stuck.queue.close(timeout_s=0.05)
    assert not stuck.finished
    assert stuck.queue.flush(timeout_s=0.05) is False
    stuck.release.set()


def test_flush_returns_when_all_is_consumed() -> None:
    seen: list[int] = []
    queue: Background[int] = Background(seen.extend, lambda: None, name="test", capacity=1000, interval_s=60.0, chunk=7)
    for item in range(100):
        queue.put(item)
    assert queue.flush(30)
    assert seen == list(range(100))
    queue.close()


def test_failure_is_kept_and_everything_after_it_discarded() -> None:
    def consume(batch: list[int]) -> None:
        raise OSError("disk full")

    queue: Background[int] = Background(consume, lambda: None, name="test", capacity=10, interval_s=0.01)
    queue.put(1)
    assert queue.flush(30) is False
    assert isinstance(queue.failure, OSError)
    for item in range(100):
        queue.put(item)
    assert queue.dropped == 0
    queue.close()


def test_forked_child_leaves_the_queue_to_its_parent(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "out")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    queue: Background[bytes] = Background(
        lambda batch: [os.write(descriptor, item) for item in batch] and None,
        lambda: os.close(descriptor),
        name="test",
        capacity=10,
        interval_s=60.0,
    )
    queue.put(b"once")
    child = os.fork()
    if child == 0:
        queue.close()
        os._exit(0 if queue.flush(0.1) is False else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    queue.close()
    with open(path, "rb") as file:
        assert file.read() == b"once"
