"""Keys and tenants: lookup, changed files, and no secret in messages."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from archerfish.errors import ArcherfishError, InvalidOptionError, UnknownOptionError, WriteError
from archerfish.serve.tenants import (
    ANONYMOUS,
    LEAST_KEY_CHARS,
    ForbiddenError,
    Tenants,
    UnauthorizedError,
    add_key,
    bearer_key,
    digest_of,
)

from .hosting import FakeClock

SALT = bytes(range(32))
KEYS = [f"af-{letter * 40}" for letter in "abc"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_key_finds_tenant_and_limits(path: Path) -> None:
    alice = add_key(path, "alice", requests_per_minute=60, tokens_per_minute=1000.5, weight=2, max_priority=1)
    boss = add_key(path, "boss", is_operator=True)
    tenants = Tenants.from_file(path)
    found = tenants.find(alice)
    assert (found.name, found.requests_per_minute, found.tokens_per_minute) == ("alice", 60.0, 1000.5)
    assert (found.weight, found.max_priority, found.is_operator) == (2.0, 1, False)
    assert tenants.find(boss).is_operator and tenants.has_keys
    assert [tenant.name for tenant in tenants.all()] == ["alice", "boss"]
    assert tenants.named("boss") == tenants.find(boss) and tenants.named("nobody") is None


def test_wrong_keys_get_the_same_error(path: Path) -> None:
    good = add_key(path, "alice")
    tenants = Tenants.from_file(path)
    messages = set()
    for wrong in (good[:-1], good + "x", good.upper(), KEYS[0], "x" * 100_000, "\ud800"):
        with pytest.raises(UnauthorizedError) as caught:
            tenants.find(wrong)
        messages.add(str(caught.value))
        assert caught.value.status == 401 and caught.value.code == "invalid_api_key"
    assert len(messages) == 1
    for missing in (None, ""):
        with pytest.raises(UnauthorizedError, match="none was sent"):
            tenants.find(missing)


def test_keys_file_can_be_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    key = KEYS[0]
    monkeypatch.setenv("SERVICE_KEYS", f"alice={key}")
    one, other = Tenants.from_file("env:SERVICE_KEYS"), Tenants.from_file("env:SERVICE_KEYS")
    assert one.find(key).name == "alice" and one.find(key) == other.find(key)
    with pytest.raises(UnauthorizedError):
        one.find(KEYS[1])
    for empty in ("", " , "):
        monkeypatch.setenv("SERVICE_KEYS", empty)
        with pytest.raises(InvalidOptionError, match="SERVICE_KEYS"):  # and not a service that is open to all
            Tenants.from_file("env:SERVICE_KEYS")


def test_without_keys_everyone_is_the_anonymous_operator() -> None:
    for tenants in (Tenants(), Tenants.from_text("  ")):
        assert not tenants.has_keys
        for key in (None, "", "anything"):
            tenant = tenants.find(key)
            assert tenant is ANONYMOUS and tenant.is_operator
            assert tenant.max_priority >= 1000 and not tenant.requests_per_minute and not tenant.tokens_per_minute
        assert tenants.named("") is ANONYMOUS and tenants.named("alice") is None and tenants.all() == [ANONYMOUS]


def test_two_keys_of_a_tenant(path: Path) -> None:
    first, second = add_key(path, "alice"), add_key(path, "alice")
    tenants = Tenants.from_file(path)
    assert tenants.find(second) == tenants.find(first)


def test_operator_check(path: Path) -> None:
    add_key(path, "alice")
    (alice,) = Tenants.from_file(path).all()
    with pytest.raises(ForbiddenError, match="alice"):
        alice.require_operator()
    ANONYMOUS.require_operator()


# Reload


def test_changed_file_is_reloaded(path: Path) -> None:
    clock = FakeClock(0.0)
    alice = add_key(path, "alice")
    tenants = Tenants.from_file(path, clock)
    bob = add_key(path, "bob")
    with pytest.raises(UnauthorizedError):
        tenants.find(bob)  # it has just been looked at
    clock.now = 1.0
    assert tenants.find(bob).name == "bob"
    path.write_text(path.read_text().replace('name = "alice"', 'name = "alice"\nrequests_per_minute = 5'))
    clock.now = 2.0
    assert tenants.find(alice).requests_per_minute == 5.0
    head, _, _ = path.read_text().partition('[[tenant]]\nname = "bob"')
    path.write_text(head)
    clock.now = 3.0
    with pytest.raises(UnauthorizedError):
        tenants.find(bob)


def test_faulty_file_is_ignored_until_repaired(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock(0.0)
    alice = add_key(path, "alice")
    good = path.read_text()
    tenants = Tenants.from_file(path, clock)
    for turn, broken in enumerate(("not toml", good + '\n[[tenant]]\nname = "x"\n', None)):
        path.unlink() if broken is None else path.write_text(broken)
        clock.now += 1.0
        assert tenants.find(alice).name == "alice"
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == turn + 1
        clock.now += 1.0
        tenants.find(alice)  # the same fault is told once
        assert len(caplog.records) == turn + 1
    with pytest.raises(InvalidOptionError):
        tenants.reload()
    path.write_text(good)
    clock.now += 1.0
    assert tenants.find(alice).name == "alice"


# The environment


def test_keys_in_environment_text() -> None:
    one, two, three = KEYS
    tenants = Tenants.from_text(f"alice={one}, operator={two}\n{three}")
    assert [tenants.find(key).name for key in (one, two, three)] == ["alice", "operator", "default"]
    assert [tenants.find(key).is_operator for key in (one, two, three)] == [False, True, False]


def test_short_keys_are_refused_without_showing_them() -> None:
    with pytest.raises(InvalidOptionError, match=f"7 characters; at least {LEAST_KEY_CHARS}") as caught:
        Tenants.from_text("alice=hunter2")
    assert "hunter2" not in str(caught.value)


def test_bearer_key() -> None:
    assert bearer_key("Bearer abc") == bearer_key("bearer  abc ") == "abc"
    assert bearer_key(None, " abc ") == "abc" and bearer_key("Basic zzz", "abc") == "abc"
    assert bearer_key("Bearer one", "two") == "one"
    assert bearer_key(None) is bearer_key("") is bearer_key("Bearer ") is bearer_key("Basic x") is None


# Files


def test_file_is_private_and_holds_no_key(path: Path) -> None:
    key = add_key(path, "alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text() and key.removeprefix("af-") not in path.read_text()
    assert list(path.parent.iterdir()) == [path]


def test_add_key_keeps_the_rest_of_the_file(path: Path) -> None:
    add_key(path, "alice")
    path.write_text("# ours\n" + path.read_text())
    add_key(path, "bob")
    assert path.read_text().startswith("# ours\n")
    before = path.read_text()
    for name, limits in (("bad name", {}), ("", {}), ("anonymous", {}), ("carol", {"weight": 0}), ("bob", {"weight": 2.0})):
        with pytest.raises(InvalidOptionError):
            add_key(path, name, **limits)
    with pytest.raises(UnknownOptionError, match="Did you mean 'weight'"):
        add_key(path, "carol", wieght=2)
    assert path.read_text() == before


def test_unwritable_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"keys\.toml"):
        add_key(tmp_path / "file" / "keys.toml", "alice")


SECRET = "sk-this-is-a-secret-that-nobody-may-see"
HASH = digest_of("k", SALT).hex()
TENANT = f'[[tenant]]\nname = "a"\nkey_hash = "{HASH}"\n'


@pytest.mark.parametrize("text", [
    "", "salt = 1\n", f'salt = "{SECRET}"\n', f'salt = "{SALT.hex()}"\n{SECRET}\n', f'salt = "{SALT.hex()}"\n"{SECRET}" = 1\n',
    f'salt = "{SALT.hex()}"\ntenant = "{SECRET}"\n', f'salt = "{SALT.hex()}"\n[[tenant]]\nname = "a"\nkey_hash = "{SECRET}"\n',
    f'salt = "{SALT.hex()}"\n[[tenant]]\nname = "a"\n', f'salt = "{SALT.hex()}"\n{TENANT}key = "{SECRET}"\n',
    f'salt = "{SALT.hex()}"\n{TENANT}"{SECRET}" = 1\n', f'salt = "{SALT.hex()}"\n{TENANT}weight = "{SECRET}"\n',
    f'salt = "{SALT.hex()}"\n{TENANT}weight = -1\n', f'salt = "{SALT.hex()}"\n{TENANT}requests_per_minute = nan\n',
    f'salt = "{SALT.hex()}"\n{TENANT}is_operator = 1\n', f'salt = "{SALT.hex()}"\n{TENANT}max_priority = 1.5\n',
    f'salt = "{SALT.hex()}"\n{TENANT}{TENANT}', f'salt = "{SALT.hex()}"\n[[tenant]]\nname = "{SECRET} "\nkey_hash = "{HASH}"\n',
], ids=range(17))  # fmt: skip
def test_faulty_file_errors_show_no_secret(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidOptionError) as caught:
        Tenants.from_file(path)
    assert SECRET not in str(caught.value) and SALT.hex() not in str(caught.value) and str(path) in str(caught.value)


def test_unreadable_files(path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        Tenants.from_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidOptionError, match="UTF-8"):
        Tenants.from_file(path)


# Secrets


def test_no_secret_in_repr_logs_or_errors(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    clock = FakeClock(0.0)
    key, other = add_key(path, "alice"), add_key(path, "bob")
    tenants = Tenants.from_file(path, clock)
    told = [repr(tenants), str(tenants), repr(tenants._table), repr(tenants.find(key)), repr(tenants.all())]
    for wrong in (key + "x", SECRET):
        with pytest.raises(ArcherfishError) as caught:
            tenants.find(wrong)
        told += [str(caught.value), repr(caught.value), repr(caught.value.__dict__)]
    path.write_text(path.read_text() + "\n# touched\n")
    clock.now = 5.0
    tenants.find(other)
    path.write_text(f'"{SECRET}" = 1')
    clock.now = 10.0
    tenants.find(other)
    assert len(caplog.records) == 2
    told.append(caplog.text)
    assert tenants._table is not None
    salt = tenants._table.salt
    for text in told:
        for secret in (key, other, SECRET, key + "x", salt.hex(), digest_of(key, salt).hex()):
            assert secret not in text
