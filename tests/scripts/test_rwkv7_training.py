"""The form of RWKV-7 that is trained: red if its chunks, its gradients or its files differ from what archerfish
computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from archerfish.text.text_tokenizer import TextTokenizer
from scripts.rwkv7_training import DECAY_SCALE, Chunks, Rwkv7, Shape, invert_triangle, prepare, run_recurrence
from scripts.story_data import ANSWER, END, REQUEST, train_tokenizer
from scripts.train_rwkv7 import export
from tests.kernels.native_support import native_ops
from tests.models.recurring import RecurrentDriver, read_rwkv7

Tensor = torch.Tensor
HEAD_DIM = 4
STORIES = ["Once upon a time there was a dog that found a ball.", "The cat saw a boat."]


def random_products(rows: int, length: int, width: int) -> tuple[list[Tensor], list[Tensor]]:
    """Products and vectors of a time mix, with strong decays and keys that are alike: the hard case of a chunk."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    products = [draw(rows, length, width) for _ in range(5)]
    products[1] += 3.0
    products[2] = 0.1 * products[2] + draw(1, 1, width)
    vectors = [1.0 + 0.1 * draw(width), 1.0 + 0.1 * draw(width), draw(width)]
    return [each.requires_grad_() for each in products], [each.requires_grad_() for each in vectors]


def token_by_token(products: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """y by the formulas of archerfish/kernels/torch/wkv.py: (rows, length, heads, head_dim)."""
    rows, length, width = products[0].shape
    receptance, decay, key, value, rate = (each.view(rows, length, width // HEAD_DIM, HEAD_DIM) for each in products)
    k_k, k_a = (each.view(-1, HEAD_DIM) for each in vectors[:2])
    rate, decay = rate.sigmoid(), (DECAY_SCALE * decay.sigmoid()).exp()
    removal = torch.nn.functional.normalize(key * k_k, dim=-1)
    key = key * (1.0 + (rate - 1.0) * k_a)
    state = torch.zeros(rows, width // HEAD_DIM, HEAD_DIM, HEAD_DIM, dtype=value.dtype)
    out = []
    for t in range(length):
        removed = state @ removal[:, t].unsqueeze(-1)
        state = state * decay[:, t].unsqueeze(-2) - removed * (removal * rate)[:, t].unsqueeze(-2)
        state = state + value[:, t].unsqueeze(-1) * key[:, t].unsqueeze(-2)
        out.append((state @ receptance[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, 1)


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("chunk", [2, 12, 16])
def test_chunks_equal_token_by_token(chunk: int, num_chunks: int) -> None:
    products, vectors = random_products(2, chunk * num_chunks, 2 * HEAD_DIM)
    expected = token_by_token(products, vectors)
    fields = prepare(tuple(products), None, (vectors[0], vectors[1], vectors[2]), HEAD_DIM, chunk)
    y = run_recurrence(Chunks(*fields[:-1])).permute(0, 2, 3, 1, 4).reshape(expected.shape)
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=1e-10)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    inputs = [*products, *vectors[:2]]
    ours, theirs = (torch.autograd.grad((each * weights).sum(), inputs) for each in (y, expected))
    for own, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(own, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 16, 32])
def test_invert_triangle(size: int) -> None:
    """Its powers are as large as binomials, its inverse is -1 below the diagonal and nothing else."""
    inverse = invert_triangle(torch.ones(size, size).tril(-1))
    expected = torch.eye(size) - torch.diag(torch.ones(size - 1), -1)
    torch.testing.assert_close(inverse, expected, atol=1e-4, rtol=0.0)


def shaken_model(vocab_size: int) -> Rwkv7:
    """A model none of whose parameters is where it starts, so that each of them matters."""
    torch.manual_seed(3)
    model = Rwkv7(Shape(vocab_size, 3, 128, 192, decay_rank=8, rate_rank=6, value_rank=4, gate_rank=12, chunk=16))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    return model


def test_exported_files_give_the_same_logits_and_tokens(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(STORIES, 300)
    model = shaken_model(tokenizer.get_vocab_size())
    export(model, tokenizer, tmp_path, torch.float32, {"steps": 0})
    tokens = torch.randint(0, tokenizer.get_vocab_size(), (2, 64), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(tokens)
    config, weights = read_rwkv7(tmp_path)
    assert (config["bos_token_id"], config["eos_token_id"]) == (END, END)
    driver = RecurrentDriver(native_ops(), weights, config, tokens.tolist())
    prefill = driver.step([(0, 40)])
    decode = driver.step([(0, 1)])
    rest = driver.step([(0, 23), (1, 64)])
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat([*prefill, *decode, rest[0]]), expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rest[1], expected[1], atol=1e-4, rtol=1e-4)
    ours = TextTokenizer(tmp_path)
    for text in (*STORIES, "Über 日本 \x00\n"):
        ids = ours.encode(text)
        assert (ids[0], ours.decode(ids)) == (END, text)
    assert ours.eos_token_ids == (END,)
    assert ours.encode(f"{REQUEST}a dog{ANSWER}", add_special_tokens=False)[0] == 1
