"""Defects in what is believed of others: GGUF files, manifests, backends, slot files, grammars, texts, tenants."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

HEADER, TOKENIZER, CONFIG = "model/gguf_header.py", "model/gguf_tokenizer.py", "model/gguf_config.py"
WEIGHTS, MANIFESTS = "model/gguf_weights.py", "model/ollama.py"
CLIENT, CORE, WIRE = "rekindle_backends/client.py", "rekindle_backends/core.py", "rekindle_backends/wire.py"
LLAMA, GAPS = "rekindle_backends/llama/wire.py", "rekindle_backends/llama/gaps.py"
SLOT_FILE = "rekindle_backends/llama/slot_file.py"
OF_HEADER, OF_FILES = "tests/model/test_gguf_header.py", "tests/model/test_gguf.py"
OF_BACKENDS, OF_LLAMA = "tests/backends/test_hostile_backends.py", "tests/backends/test_llama_wire.py"
SPARSE = f"{OF_HEADER}::test_a_sparse_file_is_not_read_for_as_long_as_it_is"
BY_NAME = f"{OF_FILES}::test_values_that_cannot_be_served_are_refused_by_name"
REFUSED = f"{OF_BACKENDS}::test_what_is_refused"
OF_TENANTS = "tests/hostile/test_tenant_routes.py"
OF_SLOT_FILES = "tests/backends/llama/test_slot_file.py::test_only_files_are_read_and_written"
OF_MANIFESTS = "tests/model/test_ollama_models.py::test_what_somebody_else_put_there"

HOSTILE: tuple[Mutant, ...] = (
    one(
        "texts of a sparse file without end",
        HEADER,
        "        if count > most:\n",
        "        if count > most << 20:\n",
        SPARSE,
    ),
    one(
        "many lists of texts in one file",
        HEADER,
        "            if self._num_texts > MOST_TEXTS:\n",
        "            if count > MOST_TEXTS:\n",
        SPARSE,
    ),
    one(
        "tensors that are all the same bytes",
        HEADER,
        "            if next_one.begin < one.end:\n",
        "            if next_one.begin < one.begin:\n",
        f"{OF_HEADER}::test_tensors_do_not_share_bytes",
    ),
    one(
        "numbers that are none",
        HEADER,
        "        if value is not None and not math.isfinite(value):\n",
        "        if value is not None and math.isinf(value):\n",
        f"{OF_HEADER}::test_numbers_are_finite",
    ),
    one("tensors without rows", HEADER, "        if 0 in shape:\n", "        if shape == (0,):\n", OF_HEADER),
    one(
        "a token of megabytes",
        TOKENIZER,
        " or longest > MOST_TOKEN_CHARS or ",
        " or longest > MOST_CHARS or ",
        BY_NAME,
    ),
    one(
        "pairs of tokens without end",
        TOKENIZER,
        "        if len(found) > MOST_MERGES:\n",
        "        if len(tokens) > MOST_MERGES:\n",
        f"{OF_FILES}::test_pairs_of_tokens_are_counted",
    ),
    one(
        "four billion layers that are listed",
        CONFIG,
        "    if count is not None and not 1 <= count <= MOST_LAYERS:\n",
        "    if count is not None and not 1 <= count:\n",
        BY_NAME,
    ),
    one(
        "a type whose table nobody has made",
        WEIGHTS,
        "    reader.init_grid()  # of types whose codes are places in a table\n",
        "",
        "tests/model/test_gguf_grids.py::test_types_whose_codes_are_places_in_a_table_are_widened",
    ),
    one(
        "a type that nobody can widen",
        WEIGHTS,
        "            _check_type(header.path, entry)\n",
        "            pass\n",
        f"{OF_FILES}::test_values_that_no_package_widens_are_named",
    ),
    one(
        "a manifest that is a pipe",
        MANIFESTS,
        "    if manifest.exists() and not manifest.is_file():",
        "    if manifest.is_dir():",
        OF_MANIFESTS,
    ),
    one(
        "a manifest of any length",
        MANIFESTS,
        "    if len(data) > MOST_MANIFEST_BYTES:\n",
        "    if not data:\n",
        OF_MANIFESTS,
    ),
    one(
        "templates of any number",
        "text/template.py",
        "        if total > MOST_SOURCE:\n",
        "        if total > MOST_SOURCE * 4:\n",
        f"{OF_FILES}::test_templates_of_several_names_are_read",
    ),
    one(
        "a compressed answer that is read",
        CLIENT,
        '    if form not in ("", "identity"):\n',
        '    if form in ("br",):\n',
        REFUSED,
    ),
    one(
        "signs of life without end",
        CLIENT,
        "            if idle_bytes > MOST_IDLE_BYTES:\n",
        "            if idle_bytes < 0:\n",
        REFUSED,
    ),
    one(
        "tokens after the end of an answer",
        CLIENT,
        "            if has_ended and piece.token_ids:\n",
        "            if has_ended and len(piece.token_ids) > 1:\n",
        REFUSED,
    ),
    one(
        "a backend that is busy for ever",
        CLIENT,
        "    return RETRY_S if math.isnan(found) else min(max(0.0, found), MOST_RETRY_S)\n",
        "    return RETRY_S if math.isnan(found) else max(0.0, found)\n",
        REFUSED,
    ),
    one(
        "an answer to another prompt",
        CORE,
        "                self._replies.fail(request, BackendFailed(OTHER_PROMPT))\n                return\n",
        "                pass\n",
        REFUSED,
    ),
    one(
        "likely ids that the model does not have",
        CORE,
        "for token in chain(piece.token_ids, scored_ids) if",
        "for token in piece.token_ids if",
        REFUSED,
    ),
    one(
        "a reply without end that nobody wants",
        CORE,
        "            if answer.num_unwanted > MOST_UNWANTED:\n",
        "            if answer.num_unwanted < 0:\n",
        f"{OF_BACKENDS}::test_a_prompt_alone_gets_no_reply_without_end",
    ),
    one(
        "log probabilities that are no numbers",
        WIRE,
        "    if not math.isfinite(found := float(value)):\n",
        "    if math.isinf(found := float(value)):\n",
        REFUSED,
    ),
    one(
        "llama-server's answer to another prompt",
        LLAMA,
        "                    raise BackendFailed(OTHER_PROMPT)\n",
        "                    pass\n",
        f"{OF_LLAMA}::test_progress_has_no_tokens",
    ),
    one(
        "megabytes of text for a gap of two tokens",
        GAPS,
        "        if len(text) > (min(num_missing, MOST_MISSING) + 1) * max(self._longest, len(self._piece(came))):\n",
        "        if not came:\n",
        f"{OF_LLAMA}::test_what_is_no_event",
    ),
    one(
        "a slot file that is a pipe",
        SLOT_FILE,
        "    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)\n",
        "    return os.open(path, flags | os.O_NONBLOCK)\n",
        OF_SLOT_FILES,
    ),
    one(
        "a slot file that is written through a link",
        SLOT_FILE,
        'open(path, "wb", opener=_plain_file)',
        'open(path, "wb")',
        OF_SLOT_FILES,
    ),
    one(
        "a signature that a user imitates",
        "text/normalise.py",
        'if "attribution" in kinds and message.role == "system" and ATTRIBUTION in content:',
        'if "attribution" in kinds and ATTRIBUTION in content:',
        f"{OF_TENANTS}::test_a_users_text_moves_and_removes_nothing",
    ),
    one(
        "a tenant that ends a model for another",
        "rekindle_models/places.py",
        "        self.keep_s = max(self.asked.values())\n",
        "        self.keep_s = keep_s\n",
        "tests/host/test_places.py::test_no_tenant_ends_a_model_for_another",
    ),
    one(
        "a request's target that names another host",
        "rekindle_models/wishes.py",
        '    if not scope["raw_path"].startswith(b"/"):\n',
        '    if not scope["raw_path"]:\n',
        "tests/host/test_named.py::test_what_only_watches_starts_nothing_and_what_no_server_has_is_not_passed_on",
    ),
    one(
        "another notation that is kept for ever",
        "text/constraints/matcher.py",
        "                while self._lark_chars > MOST_LARK_CHARS:\n",
        "                while self._lark_chars < 0:\n",
        "tests/text/test_constraints.py::test_another_notation_is_translated_once_and_where_time_is_bounded",
    ),
)
