"""Grammars in the engine: every output is what its grammar says, and nobody else's changes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import CompletionOutput
from archerfish.errors import InvalidInputError, UnsupportedModelError
from archerfish.params import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_LINES, SamplingParams
from archerfish.runtime.runner import RunningStep
from archerfish.step import PENDING, StepInput
from archerfish.text.grammar import MAX_KEPT, GrammarCompiler
from archerfish.text.text_tokenizer import TextTokenizer
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.text.tiny_tokenizers import END, ROWS, byte_level, metaspace

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["ab", "cd"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
PATTERN = r"[a-c]{2,5}-(\d\d|x+y)?"


@pytest.fixture
def compiler(directory: Path) -> GrammarCompiler:
    return GrammarCompiler(TextTokenizer(directory), ROWS)


def grammar(kind: str, value: Any = None) -> dict[str, Any]:
    return {"kind": kind, "value": value}


def constrained(kind: str, value: Any = None, **options: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar(kind, value), **{"max_tokens": 200, **options})


def outputs_of(engine: LLMEngine, params: SamplingParams, num_seeds: int) -> list[CompletionOutput]:
    """One output for each seed, of as many different prompts."""
    prompts = [[2 + seed % 200, 5 + seed % 50] for seed in range(num_seeds)]
    results = engine.generate(prompts, [params.replace(seed=seed) for seed in range(num_seeds)])
    return [result.outputs[0] for result in results]


@pytest.mark.no_cover
def test_every_output_is_a_json_object(engine: LLMEngine) -> None:
    ending = (
        {engine.tokenizer.token_to_id(word): 3.0 for word in ("}", '"', '"}', "]", "}}")} if engine.tokenizer else {}
    )
    outputs = outputs_of(engine, constrained("json", logit_bias=ending, max_tokens=230), 50)
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert len(ended) > 40 and all(output.finish_reason in ("stop", "length") for output in outputs)
    assert all(isinstance(json.loads(output.text), dict) for output in ended)
    assert len({output.text for output in ended}) > 15


@pytest.mark.no_cover
@pytest.mark.parametrize(("written", "num_seeds"), [(SCHEMA, 40), (json.dumps(SCHEMA), 5)])
def test_every_output_matches_its_schema(engine: LLMEngine, written: Any, num_seeds: int) -> None:
    for output in outputs_of(engine, constrained("json_schema", written), num_seeds):
        assert output.finish_reason == "stop" and output.stop_reason == END, output
        value = json.loads(output.text)
        assert list(value) == ["name", "kind", "sizes"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 6 and value["kind"] in ("ab", "cd")
        assert len(value["sizes"]) <= 3 and all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])


@pytest.mark.parametrize(
    "pattern", [PATTERN, r"^https?://[a-c]{1,3}/[0-9]$", "a/b\nc?", r'["\\/]{2}', "(?i)abc", r"[^\x00-\x7f]"]
)
def test_every_output_matches_its_pattern(engine: LLMEngine, pattern: str) -> None:
    outputs = outputs_of(engine, constrained("regex", pattern), 20)
    for output in outputs:
        assert output.finish_reason == "stop" and re.fullmatch(pattern, output.text), output
    assert pattern != PATTERN or {output.text[-1].isdigit() for output in outputs} == {True, False}


def test_choices_and_lark(engine: LLMEngine) -> None:
    choices = ["yes", 'no "never"', "maybe\nnot", "ünd", "a\\b"]
    seen = {output.text for output in outputs_of(engine, constrained("choice", choices), 60)}
    assert seen == set(choices)
    lark = 'start: pair ("," pair)*\npair: LETTER "=" LETTER\nLETTER: /[a-f]/\n'
    for output in outputs_of(engine, constrained("lark", lark, logit_bias={END: 4.0}), 20):
        assert output.finish_reason == "stop" and re.fullmatch(r"[a-f]=[a-f](,[a-f]=[a-f])*", output.text)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.2},
        {"min_p": 0.9},
        {"n": 8},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"logprobs": 3},
    ],
)
def test_sampling_options_respect_the_grammar(engine: LLMEngine, options: dict[str, Any]) -> None:
    params = constrained("regex", PATTERN, **options)
    results = engine.generate([[7, 8, 9], [7, 8, 9], [30]], params)
    for result in results:
        assert len(result.outputs) == options.get("n", 1)
        for output in result.outputs:
            assert re.fullmatch(PATTERN, output.text) and output.finish_reason == "stop"
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
    if "n" in options:
        assert len({output.text for output in results[0].outputs}) > 1


def test_other_sequences_are_not_affected(directory: Path) -> None:
    prompts = [[2 + place, 40, 41 + place] for place in range(6)]
    params = [SamplingParams(max_tokens=24, seed=place, logprobs=1, ignore_eos=True) for place in range(6)]

    def neighbours(beside: SamplingParams | None) -> list[tuple[list[int], Any]]:
        with LLMEngine(tiny_config(directory, deterministic=True)) as engine:
            extra = [] if beside is None else [beside]
            results = engine.generate(prompts + [[99, 98]] * len(extra), params + extra)
            return [(result.token_ids, result.logprobs) for result in results[:6]]

    alone = neighbours(None)
    assert neighbours(constrained("json_schema", SCHEMA, n=3)) == alone
    assert neighbours(constrained("regex", "[a-z]{1,60}", logit_bias={END: -50.0})) == alone


@pytest.mark.no_cover
def test_preempted_sequences_continue(directory: Path) -> None:
    params = constrained("json_schema", SCHEMA)
    with LLMEngine(tiny_config(directory)) as engine:
        expected = [output.text for output in outputs_of(engine, params, 12)]
    with LLMEngine(tiny_config(directory, max_cache_tokens=256, max_num_seqs=12, max_model_len=250)) as engine:
        found = [output.text for output in outputs_of(engine, params, 12)]
        assert engine.scheduler.stats().num_preemptions > 0
    assert found == expected


def test_a_repeated_prompt_and_a_stop_string(engine: LLMEngine) -> None:
    params = constrained("regex", "[a-c]{3}#[a-c]{3}", stop="#", seed=3)
    first, again = (engine.generate([[60, 61, 62]], params)[0] for _ in range(2))
    assert (
        re.fullmatch("[a-c]{3}", first.text) and first.finish_reason == "stop" and first.outputs[0].stop_reason == "#"
    )
    assert again.text == first.text  # its logits come out of the cache


def test_max_tokens_can_end_a_grammar_early(engine: LLMEngine) -> None:
    output = outputs_of(engine, constrained("regex", "[a-c]{50}", max_tokens=5), 1)[0]
    assert output.finish_reason == "length" and re.fullmatch("[a-c]+", output.text)


def test_the_end_token_waits_for_the_grammar(engine: LLMEngine) -> None:
    for output in outputs_of(engine, constrained("regex", "[ab]{3}d*", logit_bias={END: 100.0}), 10):
        assert re.fullmatch("[ab]{3}", output.text) and output.token_ids[-1] == END


def test_a_dead_end_ends_its_own_request_only(tmp_path: Path) -> None:
    byte_level(tmp_path, without="z")
    save_tiny_llama(tmp_path, vocab_size=ROWS, eos_token_id=END)
    with LLMEngine(tiny_config(tmp_path)) as engine:
        dead = constrained("regex", "[ab]{2}z", n=2, seed=0)
        well = constrained("regex", "[ab]{20}", seed=1)
        results = engine.generate([[5, 6], [7, 8], [9]], [dead, well, SamplingParams(max_tokens=30, ignore_eos=True)])
        for output in results[0].outputs:
            assert output.finish_reason == "error" and isinstance(output.error, InvalidInputError)
            assert "dead end" in str(output.error)
        assert re.fullmatch("[ab]{20}", results[1].text) and len(results[2].token_ids) == 30
        with pytest.raises(InvalidInputError, match="dead end after 0 tokens"):
            engine.generate([[5]], constrained("regex", "z"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (grammar("regex", "(a"), "unclosed group"),
        (grammar("regex", "(?=a)b"), "look-ahead"),
        (grammar("lark", "start: foo"), "unknown name"),
        (grammar("json_schema", {"type": "frob"}), "Invalid type: frob"),
        (grammar("json_schema", {"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
        (grammar("json_schema", {"type": "array", "uniqueItems": True}), "uniqueItems"),
    ],
)
def test_an_invalid_grammar_is_refused_at_submission(engine: LLMEngine, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why) as caught:
        engine.add_request([5], SamplingParams(grammar=given))
    assert "\n" not in caught.value.message
    assert not engine.has_work


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("json", "must be a mapping"),
        ({}, "no kind None"),
        ({"kind": "xml"}, "no kind 'xml'"),
        ({"kind": "json", "schema": {}}, "has no 'schema'"),
        (grammar("json", {"a": 1}), "takes no value"),
        (grammar("regex"), "takes a string"),
        (grammar("lark", ""), "takes a string"),
        (grammar("choice", []), "1 to"),
        (grammar("choice", "abc"), "must be a list"),
        (grammar("choice", ["a", ""]), "not empty"),
        (grammar("json_schema", [1]), "must be an object"),
        (grammar("json_schema", "{"), "not valid JSON"),
        (grammar("json_schema", {"const": float("nan")}), "not valid JSON"),
        (grammar("json_schema", {"a": set()}), "not valid JSON"),
        (grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "the limit is"),
        (grammar("lark", "start: a\n" * (MAX_GRAMMAR_LINES + 1)), "2,002 lines"),
    ],
)
def test_the_shape_of_a_grammar_is_checked_when_made(given: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        SamplingParams(grammar=given)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_parameters_that_exclude_a_grammar(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="exclude each other"):
        constrained("json", **options)


def test_a_grammar_is_copied() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    params = constrained("json_schema", schema)
    schema["properties"] = 3
    assert params.grammar == {
        "kind": "json_schema",
        "value": {"type": "object", "properties": {"a": {"type": "string"}}},
    }
    assert params.replace(temperature=0.5).grammar == params.grammar


def test_models_without_grammars(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="has no tokenizer"):
        GrammarCompiler(None, 96).compile(grammar("json"))
    with pytest.raises(InvalidInputError, match="has no end token"):
        GrammarCompiler(byte_level(tmp_path / "endless", eos_token=None), ROWS).compile(grammar("json"))
    with pytest.raises(UnsupportedModelError, match="cannot be used with the tokenizer of this model: can't determine"):
        GrammarCompiler(metaspace(tmp_path / "pieces"), 14).compile(grammar("json"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidInputError, match=r"llguidance, which is not installed.*pip install"):
        GrammarCompiler(TextTokenizer(directory), ROWS).compile(grammar("json"))


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(grammar("regex", "a+"))
    assert compiler.compile(grammar("regex", "a+")) is first
    for number in range(MAX_KEPT):
        compiler.compile(grammar("regex", f"a{{{number + 1}}}"))
    assert compiler.compile(grammar("regex", "a+")) is not first


def test_deep_grammars_do_not_crash(compiler: GrammarCompiler) -> None:
    """Each of these is too deep for the stack of a usual thread."""
    depth = 1900
    rules = "".join(f"r{place}: r{place + 1}\n" for place in range(depth))
    lark = f'start: r0\n{rules}r{depth}: "a"\n'
    schema = {f"d{place}": {"properties": {"a": {"$ref": f"#/$defs/d{place + 1}"}}} for place in range(depth)}
    deep = [grammar("lark", lark), grammar("json_schema", {"$ref": "#/$defs/d0", "$defs": {**schema, f"d{depth}": {}}})]
    bits = np.zeros(ROWS // 32, dtype=np.int32)
    for one in deep:
        read = SamplingParams(grammar=one).grammar
        assert read is not None
        compiler.compile(read).start().fill([], bits)
        assert bits.any()


def test_a_matcher_follows_its_output(compiler: GrammarCompiler, directory: Path) -> None:
    """Given token by token, several at a time, or all at once: the same tokens may follow."""
    compiled = compiler.compile(grammar("json_schema", SCHEMA))
    ids = TextTokenizer(directory).encode('{"name": "b{c", "kind":"ab", "sizes": [1, 22]}', add_special_tokens=False)
    slow, leaping = compiled.start(), compiled.start()
    bits = np.zeros((3, ROWS // 32), dtype=np.int32)
    for num in range(len(ids) + 1):
        slow.fill(ids[:num], bits[0])
        compiled.start().fill(ids[:num], bits[1])
        assert (bits[0] == bits[1]).all()
        if num % 3 == 0:
            leaping.fill(ids[:num], bits[2])
            assert (bits[2] == bits[0]).all()
    allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
    assert allowed.tolist() == [END]


def test_a_model_with_fewer_rows_than_its_tokenizer_has_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    matcher = GrammarCompiler(tokenizer, 64).compile(grammar("regex", "[!-~]+")).start()
    bits = np.zeros(2, dtype=np.int32)
    matcher.fill([], bits)
    assert bits.any()
    beyond = GrammarCompiler(tokenizer, 64).compile(grammar("choice", ["é"])).start()
    with pytest.raises(InvalidInputError, match="dead end"):
        beyond.fill([], bits)


def test_only_grammars_wait_for_their_tokens(engine: LLMEngine) -> None:
    taken: list[int] = []
    launch = engine.runner.launch

    def watch(step: StepInput) -> RunningStep:
        firsts = np.cumsum(step.counts) - step.counts
        for index in step.masked:
            taken.append(index)
            assert step.tokens[firsts[index]] != PENDING, "its token before this step's must be on the host"
        return launch(step)

    engine.runner.launch = watch  # type: ignore[method-assign]
    try:
        params = [constrained("regex", "[a-c]{9}"), SamplingParams(max_tokens=20, ignore_eos=True)]
        results = engine.generate([[3, 4], [5, 6]], params)
    finally:
        engine.runner.launch = launch  # type: ignore[method-assign]
    assert re.fullmatch("[a-c]{9}", results[0].text) and len(taken) == len(results[0].token_ids)
