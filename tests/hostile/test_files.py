"""Files of models that say anything: each loads or is refused with an error of ours. None crashes, hangs or is let
through with a raw error."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from archerfish import HubConfig, LLMEngine, SamplingParams
from archerfish.config import EngineConfig
from archerfish.engine.llm_loading import read_model_facts
from archerfish.errors import CorruptFileError, InputTooLargeError, TensorError, UnsupportedModelError
from archerfish.store.source import WORLD_NAME
from archerfish.store.sources import open_source
from archerfish.store.tokenizer_checks import open_tokenizer, tokenizer_errors
from archerfish.text.chat_template import ChatTemplate
from archerfish.text.world_tokenizer import WorldTokenizer
from archerfish.types import no_progress
from tests.engine.tiny_llama import TINY as LLAMA
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.hostile.files import MOE, NORMALIZERS, PLANS, SPLITS, make_bases, write_source
from tests.store.gguf_models import make_tensors, write_gguf
from tests.text.tiny_tokenizers import byte_fallback

Case = tuple[str, int]
NUM_SAMPLED, NUM_CASES = 4, 120  # cases of each kind: in every run of the tests, and with the mark `hostile`
MAX_SECONDS = 10.0  # processor time of a case
SILENCE_S = 120.0  # after which a child hangs; a case takes less than a second


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bases")
    make_bases(root)
    return root


def outcomes(cases: list[Case], bases: Path) -> dict[Case, str]:
    """Returns how each case ended. A child that dies or hangs is replaced, and the next one goes on."""
    found: dict[Case, str] = {}
    while len(found) < len(cases):
        left = cases[len(found) :]
        arguments = [sys.executable, "-m", "tests.hostile.files", str(bases), json.dumps(left)]
        with (
            tempfile.TemporaryFile() as noise,
            subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=noise) as child,
        ):
            num_begun = num_ended = 0
            for line in lines_of(child):
                if "begins" in line:
                    num_begun += 1
                else:
                    is_slow = line["seconds"] > MAX_SECONDS
                    found[left[num_ended]] = f"{line['seconds']} s" if is_slow else line["outcome"]
                    num_ended += 1
            child.kill()
            if num_begun > num_ended or not num_begun:
                code = child.wait()
                noise.seek(0)
                found[left[num_ended]] = f"ended with {code}: {noise.read().decode(errors='replace')[-3000:]}"
    return found


def lines_of(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of a child, up to its end or a hang."""
    assert child.stdout is not None
    pending = b""
    while select.select([child.stdout], [], [], SILENCE_S)[0]:
        read = os.read(child.stdout.fileno(), 1 << 16)
        *lines, pending = (pending + read).split(b"\n")
        yield from map(json.loads, lines)
        if not read:
            return


def check_cases(cases: list[Case], bases: Path) -> None:
    found = outcomes(cases, bases)
    assert {case: text for case, text in found.items() if text not in ("loaded", "refused")} == {}
    assert "refused" in found.values()


def test_a_sample_of_changed_files_loads_or_is_refused(bases: Path) -> None:
    check_cases([(kind, number) for kind in PLANS for number in range(NUM_SAMPLED)], bases)


@pytest.mark.hostile
@pytest.mark.parametrize("kind", PLANS)
def test_changed_files_load_or_are_refused(kind: str, bases: Path) -> None:
    check_cases([(kind, number) for number in range(NUM_SAMPLED, NUM_CASES)], bases)


@pytest.mark.hostile
def test_raw_errors_and_crashes_are_reported(bases: Path) -> None:
    raw, crash, after = outcomes([("no such kind", 0), ("abort", 0), ("adapter", 0)], bases).values()
    assert "KeyError" in raw
    assert crash.startswith("ended with -6")
    assert after in ("loaded", "refused")


VALUES = (10**9, 0, -1, 0.5, "many", True, [2])
SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


def read_facts(directory: Path, **options: Any) -> Any:
    return read_model_facts(tiny_config(directory, **options), HubConfig(offline=True), no_progress)


@pytest.mark.parametrize("name", [*SIZES, "num_experts", "moe_intermediate_size"])
def test_a_size_that_cannot_be_is_named(name: str, tmp_path: Path) -> None:
    for value in VALUES if name != "num_experts" else VALUES[:1]:
        (tmp_path / "config.json").write_text(json.dumps({**(LLAMA if name in SIZES else MOE), name: value}))
        expected = rf"has {name} = {value!r}, which must be a whole number from".replace("[", r"\[")
        with pytest.raises(UnsupportedModelError, match=expected):
            read_facts(tmp_path)


def test_experts_of_all_layers_together_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, "num_hidden_layers": 1024, "num_experts": 4096}))
    with pytest.raises(UnsupportedModelError, match="num_experts = 4,096 in num_hidden_layers = 1,024"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": ["silu"]}, "Unknown activation"),
        ({"quantization_config": 7}, "cannot be used"),
        ({"layer_types": [["a"], {}]}, "layer_types"),
        ({"partial_rotary_factor": 2.0}, "16 of 8 dimensions"),
        ({"sliding_window": 1e30, "model_type": "mistral"}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e9}}, "max_position_embeddings"),
    ],
)
def test_other_values_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedModelError, CorruptFileError), match=message):
        read_facts(save_tiny_llama(tmp_path, **changes))


def test_sizes_that_tensors_do_not_have_are_refused_before_a_conversion(tmp_path: Path) -> None:
    source = write_source(tmp_path / "llama", LLAMA)
    (source / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 288, "intermediate_size": 72}))
    hub = HubConfig(cache_dir=str(tmp_path / "cache"), offline=True)
    with pytest.raises(TensorError, match=r"shape \(64, 32\), but the configuration asks for \(72, 32\)"):
        LLMEngine(EngineConfig(model=str(source), dtype="float32"), hub=hub)
    assert not list((tmp_path / "cache").rglob("metadata.json"))


@pytest.mark.parametrize("key", ["block_count", "attention.head_count_kv", "embedding_length", "context_length"])
@pytest.mark.parametrize("value", [0, 4_000_000_000])
def test_sizes_of_gguf_files(key: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = gguf.GGUFWriter.add_uint32
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_uint32", lambda self, name, one: added(self, name, value if name.endswith(key) else one)
    )
    path = write_gguf(tmp_path / "model.gguf", "llama", make_tensors("llama"))
    with pytest.raises(UnsupportedModelError, match=rf"\({key}\) has \w+ = {value}, which must be"):
        open_source(path)


def tokenizer_json(directory: Path, **changes: Any) -> bytes:
    byte_fallback(directory)
    return json.dumps({**json.loads((directory / "tokenizer.json").read_text()), **changes}).encode()


def test_normalizers_and_decoders_that_grow_a_text_are_refused(tmp_path: Path) -> None:
    grows = [NORMALIZERS[0], NORMALIZERS[4], NORMALIZERS[5], {"pattern": {"String": ""}, "content": "a" * 99}]
    for part in grows:
        with pytest.raises(UnsupportedModelError, match="times longer; the limit is 64"):
            open_tokenizer(tokenizer_json(tmp_path, normalizer=part), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"times longer"):
        open_tokenizer(tokenizer_json(tmp_path, decoder=grows[0]), tmp_path)
    escaped = tokenizer_json(tmp_path, normalizer=grows[0]).replace(b'"pattern"', b'"p\\u0061ttern"')
    with pytest.raises(UnsupportedModelError, match="times longer"):
        open_tokenizer(escaped, tmp_path)
    assert open_tokenizer(tokenizer_json(tmp_path), tmp_path).encode("a cat").ids


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(a|a)*$|(a|a)*b"])
def test_regular_expressions_that_take_long_are_refused(pattern: str, tmp_path: Path) -> None:
    split = {**SPLITS[0], "pattern": {"Regex": pattern}}
    with pytest.raises(UnsupportedModelError, match="regular expression that takes too long or fails"):
        open_tokenizer(tokenizer_json(tmp_path, pre_tokenizer=split), tmp_path)


def test_unusual_regular_expressions_are_taken(tmp_path: Path) -> None:
    split = {**SPLITS[0], "pattern": {"Regex": r"\d{2,5}|[a-z]+(?=x)"}}
    assert open_tokenizer(tokenizer_json(tmp_path, pre_tokenizer=split), tmp_path).encode("a").ids


def test_a_table_that_the_library_panics_at_is_refused(tmp_path: Path) -> None:
    data = tokenizer_json(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(CorruptFileError, match="sound tokenizer"):
        open_tokenizer(data, tmp_path)


def test_words_without_end_are_refused(tmp_path: Path) -> None:
    model = {"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    data = tokenizer_json(
        tmp_path, model={**model, "max_input_chars_per_word": 10**9}, added_tokens=[], post_processor=None
    )
    with pytest.raises(UnsupportedModelError, match="1,000,000,000 characters"):
        open_tokenizer(data, tmp_path)


@pytest.mark.parametrize("literal", [repr("a" * 5000), "(" * 5000])
def test_tokens_of_a_world_vocabulary_are_bounded(literal: str, tmp_path: Path) -> None:
    (tmp_path / WORLD_NAME).write_text(f"1 {literal} 5000\n")
    with pytest.raises(CorruptFileError, match="is not a token with its id and length"):
        WorldTokenizer(tmp_path / WORLD_NAME).encode("a")


def test_a_panic_at_a_text_is_an_error_of_the_model(tmp_path: Path) -> None:
    split = {**SPLITS[0], "pattern": {"Regex": "(x+x+)+y"}}
    unchecked = Tokenizer.from_buffer(tokenizer_json(tmp_path, pre_tokenizer=split))
    with pytest.raises(UnsupportedModelError, match="cannot read this text"), tokenizer_errors():
        unchecked.encode("x" * 40)


def test_a_text_that_fits_no_context_is_not_tokenised(tmp_path: Path) -> None:
    byte_fallback(tmp_path, chat_template="{{ 'a' * 1100000 }}")
    with LLMEngine(tiny_config(save_tiny_llama(tmp_path, vocab_size=288))) as engine:
        with pytest.raises(InputTooLargeError, match=r"1,052,673 bytes; the context takes 1,052,672"):
            engine.generate(["a" * (16 * 256 + (1 << 20) + 1)], SamplingParams(max_tokens=1))
        with pytest.raises(InputTooLargeError, match="the context takes"):
            engine.chat([{"role": "user", "content": "a"}])


BOMBS = {
    "{{ ('a '*30000000)|title|upper|lower|length }}": "more than 8,000,000",
    "{{ ('a '*3000000)|title|length }}": "gives title more than",
    "{{ ('\\n'*7000000)|indent(900)|length }}": "more than 8,000,000",
    "{{ ([1]*80000)|tojson(indent=900)|length }}": "more than 8,000,000",
    "{{ ([[1]]*9000)|sum(start=[])|length }}": "sums lists",
    "{{ (['a'*7000000]*100)|sort|length }}": "more than 64,000,000",
    "{{ (9**99999)//7 }}": "100,000 bits",
    "{{ (['ab']*9000)|join('a'*9000)|length }}": "more than 8,000,000",
    "{% set n='f'*90000 %}{{ n|int(base=16)*2 }}": "100,000 bits",
    "{% set ns=namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a=ns.a+ns.a %}{% endfor %}": "more than 8,000,000",
}


@pytest.mark.parametrize("source", BOMBS)
def test_template_bombs_are_stopped_before_they_are_made(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match=BOMBS[source]):
        ChatTemplate(source).render([{"role": "user", "content": "hello"}])
