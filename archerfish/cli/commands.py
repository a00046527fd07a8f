"""The table of commands: in which module each is, what its help shows, and its parser.

A command NAME has two functions in its module: `add_NAME_arguments(parser)` and `run_NAME(arguments, out) -> exit
code`. Only the module of the given command is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from archerfish.bench.table import BENCHES
from archerfish.cli.options import Parser, add_common

DESCRIPTION = "archerfish: one small inference engine. `archerfish COMMAND --help` shows the options of a command."
EXIT_CODES = """exit codes:
  0 done              1 failed                    2 wrong arguments or input
  3 not found         4 the model's files         5 this machine: memory, device, a missing package
  6 try again later   7 slower than the baseline  130 interrupted
"""


@dataclass(frozen=True)
class Command:
    """A command, and where its code is."""

    name: str
    module: str
    group: str
    summary: str
    usage: str = ""
    examples: tuple[str, ...] = ()

    @property
    def code(self) -> ModuleType:
        return importlib.import_module(f"archerfish.cli.{self.module}")


USE = "use a model"
SERVE = "serve"
MODELS = "models and files"
MEASURE = "measure"
OTHER = "this installation"
COMMANDS = (
    Command("chat", "chat", USE, "talk to a model in the terminal", "[MESSAGE] ", (
        "archerfish chat", 'archerfish chat --system "Answer in one sentence." "What is a trout?"')),
    Command("generate", "generate", USE, "continue prompts", "[PROMPT ...] ", (
        'archerfish generate --model story-rwkv7 --temperature 0 --max-tokens 40 "Once upon a time"',
        "archerfish generate --input prompts.jsonl --json > answers.jsonl",
        """archerfish generate 'Is a trout a fish? Answer:' --grammar 'choice=["yes", "no"]'""")),
    Command("embed", "embed", USE, "turn texts into vectors", "[TEXT ...] ", (
        'archerfish embed "a kitten" "a young cat" --similarity', "archerfish embed --input texts.txt --output vectors.npy")),
    Command("tts", "generate", USE, "turn texts into tokens of speech", "[TEXT ...] ", (
        'archerfish tts "Hello." --model DIR --emotion HAPPY',)),
    Command("serve", "serve", SERVE, "serve chat, completions, embeddings and reranking over HTTP", "[MODEL ...] ", (
        "archerfish serve", "archerfish serve Qwen/Qwen3-8B all-minilm-l6-v2 --host 0.0.0.0 --api-keys-file keys.toml",
        "archerfish serve story-rwkv7 --kinds generation --replicas 2")),
    Command("keys", "serve", SERVE, "make an API key for a tenant of the service", "FILE TENANT ", (
        "archerfish keys keys.toml alice --tokens-per-minute 100000",)),
    Command("top", "top", SERVE, "watch a running server", "[URL] ", (
        "archerfish top", "archerfish top http://gpu-1:8000 --once --json")),
    Command("deploy ray", "deploy", SERVE, "serve on a Ray cluster, or on a Ray of this machine", "[CONFIG] ", (
        "archerfish deploy ray service.toml",)),
    Command("pull", "models", MODELS, "download models, or list those on this machine", "[MODEL ...] ", (
        "archerfish pull smollm2-135m-instruct", "archerfish pull Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf")),
    Command("list", "models", MODELS, "list the models on this machine: sizes, last use"),
    Command("rm", "models", MODELS, "delete models from the cache", "MODEL ... ", ("archerfish rm smollm2-135m-instruct",)),
    Command("convert", "models", MODELS, "convert a model into a directory of the Arrow store", "SOURCE OUTPUT_DIR ", (
        "archerfish convert all-minilm-l6-v2 minilm-arrow", "archerfish convert story-rwkv7 story-int8 --weights int8",
        "archerfish convert Qwen/Qwen3-0.6B merged --merge my-lora --dtype bfloat16")),
    Command("simulate", "simulate", MEASURE, "compare routing policies over many replicas in virtual time", "", (
        "archerfish simulate --replicas 8 --rate 100 --seconds 10",)),
    *(Command(f"bench {bench.name}", "bench", MEASURE, bench.summary, bench.usage) for bench in BENCHES),
    Command("doctor", "doctor", OTHER, "report what this machine has, which fast paths are on, and which models fit",
            "[MODEL] ", ("archerfish doctor", "archerfish doctor story-rwkv7 --json")),
    Command("completion", "completion", OTHER, "print what a shell needs to complete command lines", "SHELL ", (
        "archerfish completion bash > ~/.local/share/bash-completion/completions/archerfish",
        "archerfish completion zsh > ~/.zfunc/_archerfish    # with fpath+=~/.zfunc before compinit in ~/.zshrc",
        "archerfish completion fish > ~/.config/fish/completions/archerfish.fish")),
)  # fmt: skip


def make_parser(command: Command) -> Parser:
    """The parser of a command, with all its options and a help that shows examples and exit codes."""
    usage = f"archerfish {command.name} {command.usage}[options]"
    description = f"{command.summary[0].upper()}{command.summary[1:]}."
    examples = "".join(f"  {line}\n" for line in command.examples)
    epilog = (
        "Options of a [section] are also environment variables (ARCHERFISH_SECTION_NAME) and keys of the TOML file.\n\n"
    )
    epilog += (f"examples:\n{examples}\n" if examples else "") + EXIT_CODES
    parser = Parser(
        prog=f"archerfish {command.name}", usage=usage, description=description, epilog=epilog.replace("%", "%%")
    )
    getattr(command.code, f"add_{command.name.split()[0]}_arguments")(parser)
    add_common(parser)
    return parser


def overview(name: str = "COMMAND", listed: Sequence[Command] = COMMANDS) -> str:
    """All commands by group, or those that begin with one word."""
    width = max(len(command.name) for command in listed) + 2
    groups: dict[str, str] = {}
    for command in listed:
        line = f"  {command.name:<{width}}{command.summary}\n"
        groups[command.group] = groups.get(command.group, "") + line
    commands = "\n".join(f"{group}:\n{lines}" for group, lines in groups.items())
    return (
        f"usage: archerfish {name} [options]\n\n{DESCRIPTION}\n\n{commands}\n"
        "everywhere: --config FILE, --json, --quiet, --debug, --version, --help\n"
        f"Every option is also an environment variable and a key of the TOML file; see docs/options.md.\n\n{EXIT_CODES}"
    )
