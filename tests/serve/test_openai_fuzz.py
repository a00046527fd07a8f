"""Whatever a body holds, the answer is an answer or an error that blames the caller."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.serve.messages_routes import CountBody, MessagesBody
from archerfish.serve.openai_schemas import ChatBody, CompletionBody, TextBody
from archerfish.serve.responses_routes import ResponsesBody
from archerfish.serve.schemas import Body
from archerfish.serve.text_routes import DetokenizeBody, ExplainBody, TokenizeBody

from .fake_backend import MODEL, FakeBackend, post

HI = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HI}), "/v1/completions": (CompletionBody, {"prompt": "Hi"}),
    "/v1/responses": (ResponsesBody, {"input": "Hi"}), "/v1/messages": (MessagesBody, {"messages": HI, "max_tokens": 5}),
    "/v1/messages/count_tokens": (CountBody, {"messages": HI}), "/tokenize": (TokenizeBody, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}), "/v1/cache/explain": (ExplainBody, {"prompt": "Hi"}),
}  # fmt: skip
WORDS = [
    "", "auto", "required", "function", "text", "json_schema", "json_object", "user", "assistant", "tool", "tool_use",
    "tool_result", "function_call", "a", "\ud800", "<|end|>", "type", "role", "content", "name", "parameters", "schema",
    "tool_calls", "input_schema", "arguments", MODEL,
]
scalars = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from([10**30, -(10**30), 2**63])
    | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(WORDS) | st.text(max_size=5)
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
def test_no_body_is_the_servers_fault(route: str, data: st.DataObject) -> None:
    kind, usual = ROUTES[route]
    names = [*kind.model_fields, *(kind.unsupported if issubclass(kind, TextBody) else ())]
    body = {**usual, **data.draw(st.dictionaries(st.sampled_from(names) | st.text(max_size=3), values, max_size=3))}
    answer = post(FakeBackend(), route, body)
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
