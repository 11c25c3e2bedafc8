"""The web console: what is in doubt, since when, what it blocks, and what is safe to do.

index     every pipeline below a root, kept fresh on a thread of its own
door      who may come in: hosts, tokens, sessions, forms
pages     what people see; `api` serves the same reports as JSON
acting    what people may do, off unless a token is configured
drawing   figures as SVG
serving   the same beside another program, such as the demonstration
"""
