"""The store's side of the protocol: records and streams.

protocol has one function for each script, which returns the `Call` to send; scripts/ has the Lua
blobs has models' files
servers checks store and broker when a process starts
"""
