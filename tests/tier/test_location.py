"""Locations of a tier: directories and buckets; anything else is refused with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import GCSStore, LocalStore, S3Store

from rekindle.config import TierSettings
from rekindle.config.services import directory_of
from rekindle.errors import ConfigError
from rekindle_tier.location import open_location


def test_a_directory_is_made(tmp_path: Path) -> None:
    where = tmp_path / "deep" / "tier"
    assert directory_of(str(where)) == directory_of(f"file://{where}") == where
    assert isinstance(open_location(str(where)), LocalStore) and where.is_dir()
    assert directory_of("~/tier") == Path.home() / "tier"


def test_buckets_are_those_of_their_schemes() -> None:
    assert directory_of("s3://bucket/prefix") is directory_of("gs://bucket") is directory_of("az://box") is None
    assert isinstance(open_location("s3://bucket/prefix"), S3Store)
    assert isinstance(open_location("gs://bucket/prefix"), GCSStore)


@pytest.mark.parametrize("wrong", ["", "  ", "ftp://host/path", "s3://", "http://host/bucket", "file://host/path"])
def test_others_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/prefix"):
        TierSettings(location=wrong)


def test_what_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tier: .*file/tier cannot be used"):
        open_location(str(tmp_path / "file" / "tier"))
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="Account must be specified"):
        open_location("az://container/prefix")
