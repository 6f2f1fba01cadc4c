"""A node of its own process, for contract tests that pull from it, kill it or stop it.

Called by test_connector_pull.py. The agent and two peer servers live in the child: one with the
cluster's secret, and one with another, as a node of another cluster would have.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvcache.ledger import SlotLedger
from kvcache.transport.server import PeerServer
from tests.contract.connector_node import MODEL, Node
from tests.waiting import wait_until

SECRET = b"a secret of the cluster's"
OTHER_SECRET = b"a secret of another cluster's"
CALL_TIMEOUT_S = 30.0


class PeerHost:
    """Lives in the child. Each public method is a call of the test."""

    def __init__(self, folder: str, slab_bytes: int) -> None:
        self._node = Node(Path(folder), slab_bytes)
        self._servers = [PeerServer(self._node.agent, secret) for secret in (SECRET, OTHER_SECRET)]
        for server in self._servers:
            server.start()

    def addresses(self) -> list[str]:
        """To pull from: with the cluster's secret, with another."""
        return [server.address for server in self._servers]

    def ledger(self) -> SlotLedger:
        """The books, after a check that they agree with the slot table."""
        return self._node.ledger()

    def corrupt(self, name: bytes) -> None:
        """Flip one byte of a published block, behind everybody's back."""
        self._node.corrupt(name)

    def clear(self) -> None:
        """Forget every block."""
        self._node.agent.clear(MODEL)

    def end_handoff(self, key: str) -> bool:
        """End a hand-off that nobody took over; whether there was one."""
        return self._node.agent.end_handoff(MODEL, key)

    def close(self) -> None:
        """End the servers, then the agent."""
        for server in self._servers:
            server.close()
        self._node.agent.close()


def _serve(pipe: Connection, arguments: tuple[Any, ...]) -> None:
    host = PeerHost(*arguments)
    pipe.send((True, None))
    while True:
        try:
            call, positional = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(host, call)(*positional)))
        except BaseException as error:  # noqa: BLE001 - reported to the test
            pipe.send((False, f"{type(error).__name__}: {error}"))


class PeerProcess:
    """The parent's handle: `peer.call("ledger")`."""

    def __init__(self, folder: Path, slab_bytes: int) -> None:
        self.socket_path = str(folder / "agent.sock")
        self._folder, self._slab_bytes = folder, slab_bytes
        self.start()

    def start(self) -> None:
        """A new incarnation, with an empty slab, at other addresses; after kill(), too."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, (str(self._folder), self._slab_bytes))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._answer()
        self.address, self.untrusted = self.call("addresses")

    def call(self, name: str, *positional: Any) -> Any:
        """Call a method of PeerHost."""
        self._pipe.send((name, positional))
        return self._answer()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def stop(self) -> None:
        """SIGSTOP; returns when the process stands still."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """End a stop."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def ledger_without_leases(self) -> SlotLedger:
        """The books, once all that readers gave back has got there."""
        wait_until(
            lambda: not self.call("ledger").leases,
            timeout_s=CALL_TIMEOUT_S,
            what=lambda: f"leases to end: {self.call('ledger').leases}",
        )
        ledger: SlotLedger = self.call("ledger")
        return ledger

    def close(self) -> None:
        """End the child in good order."""
        if self._process.is_alive():
            self.go_on()
            self.call("close")
            self._pipe.close()
            self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _answer(self) -> Any:
        assert self._pipe.poll(CALL_TIMEOUT_S), "the node did not answer"
        good, value = self._pipe.recv()
        assert good, value
        return value
