"""Agents that talk in turns: the silence between two of them, and what a killed server costs."""
