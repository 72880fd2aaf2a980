"""What replies are sampled with where a request does not say.

Owns the values of the model's makers, as generation_config.json has them, and those of the servers whose APIs are
answered here, which apply to what the makers leave open. `SamplingParams` owns names, ranges, and the values that
change nothing. `do_sample` is not read, as in vLLM: a file that says false describes transformers' `generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rekindle.errors import BadRequest
from rekindle.model.described import GENERATION_CONFIG, generation_config
from rekindle.model.params import PARAMETERS, SamplingKeywords, SamplingParams

# Whose habits: OpenAI's (also Anthropic's, and those of vLLM's Python interface), Ollama's, or, for chats and sessions
# of our own, llama-server's, with which small models make sense.
Habit = Literal["openai", "ollama", "llama-server"]
HABITS: Mapping[Habit, SamplingKeywords] = {
    "openai": {},
    "ollama": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "llama-server": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}


def _limit(value: Any) -> Any:
    """A number of tokens: vLLM's -1 for none, and whole numbers that were written as floats."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return 0 if whole == -1 else whole


# What is read of generation_config.json: the fields that vLLM reads, but for max_new_tokens.
READ = frozenset(name for name, known in PARAMETERS.items() if known.makers)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of the model's makers, and what is to be said of them in the banner; without any, all is open."""

    makers: SamplingKeywords = field(default_factory=SamplingKeywords)
    notes: tuple[str, ...] = ()
    source: Literal["model", "openai"] = "model"

    @classmethod
    def read(cls, directory: Path, source: Literal["model", "openai"]) -> SamplingDefaults:
        """Read a model's directory, or with `openai` nothing; ModelRefused if the file is no JSON object.

        A value that cannot be used is left out and named in the notes.
        """
        if source == "openai":
            return cls(source=source)
        makers, wrong = SamplingKeywords(), []
        for name, value in generation_config(directory).items():
            if name not in READ or value is None:
                continue
            one: Any = {name: _limit(value) if name == "top_k" else value}
            try:
                SamplingParams(**one)
            except BadRequest as error:
                wrong.append(f"{GENERATION_CONFIG}: {error}: it is left out")
                continue
            makers.update(one)
        shown = ", ".join(f"{name} {value}" for name, value in makers.items())
        said = (f"sampling: {shown}, unless a request says otherwise ({GENERATION_CONFIG})",) if makers else ()
        return cls(makers, (*said, *wrong))

    def named(self, habit: Habit) -> SamplingKeywords:
        """Return the values for a request that names none: the makers', then those of the habit."""
        if self.source == "openai" and habit == "llama-server":
            habit = "openai"
        return {**HABITS[habit], **self.makers}

    def params(self, habit: Habit, given: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request that names those in `given`; BadRequest for one that is not valid."""
        return SamplingParams(**{**self.named(habit), **given})


NOTHING_SAID = SamplingDefaults()
