"""What surrounds a request: methods, paths, content types, broken bodies, routes not served."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.parity.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MODEL,
    RESPONSES,
    Ask,
    get,
    post,
)

GENERATING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
ROUTES = (
    *GENERATING,
    f"{CHAT}/batch",
    "/tokenize",
    "/detokenize",
    f"{MESSAGES}/count_tokens",
    "/generative_scoring",
    "/v1/systemone",
    "/invocations",
)
# Of vLLM, but for other models or other modes of its server.
NOT_SERVED = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/moderations",
    "/v1/files",
    "/v1/batches",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/inference/v1/generate",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/start_profile",
    "/update_weights",
    "/fault_tolerance/apply",
    "/v2/chat",
    "/abort_requests",
    "/inference/v1/abort_requests",
)
SMALL = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "temperature": 0}


def exchanges() -> list[Ask]:
    """All of them."""
    return [*_methods(), *_bodies(), *_paths(), *_refused_on_purpose()]


def _methods() -> list[Ask]:
    return [
        *(get(f"GET {path}", path) for path in ROUTES),
        *(
            Ask(f"{method} {path}", path, {}, method=method)
            for method in ("PUT", "DELETE", "PATCH")
            for path in (COMPLETIONS, CHAT)
        ),
        *(
            Ask(f"{method} {path}", path, method=method)
            for method in ("OPTIONS", "HEAD")
            for path in (COMPLETIONS, "/v1/models", "/health")
        ),
        post("POST /v1/models", "/v1/models", {}),
        post("POST /health", "/health", {}),
        post("POST /version", "/version", {}),
    ]


def _bodies() -> list[Ask]:
    def raw(name: str, body: bytes, path: str = CHAT, **headers: str) -> Ask:
        return post(f"body {name}, {path}", path, body, **headers)

    shapes = (("of a list", b"[]"), ("of an empty object", b"{}"), ("that is no JSON", b"{'a': 1}"))
    small = json.dumps(SMALL).encode()
    return [
        *(raw(name, body, path) for path in ROUTES for name, body in shapes),
        *(raw("that is empty", b"", path) for path in GENERATING),
        raw("of a number", b"5"),
        raw("of a string", b'"Hi"'),
        raw("of null", b"null"),
        raw("cut short", small[:-5], COMPLETIONS),
        raw("with words after it", small + b" and more", COMPLETIONS),
        raw("not in UTF-8", b'{"prompt": "\xff\xfe"}', COMPLETIONS),
        raw("in UTF-16", json.dumps(SMALL).encode("utf-16"), COMPLETIONS),
        raw("with a byte order mark", b"\xef\xbb\xbf" + small, COMPLETIONS),
        raw("with a number that is none", b'{"prompt": "a", "temperature": NaN}', COMPLETIONS),
        raw("with infinity", b'{"prompt": "a", "temperature": Infinity}', COMPLETIONS),
        raw("nested deeply", b"[" * 100_000, COMPLETIONS),
        raw(
            "nested in an object", b'{"prompt": ' + b"[" * 2_000 + b"]" * 2_000 + b"}", COMPLETIONS
        ),
        raw(
            "with a key twice",
            b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2, "temperature": 0}',
            COMPLETIONS,
        ),
        raw(
            "with a number of many digits",
            b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
            COMPLETIONS,
        ),
        *(
            raw(f"as {kind}", small, COMPLETIONS, **{"content-type": kind})
            for kind in (
                "text/plain",
                "application/json; charset=utf-8",
                "application/vnd.api+json",
                "application/x-www-form-urlencoded",
                "multipart/form-data",
            )
        ),
        raw(
            "of a form",
            b"prompt=Hi",
            COMPLETIONS,
            **{"content-type": "application/x-www-form-urlencoded"},
        ),
        *(
            raw(
                "as plain text",
                json.dumps({"model": MODEL}).encode(),
                path,
                **{"content-type": "text/plain"},
            )
            for path in (CHAT, RESPONSES, MESSAGES, "/tokenize")
        ),
    ]


def _paths() -> list[Ask]:
    authorised: dict[str, str] = {"authorization": "Bearer sk-anything"}
    return [
        get("no such page", "/nowhere"),
        post("no such route", "/v1/nowhere", {}),
        get("trailing slash of models", "/v1/models/"),
        post("trailing slash of completions", f"{COMPLETIONS}/", SMALL),
        get("double slash", "//v1/models"),
        get("upper case", "/V1/MODELS"),
        get("query string", "/v1/models?limit=1"),
        get("encoded path", "/v1%2Fmodels"),
        get("path that climbs", "/v1/../health"),
        get("models with a key", "/v1/models", **authorised),
        Ask("completion with a key", COMPLETIONS, SMALL, headers=authorised, salt="with a key"),
        Ask(
            "completion with a version of Anthropic",
            MESSAGES,
            {
                "model": MODEL,
                "max_tokens": 2,
                "messages": [{"role": "user", "content": "Hi"}],
                "temperature": 0,
            },
            headers={"anthropic-version": "2023-06-01", "x-api-key": "k"},
            salt="with a version",
        ),
        Ask(
            "completion with a name",
            COMPLETIONS,
            SMALL,
            headers={"X-Request-Id": "mine-3"},
            salt="with a name",
        ),
        Ask(
            "completion with load wanted",
            CHAT,
            {
                "model": MODEL,
                "max_tokens": 2,
                "messages": [{"role": "user", "content": "Hi"}],
                "temperature": 0,
            },
            headers={"endpoint-load-metrics-format": "JSON"},
            salt="load wanted",
        ),
        *(
            post(f"not served: {path}", path, {"model": MODEL, "input": "Hi"})
            for path in NOT_SERVED
        ),
        *(
            get(f"GET not served: {path}", path)
            for path in (
                "/is_sleeping",
                "/is_paused",
                "/server_info",
                "/get_world_size",
                "/fault_tolerance/status",
                "/weight_info",
            )
        ),
        post("not served: /scale_elastic_ep", "/scale_elastic_ep", {}),
        post("not served: /is_scaling_elastic_ep", "/is_scaling_elastic_ep", {}),
    ]


def _refused_on_purpose() -> list[Ask]:
    def ask(field: str, value: Any) -> Ask:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "temperature": 0, field: value}
        return post(f"refused field {field}", COMPLETIONS, body)

    return [
        ask("kv_transfer_params", {"do_remote_prefill": False}),
        ask("ec_transfer_params", {}),
        ask("vllm_xargs", {"a": 1}),
        ask("kv_hints", {"a": 1}),
        Ask(
            "refused fields that are null",
            COMPLETIONS,
            {**SMALL, "kv_transfer_params": None, "vllm_xargs": None},
            salt="null fields",
        ),
    ]
