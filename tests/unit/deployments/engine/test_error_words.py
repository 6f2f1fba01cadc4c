"""Errors without paths and addresses: as vLLM's own says them, whatever the client sent."""

from __future__ import annotations

import pytest
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

from deployments.engine.error_words import CHARS_MAX, show_errors_so, shown

MESSAGES = [
    "The model `x` does not exist.",
    "<object at 0x7f00ab> is no <thing at 0xZZ>",
    'Oops\n  File "/usr/lib/python3/a.py", line 12, in run\n    call(me)\nValueError: no',
    'File "a.py", line 3, in f',
    "cannot read /home/ray/model/config.json or /etc/app/conf.d/x.yaml",
    "relative gpu/foo/bar.py, a/b.c, /one.txt, /a/b, /a/b/c.d.e and /v1/chat/completions",
    "  spaces around  ",
    "/opt and /opt/x, /optional/thing.bin",
    "ratio 3/4, 1/2/3.5, //double//slash.py, /a//b.c",
    "",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_it_says_what_vllms_own_says(message: str) -> None:
    assert shown(message) == sanitize_message(message)


@pytest.mark.parametrize("text", ["/a" * 500_000, "\n" * 500_000 + 'File "', 'File "' * 200_000])
def test_a_long_text_is_cut_before_it_is_looked_through(text: str) -> None:
    assert len(shown(f"The model `{text}` does not exist.")) <= CHARS_MAX


def test_vllms_front_end_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_response, "sanitize_message", sanitize_message)
    show_errors_so()
    told = error_response.create_error_response(ValueError("no /home/me/file"))
    assert told.error.message == "no <path>"
    assert error_response.sanitize_message is shown
