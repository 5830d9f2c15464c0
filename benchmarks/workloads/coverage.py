"""The arithmetic of coverage rates. Pure functions; bytes, seconds, bits a second.

A coverage rate (CR) is the all-reduce time of one step's gradients over the time of its forward and backward passes.
"""

from __future__ import annotations


def all_reduce_bytes(gradient_bytes: float, hosts: int) -> float:
    """Bytes that each host must send, and receive, for an all-reduce: ``2 (N - 1) / N`` of the gradients.

    Raises:
        ValueError: negative bytes or fewer than one host.

    Example:
        >>> all_reduce_bytes(33.6e6, 2), all_reduce_bytes(33.6e6, 4)
        (33600000.0, 50400000.0)
    """
    if hosts < 1 or gradient_bytes < 0:
        raise ValueError(f"hosts, gradient_bytes: got {hosts}, {gradient_bytes}; give at least 1 host and 0 bytes")
    return 2 * (hosts - 1) / hosts * gradient_bytes


def all_reduce_s(gradient_bytes: float, rate: float, hosts: int) -> float:
    """Seconds of an all-reduce that uses every link fully in both directions, at ``rate`` bit/s of goodput.

    Raises:
        ValueError: a rate that is not positive, or as in :func:`all_reduce_bytes`.
    """
    if rate <= 0:
        raise ValueError(f"rate: got {rate}; give bits a second, more than 0")
    return all_reduce_bytes(gradient_bytes, hosts) * 8 / rate


def rate_for(cr: float, compute_s: float, gradient_bytes: float, hosts: int) -> float:
    """The link rate in bit/s at which the coverage rate is ``cr``, for ``compute_s`` of forward and backward.

    Raises:
        ValueError: a coverage rate or time that is not positive, or fewer than two hosts.

    Example:
        >>> round(rate_for(1.0, 0.5376, 33.6e6, 2))
        500000000
    """
    if cr <= 0 or compute_s <= 0 or hosts < 2:
        raise ValueError(
            f"cr, compute_s, hosts: got {cr}, {compute_s}, {hosts}; give cr > 0, compute_s > 0, hosts >= 2"
        )
    return all_reduce_bytes(gradient_bytes, hosts) * 8 / (cr * compute_s)


def coverage_rate(compute_s: float, gradient_bytes: float, rate: float, hosts: int) -> float:
    """The coverage rate at a link rate: the inverse of :func:`rate_for`."""
    if compute_s <= 0:
        raise ValueError(f"compute_s: got {compute_s}; give seconds, more than 0")
    return all_reduce_s(gradient_bytes, rate, hosts) / compute_s


def limit_s(compute_s: float, gradient_bytes: float, rate: float, hosts: int) -> float:
    """The shortest step of any schedule that shares every gradient: the longer of computing and all-reduce.

    ``compute_s`` is the whole step's computing here: forward, backward and update.
    """
    return max(compute_s, all_reduce_s(gradient_bytes, rate, hosts))
