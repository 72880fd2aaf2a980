"""The rules of a conversation between agents: events in, directives out. Pure: no file, no clock, no engine."""
