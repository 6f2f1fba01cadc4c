"""The streaming client: what it measures, what it says of faults, and how it hangs up."""

from __future__ import annotations

import pytest

from cluster.ask import Answer, ChatRequest, ChatStream, Message, Usage, ask, get_json
from cluster.errors import AnswerError, StartError
from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.fake_endpoint import (
    MODEL,
    Endpoint,
    answer,
    begin_stream,
    delta,
    send_json,
    stream,
    until_hung_up,
    usage,
)


def request(**fields: object) -> ChatRequest:
    return ChatRequest(MODEL, (Message("user", "Why?"),), extra=fields)


def read(server: Endpoint) -> Answer:
    with ChatStream(server.url, request()) as going:
        assert all(going)
        return going.answer()


def test_an_answer_has_its_text_trace_usage_and_finish_reason(server: Endpoint) -> None:
    server.answers = [answer("because it is", prompt=40, cached=32)]
    got = read(server)
    assert got.text == "because it is "
    assert got.trace_id == "trace-1"
    assert got.usage == Usage(prompt_tokens=40, completion_tokens=3, cached_tokens=32)
    assert got.finish_reason == "stop"
    assert got.ttft_s > 0


def test_usage_is_asked_for_and_extra_fields_are_sent(server: Endpoint) -> None:
    server.answers = [answer("so")]
    with ChatStream(server.url + "/", request(min_tokens=3)) as going:
        assert list(going) == ["so "]
    (body,) = server.asked
    assert body["stream_options"] == {"include_usage": True}
    assert body["min_tokens"] == 3
    assert body["messages"] == [{"role": "user", "content": "Why?"}]


def test_usage_without_details_counts_no_cached_tokens(server: Endpoint) -> None:
    server.answers = [answer("so it is", cached=None)]
    got = read(server)
    assert got.usage is not None
    assert got.usage.cached_tokens == 0


def test_tokens_per_second_leave_out_the_first_token() -> None:
    counted = Usage(prompt_tokens=1, completion_tokens=11, cached_tokens=0)
    assert Answer("text", 9.0, "", decode_s=2.0, usage=counted).tokens_per_s == 5.0
    assert Answer("text", 9.0, "", decode_s=2.0).tokens_per_s is None
    one = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    assert Answer("text", 9.0, "", decode_s=0.0, usage=one).tokens_per_s is None


def test_a_refusal_is_one_line_with_the_endpoints_words(server: Endpoint) -> None:
    server.answers = [send_json({"error": {"message": "too\nlong"}}, 400)]
    with pytest.raises(AnswerError) as refused:
        read(server)
    assert str(refused.value) == "the endpoint refused: 400 too long"


@pytest.mark.parametrize("body", ["not an object", ["x"], {"detail": "gone"}, None])
def test_a_refusal_in_another_shape_is_told_too(server: Endpoint, body: object) -> None:
    server.answers = [send_json(body, 503)]
    with pytest.raises(AnswerError, match=r"the endpoint refused: 503 ."):
        read(server)


def test_an_error_event_ends_the_answer_and_keeps_its_beginning(server: Endpoint) -> None:
    server.answers = [stream([delta("half "), '{"error": {"message": "worker lost"}}'])]
    with ChatStream(server.url, request()) as going:
        with pytest.raises(AnswerError, match="the answer ended in an error: worker lost"):
            list(going)
        assert going.answer().text == "half "


def test_a_connection_that_is_cut_is_not_taken_for_an_answer(server: Endpoint) -> None:
    server.answers = [stream([delta("half ")], end=False)]
    with pytest.raises(AnswerError, match=r"failed: |ended before the answer did"):
        read(server)


def test_events_that_are_not_chat_events_are_told(server: Endpoint) -> None:
    server.answers = [stream(["[1, 2"])]
    with pytest.raises(AnswerError, match=r"sent no chat event: \[1, 2"):
        read(server)


def test_leaving_early_hangs_up(server: Endpoint) -> None:
    server.answers = [until_hung_up(begin_stream)]
    with ChatStream(server.url, request()) as going:
        for text in going:
            assert text == "on "
            break
    assert server.hung_up.wait(10)


def test_nobody_listening_is_one_line_with_the_address(server: Endpoint) -> None:
    with fake_endpoint.endpoint() as gone:
        url = gone.url
    with (
        ChatStream(url, request()) as going,
        pytest.raises(AnswerError, match=r"the connection to 127.0.0.1:\d+ failed: .*refused"),
    ):
        list(going)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://x:port", ""])
def test_an_odd_url_is_told_with_an_example(url: str) -> None:
    with pytest.raises(AnswerError, match="such as http://"):
        ChatStream(url, request())


def test_a_proxy_of_the_environment_is_not_used(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.answers = [answer("direct")]
    assert read(server).text == "direct "


def test_ask_streams_one_question_and_its_usage_may_be_missing(server: Endpoint) -> None:
    server.answers = [stream([delta("Paris"), delta("", "stop")])]
    heard: list[str] = []
    got = ask(server.url, MODEL, "What?", heard.append, max_tokens=7)
    assert heard == ["Paris"]
    assert (got.text, got.trace_id, got.usage) == ("Paris", "trace-1", None)
    assert server.asked[0]["max_tokens"] == 7
    assert server.asked[0]["temperature"] == 0


def test_ask_tells_every_fault_as_a_start_error(server: Endpoint) -> None:
    server.answers = [send_json({"error": {"message": "no"}}, 500)]
    with pytest.raises(StartError, match="refused: 500 no"):
        ask(server.url, MODEL, "What?", print)


def test_json_is_fetched_and_its_faults_are_one_line(server: Endpoint) -> None:
    server.objects["/list"] = [1]
    assert get_json(server.url, "/v1/models")["data"][0]["id"] == MODEL
    with pytest.raises(AnswerError, match="404 nothing here"):
        get_json(server.url, "/absent")
    with pytest.raises(AnswerError, match="not answer with a JSON object"):
        get_json(server.url, "/list")


def test_a_chunk_with_usage_alone_is_no_text(server: Endpoint) -> None:
    server.answers = [stream([delta("a"), delta(None, "length"), usage(5, 1, 0)])]
    got = read(server)
    assert (got.text, got.finish_reason) == ("a", "length")
