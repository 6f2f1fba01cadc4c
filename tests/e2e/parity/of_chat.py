"""/v1/chat/completions without tools and grammars, and /v1/chat/completions/batch."""

from __future__ import annotations

from typing import Any

from tests.e2e.parity.asking import CHAT, LONG_TEXT, Ask, both_ways, chat, generation, streamed

CAPITAL = "What is the capital of France?"
DIALOGUE = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": CAPITAL},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]


def chats() -> list[Ask]:
    """All of them."""
    return [
        *_messages(),
        *_parameters(),
        *_at_once_or_streamed(),
        *_odd(),
        *_refused(),
        *_batches(),
    ]


def _messages() -> list[Ask]:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    asks = [
        chat("question", CAPITAL),
        chat("question with token ids", CAPITAL, return_token_ids=True),
        chat("dialogue", DIALOGUE),
        chat("content in parts", [{"role": "user", "content": parts}]),
        chat("developer", [{"role": "developer", "content": "Be brief."}, DIALOGUE[1]]),
        chat("two users in a row", [DIALOGUE[1], DIALOGUE[3]]),
        chat("system alone", [DIALOGUE[0]]),
        chat("assistant last", DIALOGUE[:3]),
        chat(
            "assistant goes on",
            [*DIALOGUE[:2], {"role": "assistant", "content": "The capital"}],
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        chat(
            "assistant goes on, echoed",
            [*DIALOGUE[:2], {"role": "assistant", "content": "The capital"}],
            add_generation_prompt=False,
            continue_final_message=True,
            echo=True,
        ),
        chat("echoed", CAPITAL, echo=True),
        chat("no generation prompt", CAPITAL, add_generation_prompt=False),
        chat("empty content", ""),
        chat(
            "null content of an assistant",
            [DIALOGUE[1], {"role": "assistant", "content": None}, DIALOGUE[3]],
        ),
        chat("named user", [{"role": "user", "name": "Ann", "content": CAPITAL}]),
        chat("long chat", f"{LONG_TEXT} How many items are there?", max_tokens=8),
        chat(
            "long dialogue",
            [
                *DIALOGUE,
                {"role": "assistant", "content": LONG_TEXT},
                {"role": "user", "content": "Sum up."},
            ],
            return_token_ids=True,
        ),
        chat("two choices in chat", CAPITAL, n=2, seed=4, temperature=0.9),
        chat(
            "three choices, long", f"Three. {LONG_TEXT}", n=3, seed=4, temperature=0.9, max_tokens=6
        ),
        chat("emoji in chat", "Repeat: 🦊🗼🌊", max_tokens=8),
    ]
    return both_ways(*asks, include_usage=True)


def _parameters() -> list[Ask]:
    asks = [
        chat("chat logprobs", CAPITAL, logprobs=True, top_logprobs=3),
        chat("chat logprobs without alternatives", CAPITAL, logprobs=True),
        chat(
            "chat logprobs as token ids",
            CAPITAL,
            logprobs=True,
            top_logprobs=1,
            return_tokens_as_token_ids=True,
            return_token_ids=True,
        ),
        chat("chat logprobs, long", f"Logs. {LONG_TEXT}", logprobs=True, top_logprobs=2),
        chat(
            "chat logprobs of two choices",
            CAPITAL,
            logprobs=True,
            top_logprobs=1,
            n=2,
            seed=1,
            temperature=0.8,
        ),
        chat("chat logprobs of given tokens", CAPITAL, logprobs=True, logprob_token_ids=[28, 30]),
        chat("chat stop string", CAPITAL, stop=["France"], max_tokens=8),
        chat(
            "chat stop string kept",
            CAPITAL,
            stop=["France"],
            include_stop_str_in_output=True,
            max_tokens=8,
        ),
        chat("chat stop token", CAPITAL, stop_token_ids=[5, 282], max_tokens=8),
        chat("chat ends by itself", "Say: yes", logit_bias={"2": 100}),
        chat("chat of one token", CAPITAL, max_tokens=1),
        chat("chat with a seed", CAPITAL, temperature=1.0, seed=12, top_p=0.9),
        chat("max completion tokens", CAPITAL, max_tokens=..., max_completion_tokens=4),
        chat("both token limits", CAPITAL, max_tokens=3, max_completion_tokens=5),
        chat("template in the request", CAPITAL, chat_template="{{ messages[0].content }}"),
        chat("template arguments", CAPITAL, chat_template_kwargs={"enable_thinking": False}),
        chat("documents", CAPITAL, documents=[{"title": "t", "text": "x"}]),
        chat("reasoning effort", CAPITAL, reasoning_effort="low"),
        chat("no reasoning", CAPITAL, include_reasoning=False),
        chat("prompt text", CAPITAL, return_prompt_text=True),
    ]
    return both_ways(*asks, include_usage=True)


def _at_once_or_streamed() -> list[Ask]:
    return [
        chat("chat prompt logprobs", CAPITAL, prompt_logprobs=1),
        chat("chat prompt logprobs, long", f"Prompt. {LONG_TEXT}", prompt_logprobs=0),
        streamed(chat("chat prompt logprobs refused", CAPITAL, prompt_logprobs=1)),
        chat("chat max tokens unset", CAPITAL, max_tokens=..., stop=["France"]),
        chat(
            "chat penalties",
            CAPITAL,
            frequency_penalty=1.5,
            presence_penalty=1.0,
            repetition_penalty=1.2,
            max_tokens=8,
        ),
        chat("chat bad words", CAPITAL, bad_words=[" France", "Paris"], max_tokens=8),
        chat("chat by beams", CAPITAL, use_beam_search=True, n=2, max_tokens=3),
        chat("chat truncated", f"Cut. {LONG_TEXT}", truncate_prompt_tokens=50),
        streamed(chat("chat without usage", CAPITAL)),
        streamed(
            chat("chat usage goes along", CAPITAL), include_usage=True, continuous_usage_stats=True
        ),
        streamed(
            chat("chat usage goes along, two choices", CAPITAL, n=2, seed=2, temperature=0.8),
            include_usage=True,
            continuous_usage_stats=True,
        ),
        streamed(chat("chat stream interval", CAPITAL, stream_interval=4)),
        chat("cached chat, first", f"Cached. {LONG_TEXT}", salt="cached chat", max_tokens=2),
        chat("cached chat, again", f"Cached. {LONG_TEXT}", salt="cached chat", max_tokens=2),
    ]


def _odd() -> list[Ask]:
    return [
        chat("unknown field in chat", CAPITAL, colour="blue"),
        chat("unknown role", [{"role": "wizard", "content": CAPITAL}]),
        chat("unknown key in a message", [{"role": "user", "content": CAPITAL, "mood": "glad"}]),
        chat("metadata", CAPITAL, metadata={"a": "b"}, store=True, user="someone"),
        chat("service tier", CAPITAL, service_tier="auto"),
        chat("top logprobs without logprobs", CAPITAL, top_logprobs=2),
        chat("own request id in chat", CAPITAL, request_id="mine-2"),
        chat("parallel tool calls without tools", CAPITAL, parallel_tool_calls=False),
        chat("no model in chat", CAPITAL, model=...),
        chat(
            "refusal part",
            [
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                DIALOGUE[1],
            ],
        ),
        chat("thinking budget in chat", CAPITAL, thinking_token_budget=4),
        chat("modalities", CAPITAL, modalities=["text"]),
        chat("prediction", CAPITAL, prediction={"type": "content", "content": "Paris"}),
    ]


def _refused() -> list[Ask]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    fields: list[tuple[str, dict[str, Any]]] = [
        ("unknown model for chat", {"model": "gpt-5"}),
        ("no messages", {"messages": ...}),
        ("null messages", {"messages": None}),
        ("messages of wrong type", {"messages": "Hi"}),
        ("message of wrong type", {"messages": ["Hi"]}),
        ("message without role", {"messages": [{"content": "Hi"}]}),
        ("message without content", {"messages": [{"role": "user"}]}),
        ("null content of a user", {"messages": [{"role": "user", "content": None}]}),
        ("content of wrong type", {"messages": [{"role": "user", "content": 5}]}),
        ("unknown part", {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}),
        ("image", {"messages": [{"role": "user", "content": [image]}]}),
        ("audio", {"messages": [{"role": "user", "content": [audio]}]}),
        ("top logprobs too many", {"logprobs": True, "top_logprobs": 21}),
        ("top logprobs negative", {"logprobs": True, "top_logprobs": -2}),
        ("chat temperature of wrong type", {"temperature": []}),
        ("chat max tokens beyond the context", {"max_tokens": 9999}),
        ("chat max tokens of nought", {"max_tokens": 0}),
        ("chat n of nought", {"n": 0}),
        ("chat with several greedy choices", {"n": 2}),
        ("chat too long", {"messages": [{"role": "user", "content": "word " * 3000}]}),
        ("generation prompt and going on", {"continue_final_message": True}),
        ("template that fails", {"chat_template": "{{ raise_exception('no') }}"}),
        ("template that does not parse", {"chat_template": "{{ messages["}),
        ("reasoning effort unknown", {"reasoning_effort": "heroic"}),
        ("chat stream options without a stream", {"stream_options": {"include_usage": True}}),
        ("chat logit bias beyond the vocabulary", {"logit_bias": {"10000000": 1}}),
        ("chat logprobs of wrong type", {"logprobs": 3}),
        ("chat beams in a stream", {"use_beam_search": True, "stream": True}),
        ("audio answer", {"modalities": ["text", "audio"], "audio": {"voice": "x"}}),
    ]
    return [
        *(chat(name, CAPITAL, **field) for name, field in fields),
        chat("no message at all", []),
        streamed(chat("chat refused before a stream", CAPITAL, top_p=3)),
    ]


def _batches() -> list[Ask]:
    def batch(name: str, *texts: str, **body: Any) -> Ask:
        messages = [[{"role": "user", "content": text}] for text in texts]
        path = f"{CHAT}/batch"
        return generation(name, path, **{"messages": messages, "max_tokens": 6, **body})

    return [
        batch("batch of one", CAPITAL),
        batch("batch of three", CAPITAL, "Hi!", f"Batch. {LONG_TEXT}"),
        batch("batch with logprobs", CAPITAL, "Hi!", logprobs=True, top_logprobs=2),
        batch("batch with token ids", CAPITAL, "Hi!", return_token_ids=True),
        batch("batch with a seed", CAPITAL, "Hi!", temperature=0.9, seed=3),
        batch("batch with a grammar", CAPITAL, "Hi!", structured_outputs={"choice": ["x", "y"]}),
        batch("batch streamed", CAPITAL, stream=True),
        batch("batch with two choices", CAPITAL, n=2, temperature=0.9, seed=3),
        batch("empty batch"),
        batch("batch with an empty chat", messages=[[]]),
        batch("batch of plain messages", messages=[{"role": "user", "content": "Hi"}]),
        batch("batch with tools", CAPITAL, tools=[], tool_choice="auto"),
        batch("batch for an unknown model", CAPITAL, model="gpt-5"),
        batch("batch too long", "word " * 3000),
    ]
