"""How far Headwater and a plain vLLM server agree in bfloat16: `python -m tests.e2e.agreement`.

In float32 they are equal (test_equality). In bfloat16 other chunkings round otherwise, so ties
fall either way: this reports, it does not judge. Prints a table; about three minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.config import BUNDLED_MODEL, default_cache_dir
from cluster.model_store import prepare_model
from tests.e2e.conftest import serving
from tests.e2e.corpus import CASES
from tests.e2e.plain_vllm import answer, corpus_answers, plain_vllm

DTYPE = "bfloat16"


def main() -> int:
    """Run both, one after the other, and print where they part."""
    model = Path(prepare_model(BUNDLED_MODEL, None, default_cache_dir(), print).path)
    with plain_vllm(model, dtype=DTYPE) as http:
        plain = corpus_answers(http)
    equal = same = total = 0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--dtype", DTYPE) as ours:
        for case in CASES:
            mine = tokens_of(answer(ours.http, case.path, case.body))
            theirs = tokens_of(plain[case.name])
            common = common_prefix(mine, theirs)
            equal += mine == theirs
            same += common
            total += len(theirs)
            if mine != theirs:
                sys.stdout.write(f"{case.name}: the first {common} of {len(theirs)} tokens\n")
    sys.stdout.write(
        f"{DTYPE}: {equal} of {len(CASES)} answers equal, "
        f"{same} of {total} tokens before the first difference\n"
    )
    return 0


def tokens_of(reply: dict[str, Any]) -> list[int]:
    """All choices' tokens, one after the other."""
    return [token for choice in reply["body"]["choices"] for token in choice["token_ids"]]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the equal beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


if __name__ == "__main__":
    sys.exit(main())
