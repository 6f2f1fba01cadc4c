import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.edge.lone_surrogates import lone_surrogate
from deployments.edge.request_body import RequestBody

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=8,
)


def is_text(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(JSON | st.text(st.characters(codec=None, categories=["Cs", "Lu", "So"])))
def test_whatever_cannot_be_encoded_is_found_and_nothing_else(value: object) -> None:
    # Adjacent halves become one character when JSON is read: judge what the reader sees.
    body = json.dumps(value).encode()
    assert (lone_surrogate(RequestBody(body)) is None) == is_text(json.loads(body))


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (rb'{"messages": [{"content": "a\ud83d"}]}', "messages[0].content"),
        (rb'{"stop": ["ok", "\uDE00"]}', "stop[1]"),
        (rb'{"a": {"\ud800": 1}}', "a"),
        (rb'"\ud83d\ud83d\ude00"', ""),
        (b'{"prompt": "\xed\xa0\xbd"}', "prompt"),
        ('{"prompt": "\\ud800"}'.encode("utf-16"), "prompt"),
    ],
)
def test_the_place_is_told(body: bytes, where: str) -> None:
    assert lone_surrogate(RequestBody(body)) == where


@pytest.mark.parametrize(
    "body",
    [
        *(rb'"\ud83d\ude00"', rb'"\\ud83d"', rb'"\\\\udc00"', '"😀"'.encode(), b'"\\u0041"'),
        *(b"", b'"\\ud83d', b"[" * 100_000 + rb"\ud83d", "{}".encode("utf-16")),
    ],
)
def test_pairs_escaped_backslashes_and_what_is_no_json_are_let_pass(body: bytes) -> None:
    assert lone_surrogate(RequestBody(body)) is None


def test_depth_is_no_matter() -> None:
    body = b"[" * 900 + rb'"\ud800"' + b"]" * 900
    assert lone_surrogate(RequestBody(body)) == "[0]" * 900


def test_a_long_name_before_a_long_list_costs_its_length_once() -> None:
    body = RequestBody(b'{"a": "\\\\ud800", "%b": [%b]}' % (b"k" * 10_000, b"1, " * 10_000 + b"1"))
    assert body.asked is not None
    tracemalloc.start()
    try:
        assert lone_surrogate(body) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # it was 100 MB
    finally:
        tracemalloc.stop()
