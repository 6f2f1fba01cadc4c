"""Two Ray nodes on one machine, each with its agent, slab and address: prefill here, decode there.

Answers are a plain engine's, token for token; blocks are pulled, and the engines count them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import AT_ONCE, Cluster
from tests.e2e.corpus import CASES, Case
from tests.e2e.nodes.across import check_agent_starts_anew, check_hand_over, check_places
from tests.e2e.nodes.ray_nodes import ON_LOOPBACK, Network
from tests.e2e.plain_vllm import corpus_answers
from tests.e2e.test_equality import check_answer
from tests.references import Recorded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Of the corpus: what a hand-over could break, whose prompts fill a block.
NAMES = {
    "length 33",
    "length 257",
    "length 1600",
    "context is filled exactly",
    "many tokens over block edges",
    "logprobs",
    "seed with a long chunked prompt",
    "four choices with a chunked prompt",
    "several prompts",
    "all penalties with a seed",
    "stop string over the first two tokens",
    "json schema with a seed",
}
ACROSS = [case for case in CASES if case.name in NAMES]


@pytest.fixture(scope="module")
def network() -> Network:
    return ON_LOOPBACK


def test_each_role_is_on_its_node_and_each_node_tells_its_own_address(
    cluster: Cluster, network: Network
) -> None:
    check_places(cluster, network)


def test_decode_pulls_the_blocks_that_prefill_left_on_the_other_node(cluster: Cluster) -> None:
    check_hand_over(cluster, 7001)


@pytest.mark.full
@pytest.mark.chaos
def test_blocks_are_pulled_from_an_agent_that_was_killed_and_started_anew(
    cluster: Cluster,
) -> None:
    check_agent_starts_anew(cluster, 7002)


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> dict[str, Any]:
    """Of each case."""
    return corpus_answers(cluster.http, ACROSS, AT_ONCE)


@pytest.mark.parametrize("case", ACROSS, ids=lambda case: case.name)
def test_an_answer_across_nodes_equals_that_of_a_plain_engine(
    answers: dict[str, Any], reference: dict[str, Recorded], case: Case
) -> None:
    check_answer(answers[case.name], reference[case.name], case.name)
