"""Chat templates: messages in, a prompt out.

template renders a model's Jinja template, in the environment of sandbox
confined does so in a child process with limits of time and memory
template_process is that child; frames is the format on its pipes
"""
