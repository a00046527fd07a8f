"""Hostile model files: small sound models, and seeded mutations of each kind of their files.

`python -m tests.hostile.files BASES CASES` loads cases, a JSON list, in a process of its own. A line of JSON on stdout
begins a case, another one says how it ended.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from archerfish import ArrowEngine, HubConfig, LLMEngine, SamplingParams
from archerfish.config import ConversionConfig, EmbedConfig, EngineConfig
from archerfish.errors import ArcherfishError
from archerfish.models.adapter import encoder_class, model_class
from archerfish.models.config import Config
from archerfish.store.converter import ModelConverter
from archerfish.store.metadata import CHECKSUM_END, CHECKSUM_KEY
from archerfish.store.tokenizer_files import build_wordpiece
from tests.engine.tiny_llama import TINY as LLAMA
from tests.engine.tiny_rwkv import TINY as RWKV
from tests.models.adapter_files import random_adapter
from tests.store.gguf_models import make_tensors, write_gguf
from tests.store.models import BERT_CONFIG, VOCABULARY
from tests.text.tiny_tokenizers import byte_fallback

MEMORY_BYTES = 4 << 30  # address space of a child
DUMP_S = 20.0  # seconds of a case until the stacks of a hang are printed
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
BERT = {**BERT_CONFIG, "max_position_embeddings": 40}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEMPLATE = """{%- for message in messages %}{{ '<|' + message.role + '|>' }}
{% if loop.first and message.role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ message['content'] | trim }}
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
NUMBERS: list[Any] = [0, -1, 1, 7, 10**5, 10**9, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, math.nan, math.inf]
OTHERS: list[Any] = ["", "x", "10", "x" * 99_999, "\ud800", None, True, False, [], {}, [0], [1e9], ["a", 1], {"a": 1}]
ADDED_KEYS = (
    "head_dim", "sliding_window", "layer_types", "rope_scaling", "rope_parameters", "quantization_config", "id2label",
    "text_config", "num_labels", "score_token_ids", "is_causal", "bos_token_id", "pad_token_id", "partial_rotary_factor",
    "original_max_position_embeddings", "attention_bias", "max_window_layers", "n_embd", "num_experts_per_tok",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules", "normalizer", "decoder",
)  # fmt: skip
NORMALIZERS: list[Any] = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
    {"type": "Prepend", "prepend": "a" * 10_000},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 3},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
]
SPLITS: list[Any] = [
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for pattern in ("", "(x+x+)+y", "(.*)*$", "(?=", "(?<!a{1000,}){9}", "(\\p{L}|\\p{L})*!", "(?:a|ab|b?)*?\\1*\\z")
]
EXPRESSIONS = (
    "('a ' * {n})", "range({n})", "'%{n}d' % 1", "'{{:>{n}}}'.format(1)", "('a' * 1000).replace('a', 'b' * {n})", "[[1] * {n}]",
    "(messages | string * {n})", "9 ** {n}", "('a' ~ 'b' * {n})", "'x'.join(['y'] * {n})", "(['z'] * {n}) | map('string')",
    "namespace(a='q' * {n}).a", "'a'.center({n})", "dict(a=[1] * {n})", "cycler(*([1] * {n}))", "('a' * {n}).encode()",
)  # fmt: skip
FILTERS = (
    "title", "upper", "lower", "length", "list", "sort", "join('ab')", "replace('a', 'aaaaaaaa')", "indent(900)", "sum",
    "center(900)", "tojson(indent=900)", "wordwrap(1)", "urlize", "batch(2)", "slice(900)", "string", "escape", "unique",
    "forceescape", "reverse", "wordcount", "striptags", "urlencode", "xmlattr", "pprint", "groupby(0)", "first", "last",
    "truncate(9)", "format(1)",
)  # fmt: skip
LOOPS = (
    "{body}",
    "{{% for a in range(99999) %}}{body}{{% endfor %}}",
    "{{% macro m(n) %}}{body}{{{{ m(n) }}}}{{% endmacro %}}{{{{ m(1) }}}}",
    "{{% set x = namespace(a='ab') %}}{{% for a in range(99) %}}{{% set x.a = x.a ~ x.a %}}{{% endfor %}}{body}",
    "{{% set x = namespace(a=[1]) %}}{{% for a in range(99) %}}{{% set x.a = x.a + x.a %}}{{% endfor %}}{body}",
    "{{% filter upper %}}{body}{{% endfilter %}}{body}{body}",
)


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    """Random weights for a configuration."""
    read, random = Config(config), np.random.default_rng(1)
    family = encoder_class(read) if config["model_type"] == "bert" else model_class(read)
    shapes = family.noted(read).shapes
    return {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_source(where: Path, config: dict[str, Any], *, has_weights: bool = True) -> Path:
    """A model directory as it is published."""
    if config["model_type"] == "bert":
        where.mkdir()
        (where / "vocab.txt").write_text("\n".join(VOCABULARY))
    else:
        byte_fallback(where, chat_template=TEMPLATE)
        config = {**config, "vocab_size": 288}
    (where / "config.json").write_text(json.dumps(config))
    if has_weights:
        save_file(weights_of(config), where / "model.safetensors")
    return where


def make_bases(root: Path) -> None:
    """The sound models that are mutated."""
    import torch

    for name, config in {"llama": LLAMA, "bert": BERT, "torch": LLAMA}.items():
        write_source(root / name, config)
    for name, config in {"dummy": LLAMA, "rwkv": RWKV, "moe": MOE}.items():
        write_source(root / name, config, has_weights=False)
    (root / "bert" / "tokenizer.json").write_text(build_wordpiece(root / "bert"))
    ModelConverter(ConversionConfig(dtype="float32")).convert(root / "llama", root / "store")
    (root / "gguf").mkdir()
    for kind in ("qwen2", "olmoe", "bert"):
        write_gguf(root / "gguf" / f"{kind}.gguf", kind, make_tensors(kind))
    (root / "torch" / "model.safetensors").unlink()
    tensors = {name: torch.from_numpy(array) for name, array in weights_of({**LLAMA, "vocab_size": 288}).items()}
    torch.save(tensors, root / "torch" / "model.pth")
    names = [f"model.layers.{layer}.{module}" for layer in range(2) for module in ("self_attn.q_proj", "mlp.down_proj")]
    random_adapter(root / "adapter", {name: (32, 64 if "down" in name else 32) for name in names})


def hostile_value(random: Random) -> Any:
    if random.random() < 0.02:
        deep: Any = 1
        for _ in range(900):
            deep = [deep]
        return deep
    return random.choice(random.choice((NUMBERS, OTHERS)))


def change_value(document: Any, random: Random) -> None:
    """Set, delete or move one value of a JSON document, or add one of ADDED_KEYS at its top."""
    if random.random() < 0.2:
        document[random.choice(ADDED_KEYS)] = hostile_value(random)
        return
    while True:
        places = list(document) if isinstance(document, dict) else range(len(document))
        place = random.choice(places)
        inner = document[place]
        if not isinstance(inner, dict | list) or not inner or random.random() < 0.25:
            break
        document = inner
    change = random.random()
    if change < 0.15:
        del document[place]
    elif change < 0.25:
        document[place] = document[random.choice(places)]
    elif change < 0.3 and isinstance(inner, int):
        document[place] = inner + random.choice((1, -1, 16))
    else:
        document[place] = hostile_value(random)


def damage(data: bytes, random: Random) -> bytes:
    """Cut, overwrite, insert or repeat bytes, mostly near the beginning, where headers are."""
    found = bytearray(data)
    place = int(len(found) * random.random() ** random.choice((1, 4, 8)))
    change = random.randrange(6)
    if change == 0:
        return bytes(found[:place])
    if change == 1:
        for _ in range(random.choice((1, 1, 8, 64))):
            found[min(place + random.randrange(64), len(found) - 1)] = random.randrange(256)
    elif change in (2, 3):
        number = random.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 10**9, len(data)))
        size = random.choice((1, 2, 4, 8))
        found[place : place + size] = struct.pack("<Q", number)[:size]
    elif change == 4:
        found[place:place] = random.randbytes(random.choice((1, 8, 100)))
    else:
        found[place : place + random.choice((1, 8, 100))] = b""
    return bytes(found)


def change_json(path: Path, random: Random) -> None:
    """Mutate a JSON file: mostly a value, sometimes its bytes."""
    if random.random() < 0.15:
        change_bytes(path, random)
        return
    document = json.loads(path.read_text())
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        change_value(document, random)
    path.write_text(json.dumps(document))


def change_tokenizer(path: Path, random: Random) -> None:
    choice, document = random.random(), json.loads(path.read_text())
    if choice < 0.2:
        document["normalizer"] = random.choice(NORMALIZERS)
    elif choice < 0.4:
        document["pre_tokenizer"] = random.choice(SPLITS)
    path.write_text(json.dumps(document))
    if choice > 0.4:
        change_json(path, random)


def change_bytes(path: Path, random: Random) -> None:
    path.write_bytes(damage(path.read_bytes(), random))


def change_header(path: Path, random: Random) -> None:
    """Mutate a safetensors file: a value of its header, or its bytes."""
    if random.random() < 0.4:
        change_bytes(path, random)
        return
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change_value(header, random)
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[end:])


def change_gguf(path: Path, random: Random) -> None:
    """Mutate a GGUF file: a number behind one of its keys, or any bytes."""
    if random.random() < 0.4:
        change_bytes(path, random)
        return
    data = bytearray(path.read_bytes())
    place = random.choice([place for place in range(len(data) // 2) if data.startswith((b".", b"blk."), place)])
    place += next(i for i in range(2, 60) if data[place + i] < 32) + random.choice((0, 4, 8, 12))  # behind the name
    number = random.choice((0, 1, 3, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 10**9, 0x7FC00000))
    size = random.choice((4, 8))
    data[place : place + size] = struct.pack("<Q", number)[:size]
    path.write_bytes(data)


def change_store(path: Path, random: Random) -> None:
    """Mutate a converted model, mostly with right checksums. path: its metadata.json."""
    choice, metadata = random.random(), json.loads(path.read_text())
    weights = path.with_name("weights.arrow")
    if choice < 0.3:  # then the Parquet file is read
        weights.unlink()
        del metadata["files"][weights.name]
        weights = path.with_name("weights.parquet")
    if random.random() < 0.5:
        change_bytes(weights, random)
        record = {"bytes": weights.stat().st_size, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
        metadata["files"][weights.name] |= record if random.random() < 0.5 else {}
    else:
        change_value(metadata, random)
    metadata.pop("checksum", None)
    body = json.dumps(metadata).encode()[:-1]
    path.write_bytes(body + CHECKSUM_KEY + hashlib.sha256(body).hexdigest().encode() + CHECKSUM_END)
    if choice > 0.9:
        change_bytes(path, random)


def hostile_template(random: Random) -> str:
    if random.random() < 0.2:
        return damage(TEMPLATE.encode(), random).decode(errors="replace")
    found = random.choice(EXPRESSIONS).format(n=random.choice((1, 900, 10**4, 10**6, 3 * 10**7, 10**9, 10**18, -1)))
    for _ in range(random.randrange(6)):
        found = f"{found} | {random.choice(FILTERS)}"
    return random.choice(LOOPS).format(body=f"{{{{ {found} }}}}")


def change_template(path: Path, random: Random) -> None:
    path.write_text(hostile_template(random))


# The models, their file and the change of each kind.
PLANS: dict[str, tuple[tuple[str, ...], str, Callable[[Path, Random], None]]] = {
    "config": (("llama", "dummy", "bert", "rwkv", "moe"), "config.json", change_json),
    "tokenizer": (("dummy", "dummy", "bert"), "tokenizer.json", change_tokenizer),
    "gguf": (("gguf/qwen2.gguf", "gguf/olmoe.gguf", "gguf/bert.gguf"), "", change_gguf),
    "safetensors": (("llama", "bert"), "model.safetensors", change_header),
    "torch": (("torch",), "model.pth", change_bytes),
    "store": (("store",), "metadata.json", change_store),
    "adapter": (("adapter",), "adapter_model.safetensors", change_header),
    "adapter config": (("adapter",), "adapter_config.json", change_json),
    "template": (("dummy",), "chat_template.jinja", change_template),
}


def make_case(kind: str, number: int, bases: Path, where: Path) -> Path:
    """Write the files of one case into `where`, and return the model's path."""
    random = Random(f"{kind} {number}")
    models, file, change = PLANS[kind]
    base = random.choice(models)
    folder = base.partition("/")[0]
    shutil.copytree(bases / folder, where / folder)
    change(where / base / file, random)
    return where / base


def load_case(kind: str, number: int, bases: Path, where: Path) -> None:
    """Load the files of a case; if they load, generate a few tokens or embed a text."""
    if kind == "abort":  # a crash, which the parent must report
        os.abort()
    model = make_case(kind, number, bases, where)
    hub = HubConfig(cache_dir=str(where / "cache"), offline=True)
    if model.name in ("bert", "bert.gguf"):
        embedder = ArrowEngine(EmbedConfig(model=str(model), dtype="float32", num_threads=1), hub=hub)
        embedder.encode_batch(["hello world", "a" * 100])
        return
    options: dict[str, Any] = {"load_format": "dummy"} if model.name in ("dummy", "rwkv", "moe") else {}
    if model.name == "adapter":
        options, model = {"load_format": "dummy", "enable_lora": True, "lora_modules": f"one={model}"}, bases / "dummy"
    options |= {"memory_budget_gib": 0.02} if model.name == "rwkv" else {"max_cache_tokens": 256}
    config = EngineConfig(model=str(model), dtype="float32", num_threads=1, max_num_seqs=2, **options)
    with LLMEngine(config, hub=hub) as engine:
        if kind == "template":
            engine.chat([{"role": "user", "content": "hello"}], GREEDY)
        engine.generate(["the cat", "a" * 100] if engine.tokenizer else [[3, 4]], GREEDY)


def main() -> None:
    bases, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for kind, number in cases:
        lines.write(json.dumps({"begins": True}) + "\n")
        started, outcome = time.process_time(), "loaded"
        faulthandler.dump_traceback_later(DUMP_S)
        with tempfile.TemporaryDirectory() as where:
            try:
                load_case(kind, number, bases, Path(where))
            except ArcherfishError as error:
                outcome = "refused" if error.message.strip() else "an error without a message"
            except BaseException:
                outcome = traceback.format_exc()
        lines.write(json.dumps({"outcome": outcome, "seconds": time.process_time() - started}) + "\n")


if __name__ == "__main__":
    main()
