"""`penstock worker --gpus`: choice says which GPUs (cuda_devices asks CUDA), workers runs a worker process for each."""
