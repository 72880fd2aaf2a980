"""Defects in agents' files: their bytes, what is taken in of them, encryption, uploads."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

FORMAT, SEALED, ENGINE = "store/agent_file.py", "store/sealed_file.py", "engine/agent_files.py"
OF_FORMAT, OF_SEALED = "tests/store/test_agent_file.py", "tests/store/test_sealed_file.py"
SESSION_FILE, OF_SESSIONS = "rekindle_sessions/cli/session_file.py", "tests/sessions/test_cli_sessions.py"
OF_ENGINE, OF_ROUTES = "tests/engine/test_agent_files.py", "tests/server/test_agent_files.py"

AGENT_FILES: tuple[Mutant, ...] = (
    one(
        "an agent's file whose digest is not compared",
        FORMAT,
        "if num_bytes != _DIGEST_BYTES or self._take(_DIGEST_BYTES) != digest:",
        "if num_bytes != _DIGEST_BYTES or not self._take(_DIGEST_BYTES):",
        f"{OF_FORMAT}::test_every_flipped_bit_and_every_cut_is_found",
    ),
    one(
        "memory for what a frame claims",
        FORMAT,
        "            piece = self._source.read(min(CHUNK, num_bytes))\n",
        "            piece = bytearray(min(num_bytes, 1 << 26)) and self._source.read(min(CHUNK, num_bytes))\n",
        f"{OF_FORMAT}::test_no_claim_takes_memory",
    ),
    one(
        "an import that begins before all of its file was read",
        ENGINE,
        "        return reader.skip_blocks()\n",
        "        return 0\n",
        f"{OF_ENGINE}::test_what_cannot_be_taken_in_is_refused_and_changes_nothing",
    ),
    one(
        "ids that mean something else here",
        ENGINE,
        " or self._content(text.ids) != text.content:",
        ":",
        f"{OF_ENGINE}::test_what_cannot_be_taken_in_is_refused_and_changes_nothing",
    ),
    one(
        "KV of another model",
        ENGINE,
        "if head.identity != ours.identity:",
        "if head.identity == self._agent:",
        f"{OF_ENGINE}::test_texts_alone_where_another_model_reads_the_same",
    ),
    one(
        "an agent's file without its tail",
        ENGINE,
        "for number, block in enumerate(chain) if",
        "for number, block in enumerate(chain[:-1]) if",
        f"{OF_ENGINE}::test_an_agent_goes_on_elsewhere_as_where_it_was",
    ),
    one(
        "an agent's file without windows",
        ENGINE,
        "yield FileBlock(at, number, block.payloads)",
        "yield FileBlock(at, number, {0: block.payloads[0]})",
        f"{OF_ENGINE}::test_windows_and_states_go_along_and_last",
    ),
    one(
        "a block of a file before its parent",
        ENGINE,
        "if identity.hash in self._come or not (identity.parent == identity.root or identity.parent in self._come):",
        "if identity.hash in self._come:",
        f"{OF_ENGINE}::test_what_cannot_be_taken_in_is_refused_and_changes_nothing",
    ),
    one(
        "a record of more than has come",
        ENGINE,
        "[stored_record(branch, end, self._size) for branch, end in ends if end]",
        "[stored_record(branch, branch.num_tokens, self._size) for branch, end in ends if end]",
        f"{OF_ENGINE}::test_kv_that_is_missing_is_computed",
    ),
    one(
        "texts of a front that end with it",
        ENGINE,
        "chains.named(iter(())) if self._parts.has_kv else chains.named(self._blank(chains))",
        "chains.named(iter(()))",
        "tests/backends/test_memory.py::test_texts_go_from_an_engine_to_a_front_and_back",
    ),
    Mutant(
        "an end of a sealed file that can be cut off",
        (
            Edit(SEALED, "seal_at(_NONCE.pack(number, last)", "seal_at(_NONCE.pack(number, 0)"),
            Edit(SEALED, "open_at(_NONCE.pack(number, last)", "open_at(_NONCE.pack(number, 0)"),
        ),
        (f"{OF_SEALED}::test_nothing_of_it_can_be_changed_moved_or_left_out",),
    ),
    Mutant(
        "chunks of a sealed file that can be moved",
        (
            Edit(SEALED, "seal_at(_NONCE.pack(number, last)", "seal_at(_NONCE.pack(0, last)"),
            Edit(SEALED, "open_at(_NONCE.pack(number, last)", "open_at(_NONCE.pack(0, last)"),
        ),
        (f"{OF_SEALED}::test_nothing_of_it_can_be_changed_moved_or_left_out",),
    ),
    one(
        "a file of any size",
        "server/gate/limits.py",
        '            if num_bytes > most:\n                raise invalid(413, f"the file',
        '            if num_bytes < 0:\n                raise invalid(413, f"the file',
        f"{OF_ROUTES}::test_a_tenant_has_one_upload_of_its_part_of_the_disk",
    ),
    one(
        "an upload that a stop waits for",
        "server/gate/limits.py",
        "partial(self._gate.listen, receive)",
        "receive",
        "tests/server/test_stop.py::test_files_that_hang_on_their_way_do_not_outlast_a_stop",
    ),
    one(
        "a download that a stop waits for",
        "server/gate/limits.py",
        "if is_empty or is_file:\n            await self._app(scope, partial(self._gate.listen, receive), send)",
        "if is_empty or is_file:\n            receive = receive if is_empty else partial(self._gate.listen, receive)\n"
        "            await self._app(scope, receive, send)",
        "tests/server/test_stop.py::test_files_that_hang_on_their_way_do_not_outlast_a_stop",
    ),
    one(
        "a buffer that a full disk refuses as the file is closed",
        "server/agents/files.py",
        "tempfile.TemporaryFile(dir=directory, buffering=0)",
        "tempfile.TemporaryFile(dir=directory)",
        f"{OF_ROUTES}::test_a_disk_that_is_full_is_said",
    ),
    one(
        "frames of a file without end",
        FORMAT,
        "if self._num_blocks > self.head.most_blocks:",
        "if self._num_blocks > 1 << 40:",
        f"{OF_FORMAT}::test_no_more_blocks_are_counted_than_the_texts_have",
    ),
    one(
        "a rewind to nothing that is not durable",
        "engine/memory/agent_commands.py",
        "if not left or not left[-1]:",
        "if not left:",
        f"{OF_ENGINE}::test_a_rewind_to_nothing_lasts",
    ),
    one(
        "an upload that keeps all tenants from theirs",
        "server/agents/files.py",
        "if namespace in self._under_way:",
        "if self._under_way:",
        f"{OF_ROUTES}::test_a_tenant_has_one_upload_of_its_part_of_the_disk",
    ),
    one(
        "an import that a purge meanwhile ends",
        ENGINE,
        "except StoreError:  # a purge",
        "except KeyError:  # a purge",
        f"{OF_ENGINE}::test_a_purge_meanwhile_of_somebody_else_costs_one_more_reading",
    ),
    one(
        "a session's file with holes that is read",
        SESSION_FILE,
        "member.isreg() and not member.issparse()",
        "member.isreg()",
        f"{OF_SESSIONS}::test_a_file_that_is_mostly_holes_is_refused_unread",
    ),
    one(
        "a session's file without the digests of its parts",
        SESSION_FILE,
        "if member.read(len(right) + 1) != right:",
        "if not member.read(len(right) + 1):",
        f"{OF_SESSIONS}::test_files_that_are_refused_change_nothing",
    ),
    one(
        "a session's file that lacks an agent",
        SESSION_FILE,
        "if contents is None or number != 1 + len(contents.agents):",
        "if contents is None:",
        f"{OF_SESSIONS}::test_files_that_lack_a_part_or_have_one_too_many",
    ),
    one(
        "agents that stay of a session that is refused",
        "rekindle_sessions/cli/sessions.py",
        "            for answer in self.imported:\n",
        "            for answer in []:\n",
        f"{OF_SESSIONS}::test_agents_of_a_session_that_is_refused_are_deleted_again",
    ),
    one(
        "a session from elsewhere whose events are not tried before they are written",
        "rekindle_sessions/service/registry.py",
        "            await asyncio.to_thread(contained(_check_past), past)\n",
        "",
        f"{OF_SESSIONS}::test_documents_that_do_not_fit_are_refused",
    ),
    one(
        "events of a session from elsewhere that are not written",
        "rekindle_sessions/service/registry.py",
        "past.plan, past.preludes, now, past.events)",
        "past.plan, past.preludes, now)",
        f"{OF_SESSIONS}::test_an_imported_session_survives_a_restart",
    ),
)
