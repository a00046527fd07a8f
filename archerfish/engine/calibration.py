"""Text that quantising is calibrated with and measured by, as token ids: from a file, or written by the model
itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, InvalidOptionError, ModelNotFoundError
from archerfish.kernels.batches import Ids
from archerfish.models.adapter import encoder_class, is_encoder, model_class
from archerfish.models.config import Config
from archerfish.store.metadata import TOKENIZER_NAME
from archerfish.store.source import ModelSource
from archerfish.types import Progress

TEXT_TOKENS = 512  # of one text at most
NUM_TEXTS = 60  # of TEXT_TOKENS: 24,576 tokens to calibrate with, six for each input of a wide matrix
HELD_OUT = 5  # every fifth text is kept for measuring
MIN_TEXTS = 5
MAX_FILE_BYTES = 64 << 20
OWN_TEXT = "that the model wrote itself"


class Texts(NamedTuple):
    calibration: list[Ids]
    held_out: list[Ids]
    origin: str  # for people to read


def find_texts(source: ModelSource, file: str, hub: HubConfig, kept: Path, progress: Progress) -> Texts:
    """Some texts of a file; without one, texts that the model writes. These are kept, for a conversion that goes on."""
    if file:
        return split(read_tokens(source, read_texts(Path(file))), f"of {Path(file).name}")
    if not kept.is_file():
        np.save(kept, write_tokens(source, hub, progress), allow_pickle=False)
    return split(list(np.load(kept, allow_pickle=False)), OWN_TEXT)


def split(texts: Sequence[Ids], origin: str) -> Texts:
    """Texts from all over the given ones, so that a file may be sorted by subjects."""
    if len(texts) < MIN_TEXTS:
        hint = f"Give at least {MIN_TEXTS} texts, or {MIN_TEXTS * TEXT_TOKENS:,} tokens."
        raise InvalidOptionError(f"[convert] calibration: there are only {len(texts)} texts {origin}.", hint=hint)
    num_tokens = np.cumsum([len(text) for text in texts])
    num_texts = min(len(texts), max(MIN_TEXTS, int(len(texts) * min(1.0, NUM_TEXTS * TEXT_TOKENS / num_tokens[-1]))))
    chosen = [texts[i] for i in np.linspace(0, len(texts) - 1, num_texts).astype(int)]
    held_out = chosen[HELD_OUT - 1 :: HELD_OUT]
    return Texts([text for i, text in enumerate(chosen, 1) if i % HELD_OUT], held_out, origin)


def read_texts(path: Path) -> list[str]:
    """The texts of a file: a .jsonl file has one in the field "text" of each line, any other file is one text."""
    if not path.is_file():
        raise ModelNotFoundError(f"[convert] calibration: {path} is not a file.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidOptionError(
            f"[convert] calibration: {path} has more than {MAX_FILE_BYTES >> 20} MiB.", hint="Cut it."
        )
    try:
        whole = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return [whole]
        found = [json.loads(line)["text"] for line in whole.splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        expected = 'plain text in UTF-8, or a .jsonl file whose lines are objects with a "text"'
        raise CorruptFileError(f"[convert] calibration: {path} is not {expected}: {error!r}.") from error
    return [str(text) for text in found]


def read_tokens(source: ModelSource, texts: Sequence[str]) -> list[Ids]:
    """Tokens of texts: for an encoder one text each, or each line of a single one; else all texts cut into equal
    pieces."""
    from archerfish.text.text_tokenizer import find_text_tokenizer
    from archerfish.text.tokenizer import FastTokenizer

    config = Config(source.config)
    with TemporaryDirectory() as folder:
        source.write_tokenizer(Path(folder) / TOKENIZER_NAME)
        if is_encoder(config):
            length = min(TEXT_TOKENS, encoder_class(config).max_positions(config))
            lines = [line for line in (texts[0].splitlines() if len(texts) == 1 else texts) if line.strip()]
            return [text.token_ids for text in FastTokenizer(Path(folder) / TOKENIZER_NAME, length).tokenize(lines)]
        tokenizer = find_text_tokenizer(folder, source.config, source.generation_config)
        if tokenizer is None:
            hint = "Leave --calibration out: the model writes its own."
            raise InvalidOptionError(f"{source.path} has no tokenizer to read a calibration text with.", hint=hint)
        tokens = np.array([token for text in texts for token in tokenizer.encode(text)], np.int64)
    length = min(TEXT_TOKENS, model_class(config).max_positions(config))
    return list(tokens[: len(tokens) // length * length].reshape(-1, length))


def write_tokens(source: ModelSource, hub: HubConfig, progress: Progress) -> Ids:
    """Texts that the model samples from nothing: what it has learnt to write tells how its inputs are distributed."""
    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.params import SamplingParams

    config = Config(source.config)
    length = min(TEXT_TOKENS, model_class(config).max_positions(config))
    stated: Any = config.values.get("bos_token_id", config.values.get("eos_token_id"))
    first = int(stated[0] if isinstance(stated, list) else stated or 0)
    params = [SamplingParams(max_tokens=length - 1, temperature=1.0, ignore_eos=True, seed=i) for i in range(NUM_TEXTS)]
    done = 0

    def count(place: int, output: Any) -> None:
        nonlocal done
        done += 1
        progress(done, NUM_TEXTS, "writing calibration text")

    progress(0, NUM_TEXTS, "writing calibration text")
    with LLMEngine(str(source.path), hub=hub, speculation="off", max_cache_tokens=NUM_TEXTS * length) as engine:
        outputs = engine.generate([[first]] * NUM_TEXTS, params, on_result=count)
    return np.array([[first, *output.token_ids] for output in outputs], np.int64)
