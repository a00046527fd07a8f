"""`archerfish keys`: the key is shown once, and found again by its hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archerfish.cli.main import main
from archerfish.cli.serve import LIMITS
from archerfish.serve.tenants import Tenant, Tenants


def test_new_key_is_found_by_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", str(file), "alice", "--tokens-per-minute", "300", "--weight", "2", "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert main(["keys", str(file), "root", "--operator"]) == 0
    shown = capsys.readouterr()
    tenants = Tenants.from_file(file)
    alice, root = tenants.find(key), tenants.find(shown.out.strip())
    assert (alice.name, alice.tokens_per_minute, alice.weight, alice.is_operator) == ("alice", 300, 2, False)
    assert (root.name, root.is_operator) == ("root", True)
    assert key not in file.read_text(encoding="utf-8")
    assert "only this once" in shown.err


def test_help_shows_defaults() -> None:
    plain = Tenant(name="x", namespace="")
    for name, (_, description) in LIMITS.items():
        default = getattr(plain, name)
        shown = "no limit" if name.endswith("_minute") and not default else f"{default:g}"
        assert description.endswith(f"(default: {shown})")


def test_invalid_tenant_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", str(file), "no spaces", "--json"]) == 2
    assert not file.exists()
