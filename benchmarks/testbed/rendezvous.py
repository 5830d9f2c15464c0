"""Horovod's rendezvous server as a process of its own, run inside the switch namespace, where every host can reach it.

``rendezvous.py host0:1,host1:1 2`` prints the port it listens on and serves until its standard input ends.
"""

from __future__ import annotations

import sys


def main(host_list: str, size: int) -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(host_list), size))
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
