"""The chart as Helm renders it, and the images that deploy/Dockerfile describes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "archerfish": [sys.executable, "-m", "archerfish"],
    "python": [sys.executable],
}  # what is in an image's PATH
NAME = "fish"
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {
        "models": ["story-rwkv7", "all-minilm-l6-v2"],
        "config": "[serve]\naccess_log = false\n",
        "gpus": 2,
        "surge": 0,
        "pullSecrets": ["a", "b"],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "modelVolume": {"size": "10Gi", "storageClass": "fast"},
        "kernelVolume": {"claim": "kernels"},
        "apiKeys": {"secret": "keys", "metricsSecret": "prometheus"},
        "pod": {
            "nodeSelector": {"card": "h200"},
            "tolerations": [{"operator": "Exists"}],
            "runtimeClassName": "nvidia",
        },
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "autoscaling": {"enabled": True},
        "dashboard": {"enabled": True},
        "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
        "service": {"type": "LoadBalancer", "port": 443},
    },
}
VARIANTS["ray"] = {**VARIANTS["full"], "ray": {"enabled": True, "serveConfig": "applications:\n- name: fish\n"}}


def run_helm(*words: str, cwd: Path = ROOT, text: str = "") -> subprocess.CompletedProcess[str]:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("Helm is not installed (`make test-deploy` installs it)")
    return subprocess.run([helm, *words], cwd=cwd, input=text, capture_output=True, text=True, check=False)


def read_manifests(text: str) -> list[dict[str, Any]]:
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    done = run_helm("template", NAME, "deploy/helm", "--namespace", "lab", "--values", "-", text=json.dumps(values))
    assert done.returncode == 0, done.stderr
    return read_manifests(done.stdout)


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [one for one in manifests if one["kind"] == kind]
    return found


def pods(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The templates of all pods."""
    found = [one["spec"]["template"] for one in manifests if one["kind"] == "Deployment"]
    for cluster in (one["spec"]["rayClusterConfig"] for one in manifests if one["kind"] == "RayService"):
        found += [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return found


@dataclass
class Image:
    """A stage of deploy/Dockerfile with all that it has of the stages before it. words: the last instruction of each
    name."""

    env: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    arguments: set[str] = field(default_factory=set)

    def argv(self, instruction: str) -> list[str]:
        found: list[str] = json.loads(self.words[instruction])
        return found


def read_images() -> dict[str, Image]:
    """The stages by name. The first has a base from elsewhere."""
    images: dict[str, Image] = {}
    image = Image()
    lines = re.sub(r"(?m)^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text()).replace("\\\n", " ").splitlines()
    for name, rest in (line.split(maxsplit=1) for line in lines if line):
        if name == "FROM":
            base, _, stage = rest.split()
            known = images.get(base, Image())
            image = images[stage] = Image({**known.env}, {**known.words}, {*known.arguments})
        elif name == "ENV":
            image.env |= dict(word.split("=", 1) for word in shlex.split(rest))
        elif name == "ARG":
            image.arguments.add(rest.partition("=")[0])
        elif name == "HEALTHCHECK":
            image.words[name] = rest.partition(" CMD ")[2]
        else:
            image.words[name] = rest
    return images


def runnable(argv: Sequence[str]) -> list[str]:
    """A command of an image as it is run here."""
    return [*PROGRAMS[argv[0]], *argv[1:]]
