"""Lesson: the context limit, and what happens at its edge."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.front_end import admit
from loadtests.lessons.lesson import Bench, Data, Table
from loadtests.lessons.records import Job

NAME = "context_limit"
TITLE = "The context limit: input + output ≤ limit"
QUESTION = "What happens when a prompt and its answer come to the limit, and one token beyond?"
TERMS = ("context", "token", "KV cache", "greedy")
EXPLANATION = """
A model has been made for contexts up to some length, and an engine may set a lower limit, since
each token of context takes memory. The limit counts prompt and answer together: an answer can be
at most limit − prompt tokens long.

Requests round that edge are put to the rules of vLLM's own HTTP front end, and those that it
admits to the engine. An answer that ends because there is no more room ends with the reason
"length", like one that ends because max_tokens is reached: a client cannot tell the two apart but
by counting.
"""
LIMIT = 256
PROMPT = 248  # leaves room for 8


def measure(bench: Bench) -> Data:
    """Prompts and max_tokens at the limit, one below and one above."""
    engine = bench.engine(
        max_model_len=LIMIT, max_num_batched_tokens=LIMIT, kv_cache_bytes=32 << 20
    )
    room = LIMIT - PROMPT
    asked: list[tuple[str, int, int | None]] = [
        *((f"{PROMPT} + {tokens}", PROMPT, tokens) for tokens in (room - 1, room, room + 1)),
        (f"{PROMPT} + no max_tokens", PROMPT, None),
        *((f"{prompt} + 1", prompt, 1) for prompt in (LIMIT - 1, LIMIT, LIMIT + 1)),
        (f"8 + {LIMIT + 1}", 8, LIMIT + 1),
    ]
    cases = []
    for number, (label, prompt_tokens, max_tokens) in enumerate(asked):
        bench.say(f"{prompt_tokens} tokens in, max_tokens {max_tokens}")
        prompt = bench.prompt(prompt_tokens, seed=700 + number)
        admitted = engine.apply(admit, prompt, max_tokens)
        case: dict[str, Any] = {
            "label": label,
            "prompt": prompt_tokens,
            "max_tokens": max_tokens,
            "granted": admitted["granted"],
            "error": admitted["error"],
            "output": 0,
            "finish_reason": "",
        }
        if not admitted["error"]:
            job = Job("request", prompt, admitted["granted"])
            answer = engine.play([job]).answers["request"]
            case |= {"output": len(answer.tokens), "finish_reason": answer.finish_reason}
        cases.append(case)
    # Past the front end: the engine itself, asked for more than there is room.
    prompt = bench.prompt(PROMPT, seed=790)
    beyond = engine.play([Job("request", prompt, room + 5)]).answers["request"]
    return {
        "n": {"requests": len(cases)},
        "conditions": {"limit (max_model_len), tokens": LIMIT, "requests at once": 1},
        "limit": LIMIT,
        "cases": cases,
        "engine_alone": {
            "prompt": PROMPT,
            "asked": room + 5,
            "output": len(beyond.tokens),
            "finish_reason": beyond.finish_reason,
        },
    }


def reading(data: Data) -> tuple[str, str]:
    """What was answered; what was refused, and how."""
    limit, cases = data["limit"], data["cases"]
    answered = [case for case in cases if case["output"]]
    longest = max((case["prompt"] + case["output"] for case in answered), default=0)
    cut = [c for c in answered if c["max_tokens"] is not None and c["output"] < c["max_tokens"]]
    if longest > limit:
        first = (
            f"Effect not seen: with a limit of {limit} a request came to {longest} tokens, more "
            "than the limit."
        )
    else:
        told = "".join(
            f"; of {c['max_tokens']} tokens asked for after {c['prompt']} it gave {c['output']}, "
            f'with the reason "{c["finish_reason"]}" and no error'
            for c in cut[:1]
        )
        first = (
            f"With a limit of {limit} no request came to more than {longest} tokens, prompt and "
            f"answer together{told}."
        )
    refused = [case for case in cases if case["error"]]
    if refused:
        prompts = sorted({c["prompt"] for c in refused if c["prompt"] >= limit})
        told = " and ".join(map(str, prompts)) or "none at or above the limit"
        reasons = sorted({_short(case["error"]) for case in refused})
        second = (
            f"{len(refused)} of {len(cases)} requests were refused before they reached the engine "
            f"(prompts of {told} tokens among them): {'; '.join(reasons)}."
        )
    else:
        second = f"Effect not seen: none of {len(cases)} requests was refused."
    return first, second


def _short(error: str) -> str:
    """The first sentence that says something."""
    words = error.split(". ")
    chosen = words[1] if words[0].startswith("This model's maximum") and words[1:] else words[0]
    return f"“{chosen.strip().rstrip('.')}”"


def plots(data: Data) -> list[Figure]:
    """Prompt and answer of each request against the limit."""
    cases, limit = data["cases"], data["limit"]
    drawn, axes = style.figure(
        f"Requests at the edge (n = {len(cases)})", "tokens", "", size=(6.4, 3.2)
    )
    places = list(range(len(cases)))[::-1]
    axes.barh(
        places, [c["prompt"] for c in cases], color=style.PALETTE[0], height=0.6, label="prompt"
    )
    axes.barh(
        places,
        [c["output"] for c in cases],
        left=[c["prompt"] for c in cases],
        color=style.PALETTE[1],
        height=0.6,
        label="answer",
    )
    axes.axvline(limit, color=style.INK, linestyle="--", linewidth=1.2, label=f"limit {limit}")
    for place, case in zip(places, cases, strict=True):
        if case["error"]:
            axes.text(
                case["prompt"] + 3, place, "refused", va="center", fontsize=8, color=style.INK
            )
    labels = [
        f"{c['prompt']} + {'any' if c['max_tokens'] is None else c['max_tokens']}" for c in cases
    ]
    axes.set_yticks(places, labels)
    axes.set_xlim(0, limit * 1.18)
    axes.grid(visible=False, axis="y")
    style.legend(axes)
    return [drawn]


def tables(data: Data) -> list[Table]:
    """Each request; and the engine without the front end."""
    rows = tuple(
        (
            str(c["prompt"]),
            "none" if c["max_tokens"] is None else str(c["max_tokens"]),
            str(c["output"]) if not c["error"] else "refused",
            str(c["prompt"] + c["output"]) if not c["error"] else "",
            c["finish_reason"] or c["error"],
        )
        for c in data["cases"]
    )
    head = ("prompt", "max_tokens", "answer", "together", "reason of the end, or the error")
    alone = data["engine_alone"]
    row = (
        *(str(alone[key]) for key in ("prompt", "asked", "output")),
        str(alone["prompt"] + alone["output"]),
        alone["finish_reason"],
    )
    return [
        Table(f"Through the front end's rules, limit {data['limit']} tokens", head, rows),
        Table("Put to the engine itself, past those rules", head, (row,)),
    ]
