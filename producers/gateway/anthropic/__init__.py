"""Anthropic's Messages: a translation onto chat completions, so that its clients reach the same models.

    body -> request: the chat that /v1/chat/completions would make -> chat.prepare: prompt, grammar, limits, Foreground
    the task's tokens -> answer: parts of the output -> content blocks, in one piece or as events

Errors have Anthropic's form on these paths, whoever makes them (`producers.gateway.http.errors`).
"""
