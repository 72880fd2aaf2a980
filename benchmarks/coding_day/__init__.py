"""A coding agent's forty turns on six chat templates, with a scripted model."""
