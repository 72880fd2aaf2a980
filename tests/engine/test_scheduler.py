"""Whose turn it is and how many rows it gets, on a clock that the test moves."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable
from rekindle.config import EngineSettings
from rekindle.engine.core.costs import StepCosts
from rekindle.engine.core.scheduler import ALONE, LONGEST_WAIT_S, MIN_CHUNK, RECENT_S, Chunk, Scheduler
from rekindle.engine.generation import Generation
from rekindle.engine.request import NO_MATCH, Reply, Request, RequestTimes, State
from rekindle.engine.sequence import Sequence
from rekindle.model.params import SamplingParams
from rekindle.model.sampler import SamplerState
from rekindle.text.pictures import Picture, PictureSpan, PromptPictures
from rekindle.text.prompt import PromptEncoder
from rekindle.text.stream import TextStream
from tests.drawn_pictures import drawn, file_of
from tests.engine.fixed_costs import FixedCosts
from tests.tiny_models import write_tokenizer

MakeRequest = Callable[..., Request]
ROW_MS = FixedCosts(base_s=0.0, row_s=0.001, row_context_s=0.0)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeRequest:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return maker(directory)


def maker(directory: Path) -> MakeRequest:
    encoder, pool = PromptEncoder.from_dir(directory), BlockPool(2, 16)
    params = SamplingParams(temperature=0.0)
    sampler = SamplerState.create(params, lambda: 0)

    def make(
        num_prompt: int,
        *,
        at: float = 0.0,
        namespace: str = "default",
        reuse: int = 0,
        state: State = State.WAITING,
        num_computed: int = 0,
        max_new_tokens: int = 1,
    ) -> Request:
        return Request(
            namespace=namespace,
            agent="a",
            sequence=Sequence(
                root=BlockHash(b"r" * 32),
                prompt_ids=np.zeros(num_prompt, dtype=np.uint32),
                table=BlockTable(pool),
                reuse="continuation",
                task="generate",
                max_new_tokens=max_new_tokens,
                num_computed=num_computed,
            ),
            match=replace(NO_MATCH, num_tokens=reuse),
            canonical_tokens=0,
            num_replies=None,
            reply=Reply(Generation(), sampler, TextStream(encoder, ())),
            times=RequestTimes(submitted=at),
            state=state,
        )

    return make


def scheduler_of(requests: list[Request], costs: FixedCosts = ROW_MS, *, largest: int = 1 << 20) -> Scheduler:
    """A scheduler whose queues hold these requests by their states."""
    scheduler = Scheduler(EngineSettings(), costs, max_chunk_tokens=largest)
    for request in requests:
        scheduler.move(request, request.state)
    scheduler.check()
    return scheduler


def decoding(make: MakeRequest, num_prompt: int) -> Request:
    """A request that has the first token of its reply."""
    request = make(num_prompt, state=State.RUNNING, num_computed=num_prompt)
    request.sequence.append(1)
    return request


def rows(chunks: list[Chunk]) -> list[int]:
    return [chunk.num_rows for chunk in chunks]


def test_namespaces_take_turns_by_their_oldest_request(make: MakeRequest) -> None:
    arrivals = "bbaabbcb"
    requests = [make(50, at=0.1 * i, namespace=name) for i, name in enumerate(arrivals)]
    order = scheduler_of([]).picks(requests, now=1.0)
    assert "".join(request.namespace for request in order) == "bacbabbb"
    assert sorted(map(id, order)) == sorted(map(id, requests))


def test_in_a_namespace_the_longest_reuse_goes_first_and_every_fourth_time_the_oldest(make: MakeRequest) -> None:
    requests = [make(100, at=0.1 * i, reuse=10 * i) for i in range(8)]
    order = scheduler_of([]).picks(requests, now=1.0)
    assert [requests.index(request) for request in order] == [7, 6, 5, 0, 4, 3, 2, 1]


def test_once_it_runs_what_was_really_reused_counts(make: MakeRequest) -> None:
    hoped = make(100, at=0.0, reuse=90, state=State.RUNNING, num_computed=10)
    found = make(100, at=0.1, reuse=0, state=State.RUNNING, num_computed=60)
    assert scheduler_of([]).picks([hoped, found], now=1.0) == [found, hoped]


def test_who_waited_too_long_comes_before_everybody_else_of_its_namespace(make: MakeRequest) -> None:
    first, second = make(100, at=0.0), make(100, at=0.1)
    just_not = make(100, at=1.0, reuse=10)
    fresh = make(100, at=2.9, reuse=99)
    now = just_not.times.submitted + LONGEST_WAIT_S
    assert scheduler_of([]).picks([fresh, just_not, second, first], now) == [first, second, fresh, just_not]


def test_a_priority_makes_a_request_so_many_seconds_older_in_its_namespace_alone(make: MakeRequest) -> None:
    others = [make(100, at=0.2 * i, namespace="b", reuse=50) for i in range(2)]
    plain, background, soon = make(100, at=0.1), make(100, at=0.3, reuse=90), make(100, at=9.5)
    background.priority, soon.priority = -20, 9
    order = scheduler_of([]).picks([plain, background, soon, *others], now=10.0)
    assert [request for request in order if request.namespace == "default"] == [plain, soon, background]
    soon.priority = 10
    order = scheduler_of([]).picks([plain, background, soon, *others], now=10.0)
    assert order == [others[0], soon, others[1], plain, background], "the turn is that of who has waited longest"
    quick, urgent = make(100, at=9.9, reuse=99), make(100, at=9.9)
    urgent.priority = 3
    assert scheduler_of([]).picks([quick, urgent], now=10.0) == [urgent, quick]


def test_however_long_a_namespace_waits_another_has_every_second_turn(make: MakeRequest) -> None:
    many = [make(100, at=0.1 * i, namespace="a") for i in range(4)]
    few = [make(100, at=9.0 + i, namespace="b") for i in range(2)]
    order = scheduler_of([]).picks([*many, *few], now=10.0)
    assert "".join(request.namespace for request in order) == "ababaa"
    assert [request for request in order if request.namespace == "a"] == many


def prefilled(scheduler: Scheduler, now: float) -> dict[str, int]:
    """One step: the rows of prompts that it ran, by namespace."""
    ran: dict[str, int] = {}
    for chunk in scheduler.plan(now):
        request = chunk.request
        assert request is not None
        if chunk.sequence.num_left > 1:
            ran[request.namespace] = ran.get(request.namespace, 0) + chunk.num_rows
        chunk.sequence.num_computed += chunk.num_rows
        if chunk.finishes:
            scheduler.move(request, State.FINISHED)
    return ran


def test_a_short_prompt_of_another_namespace_ends_in_the_next_step_which_is_a_short_one(make: MakeRequest) -> None:
    many = [make(9000, at=0.1 * i, namespace="a", state=State.RUNNING) for i in range(8)]
    scheduler = scheduler_of(many)
    for step in range(5):
        assert prefilled(scheduler, now=10.0 + step) == {"a": 240}
        small = make(60, at=10.5 + step, namespace="b", state=State.RUNNING)
        scheduler.move(small, State.RUNNING)
        assert prefilled(scheduler, now=10.7 + step) == {"b": 60, "a": 32}
        assert small.state is State.FINISHED


def test_a_prompt_that_is_known_ends_in_a_short_step(make: MakeRequest) -> None:
    def planned(*more: Request, row_s: float = 0.001) -> list[int]:
        known = make(60, state=State.RUNNING, num_computed=59)
        long = make(9000, state=State.RUNNING)
        costs = FixedCosts(base_s=0.0, row_s=row_s, row_context_s=0.0)
        return rows(scheduler_of([known, long, *more], costs).plan(now=0.0))

    assert planned() == [1, 96], "0.4 of 0.25 s"
    assert planned(make(120, state=State.RUNNING)) == [1, 120], "what ends its prompt, too, has all the time"
    assert planned(row_s=0.1) == [1, MIN_CHUNK], "the long one moves all the same"
    assert rows(scheduler_of([decoding(make, 60), make(9000, state=State.RUNNING)]).plan(now=0.0)) == [1, 240]


def test_prompts_get_a_part_of_the_bound_while_another_namespace_may_ask(make: MakeRequest) -> None:
    def planned(num_decodes: int, now: float) -> int:
        running = [*(decoding(make, 60) for _ in range(num_decodes)), make(9000, state=State.RUNNING)]
        scheduler = scheduler_of([*running, make(9000)])
        scheduler.add(asked := make(60, at=1.0, namespace="b"))
        scheduler.move(asked, State.FINISHED)
        return rows(scheduler.plan(now))[-1]

    assert planned(0, now=RECENT_S) == 96, "0.4 of 0.25 s"
    assert planned(50, now=RECENT_S) == 96, "as much next to decodes"
    assert planned(200, now=RECENT_S) == 48, "the bound is one for both"
    assert planned(0, now=1.0 + RECENT_S) == 240, "nobody else asks any more"


def test_a_first_token_of_who_decodes_nothing_waits_for_long_decodes_in_every_second_step(make: MakeRequest) -> None:
    def planned(num_decodes: int, *more: Request) -> list[list[int]]:
        scheduler = scheduler_of([*(decoding(make, 60) for _ in range(num_decodes)), *more])
        return [rows(scheduler.plan(now=0.0)) for _ in range(3)]

    def asked(num_prompt: int, *, num_computed: int = 0) -> Request:
        return make(num_prompt, namespace="b", state=State.RUNNING, num_computed=num_computed)

    many = [1] * 150
    assert planned(150, asked(60)) == [[60], [*many, 60], [60]]
    assert planned(150, asked(60, num_computed=59)) == [[1], [*many, 1], [1]], "a prompt that is known"
    assert planned(150, make(9000, state=State.RUNNING), asked(60))[0] == [60], "nor for other prompts"
    assert planned(150, asked(60), asked(9000))[0] == [60, 32], "but its own is there"
    assert planned(50, asked(60))[0] == [*[1] * 50, 60], "they are short"
    assert planned(150, asked(9000))[0] == [*many, 96], "nothing ends"
    assert planned(150, make(60, state=State.RUNNING))[0] == [*many, 60], "its own streams go on"


def test_who_comes_and_goes_gets_no_more_rows_than_who_stays(make: MakeRequest) -> None:
    stays = [make(100_000, namespace=name, state=State.RUNNING) for name in "ab"]
    scheduler = scheduler_of(stays)
    total = dict.fromkeys("abc", 0)
    for step in range(40):
        if not any(request.namespace == "c" for request in scheduler.running) and step % 2:
            scheduler.move(make(240, namespace="c"), State.RUNNING)
        for name, count in prefilled(scheduler, now=float(step)).items():
            total[name] += count
    assert max(total.values()) - min(total.values()) <= 240, "one step, that one of them is ahead"


def test_nobody_waits_longer_than_two_seconds_for_others_to_go_first(make: MakeRequest) -> None:
    scheduler = Scheduler(EngineSettings(max_running=1), ROW_MS, max_chunk_tokens=512)
    unlucky, now, started = make(900), 0.0, 0
    scheduler.add(unlucky)
    while unlucky.state is State.WAITING:
        assert now < 10 * LONGEST_WAIT_S, "it starves"
        while len(scheduler.waiting) < 4:  # so the fourth pick, the oldest's, never comes first
            scheduler.add(make(100, at=now, reuse=99, num_computed=99))
        scheduler.move(scheduler.picks(scheduler.waiting, now)[0], State.RUNNING)
        started += 1
        assert not scheduler.has_room()
        (chunk,) = scheduler.plan(now)
        now += 0.1  # what a turn of the others takes
        if chunk.request is not None and chunk.request is not unlucky:
            scheduler.move(chunk.request, State.FINISHED)
    assert started > 15, "others went first, so it is the wait that ended it"
    assert now <= LONGEST_WAIT_S + 0.1 + 0.15


@given(
    starts=st.lists(st.integers(1, 3000), max_size=12),
    prefilling=st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 900)), max_size=6),
    waiting=st.booleans(),
    base_s=st.floats(0.0, 0.2),
    row_s=st.floats(1e-5, 0.05),
    row_context_s=st.floats(0.0, 1e-6),
    largest=st.integers(32, 600),
)
def test_a_step_holds_every_decode_and_what_fits_beside_them(
    make: MakeRequest,
    starts: list[int],
    prefilling: list[tuple[int, int]],
    waiting: bool,
    base_s: float,
    row_s: float,
    row_context_s: float,
    largest: int,
) -> None:
    decodes = [decoding(make, start) for start in starts]
    prefills = [make(start + left, state=State.RUNNING, num_computed=start) for start, left in prefilling]
    others = [make(10)] if waiting else []
    costs = FixedCosts(base_s=base_s, row_s=row_s, row_context_s=row_context_s)
    scheduler = scheduler_of([*prefills, *decodes, *others], costs, largest=largest)
    chunks = scheduler.plan(now=1.0)

    assert [(chunk.request, chunk.num_rows) for chunk in chunks[: len(decodes)]] == [(one, 1) for one in decodes]
    beside = chunks[len(decodes) :]
    assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
    assert bool(beside) == bool(prefills), "a prefill moves in every step"
    for chunk in chunks:
        assert chunk.start == chunk.sequence.num_computed
        assert chunk.finishes or chunk.num_rows % MIN_CHUNK == 0 < chunk.num_rows
        assert chunk.start + chunk.num_rows <= chunk.sequence.num_tokens
    assert sum(rows(chunks)) <= largest

    alone = len(scheduler.running) == 1 and not waiting
    bound = 1.0 if alone else 0.25
    contexts = sum(chunk.num_rows * (chunk.start + chunk.num_rows / 2) for chunk in chunks)
    seconds = costs.predict(rows=sum(rows(chunks)), row_contexts=int(contexts))
    if scheduler.num_stall_misses:
        assert scheduler.num_stall_misses == 1
        assert len(beside) == 1 and beside[0].num_rows <= MIN_CHUNK, "a step that is late anyway does the least"
        assert seconds > 0.99 * bound
    elif beside:
        assert seconds <= 1.001 * bound


@pytest.mark.parametrize(("left", "run", "misses"), [(400, 16, 1), (16, 16, 1), (5, 5, 1), (2, 2, 0)])
def test_where_the_least_chunk_misses_the_bound_it_is_run_and_counted(
    make: MakeRequest, left: int, run: int, misses: int
) -> None:
    prefill = make(100 + left, state=State.RUNNING, num_computed=100)
    scheduler = scheduler_of([prefill, make(10)], FixedCosts(base_s=0.0, row_s=0.1, row_context_s=0.0))
    assert rows(scheduler.plan(now=0.0)) == [run]
    assert scheduler.num_stall_misses == misses


def test_a_chunk_has_no_more_than_its_most_tokens_beside_the_decodes(make: MakeRequest) -> None:
    decodes = [decoding(make, 50) for _ in range(5)]
    prefills = [make(900, state=State.RUNNING, at=float(i)) for i in range(2)]
    assert rows(scheduler_of(prefills[:1], largest=64).plan(now=0.0)) == [64]
    assert rows(scheduler_of([*decodes, *prefills], largest=64).plan(now=0.0)) == [1, 1, 1, 1, 1, 48]
    assert rows(scheduler_of(decodes, largest=3).plan(now=0.0)) == [1, 1, 1, 1, 1]


def test_a_prefill_moves_beside_more_decodes_than_leave_room_for_a_chunk(make: MakeRequest) -> None:
    decodes = [decoding(make, 50) for _ in range(40)]
    prefills = [make(100, state=State.RUNNING, at=float(i)) for i in range(2)]
    assert rows(scheduler_of([*decodes, *prefills], largest=48).plan(now=0.0)) == [*[1] * 40, MIN_CHUNK]


def test_what_one_prefill_leaves_of_the_bound_others_get_whole_or_up_to_a_part_of_it(make: MakeRequest) -> None:
    def planned(*lengths: int) -> list[int]:
        prefills = [make(length, state=State.RUNNING, at=float(i)) for i, length in enumerate(lengths)]
        return rows(scheduler_of(prefills).plan(now=0.0))

    assert planned(100, 100, 45, 1000) == [45, 100, 100], "three first tokens, and nothing that makes them later"
    assert planned(30, 1000) == [30, 64], "0.4 of 0.25 s"
    assert planned(1000, 1000) == [240]


def test_the_long_bound_is_for_who_has_the_engine_to_itself(make: MakeRequest) -> None:
    def planned(*others: Request) -> int:
        return rows(scheduler_of([make(2000, state=State.RUNNING), *others]).plan(now=0.0))[-1]

    assert planned() == 992
    assert planned(make(10)) == 240, "one waits"
    assert planned(make(10, state=State.LOADING)) == 240, "one loads"
    assert planned(decoding(make, 10)) == 240, "one decodes"


def test_a_preempted_request_is_queued_before_the_others_and_the_youngest_gives_way(make: MakeRequest) -> None:
    waiting = [make(10, at=float(i)) for i in range(3)]
    scheduler = scheduler_of(waiting)
    assert scheduler.youngest(waiting) is waiting[2]
    preempted = make(10, at=9.0)
    preempted.sequence.num_preemptions = 1
    scheduler.move(preempted, State.WAITING)
    assert scheduler.waiting == [preempted, *waiting]


def picks_one_by_one(requests: list[Request]) -> list[Request]:
    """The order inside one namespace as it is defined: the least to compute of all that are left, or the oldest."""
    left, order = list(requests), []
    while left:
        oldest = len(order) % 4 == 3
        order.append(
            left[0] if oldest else min(left, key=lambda request: request.sequence.num_tokens - request.match.num_tokens)
        )
        left.remove(order[-1])
    return order


class CountedFacts:
    """What a request's match found, noting each time that somebody asks."""

    def __init__(self, num_tokens: int, looked_at: list[int]) -> None:
        self._num_tokens, self._looked_at = num_tokens, looked_at

    @property
    def num_tokens(self) -> int:
        self._looked_at.append(self._num_tokens)
        return self._num_tokens


def test_a_thousand_that_wait_are_looked_at_once_each(make: MakeRequest) -> None:
    requests = [make(64, at=0.001 * i, reuse=7 * i % 60) for i in range(1000)]
    expected, looked_at = picks_one_by_one(requests), list[int]()
    for request in requests:
        request.match = CountedFacts(request.match.num_tokens, looked_at)  # type: ignore[assignment]
    assert scheduler_of([]).picks(requests, now=1.0) == expected
    assert len(looked_at) == 1000


@pytest.mark.parametrize("num_decodes", [0, 1, 31])
def test_where_time_does_not_depend_on_rows_the_chunk_is_the_largest_and_again_the_bound_once_it_does(
    make: MakeRequest, num_decodes: int
) -> None:
    decodes = [decoding(make, 50) for _ in range(num_decodes)]
    prefill, waits = make(1_000_000, state=State.RUNNING), make(10)
    scheduler = scheduler_of([*decodes, prefill, waits], StepCosts(), largest=512)

    def step(seconds: Callable[[int, int], float]) -> tuple[int, float]:
        chunks = scheduler.plan(now=0.0)
        count, contexts = sum(rows(chunks)), sum(chunk.num_rows * chunk.start for chunk in chunks)
        took = seconds(count, contexts)
        scheduler.costs.observe(rows=count, row_contexts=contexts, seconds=took)
        prefill.sequence.num_computed = (prefill.sequence.num_computed + chunks[-1].num_rows) % 3000
        return chunks[-1].num_rows, took

    def machine(count: int, contexts: int) -> float:
        return 0.02 + 0.0008 * count + 1e-7 * contexts

    for _ in range(100):
        step(machine)
    stalled = [step(lambda *_: 2.0)[0] for _ in range(400)]
    assert sum(stalled) / 400 >= 128, "16 rows in each step, as before, are 8 tokens a second"
    assert sum(count >= 480 for count in stalled[-80:]) >= 60
    recovered = [step(machine)[1] for _ in range(40)]
    assert sum(took > 0.3 for took in recovered) <= 8, "one step in eight shows what a row costs"
    assert all(took <= 0.3 for took in recovered[8:])


@pytest.mark.parametrize("ms", [16, 40, 96, 150, 250])
def test_chunks_end_at_multiples(make: MakeRequest, ms: int) -> None:
    """However many rows fit: at least up to the next multiple, and all that are left at the end."""
    settings = EngineSettings(max_stall_s=ms / 1000 / ALONE)
    scheduler = Scheduler(settings, ROW_MS, max_chunk_tokens=200, chunk_multiple=64)
    running = make(300, num_computed=64, state=State.RUNNING)
    scheduler.running.append(running)
    ends = []
    while running.sequence.num_computed < 300:
        (chunk,) = scheduler.plan(0.0)
        running.sequence.num_computed = chunk.end
        ends.append(chunk.end)
    assert ends[-1] == 300 and all(end % 64 == 0 for end in ends[:-1])
    assert ends[0] == 64 + max(64, min(ms, 200) // 64 * 64)


def test_a_second_prompt_waits_until_a_multiple_fits(make: MakeRequest) -> None:
    scheduler = Scheduler(EngineSettings(max_stall_s=0.1), ROW_MS, max_chunk_tokens=512, chunk_multiple=64)
    for _ in range(2):
        scheduler.running.append(make(300, state=State.RUNNING))
    assert [chunk.num_rows for chunk in scheduler.plan(0.0)] == [64]


def seeing(request: Request, *places: tuple[int, int]) -> Request:
    """The request with pictures whose rows see each other at these positions and ends."""
    file = base64.b64encode(file_of(drawn(1, 9, 6))).decode()
    spans = (PictureSpan(Picture.read(file, ""), first, 0, end - first, True) for first, end in places)
    request.sequence.pictures = PromptPictures(request.sequence.prompt_ids, tuple(spans))
    return request


@pytest.mark.parametrize("ms", [16, 40, 96, 150, 250])
@pytest.mark.parametrize("start", [0, 60, 130])
def test_no_chunk_ends_among_rows_that_see_each_other(make: MakeRequest, ms: int, start: int) -> None:
    """Before them, or with all of them where nothing else would be computed; idle work as well."""
    places = ((50, 114), (120, 184), (184, 248))
    for plan in ("plan", "alone"):
        scheduler = Scheduler(EngineSettings(max_stall_s=ms / 1000 / ALONE), ROW_MS, max_chunk_tokens=64)
        running = seeing(make(300, num_computed=start, state=State.RUNNING), *places)
        scheduler.running.append(running)
        sequence, ends = running.sequence, []
        while sequence.num_computed < 300:
            (chunk,) = scheduler.plan(0.0) if plan == "plan" else [scheduler.chunk_alone(sequence)]
            assert chunk.num_rows > 0
            sequence.num_computed = chunk.end
            ends.append(chunk.end)
        assert ends[-1] == 300 and not [end for end in ends for first, until in places if first < end < until]


def test_a_second_prompt_waits_until_its_picture_fits(make: MakeRequest) -> None:
    scheduler = Scheduler(EngineSettings(max_stall_s=0.1), ROW_MS, max_chunk_tokens=64)
    one, other = (seeing(make(100, at=at, state=State.RUNNING), (10, 74)) for at in (0.0, 1.0))
    scheduler.running += [one, other]
    assert rows(scheduler.plan(0.0)) == [10, 10]
    one.sequence.num_computed = other.sequence.num_computed = 10
    assert rows(scheduler.plan(0.0)) == [64]
