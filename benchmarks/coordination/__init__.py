"""Agents that talk in turns: the silence between two speakers, and the cost of a killed server."""
