"""What a lesson asks of an engine and what it sees: requests, steps, answers.

Made by engine.py and engine_host.py, read by the lessons. Plain values: they cross a pipe, and
their fields go into a lesson's JSON.
Times are seconds since the play began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What one engine is built from.

    model: folder with config, tokenizer and (unless random_weights) weights. core: CPU core that it
    is pinned to. agent_socket: of a node agent, whose slab then gets the blocks that it computes.
    max_num_batched_tokens: tokens in one step at most; a longer prompt is prefilled in chunks.
    """

    model: str
    core: int
    dtype: str = "bfloat16"
    max_model_len: int = 8192
    block_size: int = 32
    kv_cache_bytes: int = 256 << 20
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 8192
    chunked_prefill: bool = True
    prefix_caching: bool = True
    random_weights: bool = False
    agent_socket: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One request. Greedy; exactly output_tokens unless the context limit ends it before.

    at_s: when it arrives, after the play has begun. reuse: whether it may read the prefix cache.
    """

    name: str
    prompt: Sequence[int]
    output_tokens: int
    at_s: float = 0.0
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """What one step did for one request.

    tokens: computed in this step. context: tokens that the request has after it, these included.
    prefill: whether they belong to the prompt (or are computed again after a preemption).
    """

    name: str
    tokens: int
    context: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine.

    cpu_s: CPU time of the engine's thread, which is less than the step took where other processes
    had the core. Of that time: schedule_s: choosing what to compute. model_s: the forward pass,
    attention_s of it inside the attention layers (0 unless watched). sample_s: logits to tokens.
    update_s: the books after it. blocks: by request, the KV blocks that it holds (empty unless
    watched).
    """

    begin_s: float
    end_s: float
    schedule_s: float
    model_s: float
    sample_s: float
    update_s: float
    attention_s: float
    cpu_s: float
    waiting: int
    parts: tuple[Part, ...]
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """How long it took."""
        return 1e3 * (self.end_s - self.begin_s)

    @property
    def busy_ms(self) -> float:
        """What it cost, whoever else wanted the core: CPU time, ms."""
        return 1e3 * self.cpu_s

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed in it."""
        return sum(part.tokens for part in self.parts if part.prefill)

    @property
    def decoding(self) -> int:
        """Requests that got one more token without prefill: the decode batch."""
        return sum(not part.prefill for part in self.parts)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got.

    token_s: when each token was there, since the play began. cached_tokens: of the prompt, found in
    the prefix cache. names: of its full blocks, as hexadecimal hashes.
    """

    name: str
    at_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    token_s: tuple[float, ...]
    finish_reason: str
    names: tuple[str, ...] = ()

    @property
    def ttft_ms(self) -> float:
        """Arrival to first token, inside the engine: no network, no tokenisation."""
        return 1e3 * (self.token_s[0] - self.at_s)

    @property
    def e2e_ms(self) -> float:
        """Arrival to last token."""
        return 1e3 * (self.token_s[-1] - self.at_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time between tokens after the first; None of a single one."""
        gaps = len(self.token_s) - 1
        return 1e3 * (self.token_s[-1] - self.token_s[0]) / gaps if gaps else None


@dataclass(frozen=True, slots=True)
class Played:
    """A play of jobs: all steps in order, and the answers by name."""

    steps: tuple[Step, ...]
    answers: Mapping[str, Answer]

    @property
    def seconds(self) -> float:
        """From the beginning to the end of the last step."""
        return self.steps[-1].end_s if self.steps else 0.0

    def decode_steps(self, batch: int | None = None) -> Iterator[Step]:
        """Steps without prefill, of one batch size if given."""
        for step in self.steps:
            if step.prefill_tokens == 0 and step.decoding == (batch or step.decoding) > 0:
                yield step

    def prefill_steps(self) -> Iterator[Step]:
        """Steps with at least one prompt token."""
        return (step for step in self.steps if step.prefill_tokens)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine itself says of its memory.

    blocks: of the KV cache; one of them is vLLM's null block, which no request gets. cache_bytes:
    of the tensors that hold them.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_size: int
    kv_element_bytes: int
    block_size: int
    blocks: int
    cache_bytes: int
    threads: int
    versions: Mapping[str, str]

    @property
    def block_bytes(self) -> float:
        """Bytes of one block over all layers, keys and values."""
        return self.cache_bytes / self.blocks
