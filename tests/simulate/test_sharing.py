from __future__ import annotations

import itertools

import pytest

from crossover.simulate import Job, Part, gain, share, simulate, systems
from crossover.simulate.events import Landed, Link, Simulation, Transfer
from crossover.sync import JobProfile, forecast
from tests.simulate.jobs import exact_cluster


def job(name: str, compute_us: int, exposed_us: int) -> Job:
    """One bucket, ready when backward ends: all of its all-reduce is exposed."""
    return Job(name, (Part(0.4e-6 * compute_us, 0.6e-6 * compute_us, exposed_us),))


@pytest.mark.parametrize(
    "sizes",
    [
        [(200_000, 100_000), (200_000, 100_000)],
        [(200_000, 20_000), (100_000, 90_000)],
        [(100_000, 200_000), (100_000, 50_000)],
        [(100_000, 100_000)] * 3,
    ],
)
def test_turns_give_what_the_forecast_says(sizes: list[tuple[int, int]]) -> None:
    jobs = [job(f"job {n}", *size) for n, size in enumerate(sizes)]
    plain = systems.Plain()
    together = share([(each, plain) for each in jobs], exact_cluster(), 60)
    alone = [simulate(each, plain, exact_cluster()) for each in jobs]
    profiles = [JobProfile(f"job {n}", 1e-6 * c, 1e-6 * m, 1e-6 * m) for n, (c, m) in enumerate(sizes)]
    expected = forecast(profiles, shared_link=True)
    # jobs take equal turns in time, not in steps: compare the work that gets done
    ideal = sum(a.step_s for a in alone) / expected.shared_s
    if len(set(sizes)) == 1:
        assert gain(alone, together) == pytest.approx(ideal, rel=0.05)
    else:
        assert 1.0 < gain(alone, together) <= len(sizes)


def test_a_device_is_held_by_one_job_at_a_time() -> None:
    jobs = [job("a", 1000, 700), job("b", 800, 900)]
    together = share([(each, systems.Plain()) for each in jobs], exact_cluster(), 30)
    spans = sorted((s.start, s.end) for result in together for s in result.spans if s.track in ("forward", "backward"))
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert start >= end - 1e-12


def test_a_link_carries_one_transfer_at_a_time_also_of_two_jobs() -> None:
    jobs = [job("a", 1000, 700), job("b", 800, 900)]
    together = share([(each, systems.Plain()) for each in jobs], exact_cluster(), 30)
    carried = sorted((t.begin, t.end or 0.0) for result in together for t in result.transfers["link 0"])
    assert len(carried) == 60
    for (_, end), (start, _) in itertools.pairwise(carried):
        assert start >= end - 1e-12


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="name of its own"):
        share([(job("a", 1, 1), systems.Plain())] * 2, exact_cluster(), 3)


def test_a_process_that_waits_for_what_never_comes_is_noticed() -> None:
    def waits() -> object:
        yield Landed([Transfer("lost", "job", 1.0, 0.0)], 0.0)

    simulation = Simulation()
    simulation.start(waits())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="never comes"):
        simulation.run()


def test_links_serve_in_the_order_of_readiness() -> None:
    link, simulation = Link("link"), Simulation()
    late = simulation.send(link, Transfer("late", "a", 1.0, ready=2.0))
    early = simulation.send(link, Transfer("early", "b", 5.0, ready=1.0))
    simulation.run()
    assert (early.end, late.begin, late.end) == (6.0, 6.0, 7.0)
