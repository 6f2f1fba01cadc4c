"""Moves blocks from a slab that has them into memory of the reader's own.

One narrow interface (interface.py) and an implementation for each way: shm.py in the same pod,
tcp.py from another node, whose agent runs a PeerServer (server.py). See DESIGN.md beside this.
"""
