"""The options of the commands: what is parsed, and that the help promises nothing else."""

from __future__ import annotations

import pytest

from cluster import cli, config_flags, config_sources

MODEL = config_flags.FLAGS[config_flags.MODEL].dest


@pytest.mark.parametrize("command", ["serve", "prepare"])
@pytest.mark.parametrize(
    "words", [("--model", "a/b"), ("a/b",), ("--dtype", "float32", "a/b"), ("--model=a/b",)]
)
def test_model_is_an_option_or_a_positional(command: str, words: tuple[str, ...]) -> None:
    assert getattr(cli.parse([command, *words]), MODEL) == "a/b"


@pytest.mark.parametrize("words", [("--model", "a/b", "c/d"), ("c/d", "--model", "a/b")])
def test_model_named_twice_is_a_usage_error(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["serve", *words])
    assert ended.value.code == cli.EXIT_USAGE
    told = capsys.readouterr().err
    assert "MODEL" in told and "--model" in told and told.count("\n") == 1


def test_model_that_is_not_named_is_left_to_other_sources() -> None:
    assert getattr(cli.parse(["serve"]), MODEL) is None


def test_each_flag_sets_a_key_of_the_configuration() -> None:
    keys = {key for key, _ in config_sources.leaves()}
    assert {flag.key for flag in config_flags.FLAGS.values()} <= keys


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("status", "--port"),
        ("chat", "--model"),
        ("explain", "--cache-dir"),
        ("stop", "--decode-workers"),
        ("keys list", "--slab-mib"),
        ("lessons", "--kv-mib"),
        ("doctor", "--served-name"),
    ],
)
def test_option_that_a_command_does_not_read_is_rejected(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse([*command.split(), f"{flag}=1"])
    assert f"takes no {flag}=1" in capsys.readouterr().err
