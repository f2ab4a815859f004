"""Chat templates: turn messages into a prompt.

template: renders a model's Jinja template, in the environment of sandbox
confined: renders in a child process with limits of time and memory (engine.confined)
"""
