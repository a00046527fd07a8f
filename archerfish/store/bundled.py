"""Models that are part of archerfish itself: their files came with it, and nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from archerfish.errors import CorruptFileError

STORY_MODEL = "story-rwkv7"


@dataclass(frozen=True)
class BundledModel:
    """A model in a directory of its name, beside this file."""

    name: str
    kind: Literal["embedding", "text"]
    license: str
    description: str

    @property
    def directory(self) -> Path:
        return Path(__file__).with_name(self.name)

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.directory.iterdir()) if self.directory.is_dir() else 0


BUNDLED_MODELS: dict[str, BundledModel] = {
    model.name: model
    for model in (
        BundledModel(
            name=STORY_MODEL,
            kind="text",
            license="Apache-2.0 (teacher: MIT)",
            description="RWKV-7 that tells children's stories, 6.2 M parameters, float16 weights, English.",
        ),
    )
}


def find_bundled(model: BundledModel) -> Path:
    """The directory of a model, if the installation has it."""
    if not (model.directory / "config.json").is_file():
        raise CorruptFileError(
            f"The files of {model.name} should be in {model.directory}, but are not.",
            hint="This installation of archerfish is not complete: install it again.",
        )
    return model.directory
