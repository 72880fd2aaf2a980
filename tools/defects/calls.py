"""Defects in grammars of calls: names, arguments in JSON and in tags, how many there may be."""

from __future__ import annotations

from tools.defects.mutant import one

CALLS = "tests/text/test_call_grammars.py"
STEER = "tests/server/test_steering.py"
STRICT = "tests/server/test_strict_tools.py"

STRICT_CALLS = (
    one(
        "calls of tools that nobody sent",
        "text/constraints/calls.py",
        "name = literal(layout.escape(tool.name))",
        'name = "/[a-z_]+/"',
        f"{CALLS}::test_wrong_arguments_and_unknown_tools_are_not",
    ),
    one(
        "further calls where one is wanted",
        "text/constraints/calls.py",
        "return self.calls.parallel and not self.layout.only_one",
        "return not self.layout.only_one",
        f"{CALLS}::test_only_one_call_where_one_is_wanted",
    ),
    one(
        "a strict schema that nobody can enforce, taken",
        "text/constraints/matcher.py",
        "self._grammar.unenforced(tool) if tool.is_strict else None",
        "None",
        f"{CALLS}::test_what_calls_in_tags_cannot_say_is_refused_by_its_place_where_it_is_strict",
    ),
    one(
        "forced calls with any arguments",
        "engine/tool_choice.py",
        'if choice.is_forced or binds or function["name"] in strict else None',
        'if binds or function["name"] in strict else None',
        f"{STRICT}::test_forced_calls_of_chats_have_valid_arguments",
    ),
    one(
        "every tool allowed",
        "engine/tool_choice.py",
        'if choice.allowed is None or function["name"] in choice.allowed\n',
        "",
        f"{STEER}::test_some_of_the_tools_can_be_allowed",
    ),
    one(
        "required keys left out in tags",
        "text/constraints/tagged.py",
        'parts.append(argument if key in required else f"({argument})?")',
        'parts.append(f"({argument})?")',
        f"{CALLS}::test_values_in_tags_are_of_their_types",
    ),
    one(
        "values in tags without definitions",
        "text/constraints/tagged.py",
        'shared = {key: self._schema[key] for key in (*DEFINITIONS, "x-guidance") if key in self._schema}',
        "shared = dict[str, Any]()",
        f"{CALLS}::test_values_in_tags_are_of_their_types",
    ),
    one(
        "a reply that ends inside an argument",
        "text/constraints/tagged.py",
        "any_but((token,), self._ends)",
        "any_but((token,), ())",
        f"{CALLS}::test_no_value_in_tags_ends_the_reply",
    ),
    one(
        "references that nobody follows",
        "text/replies/arguments.py",
        "return _leaves(_referenced(reference, root), root, left - 1)",
        "return [schema]",
        f"{CALLS}::test_values_in_tags_are_of_their_types",
    ),
    one(
        "a name that goes on into its fence",
        "text/constraints/calls.py",
        'middle = f"{BLANK}{middle}"',
        "pass",
        f"{CALLS}::test_a_name_ends_before_its_fence",
    ),
    one(
        "a call that was cut off, whole",
        "server/answers/choice.py",
        'and (self.parsed.has_whole_call or reason != "length"):',
        "and True:",
        "tests/server/test_answering.py::test_a_call_that_was_cut_off_ends_by_length",
    ),
)
