"""Rules of a conversation between agents: events in, directives out. Pure: no files, no clock, no engine."""
