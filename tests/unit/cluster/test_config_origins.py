"""http.allowed_origins: off by default; origins as browsers send them."""

from __future__ import annotations

import argparse

import pytest
from pydantic import ValidationError

from cluster import config_flags, config_sources
from cluster.config import Config, HttpConfig


def test_allowed_origins_by_default_is_empty() -> None:
    assert Config().http.allowed_origins == ()


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://ui.example", "app://x"])
def test_allowed_origins_takes_an_origin(origin: str) -> None:
    assert HttpConfig(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    ["", "ui.example", "http://ui.example/", "http://UI.example", "http://*", "null", "a b"],
)
def test_allowed_origins_with_another_text_is_rejected(origin: str) -> None:
    with pytest.raises(ValidationError, match="allowed_origins"):
        HttpConfig(allowed_origins=(origin,))


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("*", ("*",)),
        ("", ()),
        ("http://a, https://b:1", ("http://a", "https://b:1")),
        ('["http://a"]', ("http://a",)),
    ],
)
def test_allowed_origins_of_a_flag_and_the_environment_are_read(
    text: str, origins: tuple[str, ...]
) -> None:
    parser = argparse.ArgumentParser()
    config_flags.add_arguments(parser, "model")
    flag = parser.parse_args(["--set", f"http.allowed_origins={text}"])
    name = "HEADWATER_HTTP__ALLOWED_ORIGINS"
    for arguments, environ in ((flag, {}), (parser.parse_args([]), {name: text})):
        assert config_sources.load(arguments, environ).config.http.allowed_origins == origins
