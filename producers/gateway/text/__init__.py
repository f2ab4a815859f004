"""Turns text into token ids and back, with the files that a model's card names.

blobs reads the files from the store; lru_cache keeps loaded ones; executor gives each model its own threads
prompts tokenises and detokenises; templates renders chat templates; forms judges the forms of outputs
"""
