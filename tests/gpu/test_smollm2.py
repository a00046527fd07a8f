"""SmolLM2-135M on the card: what it finds likeliest after given tokens, against float32 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from archerfish import LLMEngine, SamplingParams
from archerfish.config import HubConfig
from archerfish.kernels.torch.reference import TorchOps
from archerfish.store.converter import ensure_converted
from archerfish.store.loader import WeightLoader
from archerfish.store.names import BUILTIN_MODELS, resolve_model
from archerfish.text.text_tokenizer import TextTokenizer
from tests.gpu.given_tokens import DEVICE, DTYPE, GivenTokens, needs_card, rms
from tests.models.test_smollm2 import PROMPTS

MODEL = "smollm2-135m-instruct"
has_model = BUILTIN_MODELS[MODEL].find(HubConfig()) is not None
pytestmark = [needs_card, pytest.mark.skipif(not has_model, reason=f"{MODEL} is not in the cache")]
Tensor = torch.Tensor
NUM_NEW = 64
LEAST_AGREEMENT = 0.99
NEAR_TIE = 6.0  # times PyTorch's error: a difference of two logits, each of which may be off by a few times as much
ERROR = 0.14  # of PyTorch's logits in bfloat16 on a CPU, whose size is 8.6


@dataclass(frozen=True)
class Reference:
    """What greedy decoding in float32 on the CPU gives."""

    tokens: list[list[int]]  # prompts and what follows them
    num_prompt: list[int]
    logits: Tensor  # (prompts, NUM_NEW, vocabulary) of the places whose next tokens are the new ones


def converted(dtype: str) -> WeightLoader:
    return WeightLoader(ensure_converted(resolve_model(MODEL, HubConfig()), dtype=dtype))


@lru_cache(maxsize=1)
def reference() -> Reference:
    from archerfish.kernels.torch.reference import TorchOps

    loader = converted("float32")
    tokenizer = TextTokenizer(loader.directory, config=loader.config, generation_config={})
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    tokens = [[*prompt, *([0] * NUM_NEW)] for prompt in prompts]
    model = GivenTokens(TorchOps(), loader.load_weights(), loader.config, tokens)
    lengths = [len(prompt) for prompt in prompts]
    model.fill([length - 1 for length in lengths])
    found: list[Tensor] = []
    for step in range(NUM_NEW):
        logits = model.compute([(i, 1) for i in range(len(tokens))])
        assert logits is not None
        found.append(logits)
        for own, length, token in zip(tokens, lengths, logits.argmax(-1).tolist(), strict=True):
            own[length + step] = token
    return Reference(tokens, lengths, torch.stack(found, dim=1))


def logits_of_passes(ops: TorchOps, dtype: str) -> Tensor:
    """The places of the reference, each sequence whole in one pass."""
    loader, known = converted(dtype), reference()
    model = GivenTokens(ops, loader.load_weights(), loader.config, known.tokens)
    parts: list[Tensor] = []
    for i, (own, length) in enumerate(zip(known.tokens, known.num_prompt, strict=True)):
        logits = model.compute([(i, len(own) - 1)])
        assert logits is not None
        parts.append(logits[length - 1 :].float().cpu())
    return torch.stack(parts)


def logits_of_decodes(ops: TorchOps) -> Tensor:
    """The places of the reference by recorded decodes of all sequences."""
    loader, known = converted(DTYPE), reference()
    model = GivenTokens(ops, loader.load_weights(), loader.config, known.tokens)
    model.fill([length - 1 for length in known.num_prompt])
    return torch.stack([model.decode(24).cpu() for _ in range(NUM_NEW)], dim=1)


def margins(expected: Tensor, chosen: Tensor) -> npt.NDArray[np.float32]:
    """How much likelier the reference's own choices are to it than others'."""
    best = expected.max(-1).values
    found: npt.NDArray[np.float32] = (best - expected.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)).numpy()
    return found


@pytest.mark.parametrize("way", ["passes", "decodes"])
def test_next_tokens_agree(way: str) -> None:
    from archerfish.kernels.triton.ops import TritonOps

    expected = reference().logits
    error = rms(logits_of_passes(TorchOps(DEVICE, DTYPE), DTYPE) - expected)
    ops = TritonOps(DEVICE, DTYPE)
    logits = logits_of_passes(ops, DTYPE) if way == "passes" else logits_of_decodes(ops)
    missed = margins(expected, logits.argmax(-1))
    agreement = float((missed == 0).mean())
    print(
        f"{way}: {agreement:.2%} of {missed.size} agree, the others at margins of {sorted(missed[missed > 0].tolist())};"
    )
    print(f"error of our logits {rms(logits - expected):.4f}, of PyTorch's {error:.4f}")
    assert agreement >= LEAST_AGREEMENT
    assert missed.max() <= NEAR_TIE * error


def test_the_engine_follows_the_reference() -> None:
    """Weights are sent up from the store, prompts go in as text, decodes are recorded: greedy text is the reference's
    until two tokens are nearly equal."""
    known = reference()
    with LLMEngine(MODEL, device=DEVICE, dtype=DTYPE, max_cache_tokens=8192, max_model_len=512) as engine:
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(PROMPTS, params)
    top = known.logits.topk(2).values
    gaps = (top[..., 0] - top[..., 1]).numpy()
    firsts: list[int] = []  # where each text leaves the reference's
    for output, own, num_prompt in zip(outputs, known.tokens, known.num_prompt, strict=True):
        pairs = zip(output.token_ids, own[num_prompt:], strict=True)
        firsts.append(next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), NUM_NEW))
    print(f"texts that leave the reference's do so at {firsts}")
    assert all(first == NUM_NEW or gaps[i, first] < NEAR_TIE * ERROR for i, first in enumerate(firsts))
    assert sum(firsts) > len(PROMPTS) * NUM_NEW / 4
