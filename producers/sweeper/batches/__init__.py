"""Batches: a file of requests becomes tasks, and their results a file.

    validate ─▶ expand ─▶ tasks like any others ─▶ counted as they end (`producers/store/scripts/_final.lua`)
                          write ─▶ parts of the files ─▶ finish

duty takes all open batches forward; validate checks an input as a whole, before anything runs
expand makes a task of each line; write writes what became of the lines, a part at a time; finish ends the batch
reading reads successive requests of an input; output has the form of a line; endpoint is what the gateway implements
"""
