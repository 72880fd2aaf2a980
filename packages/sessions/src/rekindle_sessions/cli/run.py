"""run: play a scenario from a YAML file in the terminal, on the running server that has the store, or here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console
from rich.markup import escape

from rekindle.cli.border import INTERRUPTED
from rekindle.cli.console import NOT_A_TERMINAL, console
from rekindle.cli.remote import Remote, find_server, naming_the_server
from rekindle.cli.settings import FLAGS, SERVER_FLAGS, help_of, with_settings
from rekindle.cli.why import UrlOption
from rekindle.config import SETTINGS, Settings, StoreSettings
from rekindle.errors import BadRequest, ConfigError, RekindleError

if TYPE_CHECKING:
    from rekindle_sessions.log.records import SessionRecords
    from rekindle_sessions.scenes.play import Play, SceneSession
    from rekindle_sessions.scenes.scenario import Scenario
    from rekindle_sessions.service.events import SessionEvent

    Work = Callable[[SceneSession], Awaitable[None]]
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rekindle.errors import RequestFailed
from rekindle_sessions.cli.stage import DOES, audience, decision_line, figures, scores_line
from rekindle_sessions.http.described import as_body
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.types import Audience, Plan, Topology, Utterance
from rekindle_sessions.scenes.play import Begun, Events
from rekindle_sessions.scenes.scenario import Scenario
from rekindle_sessions.service.events import SessionEvent

ENGINE_FLAGS = tuple(name for name in FLAGS if name not in SERVER_FLAGS)
SESSIONS = "/v1/coordination/sessions"


class Transcript:
    """Collects the events of one scene; turns that are incomplete when it stops are not included."""

    def __init__(self, scenario: Scenario) -> None:
        self._parts = [f"# {scenario.title}", scenario.about]
        for each in scenario.plan.participants:
            role = f", {each.role}" if each.role else ""
            self._parts.append(f"- {each.name}{role}")

    def add(self, event: SessionEvent) -> None:
        """Note an event, if it has content for a reader."""
        data = event.data
        match event.kind:
            case "phase":
                self._parts.append(f"## {data['name']}")
            case "message":
                message = data["utterance"]
                self._parts.append(_entry(message["by"], "speak", message["to"], message["text"]))
            case "turn_complete":
                entry = _entry(data["speaker"], data["purpose"], data["to"], data["text"])
                self._parts.append(f"{entry}\n\n<sub>{figures(data)}</sub>")
            case "turn_failed":
                self._parts.append(f"*{data['speaker']} could not speak: {data['error']}*")
            case "decision":
                self._parts.append(f"> {decision_line(data)}")
            case "scores":
                self._parts.append(f"> {scores_line(data)}")
            case "outcome":
                self._outcome(data["verdicts"])

    def text(self, totals: str) -> str:
        """The whole document so far; `totals` is its last line."""
        return "\n\n".join([*self._parts, f"<sub>{totals}</sub>"]) + "\n"

    def _outcome(self, verdicts: list[Mapping[str, Any]]) -> None:
        if verdicts:
            self._parts.append("## Outcome")
        for verdict in verdicts:
            sign = "" if not verdict["of"] else "✓ " if verdict["holds"] else "✗ "
            self._parts.append(f"- {sign}{verdict['text']}")


def _entry(by: str, purpose: str, to: list[str] | None, text: str) -> str:
    heading = f"**{by}**{DOES[purpose]}{audience(to) if purpose == 'speak' else ''}:"
    return f"{heading} {text}"


# The session of a scene that is played on a running server, over the routes of /v1/coordination/sessions.
#
# Owns the requests and the form of their answers here. The scene is read and its phases are run in this process;
# closing a run's iterator early disconnects, which the server takes as the end of the turn. Imports no torch.


class RemoteSession:
    """One session of a server; a `SceneSession`. Raises what `Remote.ask` does."""

    def __init__(self, server: Remote) -> None:
        self._server = server
        self._path = SESSIONS

    async def begin(self, plan: Plan) -> Begun:
        """Create the session."""
        info = self._server.ask("POST", SESSIONS, as_body(plan))
        self._path = f"{SESSIONS}/{info['id']}"
        said = self._server.ask("GET", f"{self._path}/messages")["data"]
        return Begun(info["id"], info["layout"], tuple(map(_utterance, said)))

    async def post(self, text: str, *, by: str | None, to: Audience) -> Utterance:
        """Post a message, by the host unless `by` is given."""
        return _utterance(self._server.ask("POST", f"{self._path}/messages", {"text": text, "from": by, "to": to}))

    def turn(self, *, speaker: str | None, to: Audience, topology: Topology) -> Events:
        """Have one agent speak."""
        return self._run("turn", {"speaker": speaker, "to": to, "topology": topology})

    def round(self, *, speakers: Sequence[str] | None, to: Audience, topology: Topology) -> Events:
        """Play a round of a topology."""
        return self._run("round", {"speakers": speakers, "to": to, "topology": topology})

    def vote(self, question: Question, *, voters: Sequence[str]) -> Events:
        """Put a question to the voters."""
        fields = asdict(question)
        return self._run("vote", {"question": fields.pop("text"), **fields, "voters": voters})

    async def end(self) -> None:
        """Delete the session."""
        self._server.ask("DELETE", self._path)

    async def _run(self, what: str, body: Mapping[str, Any]) -> Events:
        """Yield the events of a run; RequestFailed with the server's words if it cannot continue."""
        async with aclosing(self._server.streaming_async(f"{self._path}/{what}/stream", body)) as events:
            async for name, data in events:
                if name == "error":
                    raise RequestFailed(data["message"])
                yield SessionEvent(name, data)


def _utterance(entry: Mapping[str, Any]) -> Utterance:
    to = entry["to"]
    fields = {name: entry[name] for name in ("number", "by", "text", "turn", "purpose", "cut")}
    return Utterance(**fields, to=None if to is None else tuple(to))


@with_settings(only=ENGINE_FLAGS)
def run(
    settings: Settings,
    flags: frozenset[str],
    scenario: Annotated[
        str | None, typer.Argument(metavar="[SCENARIO]", help="YAML file, or the name of a shipped one [lists those]")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help=help_of(SETTINGS["model"]))] = None,
    given: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the scenario's variables")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="of sampling [the scenario's]")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="of a reply [the scenario's]")] = None,
    transcript: Annotated[Path | None, typer.Option("--transcript", help="write a transcript as Markdown")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="no colours, as in a pipe")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="keep the session in the store when it is over")] = False,
    url: UrlOption = None,
) -> int:
    """Play a scenario: agents talk, whisper, vote and play by a YAML file; without one, list the shipped ones."""
    from rekindle_sessions.scenes.scenario import find, load

    if scenario is None:
        return _list_shipped()
    scene = load(find(scenario), _pairs(given or ())).with_sampling(seed=seed, max_tokens=max_tokens)
    if model is not None:
        settings = replace(settings, model=replace(settings.model, model=model))
    shown = Console(no_color=True, force_terminal=False, width=NOT_A_TERMINAL) if plain else console()
    if transcript is not None:
        _check_transcript(transcript)
    held = find_server(settings, flags, url)
    house = LocalHouse(settings) if held is None else RemoteHouse(held.server)
    return _play(scene, house, shown, transcript, keep)


def _list_shipped() -> int:
    from rekindle_sessions.scenes.scenario import load, shipped

    scenes = [load(path) for path in shipped()]
    width = max(len(scene.name) for scene in scenes)
    for scene in scenes:
        typer.echo(f"{scene.name:<{width}}  {len(scene.plan.participants):>2} agents  {scene.title}")
    typer.echo("play one with: rekindle run NAME; write your own: docs/scenarios.md", err=True)
    return 0


def _pairs(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not sign or not name.strip():
            raise BadRequest(f"--set needs NAME=VALUE, not {each!r}", param="set")
        found[name.strip()] = value
    return found


def _play(scene: Scenario, house: House, shown: Console, path: Path | None, keep: bool) -> int:
    from rekindle_sessions.cli.run import Transcript
    from rekindle_sessions.cli.stage import Stage

    shown.print(f"[bold]{escape(scene.title)}[/]\n{escape(scene.about)}", highlight=False, soft_wrap=True)
    stage, written = Stage(scene, shown), Transcript(scene)
    progress = Progress()
    try:
        house.run(lambda place: _follow(scene, place, (stage.show, written.add), progress, keep=keep))
    except KeyboardInterrupt:
        stage.stop()
        shown.print(_stopped(progress.play, house.resume), highlight=False, soft_wrap=True)
        return INTERRUPTED
    except RekindleError:
        stage.stop()
        if progress.play is not None and progress.play.session is not None:
            shown.print(_stopped(progress.play, house.resume), highlight=False, soft_wrap=True)
        raise
    finally:
        if path is not None:
            path.write_text(written.text(stage.totals.summary()), encoding="utf-8")
    return 0


@dataclass(slots=True)
class Progress:
    """The play, once it has been set up."""

    play: Play | None = None


class House(Protocol):
    """Where a scene is played. `resume` says what can be done with a session that stopped; None: nothing is kept."""

    @property
    def resume(self) -> str | None:
        """Who can resume a session that stopped; None: it is not kept."""
        ...

    def run(self, work: Work) -> None:
        """Give the work a session to play in, and wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class LocalHouse:
    """An engine in this process, with these settings."""

    settings: Settings

    @property
    def resume(self) -> str | None:
        """A server on the same store, if there is one."""
        return "a server on the same store" if self.settings.store.enabled else None

    def run(self, work: Work) -> None:
        """Load the model and play."""
        from rekindle.engine.api import Engine
        from rekindle_sessions.scenes.played_here import CoordinatedSession
        from rekindle_sessions.service.coordinator import Coordinator

        with naming_the_server(), Engine(self.settings) as engine, closing(_records(engine.settings.store)) as records:
            coordinator = Coordinator(engine, records)

            async def played() -> None:
                await coordinator.start()
                try:
                    await work(CoordinatedSession(coordinator))
                finally:
                    await coordinator.close()

            asyncio.run(played())


@dataclass(frozen=True, slots=True)
class RemoteHouse:
    """A running server."""

    server: Remote

    @property
    def resume(self) -> str | None:
        """The server itself."""
        return f"the server at {self.server.url}"

    def run(self, work: Work) -> None:
        """Play over HTTP."""
        from rekindle_sessions.cli.run import RemoteSession

        async def played() -> None:
            await work(RemoteSession(self.server))

        asyncio.run(played())


def _records(settings: StoreSettings) -> SessionRecords:
    """The file of sessions of an engine that runs with these settings."""
    from rekindle.store.files.keys import Given
    from rekindle_sessions.log.records import SessionRecords

    return SessionRecords.open(settings.sessions_path(), given=Given.of(settings))


def _check_transcript(path: Path) -> None:
    """Refuse a file that cannot be written before the scene is played for it."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--transcript: there is no directory {path.absolute().parent}")
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"--transcript: {path} cannot be written: {error.strerror or error}; name another") from error


async def _follow(
    scene: Scenario,
    place: SceneSession,
    followers: Sequence[Callable[[SessionEvent], None]],
    progress: Progress,
    *,
    keep: bool,
) -> None:
    """Play the scene to its end; cancelling ends the running turn within a step and keeps the session."""
    from rekindle_sessions.scenes.play import Play

    play = progress.play = Play(scene, place)
    async with aclosing(play.run()) as events:
        async for event in events:
            for follow in followers:
                follow(event)
    if not keep:
        await play.end()


def _stopped(play: Play | None, resume: str | None) -> str:
    """Where the scene stopped, and what is stored of it."""
    if play is None or play.session is None:
        return "stopped before the scene began"
    where = f"in phase {play.phase.name!r}" if play.phase is not None else "at the end"
    if resume is None:
        return f"stopped {where}; with --store off nothing is kept"
    return (
        f"stopped {where}. The conversation is saved as session {play.session}, and its agents remember it: {resume} "
        f"can resume it (POST /v1/coordination/sessions/{play.session}/round) or delete it (DELETE "
        f"/v1/coordination/sessions/{play.session})"
    )
