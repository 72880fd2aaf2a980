"""`rekindle serve --models`: from settings to a running server, until a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from rekindle.config import ServerSettings, Settings, show_bytes
from rekindle.errors import ConfigError
from rekindle.server.descriptors import raise_limit
from rekindle.server.handover import Handover
from rekindle.server.running import run_application
from rekindle_models.app import Host
from rekindle_models.named import Models


def serve(settings: Settings, say: Callable[[str], None]) -> int | None:
    """Serve several models until a signal, and return it; `say` gets the banner once requests are answered.

    ConfigError or ModelRefused for what cannot be served as it is written.
    """
    for name in ("key_file", "computed_tokens_per_day", "generated_tokens_per_day"):
        if getattr(settings.server, name) is not None:
            raise ConfigError(f"{name}: a server of several models has none: serve one model, or leave it out")
    models = Models.read(settings)
    raise_limit()
    handover = Handover.of_process(settings.server)

    @contextmanager
    def made(server: ServerSettings) -> Iterator[Host]:
        handover.wait()  # its models' processes have the stores that ours will open
        yield Host(settings, models)

    with closing(handover):
        stopped_by = run_application(
            made, settings.server, lambda url: say(banner(models, settings, url)), handover=handover
        )
    say("stopped: all models have saved what they had")
    return stopped_by


def banner(models: Models, settings: Settings, url: str) -> str:
    """Return the names of the models and where they are, with a first request."""
    width = max(len(model.name) for model in models.all)
    names = [
        f"{model.name:{width}}  {model.given['model']}{f', {show_bytes(model.size)}' if model.size else ''}"
        for model in models.all
    ]
    most = f"at most {settings.models.max_loaded} loaded at once, each for {settings.models.keep_alive} after its last"
    body = f'{{"model":"{models.default.name}","messages":[{{"role":"user","content":"Hello!"}}]}}'
    return "\n".join(
        [
            f"models     {names[0]}",
            *(f"           {name}" for name in names[1:]),
            f"           {most} request",
            f"ready      {url}/v1   (OpenAI base URL)",
            f"           curl {url}/v1/chat/completions -H 'X-Agent-ID: me' \\",
            f"             -d '{body}'",
        ]
    )
