"""What is written down of requests: a line each, metrics, the last ones of each agent."""
