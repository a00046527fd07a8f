"""Keys and tenants: lookup, changed files, no secret in messages, and rate limits."""

from __future__ import annotations

import itertools
import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import ArcherfishError, InvalidOptionError, UnknownOptionError, WriteError
from archerfish.serve import overload
from archerfish.serve.overload import OverLimitError, RateLimitedError, RateLimits, retry_after
from archerfish.serve.tenants import ANONYMOUS, Tenant, Tenants, UnauthorizedError, add_key, bearer_key, digest_of

from .hosting import FakeClock

SALT = bytes(range(32))
KEYS = [f"af-{letter * 40}" for letter in "abc"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_key_finds_tenant_and_limits(path: Path) -> None:
    alice = add_key(path, "alice", requests_per_minute=60, tokens_per_minute=1000.5, weight=2, max_priority=1)
    second = add_key(path, "alice")
    boss = add_key(path, "boss", is_operator=True)
    tenants = Tenants.from_file(path)
    found = tenants.find(alice)
    assert tenants.find(second) == found
    assert (found.name, found.requests_per_minute, found.tokens_per_minute) == ("alice", 60.0, 1000.5)
    assert (found.weight, found.max_priority, found.is_operator) == (2.0, 1, False)
    assert tenants.find(boss).is_operator and tenants.has_keys
    assert [tenant.name for tenant in tenants.all()] == ["alice", "boss"]
    assert tenants.named("boss") == tenants.find(boss) and tenants.named("nobody") is ANONYMOUS


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


def test_keys_in_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEYS", f"alice={KEYS[0]}, operator={KEYS[1]}\n{KEYS[2]}")
    one, other = Tenants.from_file("env:SERVICE_KEYS"), Tenants.from_file("env:SERVICE_KEYS")
    found = [one.find(key) for key in KEYS]
    assert [(tenant.name, tenant.is_operator) for tenant in found] == [
        ("alice", False),
        ("operator", True),
        ("default", False),
    ]
    assert found[0] == other.find(KEYS[0])
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
        assert tenants.named("") is tenants.named("alice") is ANONYMOUS and tenants.all() == [ANONYMOUS]


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
    path.write_text(good)
    clock.now += 1.0
    assert tenants.find(alice).name == "alice"


# The environment


def test_short_keys_are_refused_without_showing_them() -> None:
    with pytest.raises(InvalidOptionError, match="7 characters; at least 20") as caught:
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
    for name, limits in (
        ("bad name", {}),
        ("", {}),
        ("anonymous", {}),
        ("carol", {"weight": 0}),
        ("bob", {"weight": 2.0}),
    ):
        with pytest.raises(InvalidOptionError):
            add_key(path, name, **limits)
    with pytest.raises(UnknownOptionError, match="Did you mean 'weight'"):
        add_key(path, "carol", wieght=2)
    assert path.read_text() == before


def test_unwritable_and_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"keys\.toml"):
        add_key(tmp_path / "file" / "keys.toml", "alice")
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        Tenants.from_file(tmp_path / "none.toml")
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidOptionError, match="UTF-8"):
        Tenants.from_file(tmp_path / "file")


SECRET = "sk-this-is-a-secret-that-nobody-may-see"
HASH = digest_of("k", SALT).hex()
TENANT = f'[[tenant]]\nname = "a"\nkey_hash = "{HASH}"\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "salt = 1\n",
        f'salt = "{SECRET}"\n',
        f'salt = "{SALT.hex()}"\n{SECRET}\n',
        f'salt = "{SALT.hex()}"\n"{SECRET}" = 1\n',
        f'salt = "{SALT.hex()}"\ntenant = "{SECRET}"\n',
        f'salt = "{SALT.hex()}"\n[[tenant]]\nname = "a"\nkey_hash = "{SECRET}"\n',
        f'salt = "{SALT.hex()}"\n[[tenant]]\nname = "a"\n',
        f'salt = "{SALT.hex()}"\n{TENANT}key = "{SECRET}"\n',
        f'salt = "{SALT.hex()}"\n{TENANT}"{SECRET}" = 1\n',
        f'salt = "{SALT.hex()}"\n{TENANT}weight = "{SECRET}"\n',
        f'salt = "{SALT.hex()}"\n{TENANT}weight = -1\n',
        f'salt = "{SALT.hex()}"\n{TENANT}requests_per_minute = nan\n',
        f'salt = "{SALT.hex()}"\n{TENANT}is_operator = 1\n',
        f'salt = "{SALT.hex()}"\n{TENANT}max_priority = 1.5\n',
        f'salt = "{SALT.hex()}"\n{TENANT}{TENANT}',
        f'salt = "{SALT.hex()}"\n[[tenant]]\nname = "{SECRET} "\nkey_hash = "{HASH}"\n',
    ],
    ids=range(17),
)
def test_faulty_file_errors_show_no_secret(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidOptionError) as caught:
        Tenants.from_file(path)
    assert SECRET not in str(caught.value) and SALT.hex() not in str(caught.value) and str(path) in str(caught.value)


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


# Rate limits


ALICE = Tenant(name="alice", requests_per_minute=3, tokens_per_minute=600)
TOKENS = replace(ALICE, requests_per_minute=0.0)


def make_limits() -> tuple[RateLimits, FakeClock]:
    clock = FakeClock()
    return RateLimits(clock), clock


def try_to_take(rates: RateLimits, tenant: Tenant, num_tokens: int) -> float:
    """0 if the tokens were taken, else the seconds until they can be."""
    try:
        rates.take(tenant, num_tokens)
    except RateLimitedError as error:
        return error.retry_after_s
    return 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 600), st.integers(0, 600)), max_size=40))
def test_no_period_gets_more_than_the_limit(requests: list[tuple[float, int, int]]) -> None:
    rates, clock = make_limits()
    taken: list[tuple[float, int]] = []
    for pause, estimate, used in requests:
        clock.now += pause
        if not try_to_take(rates, TOKENS, estimate):
            rates.give_back(TOKENS, max(0, estimate - used))
            taken.append((clock.now, min(estimate, used)))
    for start, end in itertools.combinations_with_replacement(range(len(taken)), 2):
        seconds = taken[end][0] - taken[start][0]
        assert sum(amount for _, amount in taken[start : end + 1]) <= 10 * seconds + 600 + 1e-6


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 600)), max_size=20), st.integers(1, 600))
def test_wait_is_exact(requests: list[tuple[float, int]], wanted: int) -> None:
    rates, clock = make_limits()
    for pause, amount in requests:
        clock.now += pause
        try_to_take(rates, TOKENS, amount)
    wait_s = try_to_take(rates, TOKENS, wanted)
    if wait_s > 0.01:
        clock.now += wait_s - 0.01
        assert 0 < try_to_take(rates, TOKENS, wanted) < 0.011
        clock.now += 0.01001
        assert try_to_take(rates, TOKENS, wanted) == 0


def test_requests_over_the_limit_get_retry_after() -> None:
    rates, clock = make_limits()
    for _ in range(3):
        rates.take(ALICE, 10)
    clock.now += 5
    with pytest.raises(RateLimitedError, match="3 requests a minute") as caught:
        rates.take(ALICE, 10)
    assert caught.value.retry_after_s == pytest.approx(15)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert str(caught.value).endswith("Try again in 15 seconds.")
    clock.now += 15.001
    rates.take(ALICE, 10)


def test_refused_request_takes_nothing() -> None:
    rates, _ = make_limits()
    rates.take(ALICE, 400)
    for _ in range(5):
        with pytest.raises(RateLimitedError, match="tokens"):
            rates.take(ALICE, 400)
    rates.take(ALICE, 200)
    rates.take(ALICE, 0)


def test_request_above_the_limit_of_a_minute_is_an_error() -> None:
    rates, _ = make_limits()
    with pytest.raises(OverLimitError, match="601 tokens; 'alice' has 600") as caught:
        rates.take(ALICE, 601)
    assert caught.value.status == 413
    rates.take(ALICE, 600)
    rates.take(ANONYMOUS, 10**9)  # without limits


def test_changed_limits_apply_at_once() -> None:
    rates, _ = make_limits()
    for _ in range(3):
        rates.take(ALICE, 1)
    assert try_to_take(rates, ALICE, 1) == pytest.approx(20)
    assert try_to_take(rates, replace(ALICE, requests_per_minute=60.0), 1) == 0
    slow = replace(ALICE, name="slow", requests_per_minute=0.5)
    assert [try_to_take(rates, slow, 1) for _ in range(2)] == pytest.approx([0, 120])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20), st.integers(1, 400)), max_size=60))
def test_tenants_do_not_affect_each_other(requests: list[tuple[str, float, int]]) -> None:
    def waits_of_a(names: str) -> list[float]:
        rates, clock = make_limits()
        found = []
        for name, pause, num_tokens in requests:
            clock.now += pause
            if name in names:
                wait_s = try_to_take(rates, replace(ALICE, name=name), num_tokens)
                found += [wait_s] if name == "a" else []
        return found

    assert waits_of_a("ab") == waits_of_a("a")


def test_paid_debts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "MAX_KNOWN_DEBTS", 8)
    rates, clock = make_limits()
    for number in range(200):
        rates.take(replace(ALICE, name=f"t{number}"), 600)
        clock.now += 1000
        assert len(rates._debts) <= 9
    rates.take(replace(ALICE, name="new"), 600)
    assert try_to_take(rates, replace(ALICE, name="new"), 600) > 0


def test_retry_after_is_in_whole_seconds() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 0.2, 1.0, 1.01, 59.5)] == ["1", "1", "1", "2", "60"]
