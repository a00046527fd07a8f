"""How long the steps of an engine take, by measured figures, and how much KV fits beside its weights."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

BLOCK_TOKENS = 256  # as on a GPU
KV_MEMORY_SHARE = 0.9  # of a GPU, for weights and KV (`gpu_memory_utilization`)


@dataclass(frozen=True)
class Pace:
    """An engine. A step takes step_s, and prompt_token_s, output_token_s and context_token_s for every prompt token,
    decode, and token of the context of decodes.

    Attention of prompts is part of prompt_token_s, which is measured with prompts of about 2,000 tokens.
    """

    step_s: float
    prompt_token_s: float
    output_token_s: float
    context_token_s: float
    kv_tokens: int  # that fit into memory
    start_s: float  # of an engine process
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 16384
    max_model_len: int = 131_072

    def decode_s(self, num_sequences: int, context: int, num_steps: int = 1) -> float:
        """So many steps in a row, each of which brings a token to each sequence. context: of all, at the first step."""
        per_step = self.step_s + num_sequences * self.output_token_s + context * self.context_token_s
        return num_steps * per_step + self.context_token_s * num_sequences * num_steps * (num_steps - 1) / 2

    def request_s(self, num_prompt: float, num_output: float, hit_rate: float = 0.0) -> float:
        """An engine's time for one request, beside what every step takes: its prompt and each of its output tokens."""
        context = num_prompt + num_output / 2
        output_token_s = self.output_token_s + context * self.context_token_s
        return num_prompt * (1 - hit_rate) * self.prompt_token_s + num_output * output_token_s

    def mean_running(self, rate: float, num_prompt: float, num_output: float, hit_rate: float = 0.0) -> float:
        """How many requests run at once at so many a second: Little's law, solved for the number; infinite above
        capacity."""
        idle = 1 - rate * self.request_s(num_prompt, num_output, hit_rate)
        return rate * num_output * self.step_s / idle if idle > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Decodes:
    """Steps in which sequences get a token each and nothing else happens."""

    pace: Pace
    began_s: float
    num_sequences: int
    context: int
    num_steps: int

    def end_s(self, num_steps: int) -> float:
        return self.began_s + self.pace.decode_s(self.num_sequences, self.context, num_steps)

    def num_done(self, now: float) -> int:
        """Steps that have ended."""
        return bisect_right(range(self.num_steps + 1), now, key=self.end_s) - 1

    def num_begun(self, now: float) -> int:
        """Steps that have ended or run; at least one."""
        return max(1, bisect_left(range(self.num_steps + 1), now, key=self.end_s))


def kv_bytes(num_tokens: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int = 2) -> int:
    """Memory of the keys and values of so many tokens."""
    return num_tokens * num_layers * num_kv_heads * head_dim * 2 * dtype_bytes


def num_kv_tokens(memory_bytes: float, weight_bytes: float, token_bytes: int) -> int:
    """Tokens whose KV fits into a GPU beside the weights."""
    return int((memory_bytes * KV_MEMORY_SHARE - weight_bytes) / token_bytes)


# One H200 has 141 GB. docs/performance.md: "one request", "64 prompts of 2,048" and "128 sequences" give the first
# three: a step of one sequence, the time of a prompt token, and what each of 128 sequences adds to a step. A token of
# context is its KV, read at 92 % of 4.26 TB/s. start_s: the second start. The CPU: SmolLM2-135M, 1 and 32 sequences, on
# two Neoverse cores.
KV_READ_S = 1 / (0.92 * 4.26e12)  # a byte
LLAMA_8B = kv_bytes(1, 32, 8, 128)
QWEN_600M = kv_bytes(1, 28, 8, 128)
SMOLLM2 = kv_bytes(1, 30, 3, 64)
PRESETS = {
    "h200-8b": Pace(3.90e-3, 22.5e-6, 13.0e-6, LLAMA_8B * KV_READ_S, num_kv_tokens(141e9, 16.1e9, LLAMA_8B), 9.2),
    "h200-0.6b": Pace(0.61e-3, 2.34e-6, 6.9e-6, QWEN_600M * KV_READ_S, num_kv_tokens(141e9, 1.5e9, QWEN_600M), 7.2),
    "cpu-135m": Pace(4.6e-3, 2.3e-3, 2.85e-3, SMOLLM2 / 20e9, int(4 * 2**30 / SMOLLM2), 0.5, 32, 512, 8192),
}
