"""The field's words, explained once each, where they first come on a page.

Called by page.py. A lesson names the words that it uses in TERMS.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TERMS: Mapping[str, str] = MappingProxyType(
    {
        "token": "a piece of text, a word or a part of one. Models read and write tokens, so work "
        "and speed are counted in them.",
        "prefill": "computing the prompt: all its tokens in one or a few passes through the model, "
        "side by side. Its end gives the first token of the answer.",
        "decode": "making the answer one token at a time: each step passes one new token a request "
        "through the model, and needs the token before it.",
        "step": "one pass of the engine: choose what to compute, run the model over it, pick the "
        "next tokens.",
        "attention": "the part of a model in which each token looks at all tokens before it. Its "
        "work grows with their number; that of the rest does not.",
        "KV cache": "the keys and values that attention made of earlier tokens, kept so that they "
        "are not computed again.",
        "block": "a piece of the KV cache that holds a fixed number of tokens, 32 here. The engine "
        "hands out memory in blocks. (Papers also call it a page.)",
        "context": "all tokens that a request has at some moment: its prompt and its answer so "
        "far.",
        "batch": "the requests that one step serves together.",
        "TTFT": "time to first token: from the request's arrival to the first token of its answer.",
        "TPOT": "time per output token: the mean gap between tokens after the first, "
        "(end-to-end − TTFT) / (output tokens − 1).",
        "ITL": "inter-token latency: each single gap between two tokens.",
        "end-to-end": "from the request's arrival to its last token.",
        "throughput": "tokens (or requests) a second, of all users together.",
        "scheduler": "the part of the engine that chooses which requests, and how many tokens of "
        "each, the next step computes.",
        "continuous batching": "requests join and leave the batch at every step, instead of "
        "waiting until a whole batch has ended.",
        "chunked prefill": "a long prompt is computed in pieces over several steps, so that those "
        "who decode meanwhile get their tokens between them.",
        "prefix caching": "blocks of a prompt that the cache still has, from an earlier request "
        "that began with the same tokens, are used instead of computed.",
        "slab": "Headwater's shared memory on a node: blocks that one worker has computed lie "
        "there for the others.",
        "MHA, GQA, MQA": "multi-head, grouped-query and multi-query attention: every query head "
        "has keys and values of its own, a group of heads shares them, or all do.",
        "percentile": "p99 = 300 ms says that 99 of 100 values are at most 300 ms; p50 is the "
        "median.",
        "goodput": "requests a second that met all their limits of latency.",
        "greedy": "the most likely token is always taken, so that an answer can be repeated "
        "exactly.",
        "GB and GiB": "1 GB is 10⁹ bytes, 1 GiB is 2³⁰ bytes, 7 % more (1 MB and 1 MiB: 5 %).",
    }
)
