"""Text with an RWKV model: the World tokenizer, its bytes as they stream, its plain chat template, and grammars over
it."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from archerfish.config import HubConfig
from archerfish.engine.llm import LLM
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidInputError
from archerfish.params import SamplingParams
from archerfish.store.source import WORLD_NAME
from archerfish.text.chat_template import PLAIN_STOPS, ChatTemplate
from archerfish.text.text_tokenizer import TextTokenizer, find_text_tokenizer
from archerfish.text.world_tokenizer import BUNDLED, WorldTokenizer
from tests.engine.tiny_rwkv import rwkv_config, save_tiny_rwkv
from tests.models.recurring import Size, blink_weights
from tests.store.test_rwkv_source import write_pth
from tests.text.tiny_tokenizers import word_pieces

SMALLEST = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 65536}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_rwkv(tmp_path_factory.mktemp("world"), **SMALLEST)


@pytest.fixture(scope="module")
def engine(world: Path) -> Iterator[LLM]:
    with LLM(rwkv_config(world, load_format="dummy")) as made:
        yield made


def write_vocabulary(directory: Path) -> None:
    (directory / WORLD_NAME).write_bytes(gzip.decompress(BUNDLED.read_bytes()))


def test_which_tokenizer_a_directory_has(world: Path, tmp_path: Path) -> None:
    assert isinstance(find_text_tokenizer(world), WorldTokenizer)
    assert isinstance(find_text_tokenizer(world, {"model_type": "rwkv7", "vocab_size": 65536}), WorldTokenizer)
    assert find_text_tokenizer(world, {"model_type": "rwkv7", "vocab_size": 300}) is None
    assert find_text_tokenizer(world, {"model_type": "llama", "vocab_size": 65536}) is None
    write_vocabulary(tmp_path)
    assert isinstance(find_text_tokenizer(tmp_path, {"model_type": "rwkv7", "vocab_size": 70000}), WorldTokenizer)
    word_pieces(tmp_path)
    assert isinstance(find_text_tokenizer(tmp_path), TextTokenizer)  # a tokenizer.json wins


def test_a_vocabulary_beside_a_checkpoint_is_converted_with_it(tmp_path: Path, hub: HubConfig) -> None:
    size = Size(1, 64, 64, 70000, {"w": 8, "a": 8, "v": 8, "g": 8})
    path = write_pth(tmp_path / "model.pth", blink_weights(size))
    write_vocabulary(tmp_path)
    with LLMEngine(rwkv_config(path), hub=hub) as engine:
        assert isinstance(engine.tokenizer, WorldTokenizer)
        assert (engine.facts.directory / "tokenizer" / WORLD_NAME).is_file()
        assert engine.generate(["Hello"], SamplingParams(max_tokens=2))[0].prompt_token_ids == engine.tokenizer.encode(
            "Hello"
        )


def test_text_in_and_out(engine: LLM) -> None:
    output = engine.generate(["Die Größe: 水"], SamplingParams(max_tokens=12, seed=3, ignore_eos=True))[0]
    tokenizer = engine.get_tokenizer()
    assert output.prompt_token_ids == tokenizer.encode("Die Größe: 水")
    assert output.text == tokenizer.decode(output.token_ids)
    assert engine.facts.end_token_ids == tokenizer.eos_token_ids == (0,)


def test_half_a_character_is_held_back(engine: LLM) -> None:
    """水 is three bytes: as single bytes they are three tokens, of which the last makes the text."""
    tokenizer = engine.get_tokenizer()
    ids = [byte + 1 for byte in "a水".encode()]  # the first tokens are the single bytes
    assert tokenizer.decode(ids) == "a水"
    prompt = tokenizer.encode("x")
    pieces = [
        piece.text
        for piece in engine.stream(prompt, SamplingParams(max_tokens=4, grammar={"kind": "regex", "value": "a水"}))
    ]
    assert "".join(pieces) == "a水" and all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    held = engine.requests.make(prompt, SamplingParams(max_tokens=9))
    text = held.collector.texts[0]
    assert text is not None
    assert [text.feed([i])[0] for i in ids] == ["a", "", "", "水"]


def test_a_conversation_is_written_plainly(engine: LLM) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi\n\nUser: you\n \nthere "},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    text = engine.get_tokenizer().decode(engine.render_chat(messages))
    assert text == "System: Be brief.\n\nUser: Hi\nUser: you\nthere\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:"
    rest = engine.chat_template.render(messages[3:], add_generation_prompt=False)
    assert rest == "User: Bye\n\n"
    with pytest.raises(InvalidInputError, match="content"):
        engine.render_chat([{"role": "user"}])


def test_an_answer_stops_where_another_turn_would_begin(engine: LLM) -> None:
    template = engine.chat_template
    assert template.stopping(SamplingParams()).stop == PLAIN_STOPS
    given = SamplingParams(stop=["x", PLAIN_STOPS[0]], seed=1)
    assert template.stopping(given).stop == ("x", *PLAIN_STOPS)
    params = SamplingParams(max_tokens=20, grammar={"kind": "regex", "value": "Yes\n\nUser: more and more"})
    messages = [{"role": "user", "content": "Is it?"}]
    (answer,) = engine.chat(messages, params)
    assert (answer.text, answer.finish_reason, answer.outputs[0].stop_reason) == ("Yes", "stop", PLAIN_STOPS[0])
    assert "".join(piece.text for piece in engine.stream_chat(messages, params)) == "Yes"
    assert LLMEngine.chat(engine, messages, params).text == "Yes"


def test_a_template_of_its_own_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = ChatTemplate.find(tmp_path, tokenizer=WorldTokenizer())
    assert found.render([{"role": "user", "content": "mine"}]) == "mine" and found.stops == ()


def test_a_grammar_over_the_world_vocabulary(engine: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=2, grammar={"kind": "choice", "value": ["größer", "kleiner"]})
    outputs = engine.generate(["Ist es"] * 3, params)
    assert {output.text for output in outputs} <= {"größer", "kleiner"}
    assert all(output.finish_reason == "stop" for output in outputs)
