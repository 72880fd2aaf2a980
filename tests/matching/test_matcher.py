"""Matching by text (invariant 2): kept ids and the encoded rest spell the prompt; canonically they are its encoding."""

from __future__ import annotations

import random
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.matching.matcher import Matcher, Mode, StoredBranch, TextMatch
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from tests.text import factories
from tests.text.factories import KINDS, SNIPPETS, encoder_of, make_encoder, odd_ids, texts

ALL_KINDS = (*KINDS, "lower")
MODES: tuple[Mode, ...] = ("continuation", "canonical")


def stored(encoder: PromptEncoder, ids: np.ndarray, *, agent: str | None = "a", branch: int = 0) -> StoredBranch:
    return StoredBranch("ns", agent, branch, ids, encoder.canonical_tokens(ids))


def matcher_with(encoder: PromptEncoder, *branches: StoredBranch) -> Matcher:
    matcher = Matcher(encoder)
    for branch in branches:
        matcher.add(branch)
    matcher.check()
    return matcher


def final_ids(encoder: PromptEncoder, prompt: RenderedPrompt, match: TextMatch) -> np.ndarray:
    """The ids the request runs with; asserts what holds for every match."""
    if match.branch is None:
        assert (match.num_tokens, match.resume_byte, match.source) == (0, 0, None)
        return encoder.encode(prompt)
    ids = np.concatenate([match.branch.ids[: match.num_tokens], encoder.encode_rest(prompt, match.resume_byte)])
    assert encoder.key_of(ids) == prompt.key, "the ids spell something else than the prompt"
    if match.mode == "canonical":
        assert ids.tolist() == encoder.encode(prompt).tolist(), "not the encoding of the whole"
        assert match.num_tokens <= match.branch.canonical_tokens
    return ids


def edited(text: str, rng: random.Random) -> str:
    """The text with a few characters replaced, somewhere."""
    start = rng.randint(0, len(text))
    end = min(len(text), start + rng.choice([0, 0, 1, 2, 7]))
    return text[:start] + rng.choice([*SNIPPETS, ""]) + text[end:]


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=60, deadline=None)
@given(question=texts, reply=texts, seed=st.integers(0, 10**6))
def test_edited_conversations(kind: str, question: str, reply: str, seed: int) -> None:
    """Replies in ids no tokenizer would choose, then the conversation goes on, edited or not."""
    encoder, rng = encoder_of(kind), random.Random(seed)
    messages = [Message("system", "The quick brown fox."), Message("user", question)]
    prompt = encoder.encode(encoder.render_chat(messages))
    sampled = odd_ids(kind, reply, seed) if rng.random() < 0.5 else encoder.encode(encoder.render_text(reply))
    branch = stored(encoder, np.concatenate([prompt, sampled]))
    matcher = matcher_with(encoder, branch)
    later = [*messages, Message("assistant", reply), Message("user", "And then?")]
    at = rng.randrange(len(later) + 1)
    if at < len(later):
        later[at] = Message(later[at].role, edited(later[at].content, rng))
    following = encoder.render_chat(later)
    for mode in MODES:
        match = matcher.match("ns", "a", following, mode)
        assert match.mode == mode
        final_ids(encoder, following, match)


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=60, deadline=None)
@given(text=texts, seed=st.integers(0, 10**6))
def test_every_cut(kind: str, text: str, seed: int) -> None:
    """Raw text, left at every character for something else: nothing but splitting rules makes this right."""
    encoder, rng = encoder_of(kind), random.Random(seed)
    base = "Some common words before it, 1234 of them.\n\n" + text
    first = encoder.render_text(base)
    matcher = Matcher(encoder, min_reuse_tokens=1)
    matcher.add(stored(encoder, encoder.encode(first)))
    for cut in range(40, len(base) + 1):
        following = encoder.render_text(base[:cut] + rng.choice(SNIPPETS) + rng.choice(["", base[cut:], "x"]))
        final_ids(encoder, following, matcher.match("ns", "a", following, "canonical"))
        again = encoder.render_text(base[:cut])
        for mode in MODES:
            match = matcher.match("ns", "a", again, mode)
            ids = final_ids(encoder, again, match)
            assert match.relation in ("exact", "diverge", "none")
            assert len(ids) == 0 or match.branch is None or match.num_tokens <= len(ids)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("the dog's", "the dogs"),
        ("the dog' ", "the dog're"),
        ("the fox'r ", "the fox're"),
        ("so   x", "so    y"),
        ("so \n \n x", "so \n \n\n"),
        ("so  ", "so  a"),
        ("123 456", "123456"),
        ("1234 ", "12345"),
        ("HTTPs", "HTTPServer"),
        ("cafe x", "cafe\u0301 x"),
        ("!! ", "!!\n\n"),
        ("日本 ", "日本語"),
        ("a/ ", "a//\n"),
    ],
)
def test_known_traps(kind: str, before: str, after: str) -> None:
    """Pre-tokens that what follows makes longer, shorter or another."""
    encoder = encoder_of(kind)
    common = "Some common words before it, and " * 3
    for first, second in ((before, after), (after, before)):
        matcher = matcher_with(encoder, stored(encoder, encoder.encode(encoder.render_text(common + first))))
        prompt = encoder.render_text(common + second)
        match = matcher.match("ns", "a", prompt, "canonical")
        final_ids(encoder, prompt, match)


@pytest.mark.parametrize("kind", ["gpt2", "cl100k", "o200k", "deepseek", "words", "prefixed"])
def test_safe_cuts_lose_little(kind: str) -> None:
    """With a known splitter an edit costs the words around it, not the message."""
    encoder = encoder_of(kind)
    text = "The quick brown fox jumps over the lazy dog. " * 40
    branch = stored(encoder, encoder.encode(encoder.render_chat([Message("user", text)])))
    matcher = matcher_with(encoder, branch)
    for cut in range(400, 440):
        following = encoder.render_chat([Message("user", text[:cut] + "!?" + text[cut:])])
        match = matcher.match("ns", "a", following)
        assert match.relation == "diverge"
        assert 0 <= match.matched_bytes - match.resume_byte <= 16


@pytest.mark.parametrize("kind", ["unknown", "prepend", "always", "first"])
def test_without_a_known_splitter_only_control_tokens_are_safe(kind: str) -> None:
    encoder = encoder_of(kind)
    text = "The quick brown fox jumps over the lazy dog. " * 10
    messages = [Message("user", text), Message("assistant", "ok"), Message("user", text)]
    matcher = matcher_with(encoder, stored(encoder, encoder.encode(encoder.render_chat(messages))))
    following = encoder.render_chat([*messages[:2], Message("user", text[:100] + "X" + text[100:])])
    match = matcher.match("ns", "a", following)
    assert following.key[match.resume_byte - 5 : match.resume_byte + 4] == following.key[:5] + following.key[5:9]
    assert match.num_tokens > 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_never_encoded_again(kind: str) -> None:
    """The ordinary next turn: all stored ids stay, however odd, and only the new text is encoded."""
    encoder = encoder_of(kind)
    messages = [Message("system", "You are kind. " * 8), Message("user", "Tell me, isn't it 12345?")]
    for seed in range(10):
        reply = " It is, I'm sure:\n\n\n12345 is the number… 🙂"
        ids = np.concatenate([encoder.encode(encoder.render_chat(messages)), odd_ids(kind, reply, seed)])
        branch = stored(encoder, ids)
        matcher = matcher_with(encoder, branch)
        following = encoder.render_chat([*messages, Message("assistant", reply), Message("user", "Thanks.")])
        match = matcher.match("ns", "a", following)
        assert (match.relation, match.source, match.num_tokens) == ("extend", "own", len(ids))
        assert final_ids(encoder, following, match)[: len(ids)].tolist() == ids.tolist()
        canonical = matcher.match("ns", "a", following, "canonical")
        final_ids(encoder, following, canonical)
        assert canonical.num_tokens <= branch.canonical_tokens < len(ids)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_same_prompt_again(kind: str) -> None:
    encoder = encoder_of(kind)
    prompt = encoder.render_chat([Message("user", "The quick brown fox, again and again.")])
    ids = encoder.encode(prompt)
    matcher = matcher_with(encoder, stored(encoder, np.concatenate([ids, odd_ids(kind, "a reply", 1)])))
    match = matcher.match("ns", "a", prompt)
    assert (match.relation, match.num_tokens, match.resume_byte) == ("exact", len(ids), len(prompt.key))
    assert len(encoder.encode_rest(prompt, match.resume_byte)) == 0
    assert match.difference is None
    canonical = matcher.match("ns", "a", prompt, "canonical")
    assert canonical.relation == "exact"
    final_ids(encoder, prompt, canonical)


def test_a_prompt_that_ends_inside_a_stored_token() -> None:
    encoder = encoder_of("cl100k")
    ids = encoder.encode(encoder.render_text("The quick brown fox jumps over the lazy dog"))
    matcher = matcher_with(encoder, stored(encoder, ids))
    for end in range(30, 43):
        prompt = encoder.render_text("The quick brown fox jumps over the lazy dog"[:end])
        match = matcher.match("ns", "a", prompt)
        assert match.relation == "exact"
        assert final_ids(encoder, prompt, match).tolist() == encoder.encode(prompt).tolist()


def test_half_characters_are_not_kept() -> None:
    """Two characters that share their first bytes: the token of the shared bytes is inside both."""
    encoder = encoder_of("gpt2")
    singles = {encoder.vocabulary.shown(i): i for i in range(encoder.vocab_size)}
    prefix = encoder.encode(encoder.render_text("word " * 20)).tolist()
    ids = np.array(prefix + [singles[bytes([byte])] for byte in "🙂".encode()], dtype=np.uint32)
    matcher = matcher_with(encoder, stored(encoder, ids))
    prompt = encoder.render_text("word " * 20 + "🙃")
    match = matcher.match("ns", "a", prompt, "continuation")
    assert match.matched_bytes == 103
    final_ids(encoder, prompt, match)
    strict = Matcher(encoder, min_reuse_tokens=len(prefix) + 1)
    strict.add(stored(encoder, ids))
    assert strict.match("ns", "a", prompt, "continuation").relation == "none", "bytes of half a character do not count"
    cut_off = matcher_with(encoder, stored(encoder, ids[:-1]))
    match = cut_off.match("ns", "a", encoder.render_text("word " * 20 + "🙂!"))
    assert match.relation == "diverge"
    final_ids(encoder, encoder.render_text("word " * 20 + "🙂!"), match)


def test_added_tokens_that_are_text_are_not_cut() -> None:
    encoder = encoder_of("cl100k")
    before = "words and more words " * 5
    for text, later in [
        ("<|cus x", "<|custom|> y"),
        ("a\n\n<|custom| x", "a\n\n<|custom|> y"),
        ("a<|custom|> x", "a<|custom|>"),
        ("a\n\n<|custom|>", "a\n\n<|cus"),
        ("!<|custom|>'s", "!<|custom|>'t"),
    ]:
        matcher = Matcher(encoder, min_reuse_tokens=1)
        matcher.add(stored(encoder, encoder.encode(encoder.render_text(before + text))))
        prompt = encoder.render_text(before + later)
        match = matcher.match("ns", "a", prompt, "canonical")
        assert match.num_tokens > 5
        final_ids(encoder, prompt, match)


@pytest.mark.parametrize(
    "template", [factories.STRIPS_THINKING, factories.TRIMS, factories.DATED, factories.MOVES_SYSTEM]
)
@pytest.mark.parametrize("kind", ["cl100k", "prepend"])
def test_templates_that_rewrite_history(kind: str, template: str) -> None:
    encoder = encoder_of(kind, template)
    messages = [Message("system", "You are kind and brief. " * 5), Message("user", "What is it, please?")]
    matcher, total, kept = Matcher(encoder), 0, 0
    for turn in range(4):
        moved = make_encoder(kind, template, moment=datetime(2024, 1, 31 if turn < 3 else 1))
        prompt = moved.render_chat(messages)
        match = matcher.match("ns", "a", prompt)
        ids = final_ids(encoder, prompt, match)
        final_ids(encoder, prompt, matcher.match("ns", "a", prompt, "canonical"))
        total, kept = total + len(ids), kept + match.num_tokens
        reply = "<think>\nhm, so\n</think>\n\nIt is this.  \n"
        generated = odd_ids(kind, reply.replace("</think>", ""), turn)
        matcher.add(stored(encoder, np.concatenate([ids, generated]), branch=turn))
        matcher.check()
        messages += [Message("assistant", reply), Message("user", f"And number {turn}?")]
    assert kept > 16


def test_own_wins_when_equal_and_the_better_one_else() -> None:
    encoder = encoder_of("cl100k")
    system = Message("system", "The rules are long and the same for everybody. " * 6)
    short = encoder.encode(encoder.render_chat([system, Message("user", "none")]))
    prompt = encoder.render_chat([system, Message("user", "one"), Message("assistant", "fine"), Message("user", "two")])
    long = encoder.encode(prompt)
    matcher = matcher_with(encoder, stored(encoder, short, agent="a"), stored(encoder, short, agent="b"))
    match = matcher.match("ns", "a", prompt)
    assert match.source == "own" and match.branch is not None and match.branch.agent == "a"
    matcher.add(stored(encoder, long, agent="b", branch=1))
    match = matcher.match("ns", "a", prompt)
    assert (match.source, match.num_tokens, match.mode) == ("shared", len(long), "canonical")
    assert match.relation == "diverge", "said of the agent's own branches"
    assert match.difference is not None and match.difference.source == "own"
    fresh = matcher.match("ns", "new", prompt)
    assert (fresh.relation, fresh.source) == ("exact", "shared")
    assert matcher.match("ns", None, prompt).source == "shared"
    assert matcher.match("other", "a", prompt).relation == "none", "namespaces never meet"
    assert matcher.match("other", "a", prompt).difference is None


def test_own_wins_wherever_the_texts_part() -> None:
    encoder = encoder_of("cl100k")
    text = "The quick brown fox jumps over the lazy dog again"
    ids = encoder.encode(encoder.render_text(text * 3))
    matcher = matcher_with(encoder, stored(encoder, ids, agent="a"), stored(encoder, ids, agent="b"))
    for cut in range(80, 140):
        assert matcher.match("ns", "a", encoder.render_text((text * 3)[:cut] + "é"), "canonical").source == "own"
        assert matcher.match("ns", "b", encoder.render_text((text * 3)[:cut] + "é"), "canonical").source == "own"


def test_another_agents_odd_reply_is_not_taken_over() -> None:
    encoder = encoder_of("cl100k")
    messages = [Message("user", "Tell me a story about the quick brown fox and the dog.")]
    prompt_ids = encoder.encode(encoder.render_chat(messages))
    reply = "The quick brown fox jumps over the lazy dog"
    branch = stored(encoder, np.concatenate([prompt_ids, odd_ids("cl100k", reply, 3)]), agent="b")
    assert branch.canonical_tokens < len(branch.ids)
    matcher = matcher_with(encoder, branch)
    following = encoder.render_chat([*messages, Message("assistant", reply), Message("user", "More.")])
    shared = matcher.match("ns", "a", following)
    assert (shared.source, shared.mode) == ("shared", "canonical")
    assert final_ids(encoder, following, shared).tolist() == encoder.encode(following).tolist()
    asked = matcher.match("ns", "a", following, "continuation")
    assert (asked.num_tokens, asked.mode) == (len(branch.ids), "continuation")


def test_branches_of_one_agent() -> None:
    encoder = encoder_of("cl100k")
    system = Message("system", "You are kind and brief, always. " * 4)
    prompts = [
        encoder.render_chat([system, Message("user", f"{word} question, please")]) for word in ("first", "second")
    ]
    matcher = matcher_with(encoder, *(stored(encoder, encoder.encode(p), branch=n) for n, p in enumerate(prompts)))
    for number, prompt in enumerate(prompts):
        match = matcher.match("ns", "a", prompt)
        assert match.relation == "exact" and match.branch is not None and match.branch.branch == number
    matcher.remove("ns", "a", 0)
    matcher.remove("ns", "a", 0)
    matcher.check()
    assert matcher.match("ns", "a", prompts[0]).relation == "diverge"
    matcher.remove("ns", "a", 1)
    matcher.check()
    assert matcher.match("ns", "a", prompts[1]).branch is None


def test_less_than_the_minimum_is_a_miss() -> None:
    encoder = encoder_of("cl100k")
    ids = encoder.encode(encoder.render_text("one two three four five six seven eight nine ten"))
    prompt = encoder.render_text("one two three four FIVE")
    few = Matcher(encoder, min_reuse_tokens=3)
    many = Matcher(encoder, min_reuse_tokens=40)
    for matcher in (few, many):
        matcher.add(stored(encoder, ids))
    assert few.match("ns", "a", prompt).relation == "diverge"
    miss = many.match("ns", "a", prompt)
    assert (miss.relation, miss.branch, miss.matched_bytes) == ("none", None, 0)
    assert miss.difference is not None and miss.difference.position == 19


def test_the_index_is_bounded_and_named_agents_are_found_without_it() -> None:
    encoder = encoder_of("cl100k")
    matcher = Matcher(encoder, max_index_bytes=40_000)
    prompts = [encoder.render_chat([Message("user", f"number {n} asks " * 20)]) for n in range(60)]
    for number, prompt in enumerate(prompts):
        matcher.add(stored(encoder, encoder.encode(prompt), agent=f"agent {number}"))
        matcher.check()
        assert matcher.index.num_bytes <= 40_000
    assert 1 < len(list(matcher.index)) < 60
    assert matcher.match("ns", None, prompts[0]).relation != "exact", "left the index"
    assert matcher.match("ns", "agent 0", prompts[0]).relation == "exact"
    matcher.check()
    assert matcher.match("ns", None, prompts[0]).relation == "exact", "asked for, it is back"
    tiny = Matcher(encoder, max_index_bytes=100)
    tiny.add(stored(encoder, encoder.encode(prompts[0])))
    tiny.check()
    assert tiny.match("ns", "a", prompts[0]).relation == "exact"
    assert tiny.index.num_bytes == 0


def test_used_branches_stay_in_the_index() -> None:
    encoder = encoder_of("cl100k")
    matcher = Matcher(encoder, max_index_bytes=40_000)
    prompts = [encoder.render_chat([Message("user", f"number {n} asks " * 20)]) for n in range(40)]
    for number, prompt in enumerate(prompts):
        matcher.add(stored(encoder, encoder.encode(prompt), agent=f"agent {number}"))
        assert matcher.match("ns", None, prompts[0]).relation == "exact"


def test_branches_with_the_same_text() -> None:
    encoder = encoder_of("cl100k")
    prompt = encoder.render_chat([Message("user", "The same words from everybody, every time.")])
    ids = encoder.encode(prompt)
    matcher = matcher_with(encoder, *(stored(encoder, ids, agent=name) for name in "abc"))
    for name in "abc":
        assert matcher.match("ns", "z", prompt).relation == "exact"
        matcher.remove("ns", name, 0)
        matcher.check()
    assert matcher.match("ns", "z", prompt).relation == "none"


def test_empty_sequences() -> None:
    encoder = encoder_of("cl100k")
    empty = np.zeros(0, dtype=np.uint32)
    matcher = matcher_with(encoder, StoredBranch("ns", "a", 0, empty, 0))
    prompt = encoder.render_text("Hello")
    match = matcher.match("ns", "a", prompt)
    assert match.num_tokens == 0
    assert final_ids(encoder, prompt, match).tolist() == encoder.encode(prompt).tolist()
    assert matcher.match("ns", "a", RenderedPrompt(b"")).num_tokens == 0


def test_unreadable_ends() -> None:
    """A stored reply that broke off inside a character is kept up to there."""
    encoder = encoder_of("gpt2")
    messages = [Message("user", "word " * 20)]
    prompt = encoder.encode(encoder.render_chat(messages))
    singles = {encoder.vocabulary.shown(i): i for i in range(encoder.vocab_size)}
    reply = [singles[b"o"], singles[b"k"], singles[b"\xf0"]]
    ids = np.concatenate([prompt, np.array(reply, dtype=np.uint32)])
    matcher = matcher_with(encoder, stored(encoder, ids))
    following = encoder.render_chat([*messages, Message("assistant", "ok"), Message("user", "x")])
    match = matcher.match("ns", "a", following)
    assert match.relation == "diverge"
    assert len(prompt) - 10 <= match.num_tokens <= len(prompt) + 2
    final_ids(encoder, following, match)


def test_an_agent_without_branches_goes_on_from_its_parents_as_they_were_sampled() -> None:
    encoder = encoder_of("cl100k")
    matcher = Matcher(encoder)
    head = encoder.encode(encoder.render_text("<|start|>"))
    ids = np.concatenate([head, odd_ids("cl100k", "user\nTell me of the rules, please, all of them", 3)])
    matcher.add(StoredBranch("ns", "main", 0, ids, len(head)))
    prompt = encoder.render_text("<|start|>user\nTell me of the rules, please, all of them<|end|>\n<|start|>sub")
    forked = matcher.match("ns", "sub", prompt, parent="main")
    assert (forked.relation, forked.source, forked.mode) == ("extend", "parent", "continuation")
    assert forked.num_tokens == len(ids)
    stranger = matcher.match("ns", "sub", prompt)
    assert (stranger.source, stranger.mode, stranger.num_tokens) == ("shared", "canonical", len(head))
    elsewhere = matcher.match("other", "sub", prompt, parent="main")
    assert (elsewhere.relation, elsewhere.source) == ("none", None)
    matcher.add(StoredBranch("ns", "sub", 0, head, len(head)))
    own = matcher.match("ns", "sub", prompt, parent="main")
    assert (own.source, own.relation) == ("own", "extend")


def test_others_serve_a_fork_that_shares_more_with_them_than_with_its_parent() -> None:
    encoder = encoder_of("cl100k")
    matcher = Matcher(encoder)
    for number, (agent, text) in enumerate({"main": "A wholly different task", "else": "word " * 40}.items()):
        ids = encoder.encode(encoder.render_text(text))
        matcher.add(StoredBranch("ns", agent, number, ids, len(ids)))
    found = matcher.match("ns", "sub", encoder.render_text("word " * 40 + "and more"), parent="main")
    assert (found.relation, found.source, found.branch and found.branch.agent) == ("extend", "shared", "else")
