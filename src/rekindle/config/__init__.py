"""Every setting. Each component receives only its own part. Knows no torch and no HTTP."""

from rekindle.config.access import DEFAULT_NAMESPACE, is_loopback
from rekindle.config.keywords import SettingsKeywords, SettingsWithoutModel
from rekindle.config.loading import ENV_PREFIX, SETTINGS, KnownSetting, Settings, read_toml
from rekindle.config.parts import (
    DISK_SHARE,
    HOT_SHARE,
    MOST_DISK_BYTES,
    MOST_HOT_BYTES,
    NORMALISATIONS,
    RESPONSES_FILE,
    SESSIONS_FILE,
    WORDS_SHARE,
    CacheSettings,
    EngineSettings,
    MiB,
    ModelSettings,
    PromptSettings,
    StoreSettings,
)
from rekindle.config.server import ServerSettings
from rekindle.config.services import BackendKind, BackendSettings, ModelsSettings, TierSettings
from rekindle.config.setting import parse_duration, parse_size, show_bytes
from rekindle.config.store_places import NUM_SLOTS, is_slot, slot_directory, slot_numbers

__all__ = [
    "DEFAULT_NAMESPACE",
    "DISK_SHARE",
    "ENV_PREFIX",
    "HOT_SHARE",
    "MOST_DISK_BYTES",
    "MOST_HOT_BYTES",
    "NORMALISATIONS",
    "NUM_SLOTS",
    "RESPONSES_FILE",
    "SESSIONS_FILE",
    "SETTINGS",
    "WORDS_SHARE",
    "BackendKind",
    "BackendSettings",
    "CacheSettings",
    "EngineSettings",
    "KnownSetting",
    "MiB",
    "ModelSettings",
    "ModelsSettings",
    "PromptSettings",
    "ServerSettings",
    "Settings",
    "SettingsKeywords",
    "SettingsWithoutModel",
    "StoreSettings",
    "TierSettings",
    "is_loopback",
    "is_slot",
    "parse_duration",
    "parse_size",
    "read_toml",
    "show_bytes",
    "slot_directory",
    "slot_numbers",
]
