"""Records of requests: a log line each, metrics, and the latest requests of each agent."""
