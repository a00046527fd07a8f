"""`archerfish generate`: texts or JSON lines for prompts; `archerfish tts`: TTS tokens for texts, one JSON object per
line.

A single answer to a prompt is shown while it is generated, several answers when each is finished.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.cli import options
from archerfish.cli.options import Parser, add_options, add_sampling_flags, read_sampling_flags, section
from archerfish.cli.output import Output, printable, seconds, styled
from archerfish.cli.texts import gather_entries, gather_texts, read_entries
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.progress import shorten
from archerfish.engine.tts import PROPERTIES, TTSRequest
from archerfish.errors import InvalidInputError

if TYPE_CHECKING:
    from archerfish.engine.adapters import LoRARequest
    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.engine.outputs import RequestOutput
    from archerfish.params import SamplingParams

DEFAULTS: dict[str, Any] = {"max_tokens": 128}


def add_generate_arguments(parser: Parser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompts; without any, standard input is one prompt"
    )
    text = 'file with a prompt per line, or .jsonl with "prompt"; - is standard input'
    parser.add_argument("--input", default="", metavar="FILE", help=text)
    add_adapter_flag(parser)
    add_sampling_flags(parser, **DEFAULTS)
    add_options(parser, EngineConfig, HubConfig)


def add_adapter_flag(parser: Parser) -> None:
    text = "directory of a LoRA adapter that changes the model, or the name of one of --lora-modules"
    parser.add_argument("--adapter", default="", metavar="ADAPTER", help=text)


def run_generate(arguments: Namespace, out: Output) -> int:
    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    params = read_sampling_flags(arguments, **DEFAULTS)
    prompts = gather_prompts(arguments.prompts, arguments.input)
    if (params.logprobs is not None or params.prompt_logprobs is not None) and not out.as_json:
        out.note("Log-probabilities are only in the JSON output: add --json.")
    with open_engine(config, hub, out, arguments.adapter) as engine:
        params = read_sampling_flags(arguments, **{**DEFAULTS, **engine.facts.default_sampling})
        adapter = find_adapter(arguments.adapter, config)
        started = time.perf_counter()
        if len(prompts) == 1 and params.n == 1 and not out.as_json:
            outputs = stream_one(engine, prompts[0], params, out, adapter)
        else:
            outputs = generate_all(engine, prompts, params, out, adapter)
        elapsed_s = time.perf_counter() - started
    num_tokens = sum(len(output.token_ids) for request in outputs for output in request.outputs)
    num_prompt = sum(len(request.prompt_token_ids) for request in outputs)
    num_cached = sum(request.num_cached_tokens for request in outputs)
    cached = f", {num_cached:,} of them cached" if num_cached else ""
    out.note(
        f"{engine.model_name}: {num_prompt:,} prompt tokens{cached}, {num_tokens:,} tokens in {seconds(elapsed_s)}, "
        f"{num_tokens / max(elapsed_s, 1e-9):,.1f} tokens/s"
    )
    failed = [output for request in outputs for output in request.outputs if output.finish_reason == "error"]
    for output in failed:
        out.note(f"Failed: {output.error}")
    return 1 if failed else 0


def open_engine(config: EngineConfig, hub: HubConfig, out: Output, adapter: str = "") -> LLMEngine:
    """adapter: of --adapter."""
    from archerfish.engine.llm_engine import LLMEngine

    if adapter:
        config = config.replace(enable_lora=True)
    elif config.lora_modules:
        out.note("Adapters are loaded, but none is used: add --adapter NAME.")
    with out.progress(f"Loading {config.model}") as progress, ExitStack() as stack:
        engine = stack.enter_context(LLMEngine(config, hub=hub, progress=progress))
        if adapter and engine.adapters is not None:  # a wrong one is an error now, not with the first answer
            engine.adapters.for_request(find_adapter(adapter, config))
        stack.pop_all()
        return engine


def find_adapter(adapter: str, config: EngineConfig) -> LoRARequest | str | None:
    """What a request takes for the value of --adapter: a name of --lora-modules before a path."""
    from archerfish.engine.adapters import LoRARequest

    path = Path(adapter).expanduser()
    if not adapter or adapter in config.lora_paths or not (path.exists() or os.sep in adapter):
        return adapter or None
    return LoRARequest(path.resolve().name or "adapter", lora_path=str(path))


def gather_prompts(given: list[str], input_file: str) -> list[str]:
    """Prompts of the command line, then of the file. Without both, standard input is one prompt."""
    if not given and not input_file and not sys.stdin.isatty():
        text = sys.stdin.read().rstrip("\r\n")
        if not text:
            raise InvalidInputError("Standard input is empty.", hint="Give prompts as arguments or with --input FILE.")
        return [text]
    found = gather_texts(given, input_file, fields=("prompt", "text"))
    prompts = found[: len(given)] + [prompt for prompt in found[len(given) :] if prompt]
    if not prompts:
        raise InvalidInputError(f"There is no prompt in {input_file}.")
    return prompts


def stream_one(
    engine: LLMEngine, prompt: str, params: SamplingParams, out: Output, adapter: Any
) -> list[RequestOutput]:
    """Show one answer while it is generated. After ctrl-c its text so far is complete on the screen."""
    result: list[RequestOutput] = []
    is_begun = False
    try:
        for delta in engine.stream(prompt, params, lora_request=adapter):
            is_begun = True
            sys.stdout.write(printable(delta.text) if out.is_rich else delta.text)
            sys.stdout.flush()
            if delta.output is not None:
                result.append(delta.output)
    finally:
        sys.stdout.write("\n" if is_begun else "")
    return result


def generate_all(
    engine: LLMEngine, prompts: list[str], params: SamplingParams, out: Output, adapter: Any
) -> list[RequestOutput]:
    """Write several answers. After ctrl-c or an error, those that are finished are still written."""
    writer = Writer(out, len(prompts))
    try:
        return engine.generate(
            prompts, params, show_progress=out.shows_progress, on_result=writer.add, lora_request=adapter
        )
    finally:
        for place in sorted(writer.waiting):  # also when an earlier prompt has no result
            writer.write(place)
        if writer.num_written < len(prompts):
            out.note(f"{writer.num_written:,} of {len(prompts):,} prompts are finished.")


class Writer:
    """Writes results in the order of their prompts. With a progress bar on the terminal, they wait until all are
    there."""

    def __init__(self, out: Output, num_prompts: int) -> None:
        self.out, self.num_prompts = out, num_prompts
        self.num_written = 0
        self.waiting: dict[int, RequestOutput] = {}

    def add(self, place: int, request: RequestOutput) -> None:
        self.waiting[place] = request
        while not self.out.is_rich and self.num_written in self.waiting:
            self.write(self.num_written)

    def write(self, place: int) -> None:
        request = self.waiting[place]
        is_rich = self.out.is_rich
        lines = list[str]()
        title = shorten(printable(request.prompt or str(request.prompt_token_ids)), width=72)
        for output in request.outputs:
            names = [f"prompt {place + 1} of {self.num_prompts}"] if self.num_prompts > 1 else []
            names += [f"answer {output.index + 1} of {len(request.outputs)}"] if len(request.outputs) > 1 else []
            if names:
                heading = f"=== {', '.join(names)}: {title} ==="
                lines += [""] if self.num_written or output.index else []
                lines.append(styled(heading, "bold") if is_rich else heading)
            lines.append(printable(output.text) if is_rich else output.text)
        if self.out.as_json:
            self.out.result(as_json(request))
        else:
            sys.stdout.write("\n".join(lines) + "\n")  # in one write, so that ctrl-c does not cut a result in half
        del self.waiting[place]
        self.num_written += 1
        sys.stdout.flush()


def as_json(request: RequestOutput) -> dict[str, Any]:
    outputs = []
    for output in request.outputs:
        names = ("text", "token_ids", "finish_reason", "stop_reason")
        shown: dict[str, Any] = {name: getattr(output, name) for name in names}
        if output.logprobs is not None:
            shown["cumulative_logprob"] = output.cumulative_logprob
            shown["logprobs"] = [dataclasses.asdict(item) for item in output.logprobs]
        if output.error is not None:
            shown["error"] = str(output.error)
        outputs.append(shown)
    found: dict[str, Any] = {
        "prompt": request.prompt,
        "outputs": outputs,
        "num_cached_tokens": request.num_cached_tokens,
    }
    found["metrics"] = dataclasses.asdict(request.metrics)
    if request.prompt_logprobs is not None:
        found["prompt_logprobs"] = [dataclasses.asdict(item) for item in request.prompt_logprobs]
    return found


# Speech

NUMBERS = {name: options.SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed")}
NUMBERS["max_tokens"] = "most semantic tokens; 50 are a second"


def add_tts_arguments(parser: Parser) -> None:
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="texts to speak; without any, the lines of standard input"
    )
    text = 'file with a text per line, or .jsonl with "text" and other fields of a request; - is standard input'
    parser.add_argument("--input", default="", metavar="FILE", help=text)
    parser.add_argument(
        "--reference", default="", metavar="FILE", help="speak with the voice of a line of this command"
    )
    group = parser.add_argument_group("voice and sampling")
    for spec in dataclasses.fields(TTSRequest):
        if spec.name in PROPERTIES:
            text = f"one of {', '.join(PROPERTIES[spec.name])} (default: {spec.default})"
            options.add_flag(group, f"tts.{spec.name}", spec.default, help=text, metavar="NAME")
        elif spec.name in NUMBERS:
            metavar, kind = ("X", float) if spec.name in ("temperature", "top_p") else ("N", int)
            options.add_flag(
                group, f"tts.{spec.name}", spec.default, help=NUMBERS[spec.name], metavar=metavar, type=kind
            )
    add_options(parser, EngineConfig, HubConfig)


def run_tts(arguments: Namespace, out: Output) -> int:
    from archerfish.engine.rwkv_sampler import RwkvSampler

    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    voice = options.values_of("tts.", arguments)
    if arguments.reference:
        voice |= read_voice(Path(arguments.reference))
    TTSRequest(text="any", **voice)  # raises the errors that all requests would have, before the model is loaded
    requests: list[dict[str, Any]] = []
    for place, entry in gather_entries(arguments.texts, arguments.input):
        if not isinstance(entry, str | dict):
            raise InvalidInputError(f"{place} is not a JSON object.")
        requests.append(voice | ({"text": entry} if isinstance(entry, str) else entry))
    with open_engine(config, hub, out) as engine:
        started = time.perf_counter()
        found = RwkvSampler(engine).generate_tts_tokens_batch(requests)
        elapsed_s = time.perf_counter() - started
    for request, tokens in zip(requests, found, strict=True):
        names = ("global_tokens", "semantic_tokens", "finish_reason", "seconds")
        shown = {"text": request.get("text"), **{name: getattr(tokens, name) for name in names}}
        if tokens.error is not None:
            out.note(f"Failed: {tokens.error}")
            shown["error"] = str(tokens.error)
        out.result(shown)
    spoken_s = sum(tokens.seconds for tokens in found)
    out.note(f"{config.model}: {seconds(spoken_s)} of audio in {seconds(elapsed_s)}")
    return 1 if any(tokens.error is not None for tokens in found) else 0


def read_voice(path: Path) -> dict[str, Any]:
    """The voice in the first line of a file."""
    try:
        _, line = next(read_entries(path))
        entry = json.loads(line) if isinstance(line, str) else line
        return {"ref_global_tokens": entry["global_tokens"], "ref_semantic_tokens": entry["semantic_tokens"]}
    except (StopIteration, json.JSONDecodeError, TypeError, KeyError):
        hint = "`archerfish tts` writes such lines."
        raise InvalidInputError(
            f"{path} does not begin with global_tokens and semantic_tokens in JSON.", hint=hint
        ) from None
