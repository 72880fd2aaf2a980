"""A client program: how it is installed, set up and called, and what the model says to it."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tools.real_clients.install import Packages
from tools.real_clients.script import Script

Phase = Literal["day", "resume", "new", "compaction"]
NOTES, PARTS, PICTURE = "notes.txt", ("first.txt", "second.txt"), "pic.png"
OLD, NEW = "The copper key is in the attic.", 'The copper key is in the "cellar", not à côté.'
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFklEQVR4nGP8z8DAwMDAxMDAwMDAAAANHQEDasKb6QAAAABJRU5ErkJggg=="


@dataclass(frozen=True, slots=True)
class Place:
    """Where one client works: its directory, its git repository, an empty home, its commands, the server's port."""

    directory: Path
    bin: Path
    port: int

    @property
    def home(self) -> Path:
        """Its home directory."""
        return self.directory / "home"

    @property
    def repository(self) -> Path:
        """Its git repository."""
        return self.directory / "project"

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def file(self, name: str) -> str:
        """Return the absolute path of a file of the repository."""
        return str(self.repository / name)

    def prepare(self) -> None:
        """Make the home and the repository, with a commit of text files and a picture."""
        self.home.mkdir(parents=True)
        self.repository.mkdir()
        (self.repository / NOTES).write_text(f"{OLD}\nThe silver one is lost.\n", "utf-8")
        for part in PARTS:
            (self.repository / part).write_text("".join(f"Line {at} of {part}.\n" for at in range(12)), "utf-8")
        (self.repository / PICTURE).write_bytes(base64.b64decode(PIXEL))
        for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "Notes"]):
            self.git(*command)

    def git(self, *command: str) -> None:
        """Run git in the repository."""
        who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.com"]
        subprocess.run(["git", *who, *command], cwd=self.repository, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Command:
    """One call of the client: the part of the day, its arguments, and what is then expected of it.

    `steps`: those whose every reply it must ask for. `output`: must be in what it prints. `variables`: in addition to
    the client's own.
    """

    phase: Phase
    arguments: Sequence[str]
    steps: Sequence[str] = ()
    output: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 240.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client by its name; `edits`: whether its day changes the notes."""

    name: str
    packages: Packages
    script: Callable[[Place], Script]
    commands: Callable[[Place], Sequence[Command]]
    variables: Callable[[Place], Mapping[str, str]] = field(default=lambda place: {})
    configure: Callable[[Place], None] = field(default=lambda place: None)
    edits: bool = True

    @property
    def slug(self) -> str:
        """Its name as a directory."""
        return self.name.lower().replace(" ", "-").replace("`", "").replace("/", "-")


def write(path: Path, text: str) -> None:
    """Write a file, and the directories that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
