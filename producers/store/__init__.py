"""The store's side of the protocol: records and streams.

protocol has one function a script, which gives the `Call` to send and reads its answer; scripts/ has the Lua
servers checks store and broker when a process starts
"""
