"""How the hosts are wired: names, addresses, and the lines for ``ip`` and ``tc`` that make it so. Pure functions.

Each link is a veth pair from a host to a bridge in the switch's namespace. It is shaped at both ends, each being
the sender of one direction. A host's first link is on bridge ``br0``, its second on ``br1``, in another subnet.
"""

from __future__ import annotations

from collections.abc import Sequence

from .rates import GSO_BYTES, MTU, shaper

INTERFACES = ("eth0", "eth1")
"""A host's interfaces, by link."""

_SUBNETS = ("10.77.0", "10.78.0")
_SWITCH = 254
_UP = f"mtu {MTU} addrgenmode none gso_max_size {GSO_BYTES} gro_max_size {GSO_BYTES} up"


def hostname(host: int) -> str:
    """``"host0"``, ...: what ``gethostname()`` says there; all hosts resolve it."""
    return f"host{host}"


def address(host: int, link: int = 0) -> str:
    """The host's IPv4 address on the first (0) or second (1) link."""
    return f"{_SUBNETS[link]}.{host + 1}"


def switch_address() -> str:
    """Where the hosts reach the switch's namespace, over their first link."""
    return f"{_SUBNETS[0]}.{_SWITCH}"


def hosts_file(hosts: int) -> str:
    """The text of every host's ``/etc/hosts``."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in range(hosts):
        # torch's store listens on IPv6 and looks its clients up by mapped addresses; the name itself stays IPv4.
        lines += [f"{address(host)} {hostname(host)}", f"::ffff:{address(host)} {hostname(host)}-mapped"]
    return "\n".join(lines) + "\n"


def switch_setup(host_pids: Sequence[int], links: int) -> list[str]:
    """``ip`` lines for the switch: the bridges, and veth pairs whose far ends land in the hosts' namespaces."""
    lines = []
    for link in range(links):
        # A forwarding delay of 0, or the bridge's ports stay shut for the first 15 s.
        lines.append(f"link add br{link} type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
        lines.append(f"link set br{link} mtu {MTU} addrgenmode none up")
        lines.append(f"address add {_SUBNETS[link]}.{_SWITCH}/24 dev br{link}")
        for host, pid in enumerate(host_pids):
            lines.append(f"link add {_port(link, host)} type veth peer name {INTERFACES[link]} netns {pid}")
            lines.append(f"link set {_port(link, host)} master br{link} {_UP}")
    return lines


def host_setup(host: int, links: int) -> list[str]:
    """``ip`` lines for one host."""
    lines = []
    for link in range(links):
        lines.append(f"address add {address(host, link)}/24 dev {INTERFACES[link]}")
        lines.append(f"link set {INTERFACES[link]} {_UP}")
    return lines


def host_shaping(rates: Sequence[int]) -> list[str]:
    """``tc`` lines by which a host sends at ``rates``, one a link."""
    return [f"qdisc replace dev {INTERFACES[link]} root {shaper(rate)}" for link, rate in enumerate(rates)]


def switch_shaping(hosts: int, rates: Sequence[int]) -> list[str]:
    """``tc`` lines by which the switch sends to every host at ``rates``, one a link."""
    return [
        f"qdisc replace dev {_port(link, host)} root {shaper(rate)}"
        for link, rate in enumerate(rates)
        for host in range(hosts)
    ]


def _port(link: int, host: int) -> str:
    """The switch's end of a host's link."""
    return f"p{link}h{host}"
