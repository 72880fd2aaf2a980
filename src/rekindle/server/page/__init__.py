"""The page at `/`: who remembers what, a chat with any agent, sessions live. Plain files, no build step."""
