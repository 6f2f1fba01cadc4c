"""/v1/completions: prompts, sampling, logprobs, echo, stops, streams, and what is refused."""

from __future__ import annotations

from typing import Any

from tests.e2e.parity.asking import (
    Ask,
    both_ways,
    completion,
    long_prompt,
    streamed,
)

STORY = "Once upon a time there was a lighthouse"
TOKEN_IDS = {"return_token_ids": True}


def completions() -> list[Ask]:
    """All of them."""
    return [
        *_prompts(),
        *_logprobs(),
        *_sampling(),
        *_ends(),
        *_streams(),
        *_odd(),
        *_refused(),
        *_refused_prompts(),
    ]


def _prompts() -> list[Ask]:
    asks = [
        completion("text prompt", STORY),
        completion("text prompt with token ids", STORY, **TOKEN_IDS),
        completion("one character", "a"),
        completion("only spaces", "   "),
        completion("other scripts", "Быстрая лиса 東京 🦊🗼 naïve"),
        completion("emoji answer", "Repeat: 🦊🗼🌊 🦊🗼🌊 🦊🗼🌊 🦊", max_tokens=8, **TOKEN_IDS),
        completion("special tokens in the prompt", "<|im_start|>user\nHi<|im_end|>\n", **TOKEN_IDS),
        completion("token prompt", long_prompt(1, 70), **TOKEN_IDS),
        completion("long token prompt", long_prompt(2), **TOKEN_IDS),
        completion("two text prompts", [STORY, "The capital of France is"]),
        completion("three token prompts", [[500, 600], long_prompt(3, 90), [700]], **TOKEN_IDS),
        completion("short and long prompt", [long_prompt(4), [900, 901]], max_tokens=4),
        completion("array of one prompt", [STORY]),
        completion("equal prompts", [STORY, STORY], max_tokens=4),
        completion("two choices of a text", STORY, n=2, seed=5, temperature=0.9),
        completion("two choices, long", long_prompt(5), n=2, seed=5, temperature=0.9),
        completion("two prompts, two choices each", [STORY, "Hi"], n=2, seed=7, temperature=0.9),
    ]
    return [
        *both_ways(*asks, include_usage=True),
        completion("prompt of one token", [500], **TOKEN_IDS),
        completion("truncated prompt", long_prompt(6, 100), truncate_prompt_tokens=40, **TOKEN_IDS),
        completion(
            "truncated on the right",
            "a b c d e f g h",
            truncate_prompt_tokens=3,
            truncation_side="right",
            **TOKEN_IDS,
        ),
        completion(
            "truncated on the left",
            "a b c d e f g h",
            truncate_prompt_tokens=3,
            truncation_side="left",
            **TOKEN_IDS,
        ),
        completion("no special tokens added", STORY, add_special_tokens=False, **TOKEN_IDS),
        completion("no model named", STORY, model=...),
        completion("null model", STORY, model=None),
        completion("cached prompt, first", long_prompt(8, 200), salt="cached", max_tokens=2),
        completion("cached prompt, again", long_prompt(8, 200), salt="cached", max_tokens=2),
    ]


def _logprobs() -> list[Ask]:
    asks = [
        completion("logprobs", STORY, logprobs=3),
        completion("no alternatives", STORY, logprobs=0),
        completion("logprobs and token ids", STORY, logprobs=2, **TOKEN_IDS),
        completion("logprobs of a long prompt", long_prompt(10), logprobs=2, **TOKEN_IDS),
        completion("tokens as ids", STORY, logprobs=1, return_tokens_as_token_ids=True),
        completion("logprobs of given tokens", STORY, logprobs=1, logprob_token_ids=[28, 30]),
        completion("logprobs of two choices", STORY, logprobs=1, n=2, seed=3, temperature=0.8),
        completion("logprobs of two prompts", [STORY, "Hi there"], logprobs=1),
        completion("logprobs of a sampled answer", STORY, logprobs=2, seed=9, temperature=1.0),
        completion("echo", STORY, echo=True),
        completion("echo and logprobs", STORY, echo=True, logprobs=2),
        completion("echo, logprobs, token ids", STORY, echo=True, logprobs=1, **TOKEN_IDS),
        completion("echo of token ids", long_prompt(11, 40), echo=True, max_tokens=4),
        completion("echo of two prompts", [STORY, "Hi there"], echo=True, max_tokens=4),
        completion("echo with two choices", STORY, echo=True, n=2, seed=1, temperature=0.7),
        completion("echo of a long prompt", long_prompt(12), echo=True, logprobs=1, max_tokens=4),
        completion("echo alone", STORY, echo=True, max_tokens=0),
        completion("echo alone with logprobs", STORY, echo=True, logprobs=2, max_tokens=0),
        completion("echo of other scripts", "東京 🦊", echo=True, logprobs=1, max_tokens=6),
        completion("logprobs with a stop string", STORY, logprobs=1, stop=[" that"], max_tokens=8),
    ]
    return [
        *both_ways(*asks, include_usage=True),
        completion("prompt logprobs", STORY, prompt_logprobs=2),
        completion("prompt logprobs, none else", STORY, prompt_logprobs=0),
        completion("prompt logprobs and logprobs", STORY, prompt_logprobs=1, logprobs=1),
        completion("prompt logprobs of a long prompt", long_prompt(13), prompt_logprobs=1),
        completion(
            "prompt logprobs of a longer prompt",
            long_prompt(14, 1000),
            prompt_logprobs=0,
            max_tokens=4,
        ),
        completion("prompt logprobs of two prompts", [STORY, "Hi there"], prompt_logprobs=1),
        completion(
            "prompt logprobs of two choices",
            long_prompt(15, 300),
            prompt_logprobs=1,
            n=2,
            seed=2,
            temperature=0.5,
            max_tokens=4,
        ),
        streamed(completion("prompt logprobs refused", STORY, prompt_logprobs=1)),
        completion("as many logprobs as may be", STORY, logprobs=20, max_tokens=2),
        completion("more logprobs than may be", STORY, logprobs=21),
        completion("all logprobs refused", STORY, logprobs=-1),
        completion("negative logprobs", STORY, logprobs=-2),
        completion("more prompt logprobs than may be", STORY, prompt_logprobs=21),
        completion("negative prompt logprobs", STORY, prompt_logprobs=-5),
        completion("logprobs as a boolean", STORY, logprobs=True),
        completion(
            "logprobs of tokens beyond the vocabulary",
            STORY,
            logprobs=1,
            logprob_token_ids=[10_000_000],
        ),
        completion("logprobs of given tokens, without logprobs", STORY, logprob_token_ids=[28]),
    ]


def _sampling() -> list[Ask]:
    warm = {"temperature": 0.9, "seed": 17}
    long = long_prompt(20, 300)
    return [
        completion("seed", STORY, **warm),
        completion("seed, long", long, **warm),
        completion("negative seed", STORY, temperature=0.9, seed=-3),
        completion("largest seed", STORY, temperature=0.9, seed=2**63 - 1),
        completion("smallest seed", STORY, temperature=0.9, seed=-(2**63)),
        completion("seed too large", STORY, seed=2**63),
        completion("top p", STORY, top_p=0.5, **warm),
        completion("top k", STORY, top_k=5, **warm),
        completion("top k of one", STORY, top_k=1, **warm),
        completion("no top k", STORY, top_k=-1, **warm),
        completion("min p", STORY, min_p=0.2, **warm),
        completion("tiny temperature", STORY, temperature=1e-6, seed=4),
        completion("very hot", STORY, temperature=2.0, seed=4),
        completion("frequency penalty", STORY, frequency_penalty=2.0, max_tokens=8),
        completion("presence penalty", STORY, presence_penalty=-2.0, max_tokens=8),
        completion("repetition penalty", long, repetition_penalty=1.5, max_tokens=8),
        completion("logit bias", STORY, logit_bias={"338": 100}),
        completion("logit bias against", STORY, logit_bias={"338": -100, "28": -100}),
        completion("allowed tokens", STORY, allowed_token_ids=[28, 30, 284]),
        completion("bad words", STORY, bad_words=[" that", " was"], max_tokens=8),
        completion(
            "null parameters",
            STORY,
            top_p=None,
            top_k=None,
            seed=None,
            stop=None,
            frequency_penalty=None,
            presence_penalty=None,
            logit_bias=None,
            user=None,
        ),
        completion("unset temperature with top k of one", STORY, temperature=..., top_k=1),
        completion("best by beams", STORY, use_beam_search=True, n=2, max_tokens=4),
        completion(
            "beams with logprobs", STORY, use_beam_search=True, n=2, max_tokens=3, logprobs=1
        ),
        completion(
            "repetition detected",
            "la la la la la la la la la la",
            max_tokens=8,
            repetition_detection={"max_pattern_size": 2, "min_count": 3},
        ),
        completion("watermarking", STORY, watermarking=True),
        completion("priority", STORY, priority=3),
        completion("session", STORY, session_id="s-1"),
        completion("user", STORY, user="someone"),
        completion("thinking budget", STORY, thinking_token_budget=4),
    ]


def _ends() -> list[Ask]:
    asks = [
        completion("stop string", STORY, stop=" that", max_tokens=8),
        completion("stop string over tokens", STORY, stop=["t st"], max_tokens=8),
        completion("stop strings", STORY, stop=["zzz", " on"], max_tokens=8),
        completion(
            "stop string kept",
            STORY,
            stop=[" that"],
            include_stop_str_in_output=True,
            max_tokens=8,
        ),
        completion("stop string in the first token", STORY, stop=[" "], max_tokens=8),
        completion("stop string, long", long_prompt(30), stop=["e"], max_tokens=8),
        completion("stop token", STORY, stop_token_ids=[338, 28], max_tokens=8),
        completion("stop token is first", STORY, logit_bias={"338": 100}, stop_token_ids=[338]),
        completion("ends by itself", STORY, logit_bias={"2": 100}),
        completion("ends by itself, long", long_prompt(31), logit_bias={"2": 100}),
        completion("end ignored", STORY, logit_bias={"2": 100}, ignore_eos=True, max_tokens=4),
        completion(
            "special tokens shown",
            STORY,
            logit_bias={"2": 100},
            ignore_eos=True,
            skip_special_tokens=False,
            max_tokens=4,
            spaces_between_special_tokens=False,
        ),
        completion("min tokens", STORY, logit_bias={"2": 100}, min_tokens=3),
        completion("one token", STORY, max_tokens=1),
        completion("one token, long", long_prompt(32), max_tokens=1),
    ]
    return [
        *both_ways(*asks, include_usage=True),
        completion("max tokens unset", STORY, max_tokens=..., stop=[" that"]),
        completion("no stop strings", STORY, stop=[]),
        completion("empty stop string", STORY, stop=[""]),
        completion("empty stop", STORY, stop=""),
        completion("stop of wrong type", STORY, stop=5),
        completion("many stop strings", STORY, stop=[f"zz{i}" for i in range(40)]),
        completion("min tokens above max", STORY, min_tokens=9, max_tokens=8),
    ]


def _streams() -> list[Ask]:
    plain = completion("stream options", STORY, **TOKEN_IDS)
    return [
        streamed(completion("no usage", STORY)),
        streamed(completion("usage declined", STORY), include_usage=False),
        streamed(
            completion("usage goes along", STORY), include_usage=True, continuous_usage_stats=True
        ),
        streamed(
            completion("usage goes along, two choices", STORY, n=2, seed=3, temperature=0.9),
            include_usage=True,
            continuous_usage_stats=True,
        ),
        streamed(completion("usage goes along alone", STORY), continuous_usage_stats=True),
        streamed(
            completion("long stream", long_prompt(40), max_tokens=16, **TOKEN_IDS),
            include_usage=True,
        ),
        streamed(completion("stream interval", STORY, stream_interval=3), include_usage=True),
        streamed(plain, unknown_option=True),
        completion(
            "stream options without a stream", STORY, stream_options={"include_usage": True}
        ),
        completion("null stream", STORY, stream=None),
        completion("stream interval of nought", STORY, stream=True, stream_interval=0),
        completion("stream options of wrong type", STORY, stream=True, stream_options=[1]),
        completion("stream of wrong type", STORY, stream="perhaps"),
    ]


def _odd() -> list[Ask]:
    return [
        completion("unknown field", STORY, colour="blue"),
        completion("numbers as strings", STORY, max_tokens="4", temperature="0"),
        completion("max tokens as a whole float", STORY, max_tokens=4.0),
        completion("echo as a number", STORY, echo=1),
        completion("suffix", STORY, suffix=" end."),
        completion("best of", STORY, best_of=2),
        completion("own request id", STORY, request_id="mine-1"),
        completion("prompt with a null character", "a\0b"),
        completion("lone surrogate", "a\ud83d b"),
        completion("no echo, no tokens", STORY, max_tokens=0),
    ]


def _refused() -> list[Ask]:
    fields: list[tuple[str, dict[str, Any]]] = [
        ("unknown model", {"model": "gpt-5"}),
        ("empty model", {"model": ""}),
        ("model of wrong type", {"model": 5}),
        ("negative max tokens", {"max_tokens": -1}),
        ("max tokens with a fraction", {"max_tokens": 1.5}),
        ("max tokens beyond the context", {"max_tokens": 5000}),
        ("max tokens of wrong type", {"max_tokens": "many"}),
        ("n of nought", {"n": 0}),
        ("negative n", {"n": -2}),
        ("n of wrong type", {"n": "two"}),
        ("null n", {"n": None}),
        ("several greedy choices", {"n": 2}),
        ("negative temperature", {"temperature": -0.1}),
        ("temperature above two", {"temperature": 2.5, "seed": 1}),
        ("temperature of wrong type", {"temperature": "hot"}),
        ("top p of nought", {"top_p": 0}),
        ("top p above one", {"top_p": 1.1}),
        ("top k of minus two", {"top_k": -2}),
        ("top k with a fraction", {"top_k": 1.5}),
        ("min p above one", {"min_p": 1.5}),
        ("presence penalty too large", {"presence_penalty": 2.1}),
        ("frequency penalty too small", {"frequency_penalty": -2.1}),
        ("repetition penalty of nought", {"repetition_penalty": 0}),
        ("logit bias beyond the vocabulary", {"logit_bias": {"10000000": 1}}),
        ("logit bias for no token", {"logit_bias": {"fox": 1}}),
        ("logit bias too large", {"logit_bias": {"5": 1000}}),
        ("allowed tokens beyond the vocabulary", {"allowed_token_ids": [10_000_000]}),
        ("no allowed tokens", {"allowed_token_ids": []}),
        ("stop tokens beyond the vocabulary", {"stop_token_ids": [10_000_000]}),
        ("stop tokens of wrong type", {"stop_token_ids": ["a"]}),
        ("bad words with an empty one", {"bad_words": [""]}),
        ("negative min tokens", {"min_tokens": -1}),
        ("truncated below minus one", {"truncate_prompt_tokens": -2}),
        ("truncated to more than the context", {"truncate_prompt_tokens": 5000}),
        ("truncation side unknown", {"truncation_side": "middle"}),
        ("priority of wrong type", {"priority": "high"}),
        ("prompt embeddings", {"prompt_embeds": "AAAA"}),
        ("beams in a stream", {"use_beam_search": True, "stream": True}),
        (
            "repetition detection upside down",
            {
                "repetition_detection": {
                    "max_pattern_size": 1,
                    "min_pattern_size": 5,
                    "min_count": 2,
                }
            },
        ),
    ]
    return [
        *(completion(name, STORY, **field) for name, field in fields),
        streamed(completion("refused before a stream", STORY, temperature=-1)),
    ]


def _refused_prompts() -> list[Ask]:
    prompts: list[tuple[str, Any]] = [
        ("no prompt", ...),
        ("null prompt", None),
        ("empty prompt", ""),
        ("empty list of prompts", []),
        ("empty token prompt among others", [[500], []]),
        ("empty text among prompts", ["Hi", ""]),
        ("texts and tokens mixed", ["Hi", [500]]),
        ("prompt of wrong type", 5),
        ("prompt of an object", {"text": "Hi"}),
        ("negative token", [-1]),
        ("token beyond the vocabulary", [500, 49_152]),
        ("token far beyond the vocabulary", [10_000_000]),
        ("token beyond 64 bits", [2**70]),
        ("tokens with fractions", [1.5]),
        ("tokens as booleans", [True, False]),
        ("prompt as long as the context", long_prompt(50, 2048)),
        ("prompt longer than the context", long_prompt(51, 2100)),
        ("text longer than the context", "word " * 3000),
        ("one prompt of two too long", [[500], long_prompt(52, 2100)]),
        ("prompt and answer too long together", long_prompt(53, 2045)),
    ]
    return [
        *(completion(name, text) for name, text in prompts),
        streamed(completion("refused in a stream", [500, 49_152])),
        streamed(completion("too long for a stream", long_prompt(54, 2100))),
    ]
