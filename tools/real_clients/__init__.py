"""Real client programs, unchanged, through a scripted day against `rekindle serve`: docs/clients.md's table."""
