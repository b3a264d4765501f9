"""Structured output: text that follows a JSON schema, a regex, a list of choices, or a grammar.

``params`` says what a request asks for, ``grammars`` compiles it, and a ``Constraint`` follows one
sequence: which tokens may come next, and whether the text is complete. Nothing here touches a
device; ``sampling.token_masks`` takes the masks there.
"""
