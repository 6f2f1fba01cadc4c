"""All recorded reference answers are what a plain vLLM server answers on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import references
from tests.e2e.corpus import CASES
from tests.e2e.parity.corpus import ASKS
from tests.e2e.parity.known import unexplained
from tests.e2e.parity.normal_form import compare
from tests.e2e.parity.replies import replies_to
from tests.e2e.plain_vllm import corpus_answers, plain_vllm
from tests.e2e.test_equality import check_answer
from tests.equality import TIE_NATS, TIED_SHARE_MAX
from tests.references import AGAIN, Recorded

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full]


def test_recorded_answers_equal_those_of_a_server_now(
    model_path: Path, reference: dict[str, Recorded], parity_reference: dict[str, Recorded]
) -> None:
    with plain_vllm(model_path, dtype="float32") as http:
        corpus, parity = corpus_answers(http), replies_to(http, ASKS)
    for case in CASES:
        check_answer(corpus[case.name], reference[case.name], case.name)
    wrong, ties = [], 0
    for ask in ASKS:
        recorded = parity_reference[ask.name]
        found = unexplained(ask.name, compare(references.reply_of(recorded), parity[ask.name]))
        if found and recorded.lead_min < TIE_NATS["float32"]:
            ties += 1
        else:
            wrong += [f"{ask.name}: {difference}" for difference in found]
    assert not wrong, "\n".join([AGAIN, *wrong])
    assert ties <= TIED_SHARE_MAX * len(ASKS)
