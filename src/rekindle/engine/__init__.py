"""Requests over time: intake, prefix cache, scheduler, the step loop, and the public `Engine`."""
