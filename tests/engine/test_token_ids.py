"""Ids beyond a model's embedding tables, from hostile tokenizers and from callers, are refused before anything is
computed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import CorruptFileError, InvalidInputError
from archerfish.kernels.batches import Segments
from archerfish.models.adapter import TokenBatch
from archerfish.store.source import WORLD_NAME
from archerfish.text.text_tokenizer import find_text_tokenizer
from tests.conftest import TinyModel
from tests.engine.tiny_llama import tiny_config
from tests.text.tiny_tokenizers import save_text_llama

LLM = """
from archerfish.engine.llm_engine import LLMEngine
from tests.engine.tiny_llama import greedy, tiny_config
from pathlib import Path
with LLMEngine(tiny_config(Path(path))) as engine:
    print([output.token_ids for output in engine.generate(["the cat"], greedy(4))])
"""
EMBED = """
from archerfish.engine.arrow_engine import ArrowEngine
engine = ArrowEngine(path)
print(engine.rerank("the", ["a cat"]) if engine.is_cross_encoder else engine.encode(["the cat"]))
"""


def change(directory: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Edit the tokenizer.json of a model."""
    [file] = list(directory.rglob("tokenizer.json"))
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    return directory


def shift_ids(by: int) -> Callable[[dict[str, Any]], None]:
    """All ids of the vocabulary, also of added tokens, plus a number."""

    def edit(content: dict[str, Any]) -> None:
        content["model"]["vocab"] = {token: number + by for token, number in content["model"]["vocab"].items()}
        for token in content["added_tokens"]:
            token["id"] += by

    return edit


def set_template_id(content: dict[str, Any]) -> None:
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [10**9]


def set_type_id(content: dict[str, Any]) -> None:
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 2_000_000}}],
        "special_tokens": {},
    }


def outcome(script: str, path: Path) -> str:
    """What a process prints that uses a model: tokens, vectors or its last line of a traceback, or how it crashed."""
    code = f"path = {str(path)!r}\n{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return (
        f"signal {-done.returncode}" if done.returncode < 0 else (done.stderr or done.stdout).strip().splitlines()[-1]
    )


@pytest.mark.parametrize(("edit", "highest"), [(shift_ids(49_152), 49_152 + 269), (set_template_id, 10**9)])
def test_ids_beyond_the_table_of_a_llama_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], highest: int
) -> None:
    path = change(save_text_llama(tmp_path, 64), edit)
    assert f"token ids up to {highest:,}, but the model's table has 288 rows" in outcome(LLM, path)


@pytest.mark.parametrize(
    ("head", "edit", "message"),
    [
        ("Model", shift_ids(40_000), "token ids up to 40,0"),
        ("ForSequenceClassification", set_type_id, "type ids up to 2,000,000, but the model's table has 2 rows"),
    ],
)
def test_ids_beyond_the_tables_of_bert_are_refused(
    tiny_model: TinyModel, head: str, edit: Callable[[dict[str, Any]], None], message: str, own_cache: None
) -> None:
    assert message in outcome(EMBED, change(tiny_model("Bert", head=head), edit))


def add_token(content: dict[str, Any]) -> None:
    """An added token behind the table, which is in the vocabulary too: as Gemma 3's text models have one."""
    content["added_tokens"].append({**content["added_tokens"][0], "id": 100_000, "content": "<image>"})
    content["model"]["vocab"]["<image>"] = 100_000


def test_an_added_token_without_a_row_is_text(tmp_path: Path, tiny_model: TinyModel, own_cache: None) -> None:
    path = change(save_text_llama(tmp_path, 64), add_token)
    with LLMEngine(tiny_config(path)) as engine:
        assert engine.tokenizer is not None
        assert max(engine.tokenizer.encode("a<image>b")) < 288
        assert engine.tokenizer.decode(engine.tokenizer.encode("a<image>b")) == "a<image>b"
    found = find_text_tokenizer(path)
    assert found is not None
    assert 100_000 in found.encode("a<image>b")  # a tokenizer by itself has no table
    encoder = ArrowEngine(change(tiny_model("Bert"), add_token))
    assert np.isfinite(encoder.encode(["the <image> cat"])).all()


def test_a_tokenizer_of_the_world_vocabulary_needs_its_table(tmp_path: Path) -> None:
    (tmp_path / WORLD_NAME).write_text("")
    assert find_text_tokenizer(tmp_path, {}, num_ids=65_536) is not None
    with pytest.raises(CorruptFileError, match="up to 65,535, but the model's table has 65,535 rows"):
        find_text_tokenizer(tmp_path, {}, num_ids=65_535)


def test_a_batch_with_ids_beyond_a_table_is_refused(minilm: ArrowEngine) -> None:
    def run(ids: list[int], types: list[int] | None = None) -> None:
        type_ids = None if types is None else np.array(types)
        minilm.core.run(TokenBatch(np.array(ids), Segments((len(ids),)), type_ids))

    run([30_521], [1])
    wrong: list[tuple[Any, ...]] = [([30_522],), ([-1],), ([5], [2]), ([5], [-1]), ([5] * 513,)]
    for case in wrong:
        with pytest.raises(InvalidInputError):
            run(*case)
