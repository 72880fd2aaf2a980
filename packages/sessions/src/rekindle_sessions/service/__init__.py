"""Live coordination sessions: run on the engine, watched, and changed from outside."""
