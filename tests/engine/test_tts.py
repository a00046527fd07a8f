"""TTS requests, and the stages of their output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from archerfish import LLMEngine, SamplingParams
from archerfish.engine import tts
from archerfish.engine.tts import PROPERTIES, TTSRequest, TTSTokens, property_token
from archerfish.errors import CallerError, InputTooLargeError, InvalidInputError, UnknownOptionError
from archerfish.params import Stage
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.runtime.test_stages import expected_token

HELLO = [
    45447,
    12337,
    12325,
    22559,
    26902,
    12326,
]  # "Hello, 世界!": 33155, 45, 33, 10267, 14610, 34 of the World vocabulary
VOICE = [0, 4095, *range(100, 130)]
REFERENCE: dict[str, Any] = {"ref_global_tokens": VOICE, "ref_semantic_tokens": [0, 8191, 5]}


def test_the_prompt_of_a_new_voice() -> None:
    assert TTSRequest(text="Hello, 世界!").prompt() == [
        77823,
        77838,
        77869,
        77845,
        77830,
        77826,  # SPCT_0, youth-adult, female, NEUTRAL, medium pitch, medium speed
        8195,
        *HELLO,
        8193,
    ]
    request = TTSRequest(
        text="Hello, 世界!", age="elderly", gender="male", emotion="CONTEMPT", pitch="very_high", speed="very_fast"
    )
    assert request.prompt() == [77823, 77840, 77870, 77868, 77832, 77828, 8195, *HELLO, 8193]


def test_the_prompt_of_a_given_voice() -> None:
    voice: dict[str, Any] = {"age": "child", "gender": "male", "emotion": "happy", "pitch": "low", "speed": "slow"}
    request = TTSRequest(text="Hello, 世界!", **voice, **REFERENCE)
    assert request.prompt() == [
        77823,
        77836,
        77870,
        77847,
        77829,
        77825,
        8195,
        *HELLO,
        8193,
        8196,
        12291,
        *range(8296, 8326),
        8194,
    ]


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_a_voice_may_come_as_an_array(kind: Callable[[Any], Any]) -> None:
    voiced = TTSRequest(text="Hello", ref_global_tokens=kind(VOICE), ref_semantic_tokens=kind([1, 2]))
    assert voiced == TTSRequest(text="Hello", ref_global_tokens=VOICE, ref_semantic_tokens=[1, 2])
    assert voiced.prompt()[-2] == tts.GLOBAL_OFFSET + VOICE[-1] and type(voiced.prompt()[-2]) is int
    with pytest.raises(
        InvalidInputError, match=r"ref_global_tokens\[0\] must be a whole number from 0 to 4095, not \["
    ):
        TTSRequest(text="Hello", ref_global_tokens=kind([VOICE]), ref_semantic_tokens=kind([1]))
    with pytest.raises(InvalidInputError, match="must be a list of token ids"):
        TTSRequest(text="Hello", ref_global_tokens=kind(VOICE[0]), ref_semantic_tokens=kind([1]))


def test_tokens_of_properties() -> None:
    found = {kind: [property_token(kind, name) - 77823 for name in names] for kind, names in PROPERTIES.items()}
    assert found == {
        "age": [13, 14, 15, 16, 17],
        "gender": [46, 47],
        "emotion": list(range(21, 46)),
        "pitch": [6, 7, 8, 9],
        "speed": [1, 2, 3, 4, 5],
    }
    assert list(found) == ["age", "gender", "emotion", "pitch", "speed"]
    assert max(max(numbers) for numbers in found.values()) + 77823 < tts.VOCAB_SIZE
    for kind, spellings in {
        "age": ["Youth-Adult", "youth_adult", " youth adult "],
        "pitch": ["medium", "medium_pitch", "MEDIUM_PITCH"],
        "emotion": ["NO-AGREEMENT", "no_agreement"],
    }.items():
        assert len({property_token(kind, name) for name in spellings}) == 1


def test_stages_and_their_defaults() -> None:
    assert TTSRequest(text="a", seed=5).params().stages == (
        Stage(first=0, end=4096, num_tokens=32, offset=8196, temperature=1.0, top_p=0.95, top_k=20),
        Stage(first=8194, end=8195, num_tokens=1),
        Stage(first=0, end=8193, num_tokens=2048, stop_id=8192, temperature=1.0, top_p=0.95, top_k=80),
    )
    params = TTSRequest(text="a", seed=5).params()
    assert (params.seed, params.max_tokens, params.stop_token_ids) == (5, 32 + 1 + 2048, (8192,))
    changed = TTSRequest(text="a", temperature=0.5, top_p=0.7, top_k=3, max_tokens=40, **REFERENCE).params()
    assert changed.stages == (
        Stage(first=0, end=8193, num_tokens=40, stop_id=8192, temperature=0.5, top_p=0.7, top_k=3),
    )
    numbers: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "top_p": 0.7,
        "top_k": np.int64(3),
        "max_tokens": np.int64(40),
    }
    assert TTSRequest(text="a", **numbers, **REFERENCE).params() == changed, "numbers of arrays"
    greedy = TTSRequest(text="a", temperature=0, top_k=0).params().stages
    assert [(stage.temperature, stage.top_k, stage.top_p) for stage in (greedy[0], greedy[2])] == [(0, 0, 0.95)] * 2


@pytest.mark.parametrize(
    ("max_tokens", "room", "num_semantic"),
    [
        (None, None, 2048),
        (None, 5000, 2048),
        (None, 34, 1),
        (None, 133, 100),
        (40, 73, 40),
        (9999, None, 2048),
        (9999, 2081, 2048),
    ],
)
def test_the_limit_of_semantic_tokens(max_tokens: int | None, room: int | None, num_semantic: int) -> None:
    assert (
        TTSRequest(text="a", max_tokens=max_tokens).params(room).stages[-1].num_tokens
        == num_semantic
        <= tts.MAX_SEMANTIC
    )


@pytest.mark.parametrize(("max_tokens", "room"), [(None, 33), (None, -5), (40, 72), (9999, 2080)])
def test_texts_that_leave_no_room_are_refused(max_tokens: int | None, room: int) -> None:
    with pytest.raises(InputTooLargeError, match="leaves room for"):
        TTSRequest(text="a", max_tokens=max_tokens).params(room)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "text is empty"),
    ({"text": " \n"}, "text is empty"),
    ({"text": 5}, "text must be a string"),
    ({"text": None}, "text must be a string"),
    ({"emotion": "hapy"}, "no emotion 'hapy'. Did you mean 'HAPPY'?"),
    ({"age": "yuth-adult"}, "no age 'yuth-adult'. Did you mean 'youth-adult'?"),
    ({"gender": "m"}, "no gender 'm'. Known: female, male."),
    ({"pitch": "mediun_pitch"}, "no pitch 'mediun_pitch'"),
    ({"speed": "quick"}, "no speed 'quick'"),
    ({"speed": 3}, "speed must be a string, not 3"),
    ({"gender": None}, "gender must be a string"),
    ({"ref_global_tokens": VOICE}, "ref_semantic_tokens is missing"),
    ({"ref_semantic_tokens": [1]}, "ref_global_tokens is missing"),
    ({**REFERENCE, "ref_global_tokens": VOICE[:31]}, "must have 32 tokens, not 31"),
    ({**REFERENCE, "ref_global_tokens": [*VOICE, 1]}, "must have 32 tokens, not 33"),
    (
        {**REFERENCE, "ref_global_tokens": [4096, *VOICE[1:]]},
        "ref_global_tokens[0] must be a whole number from 0 to 4095",
    ),
    ({**REFERENCE, "ref_global_tokens": [*VOICE[:31], -1]}, "ref_global_tokens[31] must be"),
    ({**REFERENCE, "ref_global_tokens": [*VOICE[:31], 1.0]}, "not 1.0"),
    ({**REFERENCE, "ref_global_tokens": []}, "is empty"),
    ({**REFERENCE, "ref_global_tokens": "abc"}, "must be a list of token ids"),
    ({**REFERENCE, "ref_semantic_tokens": []}, "ref_semantic_tokens is empty"),
    ({**REFERENCE, "ref_semantic_tokens": [8192]}, "from 0 to 8191, not 8192"),
    ({**REFERENCE, "ref_semantic_tokens": [True]}, "not True"),
    ({**REFERENCE, "ref_semantic_tokens": 7}, "must be a list of token ids"),
    ({"max_tokens": 0}, "max_tokens must be a whole number at least 1, not 0"),
    ({"max_tokens": -4}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature must be"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": -(2**63) - 1}, "seed must be"),
    ({"seed": 2**64}, "seed must be"),
]


@pytest.mark.parametrize(("values", "said"), BAD, ids=range(len(BAD)))
def test_invalid_input_errors(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        TTSRequest(**{"text": "Hello", **values})
    assert said in str(raised.value)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match=r"'emotions'. Did you mean 'emotion'\?"):
        TTSRequest(text="a", emotions="HAPPY")  # type: ignore[call-arg]
    with pytest.raises(
        UnknownOptionError, match=r"'mood'\. Known: age, emotion, gender, max_tokens, pitch, ref_global_t"
    ):
        TTSRequest(text="a", mood="HAPPY")  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match="needs a text"):
        TTSRequest()  # type: ignore[call-arg]


@given(st.text(min_size=1), st.sampled_from([*PROPERTIES]), st.text())
def test_any_text_has_a_prompt_and_any_name_a_token_or_an_error(text: str, kind: str, name: str) -> None:
    try:
        values: dict[str, Any] = {"text": text, kind: name}
        prompt = TTSRequest(**values).prompt()
    except CallerError as error:
        assert error.message
        return
    assert prompt[0] == 77823 and prompt[6] == 8195 and prompt[-1] == 8193
    assert all(12292 <= token < 77822 for token in prompt[7:-1]) and len(prompt) > 8


def test_read_output_splits_global_and_semantic_tokens() -> None:
    assert tts.read_output([tts.GLOBAL_OFFSET, tts.GLOBAL_OFFSET + 4095, tts.TAG_1, 0, 8191, tts.EOS]) == (
        [0, 4095],
        [0, 8191],
    )
    assert tts.read_output([]) == ([], [])
    global_tokens, semantic_tokens = TTSTokens([1], [2] * 75)
    assert (global_tokens, len(semantic_tokens), TTSTokens([1], [2] * 75).seconds) == ([1], 75, 1.5)


# Outputs in stages through a whole engine: each token is what plain numpy draws from the model's own distribution


VOCAB = 60
PROMPT = [5, 6, 7]
STAGES = (
    Stage(first=10, end=30, num_tokens=3, offset=20, temperature=0.7, top_k=9, top_p=0.95),
    Stage(first=55, end=56, num_tokens=1),
    Stage(first=0, end=11, num_tokens=6, stop_id=10),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    with LLMEngine(tiny_config(save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB))) as made:
        yield made


def logits_after(engine: LLMEngine, tokens: list[int]) -> Any:
    (output,) = engine.generate([tokens], SamplingParams(max_tokens=1, temperature=0), wants_logits=True)
    return np.asarray(output.logits[0])


@pytest.mark.parametrize("seed", range(4))
def test_every_token_follows_from_seed_position_and_logits(engine: LLMEngine, seed: int) -> None:
    (output,) = engine.generate([PROMPT], SamplingParams(stages=STAGES, seed=seed))
    kinds = [stage for stage in STAGES for _ in range(stage.num_tokens)]
    tokens = list(PROMPT)
    for stage, token in zip(kinds, output.token_ids, strict=False):
        expected, is_unclear = expected_token(logits_after(engine, tokens), stage, seed, len(tokens))
        assert is_unclear or token == expected
        tokens.append(token)
    ended = output.token_ids[-1] == 10
    assert output.finish_reason == ("stop" if ended else "length") and (ended or len(output.token_ids) == 10)
    assert output.outputs[0].stop_reason == (10 if ended else None)


def test_some_end_and_some_do_not(engine: LLMEngine) -> None:
    outputs = engine.generate([PROMPT], SamplingParams(stages=STAGES, seed=3, n=40))[0].outputs
    assert len({tuple(output.token_ids[:3]) for output in outputs}) > 20
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    for output in outputs:
        assert all(30 <= token < 50 for token in output.token_ids[:3]) and output.token_ids[3] == 55
        assert all(token < 10 for token in output.token_ids[4:-1]) and output.text == ""
    assert any(2 in output.token_ids[4:-1] for output in outputs)  # the model's end token is one like others


def test_staged_requests_beside_others(engine: LLMEngine) -> None:
    plain = [
        SamplingParams(max_tokens=12, seed=1),
        SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3),
    ]
    params = [SamplingParams(stages=STAGES, seed=2), plain[0], SamplingParams(stages=STAGES[:1], seed=3), plain[1]]
    together = engine.generate([PROMPT] * 4, params)
    assert [output.token_ids for output in together] == [engine.generate([PROMPT], one)[0].token_ids for one in params]


@pytest.mark.parametrize(
    "stage", [Stage(first=0, end=61, num_tokens=1), Stage(first=0, end=50, num_tokens=1, offset=11)]
)
def test_stages_outside_of_the_vocabulary_are_refused(engine: LLMEngine, stage: Stage) -> None:
    with pytest.raises(InvalidInputError, match=r"stages\[1\] reaches to token 60"):
        engine.generate([PROMPT], SamplingParams(stages=[STAGES[0], stage]))
