"""A coding agent's forty turns on six chat templates, of a model that is scripted."""
