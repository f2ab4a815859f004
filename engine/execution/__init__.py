"""Executes step plans on one device.

    submit -> loop, a thread -> pipeline: scheduler.schedule -> runner: batch, model, sampler -> scheduler.update

pipeline plans the next step while one runs, on a GPU; it makes steps smaller if memory runs out
runner executes plans on a CPU, device/ on a GPU; batch turns a plan into tensors
placement sizes the KV cache and picks the runner when a model is loaded
warm compiles kernels ahead of time; threads picks the number of CPU threads
"""
