"""A prefix cache of payloads of any kind, and the prefixes a batch of prompts shares."""
