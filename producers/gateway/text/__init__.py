"""Text to token ids and back, by the files that a model's card names.

blobs reads the files from the store; lru_cache keeps what was loaded; lane gives each model threads of its own
prompts tokenises and detokenises; templates renders chat templates
"""
