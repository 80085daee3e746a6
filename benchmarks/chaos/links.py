"""Links between network namespaces, on which packets are delayed, lost, slowed down and cut.

This kernel may have no ``sch_netem``: every link is a pair of TUN devices, one in the server's namespace and one in a
node's, and a process of its own carries the packets from one to the other. Its standard input takes settings, a JSON
object a line, ``{"link": 2, "delay": 0.1, "loss": 0.05, "rate": 125000, "cut": false}``; it ends with its input.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

SERVER = "10.77.0.1"
_NAMESPACE, _SET_NAME, _TUN, _NO_HEADER = 0x40000000, 0x400454CA, 0x0001, 0x1000
_MOST_WAITING = 200
"""Packets that wait for a slow link; more are lost, as in any router."""
_MTU = 2048


@dataclass
class Link:
    """One link: its two ends, and what happens on it."""

    ends: tuple[int, int]
    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    cut: bool = False
    free_at: list[float] = field(default_factory=lambda: [0.0, 0.0])
    waiting: int = 0


def address(link: int) -> str:
    """The address of a node."""
    return f"10.77.{link + 1}.2"


def ip(*words: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def add_namespaces(names: list[str]) -> None:
    """Make namespaces in which nothing but loopback exists."""
    for name in names:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")


def remove_namespaces(names: list[str]) -> None:
    """Remove them, with every device in them."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def carry(namespaces: list[str]) -> None:
    """Carry packets between the first namespace and the others until the input ends."""
    server, nodes = namespaces[0], namespaces[1:]
    ip("-n", server, "addr", "add", f"{SERVER}/32", "dev", "lo")
    links = [_linked(server, node, number) for number, node in enumerate(nodes)]
    print("ready", flush=True)
    Carrier(links).run()


def _linked(server: str, node: str, number: int) -> Link:
    ends = _tun(server, f"link{number}"), _tun(node, "uplink")
    ip("-n", server, "link", "set", "dev", f"link{number}", "up", "mtu", "1400")
    ip("-n", server, "route", "add", address(number), "dev", f"link{number}", "src", SERVER)
    ip("-n", node, "addr", "add", address(number), "peer", SERVER, "dev", "uplink")
    ip("-n", node, "link", "set", "dev", "uplink", "up", "mtu", "1400")
    return Link(ends)


def _tun(namespace: str, name: str) -> int:
    """A TUN device in a namespace; what is written to it arrives there, what is sent there can be read from it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), _NAMESPACE):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_NAME, struct.pack("16sH", name.encode(), _TUN | _NO_HEADER))
    return device


@dataclass
class Carrier:
    """Moves packets; those that are delayed wait in a heap."""

    links: list[Link]
    random: Random = field(default_factory=lambda: Random(0))
    heap: list[tuple[float, int, Link, int, bytes]] = field(default_factory=list)
    order: count[int] = field(default_factory=count)

    def run(self) -> None:
        """Carry until the input ends."""
        selector = selectors.DefaultSelector()
        os.set_blocking(sys.stdin.fileno(), False)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        for link in self.links:
            for side in (0, 1):
                selector.register(link.ends[side], selectors.EVENT_READ, (link, side))
        while True:
            wait = max(0.0, self.heap[0][0] - time.monotonic()) if self.heap else None
            for key, _ in selector.select(wait):
                if key.data is None:
                    told = os.read(key.fd, 1 << 16)
                    if not told:
                        return
                    self.configure(told)
                else:
                    self.take(*key.data)
            self.deliver()

    def configure(self, told: bytes) -> None:
        """Change links."""
        for line in told.splitlines():
            settings: dict[str, Any] = json.loads(line)
            link = self.links[settings.pop("link")]
            for name, value in settings.items():
                setattr(link, name, value)

    def take(self, link: Link, side: int) -> None:
        """Read what one end sends."""
        for _ in range(64):
            try:
                packet = os.read(link.ends[side], _MTU)
            except BlockingIOError:
                return
            if link.cut or self.random.random() < link.loss or (link.rate and link.waiting > _MOST_WAITING):
                continue
            now = time.monotonic()
            sent = max(now, link.free_at[side]) + (len(packet) / link.rate if link.rate else 0.0)
            link.free_at[side] = sent if link.rate else 0.0
            link.waiting += 1
            heapq.heappush(self.heap, (sent + link.delay, next(self.order), link, 1 - side, packet))

    def deliver(self) -> None:
        """Pass on what is due."""
        now = time.monotonic()
        while self.heap and self.heap[0][0] <= now:
            _, _, link, side, packet = heapq.heappop(self.heap)
            link.waiting -= 1
            if not link.cut:
                try:
                    os.write(link.ends[side], packet)
                except OSError:
                    continue


@dataclass
class Links:
    """The process that carries, and how it is told."""

    process: subprocess.Popen[str]

    @staticmethod
    def start(namespaces: list[str]) -> Links:
        """Make the links of all namespaces with the first, and return when they are there."""
        command = [sys.executable, "-m", "benchmarks.chaos.links", *namespaces]
        root = Path(__file__).resolve().parents[2]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("the links could not be made; see above")
        return Links(process)

    def set(self, link: int, **settings: float | bool) -> None:
        """Change one link."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"link": link, **settings}) + "\n")
        self.process.stdin.flush()

    def heal(self, link: int) -> None:
        """A link as it was at first."""
        self.set(link, delay=0.0, loss=0.0, rate=0.0, cut=False)

    def stop(self) -> None:
        """End it; its devices disappear with it."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(10)


if __name__ == "__main__":
    carry(sys.argv[1:])
