"""Connections to Redis or Valkey, and what goes wrong with them.

connect opens them by URL, sentinel finds the primary, hello asks each new connection what server it reached
script sends Lua scripts as `Call` values; trouble tells a server's passing trouble from a call's own error
local finds the system of this directory; log_throttle keeps retries from flooding the log
"""
