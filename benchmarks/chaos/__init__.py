"""A real federation under random faults: ``python -m benchmarks.chaos --minutes 10``.

A server and six nodes, started by the commands that operators use, each in a network namespace of its own. Links are
pairs of TUN devices, and a process in between delays, loses, slows down or cuts what they carry.
Needs Linux, root and Debian's ``iproute2`` (and a C compiler; without it no clock jumps).
"""
