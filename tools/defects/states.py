"""Defects in snapshots of recurrent state."""

from __future__ import annotations

from tools.defects.mutant import one

RECURRENT = "tests/model/test_recurrent.py"
PIECES = f"{RECURRENT}::test_a_prompt_in_pieces_of_blocks_gives_the_bits_of_one_piece"
INSIDE = f"{RECURRENT}::test_states_inside_a_chunk_are_those_at_the_ends_of_their_blocks"
TOGETHER = f"{RECURRENT}::test_streams_that_decode_together_give_the_bits_of_each_alone"
SNAPSHOTS = "tests/exactness/test_snapshots.py"
EXTENDS = f"{SNAPSHOTS}::test_what_extends_a_turn_computes_its_new_tokens_and_the_last_block"
MACHINE = "tests/cache/test_windows.py::TestStateMachine"

STATES = (
    one(
        "states of two layers swapped",
        "kv/arena.py",
        "return self._states[layer_index]",
        "return self._states[min(self._states, key=lambda index: index == layer_index)]",
        PIECES,
    ),
    one(
        "a snapshot of another block loaded",
        "kv/step_layout.py",
        "source = None if position == 0 else rows[(position - 1) // block_tokens - first]",
        "source = None if position == 0 else max(rows)",
        INSIDE,
    ),
    one(
        "states of convolutions not restored",
        "model/recurrent.py",
        "            _states(self._layer, tensor.kind)[tensor.number] = value\n",
        "            _states(self._layer, tensor.kind)[tensor.number] = "
        "value if tensor.kind != 'conv' else value.zero_()\n",
        PIECES,
    ),
    one(
        "recurrent states not restored",
        "model/recurrent.py",
        "            _states(self._layer, tensor.kind)[tensor.number] = value\n",
        "            _states(self._layer, tensor.kind)[tensor.number] = "
        "value if tensor.kind == 'conv' else value.zero_()\n",
        PIECES,
    ),
    one(
        "a state written while the model runs",
        "kv/states.py",
        "        self._kept.append((layer_index, group, tensors))\n",
        "        self._kept.append((layer_index, group, tensors))\n        self.commit(())\n",
        f"{RECURRENT}::test_a_pass_that_raises_leaves_all_states",
        f"{RECURRENT}::test_a_state_that_is_not_finite_fails_its_sequence_and_is_not_kept",
    ),
    one(
        "what failed alone stops the others' states",
        "kv/states.py",
        "torch.tensor(targets, dtype=torch.int64, device=",
        "torch.tensor(targets, device=",
        f"{RECURRENT}::test_a_prompt_that_fails_alongside_a_stream_leaves_the_states_of_both_right",
    ),
    one(
        "a prompt that is preempted at the end of a block loses its state",
        "engine/blocks/prefix_cache.py",
        "[table.num_tokens, table.num_tokens + 1]",
        "[table.num_tokens]",
        f"{SNAPSHOTS}::test_a_prompt_that_is_preempted_between_chunks_goes_on_where_it_was",
    ),
    one(
        "a layer that forgets its state is served",
        "model/recurrent.py",
        "if not float(difference.max()) <= MOST_DIFFERENCE:",
        "if difference.isnan().all():",
        "tests/model/test_refusals.py::test_each_failure_has_its_reason",
    ),
    one(
        "optional states preempt others",
        "cache/blocks/table.py",
        "                del wanted[:-1]",
        "                pass",
        "tests/cache/test_windows.py::test_resume_points_do_without_states_where_slots_are_short",
    ),
    one(
        "snapshots and blocks share the rows of the staging buffer",
        "store/threads/staging.py",
        "max(2, num_bytes // len(sizes) // size)",
        "max(2, num_bytes // sum(sizes))",
        "tests/store/test_staging.py",
    ),
    one(
        "factors of longrope by the length of a prompt",
        "model/geometry.py",
        '                rope["short_factor"] = rope["long_factor"]\n',
        "",
        "tests/model/test_load.py::test_longrope_has_one_set_of_factors_for_all_lengths",
    ),
    one(
        "the id that names a call replaced",
        "text/replies/reader.py",
        "step.call_id if step.call_id and step.call_id not in self._call_ids else self._new_id()",
        "self._new_id()",
        "tests/text/test_reply_formats.py::test_the_id_that_a_model_writes_is_that_of_its_call",
    ),
    one(
        "prose after a mark read as a call",
        "text/replies/named.py",
        '        if GUARD in self._form.marks.open or text.startswith((\'"\', "}"), first):\n',
        "        if True:\n",
        "tests/text/test_reply_formats.py::test_odd_calls_are_read_or_stay_text",
    ),
    one(
        "a state that is not finite kept",
        "kv/states.py",
        "good = [at for at, segment in enumerate(group.segments) if segment.span not in failed]",
        "good = list(range(len(group.segments)))",
        f"{RECURRENT}::test_a_state_that_is_not_finite_fails_its_sequence_and_is_not_kept",
    ),
    one(
        "states of streams that decode together in another order",
        "kv/states.py",
        "sources = [segment.source for segment in group.segments]",
        "sources = [segment.source for segment in reversed(group.segments)]",
        TOGETHER,
    ),
    one(
        "chunks of a recurrence longer than a block",
        "model/recurrent.py",
        "            each.module.chunk_size = block_tokens\n",
        "            pass\n",
        PIECES,
    ),
    one(
        "chunks of prompts that end inside blocks",
        "engine/core/scheduler.py",
        "end = (start + count) // multiple * multiple",
        "end = start + count",
        "tests/engine/test_scheduler.py::test_chunks_end_at_multiples",
    ),
    one(
        "resumed inside a block",
        "engine/blocks/ending_parts.py",
        "return min(num_tokens, num_resumable) // self._size * self._size",
        "return min(num_tokens, num_resumable)",
        "tests/exactness/test_resume_points.py::test_any_order_of_turns_gives_the_answers_of_no_reuse",
    ),
    one(
        "the last token of a prompt taken for computed",
        "engine/blocks/ending_parts.py",
        "return min(num_tokens, num_resumable) // self._size * self._size",
        "return num_tokens // self._size * self._size",
        f"{SNAPSHOTS}::test_the_same_prompt_again_computes_the_tokens_after_its_last_block",
    ),
    one(
        "resume points without a state",
        "parts.py",
        "return sorted({block for block in kept if first <= block < end} | {*range(max(first, end - 1), end)})",
        "return range(max(first, end - 1), end)",
        MACHINE,
    ),
    one(
        "the state at the last full block released",
        "parts.py",
        "return max(0, self.first_needed(position, block_tokens) - 1)",
        "return self.first_needed(position, block_tokens)",
        "tests/cache/test_windows.py::test_a_sequence_holds_the_state_at_the_end_of_its_last_full_block",
    ),
    one(
        "a snapshot kept for a token that is always computed",
        "parts.py",
        "end = max(0, position - 1) // block_tokens",
        "end = position // block_tokens",
        f"{SNAPSHOTS}::test_the_same_prompt_again_computes_the_tokens_after_its_last_block",
    ),
    one(
        "covers of snapshots counted from the block that keeps them",
        "store/rows/covers.py",
        "index, block_hash = -(-num_tokens // self._block_tokens) - 1, head",
        "index, block_hash = max((index for index, _ in needed), default=-1), head",
        EXTENDS,
    ),
    one(
        "a running reply loses its state to a purge",
        "kv/arena.py",
        "        if not first_token:\n            self.parts[part][row].zero_()\n",
        "        if not first_token or self.layout.parts[part].states:\n            self.parts[part][row].zero_()\n",
        f"{SNAPSHOTS}::test_a_purge_beside_a_running_reply_leaves_its_state",
    ),
    one(
        "drafts for states that cannot go back",
        "engine/core/speculation.py",
        " and not has_states else 0",
        " else 0",
        f"{SNAPSHOTS}::test_nothing_is_drafted_for_a_state_that_cannot_go_back",
    ),
    one(
        "states of another shape under the same fingerprint",
        "spec.py",
        '            described["states"] = [asdict(x) for x in self.states]\n',
        "            pass\n",
        "tests/kv/test_state_layout.py::test_layouts_with_other_states_have_other_digests",
    ),
)
