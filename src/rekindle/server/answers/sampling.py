"""Sampling parameters in request bodies, from the table in `model/params`.

Owns the form that they have in JSON; null always means "not given".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, Field, create_model

from rekindle.model.params import BODIES, PARAMETERS, Api, SamplingParams
from rekindle.server.answers.validation import Items

Body = TypeVar("Body", bound=BaseModel)
_FORMS: Mapping[Any, Any] = {
    Sequence[str]: str | Items[str],
    Sequence[int]: Items[int],
    Sequence[tuple[int, float]]: dict[str, float],
}


def with_sampling(api: Api, **own: Any) -> Callable[[type[Body]], type[Body]]:
    """Return a decorator that adds the parameters an API takes to a body, after the fields that it has.

    `own`: type and field of those that the API describes itself. Chat completions have the table's words, others none.
    """
    kinds = get_type_hints(SamplingParams)
    fields: dict[str, Any] = {}
    for name in BODIES[api]:
        said = PARAMETERS[name].help if api == "chat" else None
        fields[name] = (_FORMS.get(kinds[name], kinds[name]) | None, Field(default=None, description=said))

    def add(body: type[Body]) -> type[Body]:
        return create_model(
            body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **{**fields, **own}
        )

    return add


def sampling_in(body: BaseModel) -> dict[str, Any]:
    """Return what a body says of parameters under the names that they have in the table."""
    return body.model_dump(include=PARAMETERS.keys() & type(body).model_fields.keys(), exclude_none=True)
