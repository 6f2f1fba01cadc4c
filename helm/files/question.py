"""What `helm test` runs: waits until the service is ready, asks one question, reads the answer.

Runs in Ray's image, with the standard library alone. Ends with 1 and one line where it fails. The
API key is read from a file, and not shown.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

POLL_S = 2.0


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Ask. Returns the exit code."""
    endpoint, timeout_s = environ["ENDPOINT"], float(environ["TIMEOUT_S"])
    headers = {"content-type": "application/json"}
    if "KEY_FILE" in environ:
        key = Path(environ["KEY_FILE"]).read_text(encoding="utf-8").strip()
        headers["authorization"] = f"Bearer {key}"
    deadline_s = time.monotonic() + timeout_s
    problem = wait_ready(endpoint, deadline_s)
    if problem:
        sys.stderr.write(f"{endpoint} is not ready after {timeout_s:.0f} s: {problem}\n")
        return 1
    body = {
        "model": environ["MODEL"],
        "messages": [{"role": "user", "content": environ["QUESTION"]}],
        "max_tokens": 32,
        "temperature": 0,
    }
    request = urllib.request.Request(  # noqa: S310 - the service's own address
        f"{endpoint}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            found = json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as refused:
        sys.stderr.write(f"status {refused.code}: {refused.read(400).decode(errors='replace')}\n")
        if refused.code == HTTPStatus.UNAUTHORIZED:
            sys.stderr.write("keys are set: name a Secret with one by test.apiKey.existingSecret\n")
        return 1
    except (OSError, ValueError, LookupError, TypeError) as failed:
        sys.stderr.write(f"no answer: {failed!r}\n")
        return 1
    if not (found or "").strip():
        sys.stderr.write("the answer is empty\n")
        return 1
    sys.stdout.write(f"Q: {environ['QUESTION']}\nA: {found}\n")
    return 0


def wait_ready(endpoint: str, deadline_s: float) -> str:
    """The last problem, or nothing once /ready says 200."""
    while True:
        try:
            with urllib.request.urlopen(f"{endpoint}/ready", timeout=POLL_S):  # noqa: S310
                return ""
        except urllib.error.HTTPError as refused:
            problem = f"status {refused.code}: {refused.read(400).decode(errors='replace')}"
        except OSError as failed:
            problem = str(failed)
        if time.monotonic() > deadline_s:
            return problem
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
