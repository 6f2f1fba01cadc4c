"""Where a node listens and what it tells others: one configuration, an address a node."""

from __future__ import annotations

import pytest
import ray

from deployments.links.listening import Listening, ListenSettings, listening, listening_here

HERE = "10.0.0.5"


@pytest.mark.parametrize(
    ("host", "advertised_host", "bound", "told"),
    [
        ("", "", HERE, HERE),
        ("0.0.0.0", "", "0.0.0.0", HERE),
        ("::", "", "::", HERE),
        ("127.0.0.1", "", "127.0.0.1", "127.0.0.1"),
        ("data.example", "", "data.example", "data.example"),
        ("", "outside.example", HERE, "outside.example"),
        ("0.0.0.0", "outside.example", "0.0.0.0", "outside.example"),
    ],
)
def test_a_node_binds_what_is_configured_and_tells_an_address_that_leads_to_it(
    host: str, advertised_host: str, bound: str, told: str
) -> None:
    settings = ListenSettings(host, advertised_host)
    assert listening(settings, HERE) == Listening(bound, told)


def test_two_nodes_of_one_configuration_tell_different_addresses() -> None:
    for settings in (ListenSettings(), ListenSettings("0.0.0.0")):
        told = {listening(settings, ip).advertised_host for ip in ("10.0.0.5", "10.0.0.6")}
        assert told == {"10.0.0.5", "10.0.0.6"}


def test_the_nodes_own_address_is_the_one_in_rays_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.9")
    assert listening_here(ListenSettings()) == Listening("10.0.0.9", "10.0.0.9")
