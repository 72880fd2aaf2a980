"""Host names in settings and headers."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Whether `text` is a valid Host header: a name or address, with or without a port; IPv6 in brackets."""
    try:
        parts = urlsplit(f"//{text}")
        has_port = parts.port is not None
    except ValueError:
        return False
    name = parts.hostname or ""
    whole = (f"[{name}]" if ":" in name else name) + (f":{parts.port}" if has_port else "")
    is_name = re.fullmatch(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?", name) is not None
    return (is_name or ":" in name) and whole == text.lower()
