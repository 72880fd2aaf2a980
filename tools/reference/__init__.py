"""Generators of the parts of docs/ that come from the code: the settings, the HTTP interface."""
