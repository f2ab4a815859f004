"""Ollama's API, `/api/*`: another form of the same chats and vectors as OpenAI's endpoints.

body -> request: OpenAI's parameters -> openai.chat: the same checks, prompt, limits, task -> answer: lines of JSON
embed -> openai.pooling: the same task -> rows
models: what is served, as Ollama lists it; a model's name may end with Ollama's tag `:latest`
"""
