"""What replicas publish of their caches."""

from __future__ import annotations

from array import array
from random import Random

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.digest import DIGEST_TOKENS, ModelDigest, PathHash, PrefixDigest, PromptHashes, read_changes
from archerfish.cache.radix import RadixCache, RadixKey
from archerfish.sequence import Namespace, pack_tokens

SECRET = b"a secret"
TENANT = Namespace("one")


class Follower:
    """What a router knows of a digest."""

    def __init__(self, digest: PrefixDigest) -> None:
        self.digest = digest
        self.version = 0
        self.present = set[int]()
        self.num_anew = 0

    def follow(self, max_bytes: int = 1 << 20) -> int:
        self.version, data, begins_anew = self.digest.changes(self.version, max_bytes)
        if begins_anew:
            self.present.clear()
            self.num_anew += 1
        for one, is_added in read_changes(data):
            (self.present.add if is_added else self.present.discard)(one)
        return len(data)


def cached_prefixes(cache: RadixCache, prompts: list[tuple[array[int], Namespace]]) -> set[int]:
    """The hashes of all prefixes of prompts that the cache has, by asking it."""
    hashes, found = PromptHashes(SECRET), set[int]()
    for tokens, namespace in prompts:
        num_cached = cache.peek(RadixKey(tokens, namespace))
        found.update(hashes(tokens, "model", namespace)[: num_cached // DIGEST_TOKENS])
    return found


def test_digest_has_what_the_cache_has() -> None:
    """After inserts, splits, evictions and clears, however slowly a router follows."""
    random, size = Random(7), 16
    blocks = BlockManager(96, size)
    cache, digest = RadixCache(blocks), PrefixDigest(SECRET)
    cache.digest = ModelDigest(digest, "model")
    quick, slow = Follower(digest), Follower(digest)
    prompts: list[tuple[array[int], Namespace]] = []
    stems = [[random.randrange(3) for _ in range(random.randrange(40, 400))] for _ in range(4)]
    for number in range(300):
        stem = random.choice(stems)
        end = [random.randrange(9) for _ in range(random.randrange(200))]
        tokens = pack_tokens([*stem[: random.randrange(1, len(stem))], *end])
        namespace = random.choice([TENANT, Namespace("two"), Namespace("one", "adapter")])
        needed = -(-len(tokens) // size)
        if blocks.num_free < needed:
            cache.evict(needed - blocks.num_free)
        own = blocks.allocate(needed)
        cache.insert(RadixKey(tokens, namespace), own)
        blocks.free(own)
        prompts.append((tokens, namespace))
        if number % 97 == 96:
            cache.clear(namespace)
        quick.follow()
        slow.follow(max_bytes=40)
        if number % 10 == 0:
            assert quick.present == cached_prefixes(cache, prompts)
    while slow.follow(max_bytes=4000):
        pass
    assert quick.present == slow.present == cached_prefixes(cache, prompts)
    assert len(quick.present) == len(digest) > 0


def test_hashes_of_a_path_do_not_depend_on_its_pieces() -> None:
    tokens = pack_tokens(range(1000))
    path_hash, data = PathHash(), tokens.tobytes()
    whole = path_hash.prefixes(0, 0, data, 0, 1000).tolist()
    before = path_hash.extend(0, 0, data, 0, 130)
    assert len(whole) == 15
    assert (
        path_hash.prefixes(0, 0, data, 0, 130).tolist() + path_hash.prefixes(before, 130, data, 130, 870).tolist()
        == whole
    )
    assert path_hash.prefixes(before, 130, data, 130, 61).tolist() == []


def test_tenants_models_and_secrets_have_hashes_of_their_own() -> None:
    tokens = pack_tokens(range(640))
    found = [
        PromptHashes(secret)(tokens, model, namespace)
        for secret in (SECRET, b"another")
        for model in ("model", "other")
        for namespace in (TENANT, Namespace("two"), Namespace("one", "adapter"), Namespace("", "one"))
    ]
    assert len({one for hashes in found for one in hashes}) == 16 * 10


def test_log_is_shortened_and_followers_stay_right() -> None:
    """Red: a follower that is up to date when the log is shortened is sent everything again."""
    digest = PrefixDigest(SECRET)
    namespace = TENANT
    path_hash = PathHash()
    up_to_date, late = Follower(digest), Follower(digest)
    for number in range(200):
        tokens = pack_tokens([number] * 64 * 100)
        hashes = path_hash.prefixes(0, 0, tokens.tobytes(), 0, len(tokens))
        digest.add(hashes, "model", namespace)
        if number > 1:
            digest.remove(hashes, "model", namespace)
        if number % 3 == 0:
            up_to_date.follow()
        if number == 100:
            late.follow(max_bytes=80)
    while late.follow() or up_to_date.follow():
        pass
    assert up_to_date.present == late.present and len(late.present) == len(digest) == 200
    assert (up_to_date.num_anew, late.num_anew) == (1, 2)


def test_a_version_of_another_process_begins_anew() -> None:
    first, second = PrefixDigest(SECRET), PrefixDigest(SECRET)
    tokens = pack_tokens(range(128))
    hashes = PathHash().prefixes(0, 0, tokens.tobytes(), 0, 128)
    first.add(hashes, "model", TENANT)
    second.add(hashes[:1], "model", TENANT)
    follower = Follower(first)
    follower.follow()
    follower.digest = second
    follower.follow()
    assert follower.present == set(PromptHashes(SECRET)(tokens, "model", TENANT)[:1])
