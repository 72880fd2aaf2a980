"""Defects in Ollama's dialect (what its clients send, what they make of answers), and in finding its models' files."""

from __future__ import annotations

from tools.defects.mutant import one

CHAT = "tests/server/test_ollama.py"
BODIES = "tests/server/test_ollama_bodies.py"
LINES = "tests/server/test_ollama_lines.py"
MODELS = "tests/server/test_ollama_catalogue.py"
PICTURES = "tests/server/test_pictures.py"
FILES = "tests/model/test_ollama_models.py"

OLLAMA = (
    one(
        "a stream only where it is asked for",
        "server/ollama/calls.py",
        "stream=asked.stream is not False",
        "stream=bool(asked.stream)",
        f"{CHAT}::test_every_call_has_a_line_of_its_own_and_a_whole_object",
    ),
    one(
        "no tokens for no limit",
        "server/ollama/calls.py",
        "given.num_predict > 0 else None",
        "given.num_predict >= 0 else None",
        f"{BODIES}::test_options_become_sampling_parameters",
    ),
    one(
        "a context that is too large in silence",
        "server/ollama/calls.py",
        "given.num_ctx > side.max_context",
        "given.num_ctx > side.max_context + 1",
        f"{BODIES}::test_what_cannot_be_done_is_named_and_refused_by_a_strict_server",
    ),
    one(
        "a call that was cut off to be run",
        "server/ollama/reply.py",
        "if event.whole else self._text(self._written(event))",
        "",
        f"{CHAT}::test_a_call_that_is_cut_off_is_text_that_nobody_runs",
    ),
    one(
        "tokens counted without those that were reused",
        "server/ollama/heading.py",
        '"prompt_eval_count": report.prompt_tokens',
        '"prompt_eval_count": report.computed_tokens',
        f"{CHAT}::test_a_conversation_goes_on_where_it_was",
    ),
    one(
        "empty lines to keep a stream alive",
        "server/ollama/reply.py",
        "return line(self._heading.line(self._piece()) | known)",
        'return b"\\n"',
        f"{LINES}::test_lines_without_text_keep_a_stream_alive_and_its_last_line_may_be_an_error",
    ),
    one(
        "a result with the id of another call",
        "server/ollama/calls.py",
        "                self._taken.add(at)\n                return call\n",
        "                queue.appendleft((at, call))\n                return call\n",
        f"{BODIES}::test_results_have_the_ids_of_their_calls",
    ),
    one(
        "a picture that cannot be read under a name that was not sent",
        "server/ollama/calls.py",
        'f"messages[{index}].images"',
        'f"messages[{index}].content"',
        f"{PICTURES}::test_a_picture_of_ollamas_is_named_as_it_was_sent",
    ),
    one(
        "errors in the shape of OpenAI's",
        "server/border.py",
        'return "ollama" if is_ollama(path) else "openai"',
        'return "openai"',
        f"{MODELS}::test_what_cannot_be_shown_is_an_error_in_ollamas_shape",
    ),
    one(
        "errors of clients of Anthropic's in the shape of OpenAI's where both have the path",
        "server/border.py",
        "path.startswith(SHARED_PATHS)",
        'path.startswith("/v1/models")',
        "tests/server/test_strayed.py::test_what_anthropic_has_and_we_have_not_is_an_error_in_its_shape",
    ),
    one(
        "an adapter of Ollama's left out in silence",
        "model/ollama.py",
        'if "adapter" in layers',
        'if "adapters" in layers',
        f"{FILES}::test_models_that_are_more_or_less_than_a_file",
    ),
    one(
        "names of Ollama's that lead out of its folder",
        "model/ollama.py",
        'PART = re.compile(r"\\w[\\w.-]*")',
        'PART = re.compile(r"[\\w.-]+")',
        f"{FILES}::test_what_is_no_name",
    ),
    one(
        "a file of Ollama's only under a name that ends in gguf",
        "model/checkpoint.py",
        " or gguf.begins_as_gguf(path)",
        "",
        f"{FILES}::test_a_model_is_served_from_ollamas_file",
    ),
)
