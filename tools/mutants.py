"""Introduce plausible defects into the code and check that the tests catch them: `make mutants`.

    python tools/mutants.py                # all, two at a time
    python tools/mutants.py --only rope    # those with the word in their name

Each mutant is a few exact replacements in a copy of the tree and the narrowest tests that must fail on it. First the
same tests run on an unchanged copy and must pass, else failures would prove nothing. Exit code 1 if a mutant survives,
if the text it replaces does not occur exactly once, or if its tests do not run. The working tree is never touched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
COPIED = (
    "src",
    "pocket",
    "tests",
    "tools",
    "pyproject.toml",
    "ARCHITECTURE.md",
    "README.md",
    "Makefile",
    "constraints.txt",
)
TIMEOUT_S = 280
PATHS, LOW = "tests/exactness/test_paths.py", "tests/exactness/test_low_precision.py"
ALONE = "tests/exactness/test_against_transformers.py"
CRASHES = "tests/store/test_crash.py::test_saved_turns_survive_a_crash_at_any_moment"
IDLE = "tests/engine/test_background.py"
FORESEEN = "tests/engine/test_anticipation.py"
PLACES = "tests/engine/test_places.py"
RETENTION, TRACES = "tests/store/test_retention.py", "tests/store/test_purge_traces.py"
Verdict = Literal["killed", "SURVIVED", "BROKEN"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of `old`, which must occur in `file` exactly once."""

    file: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """Change the file below `tree`; ValueError if `old` does not occur exactly once."""
        path = tree / "src" / "rekindle" / self.file
        text = path.read_text("utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: found {text.count(self.old)} times: {self.old.strip()!r}")
        path.write_text(text.replace(self.old, self.new), "utf-8")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect, and the tests (pytest node ids) of which at least one must fail."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a mutant; `detail` names the first failed test, or the problem."""

    name: str
    verdict: Verdict
    seconds: float
    detail: str


def one(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Build a mutant of one replacement."""
    return Mutant(name, (Edit(file, old, new),), tests)


MUTANTS = (
    one(
        "a namespace holds all slots however many others wait",
        "engine/core/shares.py",
        "        return max(1, self._scheduler.max_running // max(1, self._num_namespaces))\n",
        "        return self._scheduler.max_running\n",
        f"{PLACES}::test_places_are_divided_by_who_wants_them",
    ),
    one(
        "a preempted request is preempted again before it made progress",
        "engine/core/shares.py",
        "    return not sequence.num_preemptions or sequence.num_gained",
        "    return True or sequence.num_gained",
        f"{PLACES}::test_who_was_preempted_gets_ahead_before_it_is_again",
    ),
    one(
        "no turns if namespaces outnumber the slots",
        "engine/core/shares.py",
        "    return request.sequence.num_gained >= request.sequence.block_tokens\n",
        "    return False\n",
        f"{PLACES}::test_namespaces_that_outnumber_the_places_take_turns_of_a_block",
    ),
    one(
        "long prompts of one namespace before short ones of another",
        "engine/core/scheduler.py",
        "self._picks(prefilling, now, self._rows.of)",
        "self.picks(prefilling, now)",
        "tests/engine/test_scheduler.py::test_a_short_prompt_waits_for_one_step_of_another_namespace_that_prefills_for_long",
    ),
    one(
        "a late step always does the least",
        "engine/core/scheduler.py",
        "        if late <= bound or self.num_stall_misses % PROBE_EVERY == 1:\n",
        "        if True:\n",
        "tests/engine/test_scheduler.py::"
        "test_where_time_does_not_depend_on_rows_the_chunk_is_the_largest_and_again_the_bound_once_it_does[1]",
    ),
    one(
        "position off by one after a cut",
        "model/batch.py",
        "np.arange(step.start, step.start + step.num_rows)",
        "np.arange(step.start, step.start + step.num_rows) + (step.start > 0)",
        f"{PATHS}::test_prefill_in_chunks_equals_one_piece[llama-native]",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "position off by one in the mask",
        "kv/plan.py",
        "hidden = context > positions\n",
        "hidden = context > positions + 1\n",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "K and V swapped",
        "kv/decode.py",
        "        return keys, values\n",
        "        return values, keys\n",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "halves of V swapped",
        "kv/decode.py",
        "        return keys, values\n",
        "        return keys, values.roll(values.shape[-1] // 2, -1)\n",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "first two blocks read in the wrong order",
        "kv/plan.py",
        "        per_piece = MAX_SCORES",
        "        table = [*table[1::-1], *table[2:]] if len(table) > 1 else table\n        per_piece = MAX_SCORES",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "blocks restored in the wrong order",
        "engine/blocks/loads.py",
        "self._arena.write(targets[index], part, payload)",
        "self._arena.write(targets[-1 - index], part, payload)",
        f"{PATHS}::test_warm_after_reopening[llama-q4h]",
    ),
    one(
        "window ignored",
        "kv/plan.py",
        "            hidden |= context <= positions - shape.window\n",
        "            hidden |= context < 0\n",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-gemma3]",
    ),
    one(
        "softcap ignored",
        "model/adapter.py",
        "        softcap=float(softcap) if softcap else None,\n",
        "        softcap=None,\n",
        "tests/model/test_logits.py::test_float64_native_equals_the_model[gemma2]",
    ),
    one(
        "RoPE base changed",
        "model/load.py",
        "    config = read_config(source.fetch_description())\n",
        "    config = read_config(source.fetch_description())\n"
        '    config.rope_parameters["rope_theta"] = config.rope_parameters["rope_theta"] * 2\n',
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "tail not copied on write",
        "cache/blocks/table.py",
        "must_copy = last < len(self.blocks) and not self.pool.is_private(self.blocks[last])",
        "must_copy = False",
        f"{PATHS}::test_forks_share_blocks_and_write_their_own[llama-q4h]",
    ),
    one(
        "copied tail left empty",
        "engine/blocks/prefix_cache.py",
        "        for copy in copies:\n",
        "        for copy in copies[:0]:\n",
        f"{PATHS}::test_forks_share_blocks_and_write_their_own[llama-q4h]",
    ),
    Mutant(
        "block of another fingerprint accepted",
        (
            Edit("cache/blocks/hashing.py", "for field in (fingerprint, ", 'for field in (b"", '),
            Edit("store/directory.py", "fingerprint.hex()", '"any"'),
        ),
        ("tests/exactness/test_identity.py::test_kv_of_another_model_is_not_used[weights]",),
    ),
    one(
        "block of another format accepted",
        "model/load.py",
        "fingerprint=fingerprint(identity, layout)",
        "fingerprint=identity",
        "tests/exactness/test_identity.py::test_kv_of_another_model_is_not_used[formats]",
    ),
    one(
        "stored id replaced by re-tokenised id",
        "engine/intake/prompt_ids.py",
        "ids = np.concatenate([branch.ids[: match.num_tokens], rest])",
        "ids = encoder.encode(rendered)",
        "tests/exactness/test_identity.py::test_sampled_ids_are_kept",
    ),
    one(
        "second BOS added when resuming",
        "text/prompt.py",
        "        return self._encode_key(prompt.key[resume_byte:], most=most)\n",
        "        rest = self._encode_key(prompt.key[resume_byte:], most=most)\n"
        "        return np.concatenate([np.array(self._leading, dtype=np.uint32), rest])\n",
        "tests/exactness/test_identity.py::test_a_resumed_prompt_has_one_bos",
    ),
    one(
        "second BOS added to a rendered one",
        "text/prompt.py",
        "        if pieces[: len(leading)] == leading:\n",
        "        if pieces is None:\n",
        "tests/text/test_prompt.py::test_completions_get_leading_tokens_once[bos]",
    ),
    one(
        "rows not padded",
        "kv/plan.py",
        "ROW_MULTIPLE = 4",
        "ROW_MULTIPLE = 1",
        f"{LOW}::test_bf16_logits_of_wide_layers_are_the_same_in_every_cut[q4h]",
    ),
    one(
        "context not padded to whole tiles",
        "kv/plan.py",
        "num_context = -(-rows.until // TILE) * TILE - first",
        "num_context = -(-rows.until // 64) * 64 - first",
        f"{LOW}::test_bytes_are_the_same_on_every_path[llama-q4h-bf16]",
    ),
    one("shards never synced", "store/writer.py", "        self._shards.sync()\n", "", CRASHES),
    Mutant(
        "committed before it is synced",
        (
            Edit("store/writer.py", "        self._shards.sync()\n", ""),
            Edit(
                "store/writer.py",
                "        with self._lock:\n            self._bad -= ",
                "        self._shards.sync()\n        with self._lock:\n            self._bad -= ",
            ),
        ),
        (CRASHES,),
    ),
    one(
        "names of new shards not synced",
        "store/shards.py",
        "            self._fs.sync_directory(self._directory)\n",
        "",
        CRASHES,
    ),
    one(
        "holes punched before the commit",
        "store/writer.py",
        "            self._ledger.touch(touched, now)\n        with self._lock:",
        "            self._ledger.touch(touched, now)\n            self.room.give_back(freed)\n"
        "        with self._lock:",
        CRASHES,
    ),
    one(
        "reported as saved before it is",
        "store/writer.py",
        "            self._ledger.move(saved)\n",
        "            self._ledger.move(saved)\n            for turn in saved:\n"
        "                self._on_saved(turn.namespace, turn.agent, turn.branch, turn.num_tokens)\n",
        CRASHES,
    ),
    one(
        "a parent evicted before its child",
        "store/retention.py",
        "order.add(block_hash, None if parent == root else parent, group",
        "order.add(block_hash, None, group",
        f"{RETENTION}::test_a_shared_prefix_leaves_last",
        f"{RETENTION}::test_a_branch_is_shortened_from_its_end_and_that_is_told",
    ),
    one(
        "a namespace that takes all of hot memory",
        "engine/blocks/prefix_cache.py",
        "        self._bound(sequence.root)\n",
        "",
        "tests/engine/test_evicting.py::test_a_namespace_beyond_its_share_gives_way_before_others",
    ),
    one(
        "a policy that is parsed and ignored",
        "engine/factory.py",
        ", policy=settings.eviction)",
        ")",
        "tests/engine/test_evicting.py::test_the_policy_says_who_leaves_memory_first",
    ),
    one(
        "a pinned chain evicted",
        "store/retention.py",
        "        if pinned_until >= now:\n",
        "        if pinned_until == now:\n",
        f"{RETENTION}::test_a_pin_holds_the_whole_chain",
    ),
    one(
        "parents of the batch not held",
        "store/retention.py",
        "        elif block_hash in self._held:\n",
        "        elif block_hash == now:\n",
        f"{RETENTION}::test_a_batch_longer_than_the_budget_keeps_its_own_beginning",
        f"{RETENTION}::test_a_branch_that_fills_the_disk_is_not_shortened_for_its_own_next_turn",
    ),
    Mutant(
        "a clock that went backwards trusted",
        (
            Edit("store/retention.py", "return min(max(0.0, use), now)\n", "return max(0.0, use)\n"),
            Edit("store/ledger.py", "max(0.0, now - JUST_BEFORE_S)", "row[6]"),
        ),
        (f"{RETENTION}::test_a_use_in_the_future_makes_nobody_immortal", "tests/store/test_clock.py"),
    ),
    Mutant(
        "purged slots not zeroed",
        (
            Edit("store/purging.py", "        parts.shards.punch(freed)\n", ""),
            Edit("store/purging.py", "    return parts.shards.is_zero(*slot, buffer)\n", "    return True\n"),
            Edit("store/room.py", "            self._shards.punch(freed)\n", "            pass\n"),
        ),
        (TRACES,),
    ),
    one(
        "a panic reaches the intake's thread",
        "engine/intake/intake.py",
        "        except BaseException as error:\n",
        "        except Exception as error:\n",
        "tests/engine/test_borders.py::test_what_fails_on_the_intake_fails_for_its_caller_only[Panic]",
    ),
    one(
        "requests after the engine's death wait forever",
        "engine/core/loop.py",
        "            self._refuse_rest(self.worker.death.error())\n",
        "            pass\n",
        "tests/engine/test_dying.py::test_a_failing_inbox_ends_the_engine",
    ),
    one(
        "blocks left in the staging buffer when the writer dies",
        "store/writer.py",
        "                elif isinstance(item, WaitingBlock):\n                    self._free_staged([item])\n",
        "",
        "tests/engine/test_dying.py::test_orders_fail_when_the_writer_dies_and_the_engine_goes_on",
    ),
    one(
        "log of the index not emptied in a purge",
        "store/purging.py",
        "        parts.index.truncate_wal()\n",
        "",
        TRACES,
    ),
    one(
        "list of agents ignores the namespace",
        "engine/api.py",
        "book.agents(namespace)",
        "book.agents(None)",
        "tests/hostile/test_namespaces.py::test_no_answer_to_the_other_tenant_holds_a_word",
        "tests/hostile/test_namespaces.py::test_another_tenants_agent_does_not_exist",
    ),
    one(
        "presence counted like frequency",
        "model/adjustments.py",
        ".to(torch.float64) + params.presence_penalty",
        ".to(torch.float64) * (1 + params.presence_penalty)",
        "tests/model/test_adjustments.py",
    ),
    one(
        "repetition penalty on the reply alone",
        "model/adjustments.py",
        "np.concatenate([history.prompt, history.reply])",
        "history.reply",
        "tests/model/test_adjustments.py",
    ),
    one(
        "idle work continues alongside a request",
        "engine/core/core.py",
        "            self.background.yield_to_requests()\n",
        "            pass\n",
        f"{IDLE}::test_it_gives_way_within_a_step_and_goes_on_later",
    ),
    one(
        "idle work reads everything found on disk",
        "engine/blocks/prefix_cache.py",
        "return found if len(found) <= room // 2 else None",
        "return found",
        f"{IDLE}::test_reading_for_it_takes_no_more_than_half_either",
    ),
    one(
        "the anticipated prompt is encoded afresh",
        "engine/intake/anticipation.py",
        "ids, _ = prompt_ids(self._encoder, match, rendered)",
        "ids = self._encoder.encode(rendered)",
        f"{FORESEEN}::test_what_is_foreseen_is_found_behind_a_reply_whose_ids_are_no_encoding",
    ),
    one(
        "next prompts are anticipated while others are served",
        "engine/core/loop.py",
        "bool(self._core.scheduler.everybody())",
        "not self._core.scheduler",
        f"{FORESEEN}::test_nothing_is_foreseen_while_the_engine_is_busy",
    ),
    one(
        "parent of another namespace",
        "matching/matcher.py",
        "self._agents.get((namespace, parent), {})",
        "next((held for (_, agent), held in self._agents.items() if agent == parent), {})",
        "tests/matching/test_matcher.py::test_an_agent_without_branches_goes_on_from_its_parents_as_they_were_sampled",
    ),
    one(
        "attribution line removed from any message",
        "text/normalise.py",
        'in kinds and message.role == "system" and',
        "in kinds and",
        "tests/text/test_normalise.py",
    ),
    one(
        "cost of an attribution line counted when it did not change",
        "engine/request.py",
        " if self.is_new else 0",
        "",
        "tests/engine/test_taken_out.py::test_a_line_that_changes_costs_nothing_and_says_what_it_would_have",
    ),
    one(
        "cached breakpoints survive a purge",
        "engine/memory/agent_commands.py",
        "marked = tuple(Purge(namespace, branch.agent) for branch in kept)",
        "marked: tuple[Purge, ...] = ()",
        "tests/engine/test_keeping.py::test_a_purge_takes_them_too",
    ),
    one(
        "an unfinished upload holds its connection",
        "server/connections.py",
        "return self._has_begun and not self.cycle.more_body and not self.cycle.response_complete",
        "return self._has_begun and not self.cycle.response_complete",
        "tests/server/test_connections.py::test_connections_without_a_whole_request_give_way_to_new_ones",
    ),
    one(
        "two objects of one session in memory",
        "agents/sessions/loaded.py",
        "self._live.setdefault((namespace, id), read)",
        "self._live[namespace, id] = read",
        "tests/agents/sessions/test_loaded.py::test_what_is_not_used_leaves_memory_and_what_is_busy_stays",
    ),
    one(
        "one tenant's breakpoints displace another's",
        "engine/memory/breakpoints.py",
        "for key in list(self._names) if key[0] == turn.namespace for branch",
        "for key in list(self._names) for branch",
        "tests/engine/test_keeping.py::test_what_one_tenant_marks_ends_nothing_of_anothers",
    ),
    one(
        "an answer does not wait for its response",
        "server/responses/routes.py",
        "    await asyncio.wait([written], timeout=KEEP_S)\n",
        "    return None\n",
        "tests/server/test_responses_full.py::test_the_end_of_an_answer_waits_until_the_response_is_durable[whole]",
    ),
    one(
        "blocks that cannot be saved are offloaded",
        "engine/agent_admin.py",
        "if parts.store is not None and (unsaved or not is_flushed):",
        "if parts.store is not None and not is_flushed:",
        "tests/engine/test_refusing_disk.py::test_offloading_what_cannot_be_saved_drops_nothing",
    ),
    one(
        "a fork that the disk refuses stays registered",
        "engine/memory/agent_commands.py",
        "                self._memory.book.remove(now)\n",
        "",
        "tests/engine/test_refusing_disk.py::test_a_change_that_the_disk_refuses_changes_nothing[fork]",
    ),
    one(
        "tokens that were read counted as created, too",
        "server/anthropic/usage.py",
        "max(0, max(before, default=0) - reused)",
        "max(before, default=0)",
        "tests/server/test_anthropic.py::test_marked_prefixes_are_created_once_and_read_then",
    ),
    one(
        "rows of the index are trusted unchecked",
        "store/row_macs.py",
        "            return bool(self.of(row) == row[self._num_columns])\n",
        "            return bool(self.of(row))\n",
        "tests/store/test_row_damage.py::test_a_bit_of_the_namespace_gives_no_agent_to_another_tenant",
    ),
    one(
        "stored responses are trusted unchecked",
        "server/responses/records.py",
        "if not (self._macs.response.holds(row) and self._macs.content.holds((row[0], *row[6:]))):",
        "if False:",
        "tests/server/test_responses_damage.py::test_a_changed_column_gives_nobody_what_is_not_theirs[content]",
    ),
    one(
        "a prompt of any length is tokenised",
        "text/length.py",
        "        if num_bytes > self.max_bytes:\n",
        "        if False:\n",
        "tests/text/test_length.py::test_a_text_of_as_many_bytes_as_may_fit_is_taken_and_one_more_is_not",
    ),
    one(
        "a purge does not look at the files",
        "store/purging.py",
        "parts.ledger.has_left(forgotten) or _in_files(parts, forgotten)",
        "None",
        "tests/store/test_purging.py::test_a_purge_that_left_something_in_the_index_says_so",
    ),
    one(
        "any host without a key",
        "server/gate/guard.py",
        "access is not None and access is not self._keys.without",
        "access is not None",
        "tests/server/test_guard.py::test_rebound_names_are_refused",
    ),
    one(
        "a client that left looks half-closed",
        "server/connections.py",
        "_probe(FIRST_PROBE_S)\n        return True",
        "_stop_probing()\n        return True",
        "tests/server/test_half_closed.py::test_a_client_that_left_ends_its_request",
    ),
)


def copy_tree(target: Path) -> None:
    """Copy what the tests need, including the bundled model's weights."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        elif source.is_file():
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run pytest on the code below `tree` only; return its exit code and output."""
    paths = (tree / "src", tree / "pocket" / "src", tree)
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *dict.fromkeys(tests)]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"not finished after {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def first_red(output: str) -> str:
    """Return the first failed or broken test in pytest's summary."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1].removeprefix("tests/") if found else output.strip()[-300:]


def try_mutant(mutant: Mutant) -> Outcome:
    """Apply a mutant to a copy and run its tests there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rekindle-mutant-") as name:
        tree = Path(name)
        copy_tree(tree)
        try:
            for edit in mutant.edits:
                edit.apply(tree)
        except ValueError as error:
            return Outcome(mutant.name, "BROKEN", time.monotonic() - began, str(error))
        code, output = run_tests(tree, mutant.tests)
    verdicts: dict[int, Verdict] = {0: "SURVIVED", 1: "killed"}
    verdict = verdicts.get(code, "BROKEN")
    return Outcome(mutant.name, verdict, time.monotonic() - began, first_red(output) if code else "")


def unchanged_is_green(mutants: Sequence[Mutant]) -> bool:
    """Run every test named by a mutant on an unchanged copy; return whether all pass."""
    with tempfile.TemporaryDirectory(prefix="rekindle-mutant-") as name:
        copy_tree(Path(name))
        code, output = run_tests(Path(name), [test for mutant in mutants for test in mutant.tests])
    if code:
        print(output[-3000:])
        print(f"the unchanged code fails its tests (pytest exit code {code}): mutants cannot be judged")
    return code == 0


def main() -> int:
    """Parse arguments, run the mutants, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run mutants with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if given.only.lower() in mutant.name.lower()]
    if not mutants:
        parser.error(f"no mutant has {given.only!r} in its name")
    began = time.monotonic()
    if not unchanged_is_green(mutants):
        return 1
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = []
        for outcome in pool.map(try_mutant, mutants):
            outcomes.append(outcome)
            print(f"{outcome.verdict:<9}{outcome.seconds:5.0f} s  {outcome.name:<44}{outcome.detail}", flush=True)
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} mutants killed in {time.monotonic() - began:.0f} s")
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
