"""Executes step plans on one device.

    submit -> loop, a thread -> pipeline: scheduler.schedule -> runner: tensors, model, sampler -> scheduler.update

pipeline plans the next step while one runs, on a GPU; it makes steps smaller if memory runs out
runner turns a plan into tensors, and executes plans on a CPU; device/ does on a GPU
placement sizes the KV cache and picks the runner when a model is loaded
warm compiles kernels ahead of time; threads picks the number of CPU threads
"""
