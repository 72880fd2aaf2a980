"""Payloads of any kind under keys that share beginnings, and what a batch of prompts has in common."""
