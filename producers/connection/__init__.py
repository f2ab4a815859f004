"""Connections to Redis or Valkey, and their errors.

connect opens connections by URL and checks the server behind each new one; sentinel finds the primary
script sends Lua scripts as `Call` values; trouble separates a server's passing trouble from a call's own error
local finds the system of this directory; log_throttle keeps retries from flooding the log
"""
