"""The web console: what is in doubt, since when, what it blocks, and what is safe to do.

app       routes, and the forms that change something
index     all pipelines below a root, refreshed by a thread
access    hosts, tokens, sessions and CSRF tokens
pages     the pages, and the same reports as JSON
actions   recover and resolve; off unless a token is configured
charts    figures as SVG
server    the console inside another program, such as the demonstration
"""
