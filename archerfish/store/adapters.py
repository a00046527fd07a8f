"""LoRA adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors or .bin.

Everything is checked against the model before anything is used, and what cannot be computed is refused by its name in
the configuration, with what to do instead.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from archerfish.errors import ArcherfishError, CallerError, CorruptFileError, did_you_mean
from archerfish.kernels.adapters import Floats, LowRank, is_expert, plain_name
from archerfish.kernels.stored import widened
from archerfish.store.source import ModelSource, SourceTensor, read_json

CONFIG, FILES = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
MAX_RANK = 256
MERGE = "Merge it into the model with PEFT (merge_and_unload), and serve the merged model."
REFUSED = {  # options of PEFT that change the result in ways that are not computed here
    "use_dora": MERGE,
    "modules_to_save": f"It has whole matrices. {MERGE}",
    "lora_bias": MERGE,
    "layer_replication": MERGE,
    "trainable_token_indices": MERGE,
    "use_qalora": MERGE,
    "arrow_config": MERGE,
    "use_bdlora": MERGE,
    "kasa_config": MERGE,
    "monteclora_config": MERGE,
    "velora_config": MERGE,
    "alora_invocation_tokens": "Activated LoRA begins within a prompt, which is not supported.",
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the model's own matrices
PART = re.compile(
    r"^(?P<module>.+)\.(?:lora_(?P<side>[AB])(?:\.\w+)?\.weight|lora_embedding_(?P<lookup>[AB])(?:\.\w+)?)$"
)
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
FRONTS = ("", "model.", "model.language_model.")  # of a name, as regular expressions may mean it
# Matching may take for ever, and no thread of this process would go on meanwhile.
MATCH = "import json, re, sys; one, names = json.load(sys.stdin); print(json.dumps([n for n in names if re.fullmatch(one, n)]))"
MATCH_S = 5.0
COPIES = (".embed_tokens.base_layer.weight", "lm_head.base_layer.weight")  # of the model's matrices, which PEFT adds
STACK = re.compile(r"^(?P<module>.+\.experts(?:\.base_layer)?)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight$")
EXPERT = re.compile(r"\.experts\.\d+\.(\w+)$")
DOWN = ("down_proj", "w2")  # what the last map of an expert is called
HEAD = "lm_head"


class AdapterError(CallerError):
    """An adapter that cannot be used with this model."""

    code = "invalid_adapter"


class MapShape(NamedTuple):
    """A linear map of a model, or its embedding."""

    outputs: int
    inputs: int
    is_lookup: bool = False


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits a model: the additions to each linear map that it changes, by `plain_name`."""

    path: Path
    rank: int  # the highest
    matrices: Mapping[str, LowRank]
    digest: str  # of what it computes: two files of one content have the same
    base: str = ""  # the model that it was made for, as its configuration says

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for pair in self.matrices.values() for each in pair)


def read_adapter(
    path: Path, maps: Mapping[str, MapShape], *, max_rank: int = MAX_RANK, takes_experts: bool = True, kind: str = ""
) -> Adapter:
    """Read an adapter's directory, or its weights beside their configuration, for a model with these linear maps.

    kind: the model_type of its configuration.
    """
    from archerfish.store.sources import open_safetensors, open_torch  # which a start without adapters need not import

    weights = find_adapter(path)
    try:
        config = read_json(weights.parent / CONFIG)
        tensors = open_safetensors(weights) if weights.suffix == ".safetensors" else open_torch(weights)
    except ArcherfishError as error:
        hint = "Copy or save the adapter again." if isinstance(error, CorruptFileError) else error.hint
        raise AdapterError(error.message, hint=hint) from error
    check_config(path, config)
    tensors = [tensor for tensor in tensors if not is_copy(tensor, maps)]
    base = str(config.get("base_model_name_or_path") or "")
    found = match_tensors(path, split_stacks(path, tensors, maps, is_interleaved=kind == "gpt_oss"), maps, base)
    if not takes_experts and any(map(is_expert, found)):
        hint = "Start with lora_experts=True (--lora-experts), which takes memory for all experts in every slot."
        raise AdapterError(f"{path} adapts the experts of the model, for which slots have no room.", hint=hint)
    config = with_names(path, config, [*maps, *dict.fromkeys(map(parameter_name, maps))])
    check_targets(path, config, found, maps)
    digest, matrices = hashlib.blake2b(digest_size=16), dict[str, LowRank]()
    highest = 0
    for name in sorted(found):
        rank, scale = rank_and_scale(config, name)
        highest = max(highest, rank)
        if rank > max_rank:
            hint = f"Start with max_lora_rank={rank} (--max-lora-rank {rank})." if rank <= MAX_RANK else MERGE
            raise AdapterError(f"{path}: {name} has rank {rank}, and the highest is {max_rank}.", hint=hint)
        shape = maps[name]
        pair = found[name]
        down = read_matrix(path, pair["A"], (rank, shape.inputs), base).copy()  # the file may be written again
        with np.errstate(over="ignore", invalid="ignore"):
            up = read_matrix(path, pair["B"], (shape.outputs, rank), base) * np.float32(scale)
        if not np.isfinite(up).all():
            raise AdapterError(
                f"{path}: {name} has numbers that are not finite when multiplied with its scale, {scale}."
            )
        matrices[name] = LowRank(down, up)
        digest.update(f"{name} {down.shape} {up.shape}".encode())
        digest.update(down.tobytes())
        digest.update(up.tobytes())
    return Adapter(path, highest, matrices, digest.hexdigest(), base)


def find_adapter(path: Path) -> Path:
    """The file with an adapter's weights, beside which its configuration lies."""
    if not path.exists():
        raise AdapterError(f"There is no adapter at {path}.", hint="Give the directory that PEFT saved it in.")
    found = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
    if not found or found[0].suffix not in (".safetensors", ".bin"):
        raise AdapterError(
            f"{path} has no {' and no '.join(FILES)}.", hint="Save the adapter with PEFT's save_pretrained."
        )
    if not (found[0].parent / CONFIG).is_file():
        raise AdapterError(f"{found[0].parent} has no {CONFIG}, which states rank and scale.", hint="Copy it there.")
    return found[0]


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is no LoRA, or a kind of it that is not computed here."""
    kind = str(config.get("peft_type", "")).upper()
    if kind != "LORA":
        raise AdapterError(f"{path} is a PEFT adapter of type {kind or 'unknown'}; only LORA is supported.", hint=MERGE)
    for name, hint in REFUSED.items():
        if config.get(name):
            raise AdapterError(f"{path} was made with {name}={config[name]!r}, which is not supported.", hint=hint)
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path} was made with bias={config['bias']!r}: it has biases of the model.", hint=MERGE)
    start = str(config.get("init_lora_weights", ""))
    if start.lower().startswith(CHANGES_BASE):
        hint = "Save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA."
        raise AdapterError(
            f"{path} was made with init_lora_weights={start!r}, which changes the base model too.", hint=hint
        )
    check_values(path, config)


def check_values(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse ranks, scales and names of other types than they must have."""
    numbers = {name: config.get(name) for name in ("r", "lora_alpha")}
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise AdapterError(f"{path}: {CONFIG} has {name}={patterns!r}, which maps no names to numbers.")
        numbers |= {f"{name} of {key}": value for key, value in patterns.items()}
    for name, value in numbers.items():
        if value is None:
            raise AdapterError(f"{path}: {CONFIG} has no {name}.", hint="Copy the one that PEFT saved.")
        kinds = int if name.startswith("r") else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            raise AdapterError(f"{path}: {CONFIG} has {name}={value!r}, which is not a positive number.")
    for key in ("target_modules", "exclude_modules", "target_parameters", "layers_to_transform"):
        value = config.get(key)
        wanted: type = int if key == "layers_to_transform" else str
        if value is not None and not all(
            isinstance(one, wanted) for one in (value if isinstance(value, list) else [value])
        ):
            raise AdapterError(
                f"{path}: {CONFIG} has {key}={value!r}, which is no {wanted.__name__} and no list of them."
            )


def with_names(path: Path, config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A configuration with the names that its regular expressions mean, in place of these."""
    found = dict(config)
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), str) and config[key] != "all-linear":
            found[key] = matching(path, config[key], names)
    for key in ("rank_pattern", "alpha_pattern"):
        values: dict[str, float] = {}
        for pattern, value in (config.get(key) or {}).items():
            ends = [name for name in names if is_named([pattern], name)]
            for name in ends or matching(path, rf"(?:.*\.)?(?:{pattern})", names):
                values.setdefault(name, value)
        found[key] = values
    return found


def matching(path: Path, pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a regular expression matches as a whole."""
    import subprocess  # takes long to import

    full = {f"{front}{name}": name for name in names for front in FRONTS}
    try:
        re.compile(pattern)
        arguments = [sys.executable, "-I", "-S", "-c", MATCH]
        found = subprocess.run(
            arguments,
            input=json.dumps([pattern, list(full)]),
            text=True,
            capture_output=True,
            timeout=MATCH_S,
            check=True,
        )
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(
            f"{path}: {CONFIG} has {pattern!r:.200}, which is no regular expression: {error}."
        ) from error
    except (subprocess.SubprocessError, OSError) as error:
        message = f"{path}: the regular expression {pattern!r:.200} cannot be matched in {MATCH_S:g} s."
        raise AdapterError(message, hint="Name the modules in a list.") from error
    return list(dict.fromkeys(full[name] for name in json.loads(found.stdout)))


def is_copy(tensor: SourceTensor, maps: Mapping[str, MapShape]) -> bool:
    """Whether a tensor is the model's own embedding or head: it has the shape of that, and a LoRA beside it."""
    if not tensor.info.name.endswith(COPIES):
        return False
    shape = maps.get(plain_name(tensor.info.name.removesuffix(".base_layer.weight")))
    sizes = shape and ((shape.inputs, shape.outputs) if shape.is_lookup else (shape.outputs, shape.inputs))
    return tuple(tensor.info.shape) == sizes


def split_stacks(
    path: Path, tensors: Sequence[SourceTensor], maps: Mapping[str, MapShape], *, is_interleaved: bool
) -> list[SourceTensor]:
    """With tensors for each expert in place of stacks of all experts, as PEFT saves them with target_parameters."""
    found, stacks = list[SourceTensor](), dict[str, dict[str, SourceTensor]]()
    for tensor in tensors:
        match = STACK.match(tensor.info.name)
        if match is None:
            found.append(tensor)
        else:
            stacks.setdefault(match["module"], {})[match["side"]] = tensor
    for module, pair in stacks.items():
        experts = plain_name(module.removesuffix(".base_layer"))
        own = {name: shape for name, shape in maps.items() if name.startswith(f"{experts}.")}
        if own and len(pair) == 2 and all(len(tensor.info.shape) == 2 for tensor in pair.values()):
            found += split_stack(path, pair, own, is_interleaved=is_interleaved)
        else:
            found += pair.values()  # which are refused with the reason
    return found


def split_stack(
    path: Path, pair: Mapping[str, SourceTensor], maps: Mapping[str, MapShape], *, is_interleaved: bool
) -> Iterator[SourceTensor]:
    """A is (experts * rank, inputs), B is (outputs, rank * experts). maps: of a layer's experts, in their order, the
    last maps of experts behind the others. is_interleaved: gates and the others take turns in B."""
    first = next(iter(maps)).rpartition(".")[0]
    names, num = [name for name in maps if name.startswith(f"{first}.")], int(list(maps)[-1].split(".")[-2]) + 1
    (lines, width), (outputs, columns) = shapes = [tuple(pair[side].info.shape) for side in "AB"]
    for parts in (names[:-1], names[-1:]):
        sizes = [maps[name].outputs for name in parts]
        if width == maps[parts[0]].inputs and outputs == sum(sizes):
            break
    else:
        parts = []
    if not parts or lines % num or columns != lines:
        hint = f"It belongs to another model: this one has {num} experts with {', '.join(str(maps[name]) for name in names)}."
        raise AdapterError(f"{path}: {pair['A'].info.name!r} and B have shapes {shapes[0]} and {shapes[1]}.", hint=hint)
    down, up = (widened(pair[side].load()) for side in "AB")
    down, up = down.reshape(num, -1, width), up.reshape(outputs, -1, num).transpose(2, 0, 1)
    for place, name in enumerate(parts):
        rows = slice(place, None, len(parts)) if is_interleaved else slice(place * sizes[0], (place + 1) * sizes[0])
        front, _, last = name.rpartition(".")
        for expert in range(num):
            module = f"{front.rpartition('.')[0]}.{expert}.{last}"
            for side, matrix in (("A", down[expert]), ("B", up[expert, rows])):
                info = pair[side].info._replace(name=f"{module}.lora_{side}.weight", shape=matrix.shape)
                yield SourceTensor(info, partial(np.asarray, matrix))


def match_tensors(
    path: Path, tensors: list[SourceTensor], maps: Mapping[str, MapShape], base: str
) -> dict[str, dict[str, SourceTensor]]:
    """A and B of each linear map. Every tensor of the file must belong to one."""
    found: dict[str, dict[str, SourceTensor]] = {}
    for tensor in tensors:
        full = tensor.info.name
        match = PART.match(full)
        if match is None:
            if full.endswith((".base_layer.weight", ".embed_tokens.weight", "lm_head.weight")):
                hint = (
                    "It has a whole matrix of the model, as PEFT saves it with save_embedding_layers. Save it without."
                )
                raise AdapterError(f"{path}: the tensor {full!r} is no part of a LoRA.", hint=hint)
            raise AdapterError(f"{path}: the tensor {full!r} is no part of a LoRA.", hint=MERGE)
        name, is_lookup = plain_name(match["module"]), match["lookup"] is not None
        if name not in maps or maps[name].is_lookup != is_lookup:
            made = f" It was made for {base}." if base else ""
            kind = "embedding" if is_lookup else "linear map"
            raise AdapterError(
                f"{path}: the model has no {kind} {name!r} that takes adapters.{made}", hint=misfit(name, maps)
            )
        pair = found.setdefault(name, {})
        side = match["side"] or match["lookup"]
        if side in pair:
            raise AdapterError(f"{path}: {name} has two matrices {side}: {pair[side].info.name!r} and {full!r}.")
        pair[side] = tensor
    for name, pair in found.items():
        if len(pair) < 2:
            raise AdapterError(
                f"{path}: {name} has no matrix {'B' if 'A' in pair else 'A'}.", hint="The file is not complete."
            )
    if not found:
        raise AdapterError(f"{path} has no tensors.", hint="Save the adapter with PEFT's save_pretrained.")
    return found


def misfit(name: str, maps: Mapping[str, MapShape]) -> str:
    """What to do about an adapter of something that the model does not have."""
    if name.startswith(("transformer.h.", "h.")):  # of GPT-2
        return MERGE
    layer, layers = LAYER.search(name), [int(found[1]) for found in map(LAYER.search, maps) if found]
    if layer and layers and int(layer[1]) > max(layers):
        return f"This model has {max(layers) + 1} layers. Serve the model that it was made for."
    return did_you_mean(name, maps, most=0) or "Serve the model that it was made for."


def check_targets(
    path: Path, config: Mapping[str, Any], found: Mapping[str, Any], maps: Mapping[str, MapShape]
) -> None:
    """The file must have each linear map that its configuration names, and no other."""
    is_every = config.get("target_modules") == "all-linear"  # where PEFT leaves routers of experts out
    stated = {**config, "target_modules": ()} if is_every else config
    has_experts = any(map(is_expert, found))  # to PEFT they are modules in some versions of a model alone
    wanted = (name for name in maps if has_experts or not is_expert(name))
    missing = next((name for name in wanted if name not in found and is_target(stated, name)), None)
    parameters = {parameter_name(name) for name in found}
    for one in config.get("target_parameters") or ():
        missing = missing or (None if any(is_named([one], name) for name in parameters) else one)
    if missing is not None:
        base = config.get("base_model_name_or_path")
        message = f"{path}: {CONFIG} says that {missing} was adapted, but the file has no tensors of it."
        hint = f"The file is not complete, or this is not the model that it was made for{f' ({base})' if base else ''}."
        raise AdapterError(message, hint=hint)
    tied = {"lm_head": "embed_tokens"} if config.get("ensure_weight_tying") else {}  # which PEFT does not name
    extra = next((name for name in found if not is_target(config, tied.get(name, name))), None)
    if extra is not None:
        message = f"{path}: the file has tensors of {extra}, which {CONFIG} does not name."
        raise AdapterError(message, hint="Its files do not belong together.")


def is_target(config: Mapping[str, Any], name: str) -> bool:
    """Whether a configuration names a linear map; of those that name none, whatever the file has counts."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules") or ()
    if is_named(config.get("target_parameters") or (), parameter_name(name)):
        return True
    if is_expert(name) and config.get("target_parameters"):
        return False
    layers, layer = config.get("layers_to_transform"), LAYER.search(name)
    if (
        layers is not None
        and layer is not None
        and int(layer[1]) not in ([layers] if isinstance(layers, int) else layers)
    ):
        return False
    if is_named(excluded, name):
        return False
    if targets == "all-linear":
        return layer is not None
    return is_named(targets or (), name)


def parameter_name(name: str) -> str:
    """What PEFT calls the parameter of a linear map: experts have theirs in stacks."""
    found = EXPERT.search(name)
    if found is None:
        return f"{name}.weight"
    return f"{name[: found.start()]}.experts.{'down_proj' if found[1] in DOWN else 'gate_up_proj'}"


def is_named(targets: Any, name: str) -> bool:
    """Whether one of some names is the end of a name."""
    return any(name == one or name.endswith(f".{one}") or plain_name(one) == name for one in targets)


def rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Of a linear map, where patterns may state others than the usual ones."""
    if is_expert(name) and config.get("target_parameters"):
        name = parameter_name(name)
    rank, alpha = config["rank_pattern"].get(name, config["r"]), config["alpha_pattern"].get(name, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read_matrix(path: Path, tensor: SourceTensor, shape: tuple[int, int], base: str) -> Floats:
    """A tensor in float32, whose shape and numbers are as they must be."""
    info = tensor.info
    if tuple(info.shape) != shape:
        made = f" The adapter was made for {base}." if base else ""
        hint = f"It belongs to another model, or {CONFIG} states another rank.{made}"
        raise AdapterError(f"{path}: {info.name!r} has shape {tuple(info.shape)}; this model needs {shape}.", hint=hint)
    if not info.dtype.startswith(("float", "bfloat")) or info.dtype.startswith("float8"):
        raise AdapterError(
            f"{path}: {info.name!r} has the type {info.dtype}.", hint="Save it as float32, float16 or bfloat16."
        )
    floats = np.ascontiguousarray(widened(tensor.load()), np.float32).reshape(shape)
    if not np.isfinite(floats).all():
        raise AdapterError(f"{path}: {info.name!r} has numbers that are not finite.", hint="The training has diverged.")
    return floats


def merged_source(source: ModelSource, path: Path, maps: Mapping[str, MapShape], kind: str = "") -> ModelSource:
    """A source whose matrices have an adapter in them. maps: of the model, by the names of its tensors without
    `.weight`."""
    shapes = {plain_name(name): shape for name, shape in maps.items()}
    adapter = read_adapter(path, shapes, kind=kind)
    found = {plain_name(tensor.info.name.removesuffix(".weight")): tensor.info.name for tensor in source.tensors}
    for name in adapter.matrices:
        if name not in found or (shapes[name].is_lookup and HEAD not in found):
            hint = "Serve the adapter beside the model."
            raise AdapterError(f"{path}: {name} cannot be merged: other maps share its tensor.", hint=hint)

    def merged(tensor: SourceTensor, pair: LowRank, *, is_lookup: bool) -> Floats:
        delta = pair.up @ pair.down
        return widened(tensor.load()).astype(np.float32) + (delta.T if is_lookup else delta)

    tensors = []
    for tensor in source.tensors:
        name = plain_name(tensor.info.name.removesuffix(".weight"))
        if name in adapter.matrices:
            load = partial(merged, tensor, adapter.matrices[name], is_lookup=shapes[name].is_lookup)
            tensor = SourceTensor(tensor.info._replace(dtype="float32", quantization=None), load)
        tensors.append(tensor)
    return source._replace(tensors=tuple(tensors))
