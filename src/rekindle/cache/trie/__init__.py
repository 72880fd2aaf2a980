"""Sequences by the longest prefix they share."""
