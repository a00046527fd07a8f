"""The engines that benches compare, each with the same few methods, and the process that runs one of them for `worker`.

Nothing but the standard library is imported before `start` is called, because imports are one of the things measured.
Of archerfish only the public surface is used, so that another version can be measured beside this one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

WARMUP_CALLS = 10
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """The seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def memory_bytes(key: str) -> int:
    """VmRSS (resident memory) or VmHWM (its peak) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Engine:
    """What every engine has: a timed start. modules: its package, and what else of it the first call needs."""

    modules: tuple[str, ...] = ()

    def imports(self) -> str:
        """Import the modules; returns the version of the package."""
        self.package: Any
        self.package, *_ = map(importlib.import_module, self.modules)
        return str(self.package.__version__)

    def load(self) -> None:
        raise NotImplementedError

    def start(self) -> dict[str, Any]:
        """Import and load, each timed."""
        import_s, version = timed(self.imports)
        load_s, _ = timed(self.load)
        return {"version": version, "import_s": import_s, "load_s": load_s, "rss_bytes": memory_bytes("VmRSS")}


# Text generation


class TextEngine(Engine):
    """An engine that continues prompts of token ids; outputs have exactly the length that is asked for."""

    def run(self, prompts: list[list[int]], outputs: list[int], temperature: float, **others: Any) -> list[int]:
        """Continue all prompts; returns how many tokens each gave. others: sampling parameters."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], outputs: list[int], temperature: float = 0.0, **others: Any) -> float:
        """The seconds that the prompts take together."""
        seconds, counts = timed(lambda: self.run(prompts, outputs, temperature, **others))
        if counts != outputs:
            raise RuntimeError(f"{sum(outputs)} tokens were asked for, {sum(counts)} came")
        return seconds


class Archerfish(TextEngine):
    """LLMEngine."""

    modules = ("archerfish", "archerfish.engine.llm_engine")

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def load(self) -> None:
        from archerfish import EngineConfig, LLMEngine

        self.engine = LLMEngine(EngineConfig(**self.options))

    def params(self, num_output: int, temperature: float = 0.0, *, detokenize: bool = False, **others: Any) -> Any:
        """As of the peers, token ids come back, and no text is made of them."""
        from archerfish import SamplingParams

        return SamplingParams(
            max_tokens=num_output, temperature=temperature, ignore_eos=True, detokenize=detokenize, **others
        )

    def run(self, prompts: list[list[int]], outputs: list[int], temperature: float, **others: Any) -> list[int]:
        params = [self.params(count, temperature, **others) for count in outputs]
        self.outputs = self.engine.generate(prompts, params)
        for error in (each.error for output in self.outputs for each in output.outputs if each.error):
            raise error
        return [len(output.token_ids) for output in self.outputs]

    def token_times(self, prompt: list[int], num_output: int, *, clear: bool = True) -> list[float]:
        """Seconds from the request to each token."""
        if clear:
            self.engine.clear_cache()
        began = time.perf_counter()
        deltas = self.engine.stream(prompt, self.params(num_output))
        return [time.perf_counter() - began for delta in deltas if delta.token_ids]

    def first_text_s(self, content: str) -> float:
        """Seconds from a chat request to its first text."""
        began = time.perf_counter()
        parts = self.engine.stream_chat([{"role": "user", "content": content}], self.params(4, detokenize=True))
        times = [time.perf_counter() - began for part in parts if part.text]
        return times[0]

    def answer(self, content: str, num_output: int, *, speculate: bool) -> dict[str, float]:
        """How an answer to a chat went, after its first token."""
        self.engine.clear_cache()
        params = self.params(num_output, detokenize=True, speculate=speculate)
        metrics = self.engine.chat([{"role": "user", "content": content}], params).metrics
        rate = (metrics.num_output_tokens - 1) / (metrics.decode_ms / 1000)
        return {"rate": rate, "proposed": metrics.num_draft_tokens, "accepted": metrics.num_accepted_tokens}

    def clear_cache(self) -> None:
        self.engine.clear_cache()

    def last_outputs(self) -> dict[str, Any]:
        """The token ids of the last `generate`, and how many prompt tokens of each request came from the cache."""
        return {
            "token_ids": [list(output.token_ids) for output in self.outputs],
            "num_cached": [output.num_cached_tokens for output in self.outputs],
        }

    def facts(self) -> dict[str, Any]:
        """What benches need to know of the model and of the engine's memory."""
        facts = self.engine.facts
        return {
            "directory": str(facts.directory),
            "dtype": facts.dtype,
            "device": facts.device,
            "config": dict(facts.config.values),
            "vocab_size": facts.vocab_size,
            "has_states": facts.has_states,
            "weight_bytes": facts.weight_bytes,
            "block_bytes": facts.memory.block_bytes,
            "num_passes": self.engine.runner.num_forward_passes,
            "kv_utilization": self.engine.scheduler.stats().kv_utilization,
        }

    def speech(self, text: str, num_streams: int, num_tokens: int, seed: int) -> list[float]:
        """Seconds that so many streams of speech take at once, and the seconds of audio that they give."""
        from archerfish import RwkvSampler, TTSRequest

        sampler = RwkvSampler(self.engine)
        requests = [
            TTSRequest(text=text, seed=1000 * seed + place, max_tokens=num_tokens) for place in range(num_streams)
        ]
        seconds, found = timed(lambda: sampler.generate_tts_tokens_batch(requests))
        for tokens in found:
            if tokens.error is not None:
                raise tokens.error
        return [seconds, sum(tokens.seconds for tokens in found)]

    def copy_rate(self, num_bytes: int) -> float:
        """Bytes a second that a copy on the engine's device reads and writes: the limit of a step that reads all
        weights."""
        import torch

        device = self.engine.facts.device
        source = torch.ones(num_bytes // 4, device=device)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)
            if device == "cuda":
                torch.cuda.synchronize()

        copy()
        return 2 * num_bytes / min(timed(copy)[0] for _ in range(5))


class Transformers(TextEngine):
    """transformers' own model and generate(), with our converted weights in our type."""

    modules = ("transformers",)

    def __init__(self, directory: str, dtype: str, config: dict[str, Any], num_threads: int) -> None:
        self.directory = directory
        self.dtype = dtype
        self.config = config
        self.num_threads = num_threads

    def load(self) -> None:
        import torch

        from archerfish import WeightLoader

        if self.num_threads:
            torch.set_num_threads(self.num_threads)
        values = dict(self.config)
        dtype = getattr(torch, self.dtype)
        config = self.package.AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model = self.package.AutoModelForCausalLM.from_config(config, dtype=dtype)
        weights = {
            name: tensor.clone().to(dtype) for name, tensor in WeightLoader(self.directory).load_weights().items()
        }
        model.to_empty(device="cpu")
        missing, _ = model.load_state_dict(weights, strict=False)
        assert all("lm_head" in name for name in missing), missing
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # to_empty leaves this buffer unset
        self.model = model.eval()

    def run(self, prompts: list[list[int]], outputs: list[int], temperature: float, **others: Any) -> list[int]:
        """One left-padded batch that runs as long as its longest output."""
        import torch

        width = max(map(len, prompts))
        ids, mask = (torch.zeros((len(prompts), width), dtype=torch.int64) for _ in range(2))
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._generate(ids, max(outputs), attention_mask=mask)
        return outputs

    def token_times(self, prompt: list[int], num_output: int) -> list[float]:
        import torch

        times: list[float] = []
        began = time.perf_counter()
        clock = SimpleNamespace(put=lambda value: times.append(time.perf_counter() - began), end=lambda: None)
        mask = torch.ones((1, len(prompt)), dtype=torch.int64)
        self._generate(torch.tensor([prompt]), num_output, attention_mask=mask, streamer=clock)
        return times[1:]  # the first call of put() brings the prompt

    def _generate(self, ids: Any, num_output: int, **options: Any) -> None:
        import torch

        limits = {"max_new_tokens": num_output, "min_new_tokens": num_output, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            self.model.generate(ids, do_sample=False, **limits, **options)


class LlamaCpp(TextEngine):
    """llama.cpp through the package llama-cpp-python."""

    modules = ("llama_cpp",)
    batch_tokens, sequence_tokens = 2048, 1024  # the most of one step and of one sequence

    def __init__(self, model_path: str, num_threads: int) -> None:
        self.model_path, self.num_threads = model_path, num_threads
        self.contexts: dict[int, Any] = {}

    def load(self) -> None:
        threads = self.num_threads or os.cpu_count()
        self.model = self.package.Llama(
            self.model_path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def token_times(self, prompt: list[int], num_output: int) -> list[float]:
        """Seconds to each token through the Python interface, which has one sequence at a time."""
        self.model.reset()
        began = time.perf_counter()
        tokens = self.model.generate(prompt, temp=0.0, reset=False)
        return [time.perf_counter() - began for _, _ in zip(range(num_output), tokens, strict=False)]

    def run(self, prompts: list[list[int]], outputs: list[int], temperature: float, **others: Any) -> list[int]:
        """All prompts at once through the C interface, always greedy."""
        api, number = self.package, len(prompts)
        if number not in self.contexts:
            params = api.llama_context_default_params()
            params.n_seq_max = number
            params.n_ctx = number * self.sequence_tokens
            params.n_batch = self.batch_tokens
            params.n_threads = params.n_threads_batch = self.num_threads or os.cpu_count()
            context = api.llama_init_from_model(self.model.model, params)
            self.contexts[number] = context, api.llama_batch_init(self.batch_tokens, 0, 1)
        api.llama_memory_clear(api.llama_get_memory(self.contexts[number][0]), False)
        sequences, num_done = [list(prompt) for prompt in prompts], [0] * number
        while going := [
            place for place in range(number) if len(sequences[place]) < len(prompts[place]) + outputs[place]
        ]:
            work = [(place, num_done[place], sequences[place][num_done[place] :]) for place in going]
            for place, token in self._step(number, work).items():
                num_done[place] = len(sequences[place])
                sequences[place].append(token)
        return [len(tokens) - len(prompt) for tokens, prompt in zip(sequences, prompts, strict=True)]

    def _step(self, number: int, work: list[tuple[int, int, list[int]]]) -> dict[int, int]:
        """Decode (sequence, position, tokens) together; gives the likeliest next token of each sequence."""
        import numpy as np

        (context, batch) = self.contexts[number]
        last = {}
        size = 0
        if sum(len(tokens) for _, _, tokens in work) > self.batch_tokens:
            raise ValueError(f"one step takes at most {self.batch_tokens} tokens")
        for sequence, start, tokens in work:
            for position, token in enumerate(tokens, start):
                batch.token[size] = token
                batch.pos[size] = position
                batch.n_seq_id[size] = 1
                batch.seq_id[size][0], batch.logits[size] = sequence, position == start + len(tokens) - 1
                last[sequence], size = size, size + 1
        batch.n_tokens = size
        if status := self.package.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        vocab, logits = (self.model.n_vocab(),), self.package.llama_get_logits_ith
        return {
            sequence: int(np.ctypeslib.as_array(logits(context, row), vocab).argmax()) for sequence, row in last.items()
        }


class Vllm(TextEngine):
    """vLLM's own LLM class."""

    modules = ("vllm",)

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def load(self) -> None:
        self.engine = self.package.LLM(**self.options)

    def run(
        self,
        prompts: list[list[int]],
        outputs: list[int],
        temperature: float,
        adapters: Sequence[str] = (),
        **others: Any,
    ) -> list[int]:
        """adapters: directories with LoRA adapters, which the prompts take in turns."""
        make = partial(
            self.package.SamplingParams, temperature=temperature, ignore_eos=True, detokenize=False, **others
        )
        params = [make(max_tokens=count) for count in outputs]
        loras = None
        if adapters:
            lora = importlib.import_module("vllm.lora.request").LoRARequest
            known = [lora(folder, number, folder) for number, folder in enumerate(adapters, 1)]
            loras = [known[i % len(known)] for i in range(len(prompts))]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self.engine.generate(inputs, params, use_tqdm=False, lora_request=loras)
        return [len(output.outputs[0].token_ids) for output in found]


class RwkvPackage(Engine):
    """The package rwkv with random weights of a configuration, one stream."""

    def __init__(self, config: dict[str, Any], strategy: str, directory: str) -> None:
        self.config = config
        self.strategy = strategy
        self.path = Path(directory) / "random.pth"

    def imports(self) -> str:
        os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
        self.package = importlib.import_module("rwkv.model")
        return importlib.metadata.version("rwkv")

    def load(self) -> None:
        self.write_checkpoint()
        self.model = self.package.RWKV(model=str(self.path.with_suffix("")), strategy=self.strategy)
        self.state = self.model.forward([1, 2, 3], None)[1]

    def decode(self, num_tokens: int) -> float:
        """The seconds that so many tokens of one stream take."""
        began = time.perf_counter()
        for token in range(1, num_tokens + 1):
            logits, self.state = self.model.forward([token], self.state)
            float(logits[0])  # waits for the device
        return time.perf_counter() - began

    def write_checkpoint(self) -> None:
        """Random weights under the names that BlinkDL's checkpoints have."""
        import torch

        config, width = self.config, self.config["hidden_size"]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("emb.weight", "head.weight"), (config["vocab_size"], width))
        norms = ["ln_out", "blocks.0.ln0"]
        for layer in range(config["num_hidden_layers"]):
            block, attention = f"blocks.{layer}", f"blocks.{layer}.att"
            norms += [f"{block}.ln1", f"{block}.ln2", f"{attention}.ln_x"]
            for letter, name in zip("wavg", ("decay", "a", "v", "gate"), strict=True):
                rank = config[f"{name}_low_rank_dim"]
                shapes |= {f"{attention}.{letter}1": (width, rank), f"{attention}.{letter}2": (rank, width)}
            vectors = (*(f"x_{mix}" for mix in "rwkvag"), "w0", "a0", "v0", "k_k", "k_a")
            shapes |= {f"{attention}.{name}": (1, 1, width) for name in vectors}
            shapes |= {
                f"{attention}.{name}.weight": (width, width) for name in ("receptance", "key", "value", "output")
            }
            shapes |= {f"{attention}.r_k": (width // 64, 64), f"{block}.ffn.x_k": (1, 1, width)}
            shapes |= {f"{block}.ffn.key.weight": (4 * width, width), f"{block}.ffn.value.weight": (width, 4 * width)}
        tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
        for name in norms:
            tensors |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}
        torch.save({name: tensor.bfloat16() for name, tensor in tensors.items()}, self.path)


# Embeddings


class EmbeddingEngine(Engine):
    """An engine that turns texts into vectors. `batch_sizes`: the first is its default."""

    batch_sizes: tuple[int, ...] = (32,)

    def __init__(self, source: str, cache_dir: str, options: dict[str, Any]) -> None:
        """options: those of [embed]; peers take the device and the number of threads."""
        self.source = source
        self.cache_dir = cache_dir
        self.options = options

    def encode(self, texts: list[str], batch_size: int) -> Any:
        """An array with one vector for each text."""
        raise NotImplementedError

    def start(self) -> dict[str, Any]:
        started = super().start()
        first_s, _ = timed(lambda: self.encode(["Hello."], self.batch_sizes[0]))
        return {**started, "first_s": first_s}

    def best_batch_size(self, texts: list[str]) -> int:
        """The one of its batch sizes with which it is the fastest."""
        sizes = self.batch_sizes
        return max(sizes, key=lambda size: self.throughput(texts, size, 0)) if len(sizes) > 1 else sizes[0]

    def throughput(self, texts: list[str], batch_size: int, min_seconds: float) -> float:
        """Texts a second. The same texts are encoded again until enough time has passed."""
        began = time.perf_counter()
        num_done = 0
        elapsed = 0.0
        while not num_done or elapsed < min_seconds:
            self.encode(texts, batch_size)
            num_done += len(texts)
            elapsed = time.perf_counter() - began
        return num_done / elapsed

    def latencies(self, text: str, calls: int) -> list[float]:
        times = [timed(lambda: self.encode([text], self.batch_sizes[0]))[0] for _ in range(WARMUP_CALLS + calls)]
        return times[WARMUP_CALLS:]

    def vectors(self, texts: list[str]) -> list[list[float]]:
        found: list[list[float]] = self.encode(texts, self.batch_sizes[0]).tolist()
        return found

    def documents(self, count: int, batch_size: int) -> list[float]:
        """Seconds for many short texts in one call, and by how many bytes the resident memory grew at most."""
        texts = [f"Document {number}" for number in range(1, count + 1)]
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(
                "5", encoding="ascii"
            )  # VmHWM starts again from what is resident now
        before = memory_bytes("VmRSS")
        seconds, _ = timed(lambda: self.encode(texts, batch_size))
        return [seconds, max(0, memory_bytes("VmHWM") - before)]

    def rss_bytes(self) -> int:
        return memory_bytes("VmRSS")


class ArcherfishEmbeddings(EmbeddingEngine):
    """ArrowEngine, with the options of the command line."""

    modules: tuple[str, ...] = (
        "archerfish",
        "torch",
        "tokenizers",
        "archerfish.engine.arrow_engine",
        "archerfish.store.loader",
    )

    def load(self) -> None:
        from archerfish import ArrowEngine, EmbedConfig, HubConfig

        config = EmbedConfig(**{**self.options, "model": self.source})
        self.engine = ArrowEngine(config, hub=HubConfig(cache_dir=self.cache_dir))

    def encode(self, texts: list[str], batch_size: int) -> Any:
        return self.engine.encode(texts, batch_size)


class ArcherfishVectors(ArcherfishEmbeddings):
    """ArrowEngine, of which only what its backend needs is imported."""

    modules = ("archerfish",)


class SentenceTransformers(EmbeddingEngine):
    """sentence-transformers."""

    modules = ("sentence_transformers",)
    batch_sizes = (32, 64, 128)

    def __init__(self, *, dtype: str = "float32", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dtype = dtype

    def load(self) -> None:
        import torch

        if self.options["num_threads"]:
            torch.set_num_threads(self.options["num_threads"])
        given = {"dtype": getattr(torch, self.dtype)}
        self.model = self.package.SentenceTransformer(self.source, device=self.options["device"], model_kwargs=given)

    def encode(self, texts: list[str], batch_size: int) -> Any:
        import numpy as np

        return np.asarray(self.model.encode(texts, batch_size=batch_size, show_progress_bar=False), np.float32)


# The process


def answer(engine: Any, line: str) -> dict[str, Any]:
    """The answer to one request. An error of the engine becomes {"error": ...} with the place that raised it."""
    request = json.loads(line)
    try:
        return {"result": getattr(engine, request["method"])(**request["arguments"])}
    except Exception as error:  # a peer may raise anything
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "error": f"{type(error).__name__}: {str(error).strip()[:500]} ({Path(last.filename).name}:{last.lineno})"
        }


def main(engines: Mapping[str, Any]) -> None:
    """Answer calls of the methods of one engine: its name and its arguments in JSON are those of the command."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not disturb the answers
    engine = engines[sys.argv[1]](**json.loads(sys.argv[2]))
    for line in sys.stdin:
        answers.write(json.dumps(answer(engine, line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(globals())
