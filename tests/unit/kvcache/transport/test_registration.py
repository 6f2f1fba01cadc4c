"""Who may share blocks: a difference in any one field is refused, with its name and both values.

The table holds every field of Namespace and Layout; a field that is added later fails the first
test until it has a row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from kvcache.errors import RegistrationRefused, StoreUnavailable
from kvcache.identity import Layout, Namespace
from kvcache.protocol import PROTOCOL_VERSION
from kvcache.store import BlockStore, Registration
from tests.unit.kvcache.conftest import TIMEOUT_S, Connect, eventually
from tests.unit.kvcache.examples import (
    LAYOUT,
    MODEL,
    NAMESPACE,
    SLOT_BYTES,
    chain,
    registration,
)
from tests.unit.kvcache.transport.conftest import MakeReader, Node

# Per field, a value that another worker might come with.
OTHER: dict[str, object] = {
    "revision": "a fine-tuning",
    "dtype": "float16",
    "kv_dtype": "fp8_e5m2",
    "block_size": 64,
    "hash_algorithm": "sha256",
    "hash_root": "11" * 32,
    "build": "vllm 0.32.1 cpu",
    "slot_bytes": SLOT_BYTES // 2,
    # With layer_bytes: the same slot_bytes, cut the other way round.
    "layers": SLOT_BYTES // 4,
    "layer_bytes": 4,
    "kv_heads": 6,
    "head_range": (3, 6),
    "isa": "cpu/amx/avx512",
    "order": "token,head,block,dim",
    "ranks": 2,
}
FIELDS = pytest.mark.parametrize("field", OTHER)


@pytest.fixture
def connect_to(node: Node) -> Iterator[Connect]:
    """connect_to("owner", field=value...) registers a worker with the node's agent."""
    with contextlib.ExitStack() as ends:

        def make(owner: str, **changes: object) -> BlockStore:
            store = BlockStore.connect(
                node.agent.socket_path, registration(owner, **changes), TIMEOUT_S
            )
            ends.callback(store.close)
            return store

        yield make


def said(field: str) -> str:
    """What must be said of that field: the value of who asks, then that of who was there first."""
    mine = NAMESPACE if hasattr(NAMESPACE, field) else LAYOUT
    return f"{field}: {OTHER[field]} here, {getattr(mine, field)} there"


def test_the_table_has_every_field_but_the_model_which_names_the_arena() -> None:
    fields = [field.name for kind in (Namespace, Layout) for field in dataclasses.fields(kind)]
    assert [*OTHER] == [name for name in fields if name != "model"]
    for name, value in OTHER.items():
        assert value != getattr(NAMESPACE, name, getattr(LAYOUT, name, None))


@FIELDS
def test_an_agent_refuses_a_worker_that_differs_and_names_the_field(
    node: Node, connect_to: Connect, field: str
) -> None:
    with pytest.raises(RegistrationRefused, match="other blocks") as refused:
        connect_to("stranger", **{field: OTHER[field]})
    assert refused.value.differences == (said(field),)
    assert said(field) in str(refused.value)
    eventually(lambda: len(node.agent.sessions()) == 1, "the refused connection to end")


@FIELDS
def test_another_node_refuses_a_reader_that_differs_and_names_the_field(
    node: Node, make_tcp_reader: MakeReader, field: str
) -> None:
    node.publish(chain(1))
    stranger = make_tcp_reader(node.server.endpoint, "stranger", **{field: OTHER[field]})
    with pytest.raises(StoreUnavailable):
        stranger.lease(chain(1))
    error = stranger.source.last_error
    assert isinstance(error, RegistrationRefused)
    assert error.differences == (said(field),)
    assert node.agent.ledger(MODEL).counters.blocks_leased_total == 0


def test_all_differences_are_named_at_once(node: Node, connect_to: Connect) -> None:
    with pytest.raises(RegistrationRefused) as refused:
        connect_to("stranger", **OTHER)
    assert refused.value.differences == tuple(map(said, OTHER))


def test_swapped_layers_and_layer_bytes_are_another_layout_though_slots_are_as_large(
    node: Node, connect_to: Connect
) -> None:
    swapped = {"layers": LAYOUT.layer_bytes, "layer_bytes": LAYOUT.layers}
    assert LAYOUT.layers * LAYOUT.layer_bytes == SLOT_BYTES
    with pytest.raises(RegistrationRefused) as refused:
        connect_to("stranger", **swapped)
    assert refused.value.differences == (
        "layers: 1024 here, 4 there",
        "layer_bytes: 4 here, 1024 there",
    )
    assert node.agent.ledger(MODEL).published == 0


def test_a_model_that_a_node_does_not_serve_is_named_beside_those_that_it_does(
    node: Node, make_tcp_reader: MakeReader
) -> None:
    stranger = make_tcp_reader(node.server.endpoint, "stranger", model="other")
    with pytest.raises(StoreUnavailable):
        stranger.lease(chain(1))
    error = stranger.source.last_error
    assert isinstance(error, RegistrationRefused)
    assert error.differences == (f"model: other here, {MODEL} there",)


def test_another_protocol_is_refused_with_both_versions(
    node: Node, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = Registration.hello

    def newer(registration: Registration) -> object:
        return hello(registration).__class__(
            PROTOCOL_VERSION + 1, "stranger", "prefill", 1, NAMESPACE, LAYOUT
        )

    monkeypatch.setattr(Registration, "hello", newer)
    with pytest.raises(RegistrationRefused) as refused:
        connect_to("stranger")
    assert refused.value.differences == (
        f"protocol: {PROTOCOL_VERSION + 1} here, {PROTOCOL_VERSION} there",
    )
