"""The page at `/`: agents and what they remember, a chat with any agent, live sessions. Plain files, no build step."""
