"""Every setting. Each component is handed only its own part. Knows no torch and no HTTP."""

from rekindle.config.keys import DEFAULT_NAMESPACE
from rekindle.config.loading import ENV_PREFIX, Settings
from rekindle.config.parts import (
    NORMALISATIONS,
    RESPONSES_FILE,
    SESSIONS_FILE,
    WORDS_SHARE,
    CacheSettings,
    EngineSettings,
    MiB,
    ModelSettings,
    PromptSettings,
    ServerSettings,
    StoreSettings,
    is_loopback,
)
from rekindle.config.sizes import parse_size

__all__ = [
    "DEFAULT_NAMESPACE",
    "ENV_PREFIX",
    "NORMALISATIONS",
    "RESPONSES_FILE",
    "SESSIONS_FILE",
    "WORDS_SHARE",
    "CacheSettings",
    "EngineSettings",
    "MiB",
    "ModelSettings",
    "PromptSettings",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "is_loopback",
    "parse_size",
]
