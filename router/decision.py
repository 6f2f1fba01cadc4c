"""A routing request and the decision on it, with its explanation.

Called by: request_flow asks with a RouteRequest and keeps the Decision, which goes as JSON
(`Decision.as_json`) into logs, traces and the explanation endpoint, to be joined with what then
happened. Must not: compute anything. The decision's types are msgspec structs, not dataclasses:
a dozen are built per request, and these take a tenth of the time and are JSON-able as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

Reason = Literal[
    "only_candidate",
    "cheapest",
    "short_prompt",
    "prefix_on_decode",
    "prefix_on_prefill",
    "prefill_busy",
    "no_prefill_worker",
    "prefill_not_wanted",
    "any_role",
]
PrefixInformation = Literal["exact", "degraded"]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What has to be known of a request to place it.

    `block_hashes` names the full blocks of prompt plus resumed tokens, from block 0.
    `resume_tokens` are output tokens that exist already (a resume, after a failure): they have to
    be computed like prompt tokens. `needs_prefill_worker`: True insists on one, False forbids it,
    None leaves it to the cost.
    """

    request_id: str
    model: str
    prompt_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    max_tokens: int = 128
    priority: int = 0
    resume_tokens: int = 0
    excluded: frozenset[str] = frozenset()
    needs_prefill_worker: bool | None = None
    tenant: str = ""
    any_role: bool = False
    """Let prefill workers serve the whole request too: when no decode worker is left."""


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """The cost of a candidate, all in ms; it is their sum."""

    queue_ms: float
    """Prompt tokens queued where this prompt is computed."""
    compute_ms: float
    """The prompt's uncached tokens."""
    load_ms: float
    """Blocks read from the slab before that."""
    handoff_ms: float
    """Fixed part, blocks loaded by the decode worker, its own queue, the partial last block."""
    decode_ms: float
    """One decode step in its batch, and the wait for a slot or for free blocks."""
    caused_ms: float
    """Delay to others, weighted."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One way to serve the request. prefill None: the decode worker computes the prompt."""

    prefill: str | None
    decode: str
    cost_ms: float
    predicted_ttft_ms: float
    terms: CostTerms
    cached_tokens: int
    """Tokens not computed by whoever computes the prompt: longest of its cache and its slab."""
    prefill_cached_tokens: int
    """Of these, in the prefill engine's own cache (0 without a prefill worker)."""
    decode_cached_tokens: int
    """Tokens in the decode engine's own cache."""
    slab_cached_tokens: int
    """Tokens in the slab of their node."""
    pulled_tokens: int
    """Tokens beyond those that are pulled from another node's slab."""


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and why. `candidates`: cheapest first, at most `explained_max`."""

    request_id: str
    model: str
    prefill: str | None
    decode: str
    reason: Reason
    prefix_information: PrefixInformation
    predicted_ttft_ms: float
    cost_ms: float
    cached_tokens: int
    compute_tokens: int
    """Tokens that whoever computes the prompt is predicted to compute: pass on to `submitted`."""
    caused_weight: float
    tied: int
    """Candidates as good as this one, itself included."""
    candidates: tuple[Candidate, ...]
    candidates_total: int
    elsewhere_tokens: int
    """Longest prefix on another node's slab, whether it is worth pulling or not."""
    pull_from: str
    """Node from whose slab whoever computes the prompt pulls blocks first; empty: none."""
    degraded_sources: tuple[str, ...]
    """Sources whose blocks did not count because what they hold is in doubt."""

    def as_json(self) -> bytes:
        """The decision as one JSON object."""
        return _ENCODER.encode(self)


_ENCODER = msgspec.json.Encoder()
