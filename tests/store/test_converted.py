"""When a converted directory is still that of its source."""

from __future__ import annotations

from pathlib import Path

from archerfish.store.converter import fingerprint_parts


def test_a_link_to_nothing_is_no_part_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint_parts(tmp_path)
    (tmp_path / "lock").symlink_to(tmp_path / "nothing")
    assert fingerprint_parts(tmp_path) == before
    (tmp_path / "more").symlink_to(tmp_path / "config.json")
    assert [name for name, _, _ in fingerprint_parts(tmp_path)] == ["config.json", "more"]
