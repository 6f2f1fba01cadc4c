"""Nothing that a client sent may vanish on its way into the prompt.

vLLM (0.32) makes chat messages of Responses items and of Messages blocks, and a template makes the
prompt of those. Both leave things out and answer 200: parts after the first, a system block that
begins with a billing line, blocks that they have no place for. Here items keep all their text, and
what has no place is an error that names it; the rendered prompt is searched for each text.
Source: entrypoints/openai/responses/utils.py, entrypoints/anthropic/serving.py, renderers/hf.py.
Called by front_end.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openai.types.responses import ResponseOutputMessage, ResponseReasoningItem
from openai.types.responses.response_reasoning_item import Content
from pydantic import BaseModel
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses import utils as of_responses
from vllm.exceptions import VLLMValidationError
from vllm.renderers import chat_utils, hf

BILLING_LINE = "x-anthropic-billing-header"  # of Claude Code; another one in each request
_SYSTEM_BLOCKS = frozenset({"text", "tool_addition", "tool_removal"})
_RESULT_PARTS = frozenset({"text", "image", "tool_reference"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_THOUGHT_END = "</think>"  # what stands before it in an assistant's turn is a template's to drop


# ---- Responses ----------------------------------------------------------------------------------


def message_of_item(item: Any, prev_msg: Any = None) -> Any:
    """In place of vLLM's: all parts of an item. May change prev_msg, and then returns None."""
    if isinstance(item, ResponseReasoningItem):
        return _message_of_vllm(_with_one_thought(item), prev_msg)
    role = item.get("role") if isinstance(item, dict) else getattr(item, "role", None)
    if role == "assistant" and (
        isinstance(item, ResponseOutputMessage) or isinstance(item.get("content"), list)
    ):
        return _merged(_content_of(_field(item, "content")), prev_msg)
    message = _message_of_vllm(item, prev_msg)
    if message is not None and isinstance(message.get("content"), list):
        message = {**message, "content": [_as_dict(part) for part in message["content"]]}
    return message


def _merged(content: Any, prev_msg: Any) -> Any:
    """An assistant's text joins the reasoning or the calls before it, as vLLM has it."""
    is_turn = prev_msg is not None and prev_msg.get("role") == "assistant"
    if is_turn and prev_msg.get("content") is None:
        prev_msg["content"] = content
        return None
    return {"role": "assistant", "content": content}


def _content_of(parts: list[Any]) -> Any:
    """One text as it is; several as chat's parts, which the template's rules join."""
    found = [_as_dict(part) for part in parts]
    made = [
        {"type": "text", "text": part["text"]}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and "text" in part
        else part
        for part in found
    ]
    if len(made) == 1 and isinstance(made[0], dict) and isinstance(made[0].get("text"), str):
        return made[0]["text"]
    return made


def _with_one_thought(item: ResponseReasoningItem) -> ResponseReasoningItem:
    """All of its texts in its first, which is the one that vLLM reads."""
    texts = [part.text for part in (*item.summary, *(item.content or ()))]
    if len(texts) < 2:  # noqa: PLR2004 - nothing to join
        return item
    joined = Content(text="\n".join(texts), type="reasoning_text")
    return item.model_copy(update={"content": [joined]})


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name)


def _as_dict(part: Any) -> Any:
    return part.model_dump() if isinstance(part, BaseModel) else part


# ---- Messages -----------------------------------------------------------------------------------


def keep_blocks(request: Any) -> None:
    """Take billing lines off system texts; refuse blocks that vLLM would drop. Mutates it."""
    if isinstance(request.system, list):
        for at, block in enumerate(request.system):
            _keep_system_block(block, f"system.{at}")
    for number, message in enumerate(request.messages):
        where = f"messages.{number}.content"
        if isinstance(message.content, str):
            if message.role == "system":
                message.content = without_billing_line(message.content)
            continue
        for at, block in enumerate(message.content):
            if message.role == "system":
                _keep_system_block(block, f"{where}.{at}")
            else:
                _keep_block(block, f"{where}.{at}")


def without_billing_line(text: str) -> str:
    """A system text without the line that a client puts first for its own accounts."""
    while text.startswith(BILLING_LINE):
        text = text.partition("\n")[2]
    return text


def _keep_system_block(block: Any, where: str) -> None:
    if block.type not in _SYSTEM_BLOCKS:
        raise _no_place(f"A system prompt has no place for a block of type {block.type!r}", where)
    if block.text:
        block.text = without_billing_line(block.text)


def _keep_block(block: Any, where: str) -> None:
    if block.type in {"redacted_thinking", "tool_reference"}:
        raise _no_place(f"A block of type {block.type!r} cannot be read here", where)
    if block.type != "tool_result" or not isinstance(block.content, list):
        return
    for at, part in enumerate(block.content):
        kind = part.get("type")
        if kind not in _RESULT_PARTS or (kind == "text" and not isinstance(part.get("text"), str)):
            words = f"A tool's result has no place for a part of type {kind!r}"
            raise _no_place(words, f"{where}.content.{at}")


def _no_place(words: str, where: str) -> VLLMValidationError:
    return VLLMValidationError(f"{words}: leave it out.", parameter=where)


# ---- the rendered prompt ------------------------------------------------------------------------


def find_lost_text(conversation: list[Any], prompt: str) -> int | None:
    """The place of the first message with a text that the prompt lacks; None if it has all.

    Texts are searched in their order, and from the start where a template changes that. White
    space does not count, and a template may write a text as JSON.
    """
    written, at = _packed(prompt), 0
    for place, message in enumerate(conversation):
        for text in _texts_of(message):
            ways = (_packed(text), _packed(json.dumps(text, ensure_ascii=False)[1:-1]))
            found = next((w for w in ways if written.find(w, at) >= 0), None)
            if found is not None:
                at = written.find(found, at) + len(found)
            elif not any(way in written for way in ways):
                return place
    return None


def _texts_of(message: Any) -> Iterator[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            is_turn = message.get("role") == "assistant"
            yield text.rpartition(_THOUGHT_END)[2] if is_turn else text


def _packed(text: str) -> str:
    return "".join(text.split())


def as_text(message: Any, template: str) -> Any:
    """The message with its reasoning and calls in its content, where the template reads neither.

    As Hermes writes them, which is what `tool_call_parser` reads by default.
    """
    before, after = "", ""
    if (thought := message.get("reasoning")) and "reasoning" not in template:
        before = f"<think>\n{thought}\n{_THOUGHT_END}\n\n"
    if (calls := message.get("tool_calls")) and "tool_calls" not in template:
        told = [
            {"name": call["function"].get("name"), "arguments": call["function"].get("arguments")}
            for call in calls
        ]
        after = "".join(
            f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in told
        )
    if not before and not after:
        return message
    content = message.get("content") or ""
    if isinstance(content, list):
        shown: Any = [_text(before), *content, _text(after)]
        return {**message, "content": [part for part in shown if part["text"]]}
    return {**message, "content": f"{before}{content}{after}".lstrip("\n")}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def keep_arguments(conversation: list[Any]) -> None:
    """Arguments of calls that are no JSON object become one that holds them. Mutates it.

    vLLM would leave them out, since templates want an object.
    """
    for message in conversation:
        calls = message.get("tool_calls") if message.get("role") == "assistant" else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            given = function.get("arguments")
            if isinstance(given, str) and given and not _is_object(given):
                function["arguments"] = {"arguments": given}
    _postprocess_of_vllm(conversation)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def apply_whole(model_config: Any, tokenizer: Any, conversation: list[Any], **given: Any) -> Any:
    """In place of vLLM's: raises VLLMValidationError where the template left a text out."""
    template = hf.resolve_chat_template(
        tokenizer, given.get("chat_template"), given.get("tools"), model_config=model_config
    )
    conversation = [as_text(message, template or "") for message in conversation]
    made = _apply_of_vllm(model_config, tokenizer, conversation, **given)
    prompt = made if isinstance(made, str) else tokenizer.decode(made)
    place = find_lost_text(conversation, prompt)
    if place is not None:
        role = conversation[place].get("role")
        raise VLLMValidationError(
            f"The model's chat template has no place for the text of message {place} (role "
            f"{role!r}), which would be lost: leave it out, or give it another role.",
            parameter=f"messages.{place}.content",
        )
    return made


_message_of_vllm: Any = of_responses._construct_message_from_response_item  # noqa: SLF001
_convert_of_vllm: Any = AnthropicServingMessages.to_chat_completion_request.__func__
_postprocess_of_vllm: Any = chat_utils._postprocess_messages  # noqa: SLF001
_apply_of_vllm: Any = hf.safe_apply_chat_template


def _convert(cls: Any, /, anthropic_request: Any, **given: Any) -> Any:
    keep_blocks(anthropic_request)
    return _convert_of_vllm(cls, anthropic_request, **given)


def keep_all_input() -> None:
    """Let vLLM's front end keep it. Mutates its modules."""
    of_responses._construct_message_from_response_item = message_of_item  # noqa: SLF001
    AnthropicServingMessages.to_chat_completion_request = classmethod(_convert)
    chat_utils._postprocess_messages = keep_arguments  # noqa: SLF001
    hf.safe_apply_chat_template = apply_whole
