"""An engine for which another server computes: texts, agents and their store are here, requests go there over HTTP."""
