"""The rules that vLLM's HTTP front end applies to a request before the engine sees it.

Called in an engine's process, by Engine.apply. vLLM is imported where it is needed: lessons import
this module too.
Source: vllm/entrypoints/openai/completion/serving.py and renderers/params.py (0.32).
"""

from __future__ import annotations

from typing import Any


def admit(host: Any, prompt: list[int], max_tokens: int | None) -> dict[str, Any]:
    """What the front end makes of a completion request: tokens granted, or the error's words."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
    from vllm.exceptions import VLLMError
    from vllm.renderers import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor

    model = host.config.model_config
    renderer = renderer_from_config(host.config)
    try:
        request = CompletionRequest(prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
        (rendered,) = renderer.render_cmpl(
            [{"prompt_token_ids": prompt}], request.build_tok_params(model)
        )
        granted = get_max_tokens(model.max_model_len, request.max_tokens, len(prompt), {})
        processor = InputProcessor(host.config, renderer)
        processor.process_inputs(
            "request", rendered, request.to_sampling_params(granted, {}), ("generate",)
        )
    except (VLLMError, ValueError) as error:
        return {"granted": 0, "error": f"{error}"}
    return {"granted": granted, "error": ""}
