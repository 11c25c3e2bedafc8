"""The web console: what is in doubt, since when, what it blocks, and what is safe to do.

app       routes, the forms that change something, and a server inside another program
index     all pipelines below a root, refreshed by a thread
access    hosts, tokens, sessions and CSRF tokens
pages     the pages, and the same reports as JSON
actions   recover and resolve; off unless a token is configured
charts    figures as SVG
"""
