"""Commands about models: `penstock models`, `quantize`, `warm`. references reads model names on the command line."""
