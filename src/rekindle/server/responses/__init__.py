"""OpenAI's responses API: items in, items out, and stored responses that can be continued."""
