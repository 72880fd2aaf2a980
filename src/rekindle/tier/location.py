"""Where a tier is: a directory, or a bucket of S3, Google Cloud Storage or Azure, as its URL says.

Credentials and endpoints come from the environment, under the names that these services' own tools use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CLOUDS = {"s3": "s3://bucket/prefix", "gs": "gs://bucket/prefix", "az": "az://container/prefix"}
CONNECT_TIMEOUT, TIMEOUT = "5s", "60s"
RETRIES = 2


def directory_of(location: str) -> Path | None:
    """Return the directory that a tier's location names; None for that of a bucket. ConfigError for any other."""
    parts = urlsplit(location)
    if parts.scheme in CLOUDS and parts.netloc:
        return None
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(parts.path)
    if "://" in location or not location.strip():
        raise ConfigError(f"tier: {location!r} is no directory and none of {', '.join(CLOUDS.values())}")
    return Path(location).expanduser().absolute()


def open_location(location: str) -> ObjectStore:
    """Return the object store at a location; nothing is read yet, but a missing directory is made. ConfigError."""
    directory = directory_of(location)
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise ConfigError("tier needs packages that are not installed: pip install 'rekindle[tier]'") from error
    try:
        if directory is not None:
            return LocalStore(directory, mkdir=True)
        return from_url(
            location,
            # Such options replace those of the environment; only an endpoint that is http:// there is asked over HTTP.
            client_options={"timeout": TIMEOUT, "connect_timeout": CONNECT_TIMEOUT, "allow_http": True},
            retry_config={"max_retries": RETRIES},
        )
    except (BaseError, OSError) as error:
        raise ConfigError(f"tier: {location} cannot be used: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return what an error says; further lines are for those who debug the library."""
    return str(error).partition("\n")[0] or type(error).__name__
