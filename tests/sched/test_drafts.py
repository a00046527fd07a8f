"""Speculation: what is proposed, how many tokens, and that tokens stay the same."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.sched.drafts import LONGEST_MATCH, SHORTEST_MATCH, PromptLookup, Speculation
from tests.sched.worlds import OracleDrafter, OracleModel, World, commit, plan


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 9), st.booleans())
def test_what_followed_the_longest_match_is_proposed(tokens: list[int], count: int, is_bold: bool) -> None:
    proposed = PromptLookup().propose(array("I", tokens), count, is_bold=is_bold)
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1 if is_bold else LONGEST_MATCH - 1, -1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if ends:
            whole = list(tokens)
            for _ in range(count):  # a match may overlap the end
                whole.append(whole[ends[-1] + len(whole) - len(tokens)])
            assert proposed == whole[len(tokens) :]
            return
    assert proposed == []


def test_words_are_not_found_between_tokens() -> None:
    tokens = array("I", [1 << 8, 1 << 8, 1 << 8, 5, 1, 1, 1])
    assert PromptLookup().propose(tokens, 2, is_bold=True) == []


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_proposed_tokens_save_steps_and_change_nothing(depth: int, has_states: bool) -> None:
    steps = []
    for speculation in (None, Speculation(OracleDrafter(), 4), Speculation(OracleDrafter(), 4, model=OracleModel())):
        world = World(depth=depth, speculation=speculation, has_states=has_states)
        sequences = [
            *world.add(9, 80),
            *world.add(5, 20, seed=1),
            *world.add(7, 20, params={"repetition_penalty": 1.5}),
        ]
        world.run()
        for seq in sequences:
            world.check_output(seq)
        steps.append(world.scheduler.stats().num_steps)
        stats = world.scheduler.stats()
        assert speculation is None or stats.num_draft_tokens > stats.num_accepted_tokens > 20
    assert max(steps[1:]) < 0.8 * steps[0]
    assert sequences[0].draft is not None and sequences[0].draft.num_accepted > 20
    assert sequences[1].draft is not None and not sequences[1].draft.num_accepted


@pytest.mark.parametrize("depth", [0, 1])
def test_a_sequence_among_too_many_others_neither_waits_nor_proposes(depth: int) -> None:
    """What was proposed for it while it was alone is forgotten: it could reach beyond its last token."""
    world = World(depth=depth, speculation=Speculation(OracleDrafter(), 4, max_sequences=1))
    (seq,) = world.add(9, 40)
    for _ in range(6):
        world.step()
    assert seq.draft is not None and seq.draft.num_proposed
    (other,) = world.add(30, 60)
    while len(world.outputs.get(other.key, ())) < 2:
        world.step()
    num_proposed = seq.draft.num_proposed
    assert not seq.draft.tokens and seq.pending_limit
    world.run()
    assert seq.draft.num_proposed == num_proposed
    world.check_output(seq)
    world.check_output(other)


@pytest.mark.parametrize(("is_flat", "first", "after"), [(False, 4, 2), (True, 12, 12)])
def test_where_tokens_cost_alike_many_are_proposed_at_once(is_flat: bool, first: int, after: int) -> None:
    speculation, world = Speculation(OracleDrafter(), 12, is_flat=is_flat), World()
    (seq,) = world.add(5)
    draft = seq.draft = speculation.start(seq.request)
    assert draft is not None and draft.count == first
    draft.tokens = [1, 2, 3]
    assert speculation.verify(seq, [1, 7, 8, 9]) == [1, 7]
    assert draft.count == after


def test_nothing_waits_for_a_token_where_proposals_would_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = Speculation(OracleDrafter(), 4)
    for size in range(1, 10):
        for _ in range(3):
            speculation.times.add(size, float(size))
    world = World(speculation=speculation)
    (seq,) = world.add(9, 20)
    monkeypatch.setattr(speculation.times, "add", lambda size, seconds: None)
    while len(world.outputs.get(seq.key, ())) < 20:
        world.step()
        assert seq.draft is not None and not seq.draft.tokens and seq.pending_limit
    world.check_output(seq)


def test_a_request_can_do_without() -> None:
    world = World(speculation=Speculation(OracleDrafter(), 4))
    world.add(9, 20, params={"speculate": False})
    world.run()
    assert world.scheduler.stats().num_drafts == 0


def test_as_many_tokens_are_proposed_as_pay() -> None:
    def chosen(seconds_of_5: float, accepted: float) -> int:
        speculation, world = Speculation(OracleDrafter(), 4), World()
        (seq,) = world.add(5)
        draft = seq.draft = speculation.start(seq.request)
        assert draft is not None
        draft.accepted = accepted
        draft.rejected = 10 - accepted
        draft.tokens = [1, 2, 3, 4]
        for size in range(1, 40):
            for _ in range(3):
                speculation.times.add(size, 1.0 + (seconds_of_5 - 1) * (size - 1) / 4)
        return speculation.choose(0, [seq], 30)

    assert chosen(1.2, 9.5) == 4  # rows cost next to nothing
    assert chosen(1.2, 0.1) == 0  # but nothing is accepted
    assert chosen(2.0, 6) == 2
    assert chosen(5.0, 9.5) == 0  # five tokens take as long as five steps


def test_a_sequence_whose_proposals_fail_is_left_alone_for_longer_and_longer() -> None:
    class Wrong:
        calls = 0

        def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
            self.calls += 1
            return [10**6] * count

    drafter = Wrong()
    world = World(num_blocks=200, speculation=Speculation(drafter, 4))
    (seq,) = world.add(5, 300)
    world.run()
    world.check_output(seq)
    assert seq.draft is not None and seq.draft.num_proposed < 60 and drafter.calls < 30


def test_the_time_of_drafting_counts() -> None:
    for seconds, expected in ((0.0, 4), (0.3, 2), (2.0, 0)):
        model, world = OracleModel(), World()
        model.seconds = seconds
        speculation = Speculation(OracleDrafter(), 4, model=model)
        (seq,) = world.add(5)
        seq.draft = speculation.start(seq.request)
        assert seq.draft is not None
        seq.draft.accepted, seq.draft.rejected = 7.0, 3.0
        for size in range(1, 10):
            for _ in range(3):
                speculation.times.add(size, 1.0 + size / 20)
        assert speculation.choose(0, [seq], 4, 4) == expected
        seq.draft.tokens = [1, 2, 3, 4]
        assert speculation.choose(0, [seq], 4) == 4  # it is spent


def test_nothing_is_drafted_before_plain_steps_were_measured() -> None:
    model = OracleModel()
    world = World(speculation=Speculation(OracleDrafter(), 4, model=model))
    (seq,) = world.add(9, 40)
    while len(world.outputs.get(seq.key, ())) < 3:
        world.step()
    assert not model.num_begun
    world.run()
    world.check_output(seq)
    assert model.num_begun


@pytest.mark.parametrize("fails", [False, True])
def test_a_sequence_that_is_aborted_while_proposals_are_verified_leaves_right_states(fails: bool) -> None:
    """What others find in the cache is the state behind its known tokens, not one before or behind it, nor of a failed
    step."""
    num_verified = 0
    for num_steps in range(2, 12):
        world = World(has_states=True, speculation=Speculation(OracleDrafter(), 4))
        (seq,) = world.add(6, 40)
        for _ in range(num_steps):
            world.step()
        made = plan(world)
        num_verified += len(made.input.states)
        world.scheduler.abort(seq.request.request_id)
        if fails:
            world.runner.execute(made)
            world.fail(made)
        else:
            commit(world, made)
        world.check_nothing_is_held()
        (other,) = world.add([*seq.tokens, 7], 5)
        world.run()
        world.check_output(other)
    assert num_verified > 5
