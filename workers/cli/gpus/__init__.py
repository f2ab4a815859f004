"""`penstock worker --gpus`: choice selects the GPUs (cuda_devices asks CUDA), workers runs one worker on each."""
