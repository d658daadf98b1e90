"""The connection to Redis or Valkey. The only module that knows redis-py."""
