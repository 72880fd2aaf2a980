"""Conversations that go on or are cut back after a restart, compared with slots that were never restarted.

    python -m benchmarks llama-cuts MODEL.gguf --cut 50 --cut 300 --cut 450

Several turns of an agent for each cut, then Rekindle and its llama-server are killed and started again. A prompt leaves
the conversation so many tokens before its end (0: it continues it). The reply that comes through Rekindle is compared
with that of a slot of another llama-server, which had all turns and goes on from them (hot). How far that one is from
other ways to the same prompt, all of them llama-server's own, is its noise: a reply that is farther from the hot one
than the largest noise of the run is wrong. The ways are a slot that computes it from its beginning, and the hot slot
after it has left the prompt and come back.

With `-ub 1` among the flags a token is computed alone, and what is left of noise is the order of the cells: attention
adds up in their order, and a window's cells are used again once all were. A restored slot has them in the order of the
tokens, as a slot has that never used one again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from benchmarks.llama_kills import ROUNDING, Scored, fronted_reply, own_reply, sentence
from benchmarks.llama_slots import Fronted, Plain, SlotsBench

NUM_TURNS, TURN_WORDS, PROMPT_WORDS = 4, 30, 20
REST_S = 1.0  # after a turn, so that its slot is read
LEFT_TOKENS = 40  # before a prompt's end, where the hot slot leaves it to come back
HOT, COLD = 0, 1  # slots of the llama-server that is not killed


@dataclass(frozen=True, slots=True)
class CutsBench:
    """What is run: conversations of about `words` words and `NUM_TURNS` turns more, cut back by these tokens."""

    slots: SlotsBench
    cuts: tuple[int, ...]
    words: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an agent was asked, turn by turn, and all ids after the last reply; cut back by `cut`, `prompt` follows."""

    agent: str
    asked: tuple[list[int], ...]
    ids: list[int]
    cut: int
    prompt: list[int] = field(default_factory=list)
    num_new: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """A cut: the replies through Rekindle, of the hot slot, and of llama-server's other ways to the same prompt."""

    conversation: Conversation
    reply: Scored
    hot: Scored
    others: tuple[Scored, ...]

    @property
    def distance(self) -> float:
        return self.reply.distance(self.hot)

    @property
    def noise(self) -> float:
        """The largest distance of any of llama-server's ways from any other."""
        own = (self.hot, *self.others)
        return max(one.distance(other) for one in own for other in own)


def talked(front: Fronted, plain: Plain, bench: CutsBench, cut: int, random: Random) -> Conversation:
    """Have an agent take its turns through Rekindle."""
    agent, asked = f"cut-{cut}", list[list[int]]()
    ids = plain.tokens(f"{agent}: {sentence(random, bench.words)}")
    for _ in range(1 + NUM_TURNS):
        ids = [*ids, *plain.tokens(f" {sentence(random, TURN_WORDS)}")]
        asked.append(ids)
        ids = [*ids, *fronted_reply(front, agent, ids, bench.slots.reply).ids]
        time.sleep(REST_S)
    more = plain.tokens(f" {sentence(random, PROMPT_WORDS)}")
    return Conversation(agent, tuple(asked), ids, cut, [*ids[: len(ids) - cut], *more], len(more))


def compared(front: Fronted, plain: Plain, talk: Conversation, most: int) -> Compared:
    """Ask for the reply to a cut in all three ways."""
    reply = fronted_reply(front, talk.agent, talk.prompt, most)
    for number, ids in enumerate((*talk.asked, talk.ids)):
        own_reply(plain, ids, 1, id_slot=HOT, cache_prompt=number > 0)
    hot = own_reply(plain, talk.prompt, most, id_slot=HOT)
    own_reply(plain, [*talk.prompt[:-LEFT_TOKENS], *talk.prompt[:LEFT_TOKENS]], 1, id_slot=HOT)
    back = own_reply(plain, talk.prompt, most, id_slot=HOT)
    cold = own_reply(plain, talk.prompt, most, id_slot=COLD, cache_prompt=False)
    return Compared(talk, reply, hot, (back, cold))


def run_cuts_bench(bench: CutsBench, console: Console) -> int:
    """Print what each cut computes and how far its reply is from the hot one; return 1 if one is wrong, or if a
    conversation that is continued computes more than what is new and one token."""
    random = Random(bench.seed)
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name:
        folder = Path(name)
        front = Fronted(bench.slots, folder / "rekindle.log", folder / "store")
        plain = Plain(bench.slots, folder / "plain.log")
        try:
            plain.start()
            front.start()
            talks = [talked(front, plain, bench, cut, random) for cut in (0, *bench.cuts)]
            front.kill("both")
            found = [compared(front, plain, talk, bench.slots.reply) for talk in talks]
        finally:
            front.end()
            plain.end()
    return shown(found, console)


def shown(found: Sequence[Compared], console: Console) -> int:
    """Print the table; return 1 if something is wrong."""
    band = max(each.noise for each in found) + ROUNDING
    table = Table("cut back by", "prompt, new", "computed after the restart", "by the hot slot", "distance", "noise")
    for each in found:
        talk = each.conversation
        table.add_row(
            str(talk.cut),
            f"{len(talk.prompt):,}, {talk.num_new}",
            f"{each.reply.computed:,}",
            f"{each.hot.computed:,}",
            f"{each.distance:.6f}",
            f"{each.noise:.6f}",
        )
    console.print(table)
    wrong = [each for each in found if each.distance > band]
    late = [each for each in found if not each.conversation.cut and each.reply.computed > each.conversation.num_new + 1]
    console.print(f"{len(found) - len(wrong)} of {len(found)} replies within {band:.6f} of the hot slot's")
    return int(bool(wrong or late))
