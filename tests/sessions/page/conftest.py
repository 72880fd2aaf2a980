"""The browser and the site of the page's tests."""

from tests.page.conftest import browser, opened, seen, site

__all__ = ["browser", "opened", "seen", "site"]
