"""Several hosts with slow links on one machine: network namespaces, ``tc tbf``, pinned cores. Needs root and iproute2.

Link time costs no computing here, so communication really hides under computing, and is measured in seconds.

Example::

    python -m benchmarks.testbed check --hosts 2
    python -m benchmarks.testbed run --hosts 2 --rate 500mbit -- train.py --steps 20

    with Testbed(hosts=2, rate="500mbit") as bed:
        result = bed.run(["train.py", "--steps", "20"], timeout=120)
"""

from .bandwidth import verify
from .bed import Testbed
from .errors import BandwidthError, JobError, TestbedError
from .job import Job, JobResult
from .rates import format_rate, parse_rate
from .requirements import missing

__all__ = [
    "BandwidthError",
    "Job",
    "JobError",
    "JobResult",
    "Testbed",
    "TestbedError",
    "format_rate",
    "missing",
    "parse_rate",
    "verify",
]
