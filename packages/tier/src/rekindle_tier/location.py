"""Where a tier is: a directory, or a bucket of S3, Google Cloud Storage or Azure, as its URL says.

Credentials and endpoints come from the environment, under the names that these services' own tools use.
"""

from __future__ import annotations

from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from rekindle.config.services import directory_of
from rekindle.errors import ConfigError

CONNECT_TIMEOUT, TIMEOUT = "5s", "60s"
RETRIES = 2


def open_location(location: str) -> ObjectStore:
    """Return the object store at a location; nothing is read yet, but a missing directory is made. ConfigError."""
    directory = directory_of(location)
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
