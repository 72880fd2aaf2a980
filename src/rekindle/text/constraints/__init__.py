"""What a reply may be, beyond what the model would say: JSON of a schema, one of several texts, text of a grammar.

    Constraint ─schema, grammar─▶ a grammar of whole replies ─matcher─▶ which tokens may come next

Reasoning and tool calls stay free; the rest of the reply is what the constraint says. The masks are those of
llguidance, which follows a grammar token by token.
"""
