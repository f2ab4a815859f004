"""Turns step plans into tokens on one device.

loop (a thread) -> pipeline (plans ahead while a step runs) -> runner on a CPU, device/ on a GPU -> sampled tokens
placement chooses the runner when a model is loaded; batch and block_rows make a plan's tensors
shrink makes smaller steps where memory is short; device_health tells a lost device; warm compiles kernels beforehand
"""
