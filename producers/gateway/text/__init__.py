"""Turns text into token ids and back, with the files that a model's card names.

lru_cache keeps loaded files; executor gives each model its own threads
prompts renders chat templates, tokenises and detokenises; forms judges the forms of outputs
"""
