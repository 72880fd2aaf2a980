"""Description of the HTTP interface from its OpenAPI document: routes by dialect, with bodies and answers.

Objects used by one group of routes are described after it, those of several groups at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from rekindle.model.params import SamplingParams
from rekindle.model.sampling_defaults import READ
from tools.reference.page import sentence, table

Schema = Mapping[str, Any]
# Title -> prefixes of its paths; a path belongs to the first group that matches.
GROUPS: dict[str, tuple[str, ...]] = {
    "OpenAI: completions": ("/v1/chat/completions", "/v1/completions"),
    "OpenAI: responses": ("/v1/responses",),
    "Anthropic: messages": ("/v1/messages",),
    "Ollama": ("/api/",),
    "Receipts": ("/v1/receipts",),
    "Models and tokens": ("/v1/models", "/v1/tokenize", "/tokenize", "/detokenize", "/tokenizer_info"),
    "Agents": ("/v1/agents",),
    "Coordination sessions": ("/v1/coordination/sessions",),
    "Operation": ("/overview", "/v1/stats", "/metrics", "/health/", "/version"),
}
GENERATING = ("ChatBody", "CompletionBody", "ResponseBody", "MessagesBody", "OllamaChatBody", "OllamaGenerateBody")
UNLESS = "the model's, or "
SAMPLING = {item.name: item.default for item in fields(SamplingParams) if item.default not in (None, ())}
STREAMS = ("text/event-stream", "application/x-ndjson")


def http(api: Schema) -> str:
    """Describe every route and every object of an OpenAPI document."""
    routes: dict[str, list[Route]] = {title: [] for title in GROUPS}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            routes[group_of(path)].append(Route(f"{method.upper()} {path}", operation))
    models: Mapping[str, Schema] = api["components"]["schemas"]
    used = {title: _reachable(found, models) for title, found in routes.items()}
    times = Counter(name for names in used.values() for name in names)
    parts = []
    for title, found in routes.items():
        parts += [f"## {title}", *_group(found, models)]
        own = sorted(name for name in used[title] if times[name] == 1)
        if own:
            parts += ["### Objects", *(_object(name, models) for name in own)]
    parts += ["## Objects of several groups", *(_object(name, models) for name in sorted(times) if times[name] > 1)]
    return "\n\n".join(parts)


class Route(NamedTuple):
    """A route: its method and path, and its OpenAPI operation."""

    name: str
    operation: Schema

    @property
    def about(self) -> str:
        """What the route does. FastAPI derives a summary from the function's name if none is written."""
        about = _one_line(self.operation.get("description", self.operation["summary"]))
        is_written = "tags" not in self.operation and any(kind in str(self.operation["responses"]) for kind in STREAMS)
        return f"{sentence(self.operation['summary'])} {about}" if is_written else about

    @property
    def body(self) -> str | None:
        """The name of its body's object."""
        content = self.operation.get("requestBody", {}).get("content", {})
        return next(_named(content.get("application/json", {})), None)


def group_of(path: str) -> str:
    """Return the title for a path; ValueError if no group matches."""
    for title, beginnings in GROUPS.items():
        if path.startswith(beginnings):
            return title
    raise ValueError(f"{path} is in no group of tools/reference/http.py: add it to one")


def _group(routes: Sequence[Route], models: Mapping[str, Schema]) -> Iterator[str]:
    """Yield a list of the routes, their parameters, and each route with its body and answer."""
    yield table(
        ("route", "does"), [(f"`{route.name}`", route.about.partition(". ")[0].rstrip(".")) for route in routes]
    )
    parameters = [_parameter(each) for route in routes for each in route.operation.get("parameters", ())]
    if parameters:
        yield table(("parameter", "in", "takes", "default", "meaning"), dict.fromkeys(parameters))
    first: dict[str, str] = {}
    for route in routes:
        names = ", ".join(f"`{each['name']}`" for each in route.operation.get("parameters", ()))
        yield f"### `{route.name}`"
        yield " ".join(filter(None, (route.about, f"Parameters: {names}." if names else "")))
        if route.body is not None:
            yield from _body(route, models, first.setdefault(route.body, route.name))
        answers = [
            _answer(status, each) for status, each in route.operation["responses"].items() if status != "default"
        ]
        yield f"Answer: {'; '.join(answers)}."


def _body(route: Route, models: Mapping[str, Schema], first: str) -> Iterator[str]:
    """Yield the description of a body and its fields; `first` is the first route that takes it."""
    model = models[route.body or ""]
    named = "Body" if route.operation["requestBody"].get("required", False) else "Body, if any"
    if first != route.name:
        yield f"{named}: as of `{first}`."
        return
    about = sentence(_one_line(model["description"])).removeprefix(f"{route.name}.").strip()
    yield f"{named}: {about}" if about else f"{named}:"
    yield _fields(model, models["ChatBody"]["properties"] if route.body in GENERATING else {})


def _parameter(parameter: Schema) -> tuple[str, ...]:
    schema = parameter["schema"]
    default = _default(schema, required=parameter.get("required", False))
    takes = _type(schema).removesuffix(" or null")
    return f"`{parameter['name']}`", parameter["in"], takes, default, parameter.get("description", "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _answer(status: str, answer: Schema) -> str:
    kinds = []
    for kind, content in answer.get("content", {}).items():
        if content.get("schema"):
            name = _type(content["schema"])
            kinds.append(f"a stream of {name}" if kind in STREAMS else name)
    return f"{status} with {' or '.join(kinds)}" if kinds else status


def _fields(model: Schema, common: Schema) -> str:
    """Tabulate the fields of a body, required ones first. Null means "not given" wherever it is allowed.

    A field in `common` takes a missing meaning from there, and a missing default from `SamplingParams`, unless the
    model has one.
    """
    required = model.get("required", ())
    rows = []
    for name, schema in sorted(model["properties"].items(), key=lambda item: item[0] not in required):
        default = _default(schema, required=name in required)
        if name in common and not default and name in SAMPLING:
            default = f"{UNLESS if name in READ else ''}`{_json(SAMPLING[name])}`"
        meaning = schema.get("description") or common.get(name, {}).get("description", "")
        rows.append((f"`{name}`", _type(schema).removesuffix(" or null"), default, meaning))
    return table(("field", "takes", "default", "meaning"), rows)


def _object(name: str, models: Mapping[str, Schema]) -> str:
    """Describe an object, with its fields in a table if any has a description, else in a line."""
    model = models[name]
    about = sentence(_one_line(model.get("description", "")))
    found = model.get("properties", {})
    if any("description" in schema for schema in found.values()):
        rows = [(f"`{field}`", _type(schema), schema.get("description", "")) for field, schema in found.items()]
        shown = table(("field", "is", "meaning"), rows)
    else:
        shown = ", ".join(f"`{field}` ({_type(schema)})" for field, schema in found.items())
    return f"**{_short(name)}.** {about}\n\n{shown}"


def _type(schema: Schema) -> str:
    """Describe a type in a few words."""
    if "$ref" in schema:
        return _short(_name_of(schema["$ref"]))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        values = [value for value in schema.get("enum", [schema.get("const")]) if value is not None]
        return " ".join(f"`{_json(value)}`" for value in values)
    if schema.get("type") == "array":
        item = _type(schema.get("items", {}))
        return f"list of {item}{_range(schema, 'minItems', 'maxItems', ' entries')}"
    if schema.get("properties"):
        return f"object with {' '.join(f'`{name}`' for name in schema['properties'])}"
    if schema.get("type") == "string":
        return f"string{_range(schema, 'minLength', 'maxLength', ' characters')}"
    return f"{schema.get('type', 'anything')}{_range(schema, 'minimum', 'maximum', '')}"


def _range(schema: Schema, low: str, high: str, unit: str) -> str:
    least, most, above = schema.get(low), schema.get(high), schema.get("exclusiveMinimum")
    if least is not None and most is not None:
        return f", {_count(least)} to {_count(most)}{unit}"
    if most is not None:
        return f", at most {_count(most)}{unit}"
    if least == 1 and unit:
        return ", not empty"
    if least is not None:
        return f", at least {_count(least)}{unit}"
    return "" if above is None else f", above {_count(above)}"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def _default(schema: Schema, *, required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    return "" if default is None else f"`{_json(default)}`"


def _json(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    if isinstance(value, float):
        return f"{value:g}"
    return '""' if value == "" else str(value)


def _name_of(reference: str) -> str:
    return reference.rpartition("/")[2]


def _short(name: str) -> str:
    """Strip the module that pydantic prepends to ambiguous names."""
    return name.rpartition("__")[2]


def _named(schema: Any) -> Iterator[str]:
    """Yield the names of all objects that a schema refers to."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield _name_of(schema["$ref"])
        for each in schema.values():
            yield from _named(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _named(each)


def _reachable(routes: Sequence[Route], models: Mapping[str, Schema]) -> set[str]:
    """Return the objects in answers and inside bodies, directly or indirectly."""
    left = [name for route in routes for name in _named(route.operation["responses"])]
    left += [name for route in routes if route.body is not None for name in _named(models[route.body])]
    found: set[str] = set()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _named(models[name])
    return found
