"""Clients, and vLLM's front end as far as the flow sees it: streams, stop strings, leaving clients.

Checks what a client can see: its tokens are those of the reference, each once and in order (I5),
and it comes to exactly one end (I4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.flow.flow_types import Finish
from tests.simulation.model import EOS, Text, is_stop, reference
from tests.simulation.scenario import Asked
from tests.simulation.sim_ingress import LIMITS, SimIngress
from tests.simulation.virtual_time import VirtualTime

DELIVERY_S = 0.001


@dataclass(slots=True)
class Client:
    """One client, and what it must and did get."""

    asked: Asked
    name: str
    expected: list[int]
    prompt: Text
    ingress: SimIngress | None = None
    emitted: list[int] = field(default_factory=list)  # by the flow
    seen: int = 0  # of these, by the front end
    is_waiting: bool = False  # the front end still knows it
    ends: list[str] = field(default_factory=list)


class Wrong(AssertionError):
    """An invariant does not hold; the message begins with its number."""


class Clients:
    """All clients of a run; the FrontEnd of every ingress."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.all: dict[str, Client] = {}

    def come(self, asked: Asked, ingress: SimIngress | None) -> None:
        """A client asks; with no ingress there is nobody to ask."""
        name = f"r{asked.number}"
        expected, _ = reference(
            asked.prompt, asked.salt, asked.max_tokens, asked.min_tokens, asked.stop
        )
        prompt = Text(asked.prompt, asked.salt)
        client = Client(asked, name, expected, prompt, ingress)
        self.all[name] = client
        if ingress is None:
            client.ends.append("ingress lost")
            return
        client.is_waiting = True
        if asked.cancel_s is not None:
            ingress.process.at(asked.cancel_s, "client leaves", self._leaves, client)
        if not ingress.submit(name, asked, tuple(prompt.names)):
            client.is_waiting = False
            client.ends.append("refused")

    def _leaves(self, client: Client) -> None:
        if client.is_waiting and client.ingress is not None:
            self._ends(client, "cancelled")
            client.ingress.abort(client.name, cancelled=True)
            client.ingress.released(client.name)

    # ---- FrontEnd -------------------------------------------------------------------------------

    def emitted(self, request_id: str, tokens: list[int], finish: int | None) -> None:
        """Outputs of the flow, which the front end reads a moment later."""
        client = self.all[request_id]
        start = len(client.emitted)
        client.emitted += tokens
        expected = self._reference(client)
        if client.emitted != expected[: len(client.emitted)]:
            raise Wrong(
                f"I5: {request_id} got {tokens} at {start}, the reference goes on "
                f"{expected[start : start + 3]}: twice, skipped, or wrong KV (I1)"
            )
        if finish is not None and len(client.emitted) < len(expected):
            raise Wrong(f"I5: {request_id} is finished after {len(client.emitted)} tokens")
        if finish is not None:
            is_right = finish == (Finish.STOP if expected[-1] == EOS else Finish.LENGTH)
            if not is_right:
                raise Wrong(f"I4: {request_id} finished with {finish!r}")
        ingress = client.ingress
        assert ingress is not None
        end = finish is not None
        ingress.process.at(DELIVERY_S, "delivered", self._delivered, client, len(tokens), end)

    def _reference(self, client: Client) -> list[int]:
        """Without the front end's stop: the flow does not know of it."""
        asked = client.asked
        if asked.stop is None:
            return client.expected
        return reference(asked.prompt, asked.salt, asked.max_tokens, asked.min_tokens, None)[0]

    def _delivered(self, client: Client, count: int, is_end: bool) -> None:  # noqa: FBT001
        if not client.is_waiting:
            return  # vLLM's output processor drops what nobody waits for
        ingress = client.ingress
        assert ingress is not None
        for token in client.emitted[client.seen : client.seen + count]:
            client.seen += 1
            if is_stop(token, client.asked.stop):
                self._ends(client, "finished")
                if not is_end:
                    ingress.abort(client.name, cancelled=False)
                ingress.released(client.name)
                return
        if is_end:
            self._ends(client, "finished")
            ingress.released(client.name)

    def failed(self, request_id: str, code: str) -> None:
        """The flow gives the request up."""
        client = self.all[request_id]
        ingress = client.ingress
        assert ingress is not None
        deaths = ingress.lost_as_deaths.get(request_id, 0)
        if (code == "poison_request") != (deaths >= LIMITS.worker_deaths_max):
            raise Wrong(f"I4: {request_id} failed with {code} after {deaths} deaths")
        if code == "rejected_by_engine":
            raise Wrong(f"I4: {request_id} was sound, but failed with {code}")
        if client.is_waiting:
            self._ends(client, f"failed {code}")
            ingress.released(request_id)

    def ingress_died(self, ingress: SimIngress) -> None:
        """Its clients see their connections end."""
        for client in self.all.values():
            if client.ingress is ingress and client.is_waiting:
                self._ends(client, "ingress lost")

    def _ends(self, client: Client, how: str) -> None:
        client.is_waiting = False
        client.ends.append(how)
        self._time.note(client.name, how)
        if how == "finished" and client.emitted[: client.seen] != client.expected:
            raise Wrong(f"I5: {client.name} got {client.seen} of {len(client.expected)} tokens")

    def waiting(self) -> int:
        """Clients without an end."""
        return sum(client.is_waiting for client in self.all.values())
