"""Batches: a file of requests becomes tasks, and their results a file.

    input: check ─▶ expand ─▶ tasks like any others ─▶ counted as they end (`producers/store/scripts/_final.lua`)
                              results: parts of the files ─▶ the files

duty takes all open batches forward; input checks an input as a whole, before anything runs, and reads its requests
expand makes a task of each line; results writes the lines' outcomes, a part at a time, and ends the batch
endpoint is what the gateway implements
"""
