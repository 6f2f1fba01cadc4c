"""The router's settings: start values and bounds, each with its unit and its trade-off.

Called by: whoever builds a Router or an Admission. Must not: be changed after construction. The
start values fit a model of 135M parameters on one CPU core; every constant that has a start value
is fitted online from samples, within the bounds in router/fit.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Constants of the cost model and of the choice."""

    seed: int = 0
    """Orders equal workers when nothing else does; give each ingress another one."""

    prefill_start_ms_per_token: float = 2.0
    prefill_start_ms_per_megapair: float = 50.0
    """Attention: per million pairs of (new token, token before it)."""
    step_start_ms: float = 25.0
    """One decode step with an empty batch."""
    step_start_ms_per_stream: float = 3.0
    load_start_ms: float = 2.0
    """Fixed part of loading blocks from the slab."""
    load_start_ms_per_block: float = 1.0
    pull_start_ms: float = 5.0
    """Fixed part of pulling blocks from another node's slab."""
    pull_start_ms_per_block: float = 2.0
    handoff_start_ms: float = 40.0
    """Fixed part of handing a request over (submit, look-up, one idle step), without loading."""

    fit_half_life_samples: float = 40.0
    """After so many samples an old one counts half: short follows change, long averages noise."""
    fit_prior_weight: float = 2.0
    """Samples that the start values are worth."""

    caused_weight_idle: float = 0.3
    """Value of a ms of delay to others against a ms of this request's own, with no load at all."""
    caused_weight_full: float = 1.0
    """The same when every decode slot of the model is taken; linear in between."""
    streams_stalled_min: float = 1.0
    """Streams that a prompt computed on a decode worker is taken to stall, even on an idle one:
    those that arrive meanwhile. 0 would compute any prompt on an idle decode worker."""
    expected_output_tokens: int = 128
    """Tokens a request is taken to generate, if its max_tokens is not lower."""

    tie_ms: float = 2.0
    tie_fraction: float = 0.02
    """Candidates within tie_ms or this share of the cheapest are equal, and are spread over."""

    report_ttl_s: float = 3.0
    """A worker's report older than this is not used; own submissions always are."""
    report_margin_s: float = 0.05
    """Submissions up to this long before a report are taken not to be in it yet."""

    index_blocks_max: int = 500_000
    """Distinct blocks per model in the prefix index (about 280 B each); the least used go first."""
    shortlist_max: int = 4
    """Prefill and decode workers per node and kind of cost that are paired up."""
    nodes_priced_max: int = 16
    """Nodes whose workers are priced for one request, of a model that has more."""
    explained_max: int = 12
    """Candidates that a decision carries; each costs about 1 us to build."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Bounds of admission."""

    queue_max: int = 8
    """Requests per model beyond the workers' slots; more waiting means later refusals."""
    start_service_s: float = 10.0
    """Time a request is taken to hold a slot before any completion was measured."""
    retry_after_min_s: float = 1.0
    retry_after_max_s: float = 120.0
    completions_window: int = 64
    """Completions that the measured rate looks back on."""
