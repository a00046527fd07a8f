"""LLM as users of vLLM know it, and what calls of an engine promise: mistakes are named, nothing is left open."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archerfish import LLM, AsyncLLMEngine, LLMEngine, SamplingParams
from archerfish.engine.outputs import RequestOutput
from archerfish.errors import ArcherfishError, InvalidInputError
from tests.engine.tiny_llama import greedy, tiny_config
from tests.text.tiny_tokenizers import save_text_llama

VOCAB = 288
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]
FISH = [{"role": "user", "content": "A fish?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_llama(tmp_path_factory.mktemp("talking-llama"), 256, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(tiny_config(directory)) as made:
        yield made


def test_chat_gives_a_list_for_one_conversation_and_for_several(llm: LLM) -> None:
    one = llm.chat(HELLO, greedy())
    several = llm.chat([HELLO, FISH], [greedy(), greedy(4)], use_tqdm=False)
    assert isinstance(one, list) and [len(output.token_ids) for output in several] == [12, 4]
    single = LLMEngine.chat(llm, HELLO, greedy())  # one result there
    assert one[0].token_ids == several[0].token_ids == single.token_ids
    assert several[1].prompt_token_ids == llm.render_chat(FISH)


def test_reasoning_stands_beside_the_text(tmp_path: Path, llm: LLM) -> None:
    plain = llm.chat(HELLO, greedy())[0].outputs[0]
    assert plain.reasoning_content is None and plain.content == plain.text != ""
    directory = save_text_llama(tmp_path, 256, chat_template=TEMPLATE + "<think>\n")
    with LLM(tiny_config(directory)) as thinker:
        written = thinker.get_tokenizer().encode("Two and two.\n</think>\n\nFour.", False)

        def write(past: list[int], logits: Any) -> Any:
            logits[written[len(past)]] = 1e9
            return logits

        params = greedy(len(written), logits_processors=[write])

        async def chat() -> RequestOutput:
            engine = AsyncLLMEngine(thinker)
            answer = await engine.chat(HELLO, params)
            await engine.close()
            return answer

        for answer in (thinker.chat(HELLO, params)[0], LLMEngine.chat(thinker, HELLO, params), asyncio.run(chat())):
            [output] = answer.outputs
            assert (output.reasoning_content, output.content) == ("Two and two.", "Four.") and output.text.endswith(
                "\n\nFour."
            )
        [output] = thinker.chat(HELLO, SamplingParams(max_tokens=9, grammar={"kind": "choice", "value": ["yes"]}))[
            0
        ].outputs
        assert (output.reasoning_content, output.content) == (None, "yes")


@pytest.mark.parametrize("messages", ["Hello", [], ["Hello"], [HELLO, []], [HELLO, HELLO[0]], HELLO[0], None], ids=str)
def test_invalid_conversations_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidInputError, match="messages"):
        llm.chat(messages)


def test_prompts_may_be_dicts_as_in_vllm(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    expected = llm.generate([5, 6, 7], params)[0].token_ids
    assert llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].token_ids == expected
    mixed: list[Any] = [{"prompt_token_ids": [5, 6, 7]}, [5, 6, 7]]
    both = llm.generate(mixed, params)
    assert [one.token_ids for one in both] == [expected, expected]
    for wrong in (
        {},
        {"prompts": "a"},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt": "a", "multi_modal_data": 1},
    ):
        with pytest.raises(InvalidInputError, match="has one key"):
            llm.generate([wrong], params)


def test_use_tqdm_is_another_name_of_show_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("use_tqdm", "show_progress"):
        option: dict[str, Any] = {name: True}
        llm.generate([[5]], greedy(1), **option)
        llm.chat(HELLO, greedy(1), **option)
        assert capsys.readouterr().err.count("Generating") >= 2
    llm.generate([[5]], greedy(1), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_get_tokenizer(llm: LLM, llama: Path) -> None:
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("a fish")) == "a fish"
    with LLM(tiny_config(llama)) as mute, pytest.raises(InvalidInputError, match="has no tokenizer"):
        mute.get_tokenizer()


def test_repr_of_an_engine(directory: Path, llm: LLM) -> None:
    assert repr(llm) == f"LLM({directory.name!r}, device='cpu', dtype='float32', kv_tokens=4096)"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"priority": 1.5}, "priority must"),
        ({"priority": True}, "priority must"),
        ({"deadline_s": -1}, "deadline_s must be .* from 0 to"),
        ({"deadline_s": math.nan}, "deadline_s must"),
        ({"deadline_s": math.inf}, "deadline_s must"),
        ({"deadline_s": "1"}, "deadline_s must"),
        ({"deadline_s": 10**400}, "deadline_s must"),
        ({"request_id": 5}, "request_id must be a string"),
        ({"namespace": ("a", "b")}, "namespace must"),
        (
            {"sampling_params": SamplingParams(stop_token_ids=[VOCAB])},
            f"stop_token_ids names token {VOCAB}.* of {VOCAB}",
        ),
        ({"sampling_params": SamplingParams(logit_bias={VOCAB: 1.0})}, f"logit_bias names token {VOCAB}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_request_options_are_refused(llm: LLM, options: dict[str, Any], said: str) -> None:
    before = llm.engine_stats().total_requests
    for call in (llm.generate, llm.add_request, lambda prompt, **options: next(llm.stream(prompt, **options))):
        with pytest.raises(InvalidInputError, match=said):
            call([5], **options)
    assert llm.engine_stats().total_requests == before


@pytest.mark.parametrize(("text", "said"), [("x" * 5_000_000, "bytes"), ("fish " * 9000, "tokens")], ids=len)
def test_long_texts_are_refused(llm: LLM, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        llm.generate(text)


def test_a_request_id_cannot_name_several_requests(llm: LLM) -> None:
    with pytest.raises(ArcherfishError, match="request_id names one request, but there are 2 prompts"):
        llm.generate([[5], [6]], greedy(1), request_id="mine")
    assert llm.generate([[5]], greedy(1), request_id="mine")[0].request_id == "mine"


def test_no_step_is_left_in_flight_after_a_stop(llm: LLM) -> None:
    """The step that was launched before a stop was found is taken in before the call returns."""
    text = llm.generate("a cat", greedy(20))[0].text
    for stop in ({"stop": text[4]}, {"stop_token_ids": llm.generate("a cat", greedy(20))[0].token_ids[5:6]}):
        output = llm.generate("a cat", greedy(20, **stop))[0]
        assert output.finish_reason == "stop" and len(output.token_ids) < 20 and not llm.has_work
        assert list(llm.stream("a cat", greedy(20, **stop)))[-1].finish_reason == "stop" and not llm.has_work


def test_generate_does_not_run_queued_requests_of_others(llm: LLM) -> None:
    queued = llm.add_request([5, 6, 7], greedy(30))
    llm.generate([[8]], greedy(2))
    assert llm.get_output(queued) is None and llm.has_work
    llm.wait_until(lambda: llm.get_output(queued) is not None)
    assert not llm.has_work


def test_on_result_is_called_for_each_result(llm: LLM) -> None:
    told: list[tuple[int, RequestOutput]] = []

    def take(place: int, result: RequestOutput) -> None:
        told.append((place, result))
        if place == 1:
            raise KeyboardInterrupt

    params = [greedy(length) for length in (2, 4, 4, 40)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6], [7], [8]], params, on_result=take)
    assert [(place, len(result.token_ids)) for place, result in told] == [(0, 2), (1, 4), (2, 4)]
